"""Sentence scores → boundaries. Goes in: one mean NLL per sentence. Comes out: one entry per sentence.

The entry of sentence b is the strength of a boundary at its start, or None where there is no boundary: a boundary
at b means that a chunk may start at b. In the paper the sentence at a minimum ends its chunk, so a minimum at
sentence i is a boundary at i + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

__all__ = ["AUTO_AFTER", "find_boundaries"]

AUTO_AFTER = 100
"""The moving threshold begins to move once so many minima have been seen."""


def find_boundaries(mean_nll: Iterable[float], threshold: float | Literal["auto"]) -> Iterator[float | None]:
    """Yield, for each sentence, the strength of the boundary at its start, or None.

    Sentence i is a minimum if its score is lower than both neighbours' and the drop on at least one side exceeds the
    threshold, or if it is lower than its left neighbour's by more than the threshold and equal to its right one's.
    The first and the last sentence are never minima. The strength is the largest threshold that the minimum would
    still reach, in nats: the larger drop for the first kind, the left drop for the second.

    With "auto" the threshold starts at 0; once 100 minima have been seen, it is the smallest drop among all minima
    so far (the smaller side of the first kind), as the authors' code has it.

    The entry of a sentence needs no later sentence, so that a stream is never held up.

    Source: Meta-Chunking (arXiv 2410.12788), Section 3.1.1; the moving threshold: the authors' code.

    >>> list(find_boundaries([3.0, 1.0, 2.5, 2.0, 2.2], threshold=0.6))
    [None, None, 2.0, None, None]
    """
    moving = threshold == "auto"
    limit = 0.0 if threshold == "auto" else threshold
    n_minima = 0
    smallest_drop = float("inf")
    left: float | None = None
    middle: float | None = None
    for right in mean_nll:
        strength: float | None = None
        if left is not None and middle is not None and middle < left:
            drops = _drops(left, middle, right)
            if drops and max(drops) > limit:
                strength = max(drops)
                n_minima += 1
                smallest_drop = min(smallest_drop, *drops)
                if moving and n_minima >= AUTO_AFTER:
                    limit = smallest_drop
        yield strength
        left, middle = middle, right


def _drops(left: float, middle: float, right: float) -> tuple[float, ...]:
    """The drops on both sides of a strict minimum, the left one where the right neighbour is equal, else nothing."""
    if middle < right:
        return (left - middle, right - middle)
    if middle == right:
        return (left - middle,)
    return ()
