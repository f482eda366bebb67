"""Logits → log-probabilities of the targets, a few rows at a time."""

from __future__ import annotations

import numpy as np

from metachunk_edge.errors import BackendError
from metachunk_edge.types import FloatArray, TokenIds

__all__ = ["check_finite", "reduce_logits"]


def reduce_logits(logits: FloatArray, targets: TokenIds, scratch: FloatArray) -> FloatArray:
    """Return ln softmax(logits)[target] for each row, in float32 with a stable log-sum-exp.

    Args:
        logits: float32 [n, vocabulary].
        targets: int32 [n].
        scratch: float32 [rows, vocabulary], overwritten; so many rows are reduced at once.

    Raises:
        BackendError: a result is not a finite number.
    """
    logprobs = np.empty(len(targets), np.float32)
    with np.errstate(invalid="ignore"):  # reported below
        for start in range(0, len(targets), len(scratch)):
            rows = logits[start : start + len(scratch)]
            part = scratch[: len(rows)]
            highest = rows.max(axis=1)
            np.subtract(rows, highest[:, None], out=part)
            np.exp(part, out=part)
            chosen = rows[np.arange(len(rows)), targets[start : start + len(rows)]]
            logprobs[start : start + len(rows)] = chosen - highest - np.log(part.sum(axis=1))
    check_finite(logprobs)
    return logprobs


def check_finite(logprobs: FloatArray) -> None:
    """Raise a `BackendError` if a value is not a finite number: it must never become a boundary."""
    if not np.isfinite(logprobs).all():
        raise BackendError(
            "The model returned values that are not numbers; the device's half-precision arithmetic overflows with "
            "this model, or the file is damaged: try --device cpu, and `metachunk-edge models verify`."
        )
