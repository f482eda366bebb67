"""Sentences tile the text, wherever they are cut."""

from __future__ import annotations

import pytest
import regex
from hypothesis import given
from strategies import TEXTS, cut_texts

from metachunk_edge.sentences import (
    MAX_SENTENCE_CHARACTERS,
    best_cut,
    detect_language,
    is_grapheme_boundary,
    passages,
    split_sentences,
)


def pieces(text: str, language: str = "en") -> list[str]:
    return [text[sentence.start : sentence.end] for sentence in split_sentences(text, language=language)]


@given(TEXTS)
def test_the_sentences_tile_the_text(text: str) -> None:
    assert "".join(pieces(text)) == text
    assert all(pieces(text))


@given(TEXTS)
def test_no_sentence_begins_inside_a_grapheme(text: str) -> None:
    boundaries = {match.start() for match in regex.finditer(r"\X", text)}
    assert all(sentence.start in boundaries for sentence in split_sentences(text))


@given(TEXTS)
def test_a_grapheme_boundary_is_one_in_the_whole_text(text: str) -> None:
    boundaries = {0, len(text), *(match.start() for match in regex.finditer(r"\X", text))}
    assert {place for place in range(len(text) + 1) if is_grapheme_boundary(text, place)} == boundaries


@given(cut_texts())
def test_passages_do_not_depend_on_how_the_stream_is_cut(cut: tuple[str, list[str]]) -> None:
    text, stream = cut
    whole = list(passages([text]))
    assert list(passages(stream)) == whole
    assert "".join(passage.text for passage in whole) == text
    spans = [(sentence.start, sentence.end) for passage in whole for sentence in passage.sentences]
    assert "".join(text[start:end] for start, end in spans) == text


def test_a_long_stream_of_single_characters_gives_the_passages_of_the_text() -> None:
    text = ("It was the best of times, it was the worst of times. " * 40 + "\r\n\r\n") * 40
    assert len(text) > 4 * 16_384
    assert list(passages(iter(text))) == list(passages([text]))


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "Dr. Smith came. He left!", ["Dr. Smith came. ", "He left!"]),
        ("zh", "今天天气很好。我们去公园吧！你说呢？", ["今天天气很好。", "我们去公园吧！", "你说呢？"]),
        ("ja", "これは文です。次の文です。", ["これは文です。", "次の文です。"]),
        ("hi", "यह एक वाक्य है। यह दूसरा है।", ["यह एक वाक्य है। ", "यह दूसरा है।"]),
        ("ar", "هذه جملة. وهذه أخرى؟ نعم.", ["هذه جملة. ", "وهذه أخرى؟ ", "نعم."]),
    ],
)
def test_sentences_of_several_languages(language: str, text: str, expected: list[str]) -> None:
    assert pieces(text, language) == expected
    assert detect_language(text) == language


def test_a_paragraph_break_ends_a_sentence_and_stays_with_it() -> None:
    assert pieces("no full stop\n\nnext") == ["no full stop\n\n", "next"]
    assert pieces("no full stop\n \t\n  next") == ["no full stop\n \t\n", "  next"]


def test_headings_list_items_and_table_rows_begin_sentences() -> None:
    text = "# Title\nText goes\non here\n- one\n- two\n1. three\n| a | b |\n```\ncode"
    assert pieces(text) == [
        "# Title\n",
        "Text goes\non here\n",
        "- one\n",
        "- two\n",
        "1. three\n",
        "| a | b |\n",
        "```\ncode",
    ]


@given(TEXTS)
def test_windows_line_ends_give_the_same_sentences(text: str) -> None:
    unix = text.replace("\r\n", "\n").replace("\r", "")
    windows = unix.replace("\n", "\r\n")
    assert [piece.replace("\r\n", "\n") for piece in pieces(windows)] == pieces(unix)


def test_windows_line_ends_give_the_same_sentences_in_a_long_document() -> None:
    unix = "".join(f"Line {number} is one of Mr. Long's\nsentences. Is it?\n\n" for number in range(2_000))
    windows = unix.replace("\n", "\r\n")
    spans = [sentence for passage in passages([windows]) for sentence in passage.sentences]
    assert [windows[span.start : span.end].replace("\r\n", "\n") for span in spans] == [
        unix[span.start : span.end] for passage in passages([unix]) for span in passage.sentences
    ]


@pytest.mark.parametrize("unit", ["a", "\n", "word ", "“", "字", "Mr. "])
def test_text_without_punctuation_still_gives_bounded_sentences(unit: str) -> None:
    text = unit * 30_000
    spans = [sentence for passage in passages([text]) for sentence in passage.sentences]
    assert max(span.end - span.start for span in spans) <= MAX_SENTENCE_CHARACTERS
    assert "".join(text[span.start : span.end] for span in spans) == text


def test_the_best_cut_is_a_clause_then_a_word_then_a_grapheme() -> None:
    assert best_cut("one two, three four", 0, 12) == len("one two, ")
    assert best_cut("one two three four", 0, 12) == len("one two ")
    assert best_cut("onetwothreefour", 0, 12) == 12
    assert best_cut("ab👨‍👩‍👧cd", 0, 4) == 2
    assert best_cut("👨‍👩‍👧cd", 0, 2) == len("👨‍👩‍👧")
