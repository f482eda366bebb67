"""What holds for every text and every setting, from text to chunks, on the fake backend."""

from __future__ import annotations

import time

import pytest
import regex
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import HOSTILE, TEXTS, cut_texts

from metachunk_edge import Chunk, Chunker, FakeBackend, Settings
from metachunk_edge.tokens import encode

WORD = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}]|[^\s\p{Han}\p{Hiragana}\p{Katakana}]{1,64}")


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    max_size = draw(st.integers(1, 60))
    return Settings(
        max_size=max_size,
        min_size=draw(st.one_of(st.none(), st.integers(0, max_size))),
        unit=draw(st.sampled_from(["tokens", "words", "characters"])),
        threshold=draw(st.sampled_from([0.0, 0.5, 2.0, "auto"])),
        merge=draw(st.sampled_from(["none", "greedy", "optimal"])),
        overlap=draw(st.one_of(st.sampled_from(["none", "dynamic"]), st.integers(0, min(3, max_size - 1)))),
        window=draw(st.sampled_from(["rolling", "strided"])),
        context_length=256,
    )


def size(chunk: Chunk, unit: str) -> int:
    if unit == "tokens":
        return chunk.n_tokens
    return len(chunk.text) if unit == "characters" else len(WORD.findall(chunk.text))


def is_one_grapheme(text: str) -> bool:
    return regex.fullmatch(r"\X", text) is not None


@settings(max_examples=400)
@given(TEXTS, all_settings())
def test_chunks_of_any_text_keep_every_promise(text: str, options: Settings) -> None:
    chunks = Chunker(FakeBackend(), options).chunk(text)
    if not text.strip():
        assert chunks == []
        return
    graphemes = {match.start() for match in regex.finditer(r"\X", text)}
    covered = 0
    for place, chunk in enumerate(chunks):
        assert chunk.index == place
        assert text[chunk.start : chunk.end] == chunk.text != ""
        assert chunk.start in graphemes
        assert size(chunk, options.unit) <= options.max_size or is_one_grapheme(chunk.text)
        assert chunk.start <= covered < chunk.end
        assert (chunk.boundary_strength is None) == (place == 0)
        covered = chunk.end
    assert covered == len(text)
    if options.overlap in ("none", 0):
        assert "".join(chunk.text for chunk in chunks) == text


@given(TEXTS, all_settings())
def test_n_tokens_counts_the_documents_tokens_that_touch_the_chunk(text: str, options: Settings) -> None:
    offsets = encode(text, FakeBackend().tokenizer).offsets
    for chunk in Chunker(FakeBackend(), options).chunk(text):
        assert chunk.n_tokens == int(((offsets[:, 0] < chunk.end) & (offsets[:, 1] > chunk.start)).sum())


@given(cut_texts(), all_settings())
def test_a_stream_has_the_chunks_of_the_text(cut: tuple[str, list[str]], options: Settings) -> None:
    text, stream = cut
    assert list(Chunker(FakeBackend(), options).chunk_iter(stream)) == Chunker(FakeBackend(), options).chunk(text)


@given(st.lists(TEXTS, max_size=8), all_settings())
def test_many_texts_have_the_chunks_that_each_has_alone(texts: list[str], options: Settings) -> None:
    chunker = Chunker(FakeBackend(), options)
    assert list(chunker.chunk_many(texts)) == [chunker.chunk(text) for text in texts]


@given(TEXTS, all_settings())
def test_the_same_call_twice_gives_the_same_chunks(text: str, options: Settings) -> None:
    chunker = Chunker(FakeBackend(), options)
    assert repr(chunker.chunk(text)) == repr(chunker.chunk(text))


