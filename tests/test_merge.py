"""Merging: the optimum against brute force, the paper's greedy rule, hard limits, overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metachunk_edge import Chunk, ScoredSentence, ScoredTokens, Settings
from metachunk_edge.merge import LOOK_AHEAD_CHUNKS, merge_sentences, size_cost

INFINITE = float("inf")


def sentences_of(texts: Sequence[str]) -> list[ScoredSentence]:
    """Sentences whose every character is a token."""
    made = []
    start = 0
    for text in texts:
        end = start + len(text)
        spans = np.stack([np.arange(start, end), np.arange(start, end) + 1], axis=1).astype(np.int64)
        tokens = ScoredTokens(np.zeros(len(text), np.int32), spans, spans[:, 0], np.zeros(len(text), np.float32))
        made.append(ScoredSentence(start, end, text, 1.0, start, tokens, start, spans))
        start = end
    return made


def merged(texts: Sequence[str], strengths: Sequence[float | None], **options: object) -> list[Chunk]:
    return list(merge_sentences(sentences_of(texts), strengths, Settings(**options)))  # type: ignore[arg-type]


def ends(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.end for chunk in chunks]


@dataclass
class Document:
    lengths: list[int]
    strengths: list[float | None]

    @property
    def texts(self) -> list[str]:
        return ["x" * (length - 1) + " " for length in self.lengths]


@st.composite
def documents(draw: st.DrawFn, longest: int = 9, most: int = 10) -> Document:
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    strengths = draw(
        st.lists(
            st.one_of(st.none(), st.integers(0, 20).map(lambda tenth: tenth / 10)),
            min_size=len(lengths),
            max_size=len(lengths),
        )
    )
    return Document(lengths, [None, *strengths[1:]])


def meta_chunks(document: Document) -> list[tuple[int, float]]:
    """(length, gain of a cut before it) of every unit, for sentences that are all within the limit of 12."""
    groups: list[tuple[list[int], float]] = []
    for length, strength in zip(document.lengths, document.strengths, strict=True):
        if strength is not None or not groups:
            groups.append(([], strength or 0.0))
        groups[-1][0].append(length)
    units: list[tuple[int, float]] = []
    for lengths, gain in groups:
        if sum(lengths) <= 12:
            units.append((sum(lengths), gain))
        else:
            units.extend((length, gain if place == 0 else 0.0) for place, length in enumerate(lengths))
    return units


def value(sizes: Sequence[int], gains: Sequence[float], options: Settings) -> float:
    return sum(gains) - sum(size_cost(size, options) for size in sizes)


def best_by_trying_all(units: list[tuple[int, float]], options: Settings) -> float:
    best = -INFINITE
    for cuts in itertools.product([False, True], repeat=len(units) - 1):
        sizes, gains = [units[0][0]], []
        for cut, (length, gain) in zip(cuts, units[1:], strict=True):
            if cut:
                sizes.append(length)
                gains.append(gain)
            else:
                sizes[-1] += length
        if max(sizes) <= options.max_size:
            best = max(best, value(sizes, gains, options))
    return best


@given(documents(), st.integers(0, 12))
def test_optimal_is_as_good_as_the_best_of_all_groupings(document: Document, min_size: int) -> None:
    options = Settings(max_size=12, min_size=min_size)
    chunks = list(merge_sentences(sentences_of(document.texts), document.strengths, options))
    units = meta_chunks(document)
    starts = itertools.accumulate((length for length, _ in units), initial=0)
    gain_at = {start: gain for start, (_, gain) in zip(starts, units, strict=False)}
    sizes = [chunk.end - chunk.start for chunk in chunks]
    found = value(sizes, [gain_at[chunk.start] for chunk in chunks[1:]], options)
    assert found == pytest.approx(best_by_trying_all(units, options))


@given(documents(most=60), st.integers(1, 12))
def test_what_optimal_has_settled_stays_whatever_follows(document: Document, max_size: int) -> None:
    chunks = merged(document.texts, document.strengths, max_size=max_size)
    kept = -(-len(document.texts) * 2 // 3)
    shorter = merged(document.texts[:kept], document.strengths[:kept], max_size=max_size)
    settled_to = shorter[-1].end - LOOK_AHEAD_CHUNKS * max_size
    assert [end for end in ends(chunks) if end <= settled_to] == [end for end in ends(shorter) if end <= settled_to]


def test_optimal_prefers_a_strong_boundary_over_a_weak_one_of_equal_fit() -> None:
    texts = ["aaaaaaaaa "] * 6
    chunks = merged(texts, [None, 0.1, 0.1, 0.1, 2.0, 0.1], max_size=40, min_size=20)
    assert 40 in [chunk.start for chunk in chunks]


def test_optimal_keeps_to_the_minimum_where_it_can() -> None:
    chunks = merged(["aaa "] * 9, [None, *[5.0] * 8], max_size=16, min_size=12)
    assert min(chunk.n_tokens for chunk in chunks) >= 12


def test_greedy_joins_meta_chunks_while_they_fit() -> None:
    texts = ["aaaa", "bbbb", "cccc", "dddd", "eeee"]
    assert ends(merged(texts, [None, 1.0, None, 1.0, 1.0], max_size=13, merge="greedy")) == [12, 20]


def test_greedy_begins_with_no_empty_chunk_where_the_first_meta_chunk_is_too_large() -> None:
    chunks = merged(["aaaa bbbb cccc ", "dd"], [None, 1.0], max_size=6, merge="greedy")
    assert all(chunk.text for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == "aaaa bbbb cccc dd"


def test_none_leaves_the_meta_chunks_bare() -> None:
    texts = ["aa ", "bb ", "cc ", "dd ", "ee "]
    chunks = merged(texts, [None, None, 0.7, None, 0.2], max_size=100, merge="none")
    assert [chunk.text for chunk in chunks] == ["aa bb ", "cc dd ", "ee "]
    assert [chunk.boundary_strength for chunk in chunks] == [None, 0.7, 0.2]


@pytest.mark.parametrize("merge", ["none", "greedy", "optimal"])
def test_a_meta_chunk_beyond_the_limit_is_cut_at_its_sentences(merge: str) -> None:
    chunks = merged(["aaaaa ", "bbbbb ", "ccccc "], [None] * 3, max_size=12, merge=merge, min_size=0)
    assert {chunk.end for chunk in chunks} <= {6, 12, 18}
    assert max(chunk.n_tokens for chunk in chunks) <= 12


def test_a_sentence_beyond_the_limit_is_cut_behind_a_clause() -> None:
    chunks = merged(["one two three, four five six seven."], [None], max_size=20, merge="greedy")
    assert [chunk.text for chunk in chunks] == ["one two three, ", "four five six seven."]


def test_a_cut_inside_a_sentence_is_the_last_resort() -> None:
    texts = ["aaaa. ", "bbbb. ", "cccc cccc cccc cccc cccc. ", "dddd. "]
    chunks = merged(texts, [None, None, None, None], max_size=16, min_size=0)
    inside = [chunk.end for chunk in chunks if chunk.end not in (6, 12, 38, 44)]
    assert len(inside) == 1  # 26 characters need one cut inside, and get no second one


def test_a_number_of_sentences_is_repeated() -> None:
    chunks = merged(["aa ", "bb ", "cc ", "dd "], [None, 1.0, 1.0, 1.0], max_size=9, merge="greedy", overlap=1)
    assert [chunk.text for chunk in chunks] == ["aa bb cc ", "cc dd "]


def test_dynamic_overlap_repeats_the_sentence_at_the_minimum_only() -> None:
    texts = ["aa ", "bb ", "cc ", "dd "]
    chunks = merged(texts, [None, None, 1.0, None], max_size=100, merge="none", overlap="dynamic")
    assert [chunk.text for chunk in chunks] == ["aa bb ", "bb cc dd "]
    chunks = merged(texts, [None] * 4, max_size=6, merge="greedy", overlap="dynamic")
    assert [chunk.text for chunk in chunks] == ["aa bb ", "cc dd "]  # cut for size: no minimum, no overlap


def test_a_repeat_that_would_not_fit_does_not_decide_the_cuts() -> None:
    texts = ["one two three four five six. ", "Short one. ", "And two."]
    chunks = merged(texts, [None, 1.0, 1.0], max_size=6, unit="words", merge="greedy", overlap=1)
    assert [chunk.text for chunk in chunks] == [texts[0], "Short one. And two."]


def test_overlap_is_shortened_where_it_does_not_fit() -> None:
    chunks = merged(["aaaaaaa ", "bbbbbbb "], [None, 1.0], max_size=10, merge="greedy", overlap=1)
    assert [chunk.text for chunk in chunks] == ["aaaaaaa ", "bbbbbbb "]


@settings(max_examples=200)
@given(
    documents(longest=30, most=25),
    st.integers(1, 40),
    st.sampled_from(["none", "greedy", "optimal"]),
    st.sampled_from(["tokens", "words", "characters"]),
    st.sampled_from(["none", "dynamic", 1, 3]),
)
def test_chunks_cover_the_text_within_the_limit_in_every_mode(
    document: Document, max_size: int, merge: str, unit: str, overlap: str | int
) -> None:
    if isinstance(overlap, int) and overlap >= max_size:
        return
    text = "".join(document.texts)
    chunks = merged(document.texts, document.strengths, max_size=max_size, merge=merge, unit=unit, overlap=overlap)
    covered = 0
    for chunk in chunks:
        assert text[chunk.start : chunk.end] == chunk.text != ""
        assert chunk.start == covered if overlap == "none" else chunk.start <= covered
        assert chunk.end > covered
        covered = chunk.end
        size = {"tokens": chunk.n_tokens, "characters": len(chunk.text), "words": len(chunk.text.split())}[unit]
        assert size <= max_size
    assert covered == len(text)


def test_work_is_linear_in_the_number_of_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: how often the dynamic programming asks for a cost."""
    from metachunk_edge import merge

    def n_costs(n_sentences: int) -> int:
        calls = 0
        original = merge.size_cost

        def counted(size: int, options: Settings) -> float:
            nonlocal calls
            calls += 1
            return original(size, options)

        with monkeypatch.context() as patch:
            patch.setattr(merge, "size_cost", counted)
            strengths = [None, *(0.5 + math.sin(place) / 2 for place in range(1, n_sentences))]
            merged(["aaaa bbbb "] * n_sentences, strengths, max_size=100)
        return calls

    assert n_costs(4_000) < 4.4 * n_costs(1_000)
