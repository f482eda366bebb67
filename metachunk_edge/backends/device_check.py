"""Does a device compute what the CPU computes? Some drivers return garbage for just these models' matrices.

Goes in: one model, loaded on the device and on the CPU. Comes out: nothing, or a sentence for the user.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from metachunk_edge.backends.base import Backend
from metachunk_edge.errors import BackendError
from metachunk_edge.types import FloatArray

__all__ = ["ALLOWED_HIGHEST", "ALLOWED_MEAN", "TEXT", "check_device"]

TEXT = "In 2024 the river rose by 3.75 metres, and nobody had seen it coming: 谁也没想到。"
"""Both scripts and digits; 30 tokens of Qwen2, 37 of SmolLM2."""

# On a half-precision Vulkan device, SmolLM2 in Q4_1 and Qwen2.5-0.5B in Q4_K_M differ by 0.06 to 0.1 on average, and
# by 0.8 for one token, since the CPU rounds what it multiplies the weights with to 8 bits. Scores that are wrong, such
# as those of the token before, differ by about 2 on average.
ALLOWED_MEAN = 0.25
"""Nats per token."""

ALLOWED_HIGHEST = 1.5
"""Nats, for a single token."""


def check_device(on_device: Backend, on_cpu: Backend) -> str | None:
    """Score a short text on both: in blocks of 1, 8 and more tokens, and as documents that fill a batch.

    A GPU has kernels of its own for few rows, for more and for many; each of them may be the faulty one.

    Returns:
        None if the device is right, else a sentence which says how wrong it is, and that the CPU is used.
    """
    device, name = on_device.model["device"], on_device.tokenizer.name
    expected = _scores(on_cpu)
    try:
        differences = [np.abs(found - right) for found, right in zip(_scores(on_device), expected, strict=True)]
    except BackendError as error:
        return f"The model {name} runs on the CPU, since it fails on the device {device!r}: {error}"
    mean = np.max([difference.mean() for difference in differences])
    highest = np.max([difference.max() for difference in differences])
    if mean <= ALLOWED_MEAN and highest <= ALLOWED_HIGHEST:
        return None
    return (
        f"The model {name} runs on the CPU, since the device {device!r} gives wrong values for it: they differ by "
        f"{mean:.2f} nats on average and {highest:.2f} at most, where {ALLOWED_MEAN} and {ALLOWED_HIGHEST} are allowed."
    )


def _scores(backend: Backend) -> list[FloatArray]:
    """Log-probabilities of the text's tokens in blocks, and of those of two documents in one full batch."""
    ids, _ = backend.tokenizer.tokenize(TEXT.encode("utf-8"))
    inputs = np.concatenate([[backend.tokenizer.prefix_id], ids[:-1]]).astype(np.int32)
    bounds = [0, 1, 9, *range(9 + backend.block_size, len(ids), backend.block_size), len(ids)]
    with backend.open_session() as session:
        blocks = [
            session.advance(inputs[start:end], ids[start:end], position=start, keep_from=0, shift=0)
            for start, end in pairwise(bounds)
        ]
    documents = np.split(np.resize(ids, backend.block_size), [backend.block_size // 4])
    return [np.concatenate(blocks), np.concatenate(backend.score_packed(documents))]