@given(TEXTS, all_settings())
def test_windows_line_ends_are_cut_where_line_feeds_are(text: str, options: Settings) -> None:
    assume(options.unit != "characters")  # "\r\n" is two characters
    unix = text.replace("\r\n", "\n").replace("\r", "")
    windows = unix.replace("\n", "\r\n")
    expected = [chunk.text for chunk in Chunker(FakeBackend(), options).chunk(unix)]
    assert [chunk.text.replace("\r\n", "\n") for chunk in Chunker(FakeBackend(), options).chunk(windows)] == expected


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("max_size", [1, 2, 3])
def test_characters_of_several_tokens_stay_whole_at_a_tiny_limit(text: str, max_size: int) -> None:
    chunks = Chunker(FakeBackend(), Settings(max_size=max_size, context_length=256)).chunk(text)
    assert "".join(chunk.text for chunk in chunks) == (text if text.strip() else "")
    assert all(chunk.n_tokens <= max_size or is_one_grapheme(chunk.text) for chunk in chunks)


def test_repeated_sentences_each_have_their_own_offsets() -> None:
    text = "Same again. " * 50
    chunks = Chunker(FakeBackend(), Settings(max_size=3, context_length=256, merge="none")).chunk(text)
    assert [chunk.start for chunk in chunks] == sorted({chunk.start for chunk in chunks})
    assert all(text[chunk.start : chunk.end] == chunk.text for chunk in chunks)


@pytest.mark.parametrize(
    ("text", "most"),
    [("", 0), (" \n\t\r\n\u00a0\u3000", 0), ("One.", 1), ("One. Two.", 2), ("word", 1), ("。", 1)],
)
def test_the_shortest_texts(text: str, most: int) -> None:
    for merge in ("none", "greedy", "optimal"):
        chunks = Chunker(FakeBackend(), Settings(merge=merge, context_length=256)).chunk(text)
        assert len(chunks) <= most
        assert bool(chunks) == bool(text.strip())


def test_blank_texts_are_never_shown_to_the_model() -> None:
    backend = FakeBackend()
    assert Chunker(backend, Settings(context_length=256)).chunk("\n" * 50_000) == []
    assert backend.n_calls == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["a" * 10_000_000, "x" + "\n" * 50_000 + "y", "word " * 500_000, "字" * 500_000],
    ids=["letters", "blank lines", "words", "ideographs"],
)
def test_endless_runs_come_out_within_the_limit(text: str) -> None:
    backend = FakeBackend(context_length=8_192, block_size=2_048, position_limit=32_768)
    started = time.monotonic()
    chunks = Chunker(backend, Settings(max_size=512, context_length=8_192)).chunk(text)
    assert time.monotonic() - started < 120  # a runaway would take hours; speed itself is measured in benchmarks/
    assert "".join(chunk.text for chunk in chunks) == text
    assert max(chunk.n_tokens for chunk in chunks) <= 512


def test_a_sentence_longer_than_the_context_is_scored_and_cut() -> None:
    text = "word " * 3_000
    chunks = Chunker(FakeBackend(), Settings(max_size=50, context_length=256)).chunk(text)
    assert "".join(chunk.text for chunk in chunks) == text
    assert max(chunk.n_tokens for chunk in chunks) <= 50


def test_forty_eight_thousand_tokens_without_a_full_stop_at_limit_2048() -> None:
    backend = FakeBackend(context_length=2_048, block_size=256, position_limit=32_768)
    text = "word and " * 24_000
    chunks = Chunker(backend, Settings(max_size=2_048)).chunk(text)
    assert sum(chunk.n_tokens for chunk in chunks) >= 48_000
    assert max(chunk.n_tokens for chunk in chunks) <= 2_048
    assert "".join(chunk.text for chunk in chunks) == text


@pytest.mark.parametrize("max_size", [5, 12, 40])
def test_a_long_sentence_with_windows_line_ends_is_cut_where_it_is_with_line_feeds(max_size: int) -> None:
    unix = "and so they\nwent on\nand on over hills\n\nand rivers, without\na stop\n" * 40
    options = Settings(max_size=max_size, context_length=256)
    expected = [chunk.text for chunk in Chunker(FakeBackend(), options).chunk(unix)]
    windows = Chunker(FakeBackend(), options).chunk(unix.replace("\n", "\r\n"))
    assert [chunk.text.replace("\r\n", "\n") for chunk in windows] == expected
