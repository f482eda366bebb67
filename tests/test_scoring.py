"""Scores: windows, packing, streams; work and memory are counted on the fake backend."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import TEXTS, cut_texts

from metachunk_edge import Chunker, FakeBackend, ScoredSentence, Settings
from metachunk_edge.scoring import score_documents, scored_sentences
from metachunk_edge.tokens import encode
from metachunk_edge.types import FloatArray, TokenIds
from metachunk_edge.windows import plan_blocks

WINDOWS = st.sampled_from(["rolling", "strided"])


def scores(
    text: str, backend: FakeBackend, *, window: str = "rolling", context_length: int | None = None
) -> list[ScoredSentence]:
    return list(
        scored_sentences(
            [text],
            backend,
            language="auto",
            window=window,
            context_length=context_length or backend.context_length,
        )
    )


def logprobs(sentences: list[ScoredSentence]) -> list[float]:
    return [value for sentence in sentences for value in sentence.tokens.logprobs.tolist()]


def full_context(text: str, memory: int = 3) -> list[float]:
    """The scores of one call that sees everything."""
    backend = FakeBackend(memory=memory, context_length=110_000, block_size=50_000, position_limit=110_000)
    return logprobs(scores(text, backend))


@given(TEXTS, st.integers(1, 9), st.integers(0, 40), WINDOWS, st.integers(0, 60))
def test_windowed_scores_of_a_model_with_bounded_memory_are_those_of_full_context(
    text: str, block_size: int, extra: int, window: str, positions: int
) -> None:
    memory = 3
    context_length = 2 * max(block_size, memory) + 4 + extra
    backend = FakeBackend(
        context_length=context_length,
        block_size=block_size,
        position_limit=context_length + positions,
        memory=memory,
    )
    assert logprobs(scores(text * 3, backend, window=window)) == full_context(text * 3)
    assert backend.longest_cache <= context_length


@given(TEXTS, WINDOWS)
def test_every_token_is_scored_once_and_belongs_to_one_sentence(text: str, window: str) -> None:
    backend = FakeBackend()
    sentences = scores(text, backend, window=window)
    encoding = encode(text, backend.tokenizer)
    assert backend.n_scored == len(encoding.ids)
    assert [token for sentence in sentences for token in sentence.tokens.ids.tolist()] == encoding.ids.tolist()
    for sentence in sentences:
        assert all(sentence.start <= anchor < sentence.end for anchor in sentence.tokens.anchors.tolist())


@given(TEXTS)
def test_the_touching_tokens_are_all_that_have_a_character_in_the_sentence(text: str) -> None:
    offsets = encode(text, FakeBackend().tokenizer).offsets
    for sentence in scores(text, FakeBackend()):
        expected = (offsets[:, 0] < sentence.end) & (offsets[:, 1] > sentence.start)
        np.testing.assert_array_equal(sentence.touching, offsets[expected])
        assert sentence.first_touching == int(np.flatnonzero(expected)[0])


@given(TEXTS)
def test_a_sentences_score_is_the_mean_of_its_own_tokens(text: str) -> None:
    for sentence in scores(text, FakeBackend()):
        if len(sentence.tokens.logprobs):
            assert sentence.mean_nll == pytest.approx(-np.mean(sentence.tokens.logprobs, dtype=np.float64))
        assert np.isfinite(sentence.mean_nll)


@given(cut_texts())
def test_scores_do_not_depend_on_how_the_stream_is_cut(cut: tuple[str, list[str]]) -> None:
    text, stream = cut
    backend = FakeBackend()
    streamed = list(
        scored_sentences(stream, backend, language="auto", window="rolling", context_length=backend.context_length)
    )
    whole = scores(text, FakeBackend())
    assert [(s.start, s.end, s.text, s.mean_nll) for s in streamed] == [
        (s.start, s.end, s.text, s.mean_nll) for s in whole
    ]


@given(TEXTS, WINDOWS)
def test_the_backend_is_called_as_planned(text: str, window: str) -> None:
    backend = FakeBackend(context_length=72, block_size=16)
    n_tokens = len(encode(text, backend.tokenizer).ids)
    scores(text, backend, window=window)
    blocks = list(
        plan_blocks(n_tokens, policy=window, context_length=72, block_size=16, position_limit=backend.position_limit)
    )
    assert backend.n_calls == len(blocks)
    assert backend.n_decoded == sum(block.end - block.start for block in blocks)


@given(st.lists(TEXTS, max_size=12))
def test_short_documents_share_batches_and_score_as_they_do_alone(texts: list[str]) -> None:
    backend = FakeBackend(block_size=64, context_length=256)
    together = list(score_documents(texts, backend, language="auto", window="rolling", context_length=256))
    assert [logprobs(sentences) for sentences in together] == [logprobs(scores(text, FakeBackend())) for text in texts]
    assert ["".join(s.text for s in sentences) for sentences in together] == texts


def test_thirty_short_documents_take_two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(block_size=128, context_length=512)
    packed: list[int] = []
    original = backend.score_packed

    def counted(documents: Sequence[TokenIds]) -> list[FloatArray]:
        packed.append(len(documents))
        return original(documents)

    monkeypatch.setattr(backend, "score_packed", counted)
    list(score_documents(["A short one."] * 30, backend, language="en", window="rolling", context_length=512))
    assert packed == [25, 5]  # five tokens each, 128 to a batch


def endless() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"This is sentence number {number} of a document without an end. "


def tokens_until_first_chunk(n_sentences: int) -> int:
    backend = FakeBackend(context_length=512, block_size=64, position_limit=2_048)
    chunker = Chunker(backend, Settings(max_size=100, context_length=512))
    stream = (sentence for sentence, _ in zip(endless(), range(n_sentences), strict=False))
    next(chunker.chunk_iter(stream))
    return backend.n_decoded


def test_the_first_chunk_comes_after_the_same_work_whatever_the_length() -> None:
    assert tokens_until_first_chunk(1_000) == tokens_until_first_chunk(50_000) < 3_000


def peak_memory_bytes(n_sentences: int) -> tuple[int, int]:
    backend = FakeBackend(context_length=512, block_size=64, position_limit=2_048)
    chunker = Chunker(backend, Settings(max_size=100, context_length=512))
    stream = (sentence for sentence, _ in zip(endless(), range(n_sentences), strict=False))
    tracemalloc.start()
    for _ in chunker.chunk_iter(stream):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return backend.n_scored, peak


def test_peak_memory_is_flat_and_work_linear_from_ten_to_a_hundred_thousand_tokens() -> None:
    short_tokens, short_peak = peak_memory_bytes(600)
    long_tokens, long_peak = peak_memory_bytes(6_000)
    assert short_tokens > 10_000
    assert long_tokens > 100_000
    assert long_peak < 1.1 * short_peak
