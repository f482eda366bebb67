"""The figures of a parity run, as pure functions of two models' scores. All sums are in float64."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from metachunk_edge.types import DoubleArray, FloatArray

__all__ = ["Parity", "boundary_f1", "kl_divergence", "log_softmax", "rank_correlation", "share_found"]


@dataclass(frozen=True, slots=True)
class Parity:
    """How far a model is from the reference, over all tokens of all texts.

    Attributes:
        n_tokens: how many tokens were scored.
        n_sentences: how many sentences these make.
        mean_abs: mean of |Δ ln p| of the texts' tokens, in nats.
        p999_abs: its 99.9th percentile.
        max_abs: its maximum.
        rms_delta_p: root mean square of p(model) - p(reference) of the texts' tokens, as llama.cpp's "RMS Δp".
        kl_mean: mean of the Kullback-Leibler divergence KL(reference ‖ model) of the whole distributions, in nats.
        kl_p999: its 99.9th percentile.
        kl_max: its maximum.
        same_top: the share of tokens for which both models find the same token the most likely.
        nll_difference: (NLL of the model - NLL of the reference) / NLL of the reference.
        rank_correlation: Spearman's, of the sentences' scores.
        boundary_f1: F1 of the model's boundaries at threshold 0, with the reference's for truth.
        identical_chunks: the share of the reference's chunks whose start and end the model reproduces.
    """

    n_tokens: int
    n_sentences: int
    mean_abs: float
    p999_abs: float
    max_abs: float
    rms_delta_p: float
    kl_mean: float
    kl_p999: float
    kl_max: float
    same_top: float
    nll_difference: float
    rank_correlation: float
    boundary_f1: float
    identical_chunks: float


def log_softmax(logits: FloatArray | DoubleArray) -> DoubleArray:
    """Return ln softmax of each row, float64 [n, vocabulary]."""
    double = logits.astype(np.float64)
    shifted = double - double.max(axis=1, keepdims=True)
    logprobs: DoubleArray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logprobs


def kl_divergence(reference: FloatArray | DoubleArray, model: FloatArray | DoubleArray) -> DoubleArray:
    """Return KL(reference ‖ model) of each row in nats, float64 [n].

    Both arguments are logits or log-probabilities, [n, vocabulary]; they are normalized here, in float64, so that
    float32's rounding of log-probabilities does not count as a difference.

    >>> kl_divergence(np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])).round(4)
    array([0.1438])
    """
    reference_logprobs, model_logprobs = log_softmax(reference), log_softmax(model)
    divergence: DoubleArray = (np.exp(reference_logprobs) * (reference_logprobs - model_logprobs)).sum(axis=1)
    return divergence


def rank_correlation(reference: DoubleArray, model: DoubleArray) -> float:
    """Return Spearman's rank correlation of two arrays [n]; equal values share the mean of their ranks.

    Where one side has no order (fewer than two different values), it is 1 if the other has none either, else 0.

    >>> round(rank_correlation(np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 4.0])), 4)
    0.8
    """
    first, second = _ranks(reference), _ranks(model)
    if first.std() == 0 or second.std() == 0:
        return float(first.std() == second.std())
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: DoubleArray) -> DoubleArray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: DoubleArray = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def boundary_f1(reference: Set[Any], model: Set[Any]) -> float:
    """Return F1 of the model's boundaries, 2 · common / (reference's + model's); 1 if there are none at all.

    >>> boundary_f1({1, 2, 3}, {2, 3, 4})
    0.6666666666666666
    """
    n_both = len(reference) + len(model)
    return 2 * len(reference & model) / n_both if n_both else 1.0


def share_found(reference: Set[Any], model: Set[Any]) -> float:
    """Return the share of the reference's elements that the model has too; 1 if the reference has none.

    >>> share_found({1, 2, 3, 4}, {2, 3, 5})
    0.5
    """
    return len(reference & model) / len(reference) if reference else 1.0
