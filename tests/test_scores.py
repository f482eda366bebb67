"""Behaviour of scores files: cutting from one is cutting the text, and a file that does not fit is refused."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from strategies import HOSTILE, TEXTS

from metachunk_edge import Backend, Chunker, FakeBackend, ScoredSentence, ScoresError, Settings, cut
from metachunk_edge.scores import StoredScores, read_scores, write_scores

TEXT = "\r\n".join(
    [
        "Chapter 1",
        "",
        "It was a dark night. The same sentence. The same sentence. “é—ü” said e\u0301a\u0308, and 👨‍👩‍👧‍👦 laughed!",
        "今天天气很好。我们去公园吧！هذه جملة. यह एक वाक्य है। 童话。",
        "",
        "A sentence that goes on and on, " + "with one clause after another, " * 12 + "until it ends.",
        "The end.",
    ]
)
SCORING: dict[str, Any] = {"window": "rolling", "context_length": 256, "language": "auto"}


def scored(text: str) -> list[ScoredSentence]:
    return list(Chunker(FakeBackend(), Settings(**SCORING)).score_iter([text]))


def written(text: str, *, source: str = "a.txt") -> str:
    file = io.StringIO()
    n_sentences = write_scores(scored(text), file, source=source, model=FakeBackend().model, scoring=SCORING)
    assert n_sentences == len(scored(text))
    return file.getvalue()


def read(content: str, text: str) -> StoredScores:
    return read_scores(io.StringIO(content), text)


def refusal(lines: str | Iterable[str], text: str = TEXT) -> str:
    with pytest.raises(ScoresError) as refused:
        read_scores(io.StringIO(lines) if isinstance(lines, str) else lines, text)
    return str(refused.value)


# What comes back


@pytest.mark.parametrize("merge", ["none", "greedy", "optimal"])
@pytest.mark.parametrize("overlap", ["none", "dynamic", 0, 1, 3])
@pytest.mark.parametrize("unit", ["tokens", "words", "characters"])
@pytest.mark.parametrize("threshold", [0.0, 0.5, "auto"])
def test_cutting_from_the_file_is_chunking_the_text(merge: Any, overlap: Any, unit: Any, threshold: Any) -> None:
    stored = read(written(TEXT), TEXT)
    for max_size in (5, 30, 200):
        settings = Settings(
            max_size=max_size,
            merge=merge,
            overlap=overlap,
            unit=unit,
            threshold=threshold,
            **SCORING,
        )
        assert list(cut(stored.sentences, settings)) == Chunker(FakeBackend(), settings).chunk(TEXT)


@given(text=TEXTS)
@hypothesis_settings(max_examples=60, deadline=None)
def test_what_was_written_comes_back_to_the_bit(text: str) -> None:
    stored = read(written(text), text)
    assert_same(stored.sentences, scored(text))


@pytest.mark.parametrize("text", ["", " \r\n\t", *HOSTILE, "word " * 3_000, "x" * 20_000])
def test_odd_texts_come_back_to_the_bit(text: str) -> None:
    assert_same(read(written(text), text).sentences, scored(text))


def assert_same(stored: Iterable[ScoredSentence], direct: Iterable[ScoredSentence]) -> None:
    for one, other in itertools.zip_longest(stored, direct):
        for name in ("start", "end", "text", "mean_nll", "first_token", "first_touching"):
            assert getattr(one, name) == getattr(other, name), name
        np.testing.assert_array_equal(one.touching, other.touching)
        for name in ("ids", "offsets", "anchors", "logprobs"):
            mine, its = getattr(one.tokens, name), getattr(other.tokens, name)
            np.testing.assert_array_equal(mine, its)
            assert mine.dtype == its.dtype


def test_a_log_probability_comes_back_to_the_bit_whatever_its_size() -> None:
    (sentence,) = scored("word " * 300)
    random = np.random.default_rng(0)
    logprobs = -np.exp(random.uniform(-30, 3, len(sentence.tokens.ids))).astype(np.float32)
    odd = replace(sentence, tokens=replace(sentence.tokens, logprobs=logprobs))
    file = io.StringIO()
    write_scores([odd], file, source="a.txt", model={}, scoring=SCORING)
    assert_same(read(file.getvalue(), "word " * 300).sentences, [odd])


def test_the_header_says_which_text_model_and_settings_the_scores_are_of() -> None:
    stored = read(written(TEXT, source="caf\udce9 童话.txt"), TEXT)
    assert stored.source == "caf\udce9 童话.txt"
    assert stored.model == FakeBackend().model
    assert stored.scoring == SCORING


def test_a_line_has_the_sentence_and_its_tokens_with_their_places_in_the_text() -> None:
    _, *sentences, _ = map(json.loads, written(TEXT).splitlines())
    assert "".join(TEXT[sentence["start"] : sentence["end"]] for sentence in sentences) == TEXT
    for sentence in sentences:
        logprobs = [logprob for _, _, _, logprob in sentence["tokens"]]
        assert sentence["mean_nll"] == pytest.approx(-np.mean(np.array(logprobs, np.float32)), rel=1e-6)
        assert all(0 <= start < end <= len(TEXT) for _, start, end, _ in sentence["tokens"])


def test_line_ends_do_not_matter() -> None:
    content = written(TEXT)
    for lines in (content.splitlines(), content.replace("\n", "\r\n").splitlines(keepends=True)):
        assert len(read_scores(lines, TEXT).sentences) == len(scored(TEXT))


# What is refused

NOT_SCORES = "This is not a scores file: make one with `metachunk-edge score`."
CUT_SHORT = "The scores file is cut short, its last line is missing: score the document again."
ALTERED = "The scores file was altered after it was written: score the document again."


@pytest.mark.parametrize(
    "content",
    ["", "\n", "text\n", "[]\n", "1\n", "{}\n", '{"source": "a.txt", "text": "a chunk"}\n', "\0\n", "[" * 100_000],
)
def test_a_file_that_is_none_is_refused(content: str) -> None:
    assert refusal(content) == NOT_SCORES


def test_a_file_of_another_version_is_refused_with_both_versions() -> None:
    content = written(TEXT).replace('"version":1', '"version":2', 1)
    assert refusal(content) == ("This scores file has version 2 and this program reads 1: score the document again.")


def test_a_file_that_is_cut_short_anywhere_is_refused() -> None:
    content = written("One sentence. Another one!\n\nAnd a third.")
    for length in range(len(content) - 1):
        assert refusal(content[:length], "One sentence. Another one!\n\nAnd a third.") in (NOT_SCORES, CUT_SHORT)


def test_a_file_that_was_altered_anywhere_is_refused() -> None:
    text = "One sentence. Another one!\n\nAnd a third."
    lines = written(text).splitlines(keepends=True)
    body = len("".join(lines[:-1]))
    for place in range(1, body - 1):
        content = "".join(lines)
        changed = content[:place] + ("7" if content[place] != "7" else "3") + content[place + 1 :]
        assert re.fullmatch(f"{NOT_SCORES}|{ALTERED}|This scores file has version .*", refusal(changed, text))
    assert refusal("".join(lines[:1] + lines[2:]), text) == ALTERED
    assert refusal("".join([lines[0], lines[2], lines[1], *lines[3:]]), text) == ALTERED
    assert refusal("".join([*lines, lines[1]]), text) == CUT_SHORT


@pytest.mark.parametrize(
    "other", [TEXT[:-1], TEXT + " ", TEXT.replace("dark", "dork"), TEXT.replace("\r\n", "\n"), "", " "]
)
def test_scores_of_another_text_are_refused(other: str) -> None:
    assert refusal(written(TEXT), other) == (
        f"The scores were made from another text than this one ({len(TEXT)} characters there, "
        f"{len(other) if other.strip() else 0} here): score the document again."
    )


def test_scores_of_a_blank_text_go_with_any_blank_text_and_no_other() -> None:
    assert read(written(" \n"), "").sentences == ()
    assert "another text" in refusal(written(" \n"), TEXT)


@pytest.mark.model
def test_cutting_from_the_file_is_chunking_the_text_with_a_real_model(small_backend: Backend) -> None:
    text = TEXT[:190]
    chunker = Chunker(small_backend, Settings(max_size=20, overlap="dynamic"))
    file = io.StringIO()
    scoring = chunker.settings.scoring()
    write_scores(chunker.score_iter([text]), file, source="a.txt", model=small_backend.model, scoring=scoring)
    stored = read(file.getvalue(), text)
    assert stored.model == small_backend.model
    assert list(cut(stored.sentences, chunker.settings)) == chunker.chunk(text)
