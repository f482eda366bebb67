"""Text → sentence spans. Goes in: a text, whole or as a stream. Comes out: passages whose sentences tile the text.

The boundaries come from the `sentencex` library; a paragraph break, a Markdown heading, a list item and a table
row begin a sentence too. White space stays with the sentence before it, except for the indentation of a new line.
A sentence is cut at MAX_SENTENCE_CHARACTERS (or behind the character that stands there, however many accents it has),
so that text without any punctuation is handled as well.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import regex
import sentencex

from metachunk_edge.types import Sentence

__all__ = [
    "MAX_SENTENCE_CHARACTERS",
    "Passage",
    "best_cut",
    "detect_language",
    "is_grapheme_boundary",
    "passages",
    "split_sentences",
]

MAX_SENTENCE_CHARACTERS = 2_000
"""Longer sentences are cut at the best smaller place (see `best_cut`)."""

_PASSAGE_CHARACTERS = 16_384
_LONGEST_GRAPHEME = 256  # a longer cluster (stacked accents without end) may be cut, or memory would have no bound

_STRUCTURE = regex.compile(
    r"""\n[^\S\n]*\n\s*                                      # a blank line
      | \n(?=[^\S\n]*(?:\#{1,6}\s | [-*+•]\s | \d{1,3}[.)]\s | \||```))   # before a heading, list, table row, fence
      | ^[^\S\n]*\#{1,6}[^\S\n][^\n]*\n                       # after a heading
    """,
    regex.VERBOSE | regex.MULTILINE,
)
_CLAUSE_END = regex.compile(r"[,;:，；：、،؛।](?=\s)\s*|[，；：、。！？]|\n+")
_WHITE_SPACE = regex.compile(r"\s+")
_WIDE_WHITE_SPACE = regex.compile(r"[^\S\x00-\x7f]")
_SURROGATE = regex.compile(r"[\ud800-\udfff]")
_WINDOWS_LINE_END = regex.compile(r"\r\n")
_GRAPHEME = regex.compile(r"\X")
_SCRIPTS = {
    "zh": regex.compile(r"\p{Han}"),
    "ja": regex.compile(r"[\p{Hiragana}\p{Katakana}]"),
    "ko": regex.compile(r"\p{Hangul}"),
    "ar": regex.compile(r"\p{Arabic}"),
    "hi": regex.compile(r"\p{Devanagari}"),
    "ru": regex.compile(r"\p{Cyrillic}"),
    "el": regex.compile(r"\p{Greek}"),
    "he": regex.compile(r"\p{Hebrew}"),
    "th": regex.compile(r"\p{Thai}"),
}


@dataclass(frozen=True, slots=True)
class Passage:
    """A run of whole sentences. The spans count from the beginning of the document, where `start` is the passage."""

    start: int
    text: str
    sentences: tuple[Sentence, ...]


def passages(pieces: Iterable[str], *, language: str = "auto") -> Iterator[Passage]:
    """Cut a stream of text into passages of whole sentences, of bounded length.

    The result depends on the text alone, not on how the stream cuts it into `pieces`. `language` is a code that
    sentencex knows ("en", "zh", …) or "auto": the script of the document's beginning decides.

    >>> [p.sentences for p in passages(["One. T", "wo."], language="en")]
    [(Sentence(start=0, end=5), Sentence(start=5, end=9))]
    """
    start = 0
    pending = ""
    for portion in _portions(pieces, _PASSAGE_CHARACTERS):
        pending += portion
        while len(lines := _with_line_feeds(pending)) >= _PASSAGE_CHARACTERS:
            head = lines[:_PASSAGE_CHARACTERS]
            language = detect_language(head) if language == "auto" else language
            # The last sentence may go on behind the passage's end: it begins the next passage.
            ends = _positions_before(pending, _sentence_ends(head, language)[:-1])
            yield Passage(start, pending[: ends[-1]], _spans(ends, start))
            start += ends[-1]
            pending = pending[ends[-1] :]
    if pending:
        language = detect_language(pending) if language == "auto" else language
        ends = _positions_before(pending, _sentence_ends(_with_line_feeds(pending), language))
        yield Passage(start, pending, _spans(ends, start))


def split_sentences(text: str, *, language: str = "en") -> tuple[Sentence, ...]:
    r"""Return the sentences of a text, tiling it.

    >>> split_sentences("She came.  He left.\n\nThe end", language="en")
    (Sentence(start=0, end=11), Sentence(start=11, end=21), Sentence(start=21, end=28))
    """
    if not text:
        return ()
    return _spans(_positions_before(text, _sentence_ends(_with_line_feeds(text), language)), 0)


def _sentence_ends(lines: str, language: str) -> list[int]:
    candidates = set(_splitter_ends(lines, language))
    candidates.update(match.end() for match in _STRUCTURE.finditer(lines))
    ends = _behind_white_space(lines, candidates)
    first_letter = len(lines) - len(lines.lstrip())
    inner = sorted(end for end in ends if first_letter < end < len(lines) and is_grapheme_boundary(lines, end))
    bounded: list[int] = []
    start = 0
    for end in (*inner, len(lines)):
        while end - start > MAX_SENTENCE_CHARACTERS:
            start = best_cut(lines, start, start + MAX_SENTENCE_CHARACTERS)
            bounded.append(start)
        if end > start:
            bounded.append(end)
        start = end
    return bounded


def _splitter_ends(lines: str, language: str) -> list[int]:
    # sentencex 1.0.32 panics on some white space beyond ASCII, and takes no surrogates: it sees harmless stand-ins.
    shown = _WIDE_WHITE_SPACE.sub(" ", lines)
    shown = _SURROGATE.sub("\ufffd", shown)
    try:
        return [boundary["end_index"] for boundary in sentencex.get_sentence_boundaries(language, shown)]
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library's own class; it is no Exception
            raise
        return []  # paragraphs and the longest sentence still cut the text


def _with_line_feeds(text: str) -> str:
    """A document with Windows line ends is cut where the same document with line feeds is."""
    return text.replace("\r\n", "\n") if "\r\n" in text else text


def _positions_before(text: str, positions: list[int]) -> list[int]:
    """Turn positions in `_with_line_feeds(text)` into positions in `text`."""
    if "\r\n" not in text:
        return positions
    pairs = [match.start() - count for count, match in enumerate(_WINDOWS_LINE_END.finditer(text))]
    return [position + bisect_left(pairs, position) for position in positions]


def _spans(ends: list[int], offset: int) -> tuple[Sentence, ...]:
    return tuple(Sentence(offset + start, offset + end) for start, end in zip([0, *ends], ends, strict=False))


def _behind_white_space(text: str, candidates: Iterable[int]) -> set[int]:
    """Move boundaries out of white space: behind its last line feed, where a line follows, else behind all of it."""
    runs = [match.span() for match in _WHITE_SPACE.finditer(text)]
    begins = [begin for begin, _ in runs]
    moved = set()
    for candidate in candidates:
        begin, end = runs[run] if (run := bisect_right(begins, candidate) - 1) >= 0 else (0, -1)
        if candidate <= end:
            line_feed = text.rfind("\n", begin, end)
            moved.add(line_feed + 1 if line_feed >= 0 and end < len(text) else end)
        else:
            moved.add(candidate)
    return moved


def best_cut(text: str, start: int, limit: int) -> int:
    """Return the best place in (start, limit] to cut a stretch that is too long.

    After the last clause end of the second half, else after the last white space there, else at the last
    grapheme boundary; if a single grapheme is longer than the limit, behind that grapheme.

    >>> best_cut("one two, three four", 0, 12)
    9
    """
    if "\r\n" in text:
        before_limit = limit - 1 if limit - 1 > start and text[limit - 1 : limit + 1] == "\r\n" else limit
        inner = [place - text.count("\r\n", 0, place) for place in (start, before_limit)]
        return _positions_before(text, [best_cut(_with_line_feeds(text), *inner)])[0]
    half = start + (limit - start) // 2
    for pattern in (_CLAUSE_END, _WHITE_SPACE):
        cuts = [match.end() for match in pattern.finditer(text, half, limit) if match.end() <= limit]
        for cut in reversed(cuts):
            if cut > start and (cut == len(text) or is_grapheme_boundary(text, cut)):
                return cut
    cut = start
    for grapheme in _GRAPHEME.finditer(text, start, min(len(text), limit + _LONGEST_GRAPHEME)):
        if grapheme.end() > limit and cut > start:
            break
        cut = grapheme.end()
    return cut


def is_grapheme_boundary(text: str, position: int) -> bool:
    """Whether a cut at `position` leaves every user-perceived character whole (Unicode Standard Annex 29)."""
    if position <= 0 or position >= len(text):
        return True
    if text[position - 1] < "\u0300" and text[position] < "\u0300":
        return not (text[position - 1] == "\r" and text[position] == "\n")
    # Start where a boundary is certain: behind a line feed, or well before the position.
    start = max(0, position - _LONGEST_GRAPHEME, text.rfind("\n", 0, position - 1) + 1)
    return any(grapheme.end() == position for grapheme in _GRAPHEME.finditer(text, start, position + 1))


def detect_language(text: str) -> str:
    """Guess the language from the script of the first 2,000 characters; Latin script counts as English.

    >>> detect_language("今天天气很好。"), detect_language("What a day.")
    ('zh', 'en')
    """
    sample = text[:2_000]
    letters = sum(character.isalpha() for character in sample)
    counts = {language: len(pattern.findall(sample)) for language, pattern in _SCRIPTS.items()}
    if counts["ja"] * 10 > letters > 0:
        return "ja"
    language = max(counts, key=lambda code: counts[code])
    return language if counts[language] * 3 > letters > 0 else "en"


def _portions(pieces: Iterable[str], size: int) -> Iterator[str]:
    """Join small pieces and cut large ones, so that neither single characters nor whole books cost extra."""
    buffer: list[str] = []
    length = 0
    for piece in pieces:
        for begin in range(0, len(piece), size):
            part = piece[begin : begin + size]
            buffer.append(part)
            length += len(part)
            if length >= size and not part.endswith("\r"):  # its line feed may be still to come
                yield "".join(buffer)
                buffer, length = [], 0
    if buffer:
        yield "".join(buffer)
