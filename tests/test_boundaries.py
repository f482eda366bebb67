"""The boundary rule against an independent, slow re-statement of the paper's Section 3.1.1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metachunk_edge.boundaries import AUTO_AFTER, find_boundaries

# Few distinct values, so that equal neighbours (the second kind of minimum) are common.
SCORES = st.lists(st.integers(0, 12).map(lambda quarter: quarter / 4), max_size=60)
THRESHOLDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.34])


def minima_by_the_paper(scores: list[float], threshold: float) -> set[int]:
    """The paper's two sentences, word by word, point by point."""
    minima = set()
    for point in range(len(scores)):
        if point == 0 or point == len(scores) - 1:
            continue
        left_is_higher = scores[point - 1] > scores[point]
        right_is_higher = scores[point + 1] > scores[point]
        left_exceeds = scores[point - 1] - scores[point] > threshold
        right_exceeds = scores[point + 1] - scores[point] > threshold
        right_is_equal = scores[point + 1] == scores[point]
        if left_is_higher and right_is_higher and (left_exceeds or right_exceeds):
            minima.add(point)
        if left_exceeds and right_is_equal:
            minima.add(point)
    return minima


@given(SCORES, THRESHOLDS)
def test_boundaries_are_the_papers_minima_one_sentence_later(scores: list[float], threshold: float) -> None:
    strengths = list(find_boundaries(scores, threshold))
    assert {place for place, strength in enumerate(strengths) if strength is not None} == {
        minimum + 1 for minimum in minima_by_the_paper(scores, threshold)
    }


@given(SCORES, THRESHOLDS)
def test_there_is_one_entry_per_sentence(scores: list[float], threshold: float) -> None:
    assert len(list(find_boundaries(scores, threshold))) == len(scores)


@given(SCORES)
def test_the_strength_is_the_largest_threshold_that_a_boundary_survives(scores: list[float]) -> None:
    for place, strength in enumerate(find_boundaries(scores, 0.0)):
        if strength is not None:
            assert list(find_boundaries(scores, strength - 1e-9))[place] == strength
            assert list(find_boundaries(scores, strength))[place] is None


def test_the_threshold_must_be_exceeded_not_only_reached() -> None:
    assert list(find_boundaries([1.0, 0.5, 1.0, 1.0], 0.5)) == [None, None, None, None]
    assert list(find_boundaries([1.0, 0.5, 1.0, 1.0], 0.49)) == [None, None, 0.5, None]


def test_a_rise_on_the_right_alone_is_enough() -> None:
    assert list(find_boundaries([1.1, 1.0, 3.0, 3.0], 0.5)) == [None, None, 2.0, None]


def test_an_equal_right_neighbour_needs_the_drop_on_the_left() -> None:
    assert list(find_boundaries([2.0, 1.0, 1.0, 2.0], 0.5)) == [None, None, 1.0, None]
    assert list(find_boundaries([1.25, 1.0, 1.0, 9.0], 0.5)) == [None, None, None, None]


def moving_by_the_authors_rule(scores: list[float]) -> set[int]:
    """Once 100 minima are in the list, the threshold is the smallest entry; it is looked at after each point."""
    threshold, drops, boundaries = 0.0, [], set()
    for point in range(1, len(scores) - 1):
        left, right = scores[point - 1] - scores[point], scores[point + 1] - scores[point]
        if left > 0 and right > 0 and (left > threshold or right > threshold):
            boundaries.add(point + 1)
            drops.append(min(left, right))
        elif left > 0 and right == 0 and left > threshold:
            boundaries.add(point + 1)
            drops.append(left)
        if len(drops) >= 100:
            threshold = min(drops)
    return boundaries


@given(st.lists(st.integers(0, 40).map(lambda tenth: tenth / 10), min_size=300, max_size=900))
def test_the_moving_threshold_is_the_authors(scores: list[float]) -> None:
    found = {place for place, strength in enumerate(find_boundaries(scores, "auto")) if strength is not None}
    assert found == moving_by_the_authors_rule(scores)


def test_the_moving_threshold_begins_to_move_after_a_hundred_minima() -> None:
    deep = [2.0, 1.0] * AUTO_AFTER
    shallow = [2.0, 1.5, 2.0]
    strengths = list(find_boundaries([*deep, *shallow], "auto"))
    assert sum(strength is not None for strength in strengths) == AUTO_AFTER
    assert list(find_boundaries(shallow, "auto"))[2] == pytest.approx(0.5)
