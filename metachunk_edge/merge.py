"""Sentences and boundaries → chunks. Goes in: scored sentences, each with its boundary strength or None.

In three steps, each a generator that looks ahead by a bounded number of chunks:

1. `_segments`: the sentences between two boundaries form a meta-chunk, which is one segment. One that is larger than
   the maximum is taken apart into its sentences, and a sentence that is larger into pieces: clause, word, grapheme.
2. `none`, `greedy` (the paper's Section 3.1.3) or `optimal` group segments into chunks.
3. Overlap is added in front of each chunk, and the text is joined.

The objective of `optimal`: among all groupings into chunks of at most `max_size`, take the one with the largest

    Σ over cuts       strength of the boundary (0 at a sentence that is none, -1 inside a sentence)
  − Σ over chunks     FIT_WEIGHT · ((size − target) / target)²         target = (min_size + max_size) / 2
  − Σ over chunks     SHORT_COST · (1 + (min_size − size) / min_size)  where size < min_size

A size is the number of units of measure (tokens, words, characters) that the chunk touches.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np
import regex

from metachunk_edge.scoring import ScoredSentence
from metachunk_edge.sentences import best_cut
from metachunk_edge.settings import Settings, Unit
from metachunk_edge.types import Chunk, IntArray

__all__ = ["FIT_WEIGHT", "LOOK_AHEAD_CHUNKS", "SHORT_COST", "merge_sentences", "size_cost"]

FIT_WEIGHT = 4.0
SHORT_COST = 1_000.0
LOOK_AHEAD_CHUNKS = 8
"""`optimal` settles a cut at the latest when so many chunks' worth of text lies behind it."""

_INSIDE_SENTENCE = -1.0
_WORD = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}]|[^\s\p{Han}\p{Hiragana}\p{Katakana}]{1,64}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A sentence, or a part of one that is too large. Counters run through the document.

    A run of pieces touches the tokens [first.token_from, last.token_to); its size is last.size_to − first.size_from.
    """

    start: int
    end: int
    text: str
    token_from: int
    token_to: int
    size_from: int
    size_to: int


@dataclass(frozen=True, slots=True)
class Segment:
    """What is never cut again: a meta-chunk, or a part of one that is too large.

    `strength` is that of the boundary at its start, None where there is none; `gain` is what a cut there is worth.
    `lead` are the pieces before it that a chunk beginning here repeats.
    """

    pieces: tuple[Piece, ...]
    strength: float | None
    gain: float
    lead: tuple[Piece, ...]


def merge_sentences(
    sentences: Iterable[ScoredSentence], boundaries: Iterable[float | None], settings: Settings
) -> Iterator[Chunk]:
    """Yield the chunks of a document. Without overlap they tile it.

    The same chunks come out whether the sentences come from a list or a stream.
    """
    group: Callable[[Iterable[Segment], Settings], Iterator[list[Segment]]]
    group = {"none": _group_none, "greedy": _group_greedy, "optimal": _group_optimal}[settings.merge]
    segments = _segments(zip(sentences, boundaries, strict=False), settings)
    for index, members in enumerate(group(segments, settings)):
        core = [piece for segment in members for piece in segment.pieces]
        pieces = [*_fitting(members[0].lead, core[-1], settings.max_size), *core]
        yield Chunk(
            index=index,
            text="".join(piece.text for piece in pieces),
            start=pieces[0].start,
            end=pieces[-1].end,
            n_tokens=pieces[-1].token_to - pieces[0].token_from,
            boundary_strength=None if index == 0 else members[0].strength or 0.0,
        )


def size_cost(size: int, settings: Settings) -> float:
    """Return what a chunk of this size costs in the objective of `optimal`."""
    smallest = settings.smallest
    target = (smallest + settings.max_size) / 2
    cost = FIT_WEIGHT * ((size - target) / target) ** 2
    if size < smallest:
        cost += SHORT_COST * (1 + (smallest - size) / smallest)
    return cost


def _size(first: Piece, last: Piece) -> int:
    return last.size_to - first.size_from


# Step 1: segments


def _segments(sentences: Iterable[tuple[ScoredSentence, float | None]], settings: Settings) -> Iterator[Segment]:
    before: deque[Piece] = deque(maxlen=1 if settings.overlap == "dynamic" else _n_overlap(settings))
    held: list[Piece] = []  # the pieces of the meta-chunk so far, while they fit together
    held_strength: float | None = None
    apart = False  # the meta-chunk did not fit: its pieces are segments of their own
    n_words = 0

    def segment(pieces: list[Piece], strength: float | None, gain: float) -> Segment:
        repeated = () if settings.overlap == "dynamic" and strength is None else before
        lead = _fitting(repeated, pieces[-1], settings.max_size)  # what cannot be repeated must not decide the cuts
        before.extend(pieces)
        return Segment(tuple(pieces), strength, gain, lead)

    def taken_apart(pieces: list[Piece], strength: float | None) -> Iterator[Segment]:
        for place, piece in enumerate(pieces):
            own = strength if place == 0 else None
            yield segment([piece], own, own or 0.0)

    for sentence, strength in sentences:
        if strength is not None:
            if held:
                yield segment(held, held_strength, held_strength or 0.0)
            held, held_strength, apart = [], strength, False
        pieces = _pieces(sentence, settings, n_words)
        n_words = pieces[-1].size_to
        if len(pieces) == 1 and not apart and (not held or _size(held[0], pieces[0]) <= settings.max_size):
            held.append(pieces[0])
            continue
        yield from taken_apart(held, held_strength)
        held, apart = [], True
        yield segment([pieces[0]], strength, strength or 0.0)
        for piece in pieces[1:]:
            yield segment([piece], None, _INSIDE_SENTENCE)
    if held:
        yield segment(held, held_strength, held_strength or 0.0)


def _n_overlap(settings: Settings) -> int:
    return settings.overlap if isinstance(settings.overlap, int) else 0


def _pieces(sentence: ScoredSentence, settings: Settings, n_words: int) -> list[Piece]:
    """The sentence as one piece, or cut so that every piece is within the limit."""
    spans, first = _measures(sentence, settings.unit, n_words)
    pieces = []
    start = sentence.start
    while start < sentence.end:
        size_from = first + int(np.searchsorted(spans[:, 1], start, "right"))
        beyond = size_from - first + settings.max_size
        if beyond < len(spans):
            # A cut at the start of the first measure that is too many; a lone large character may need more.
            limit = max(int(spans[beyond, 0]), start + 1)
            end = sentence.start + best_cut(sentence.text, start - sentence.start, limit - sentence.start)
        else:
            end = sentence.end
        pieces.append(
            Piece(
                start=start,
                end=end,
                text=sentence.text[start - sentence.start : end - sentence.start],
                token_from=sentence.first_touching + int(np.searchsorted(sentence.touching[:, 1], start, "right")),
                token_to=sentence.first_touching + int(np.searchsorted(sentence.touching[:, 0], end, "left")),
                size_from=size_from,
                size_to=first + int(np.searchsorted(spans[:, 0], end, "left")),
            )
        )
        start = end
    return pieces


def _measures(sentence: ScoredSentence, unit: Unit, n_words: int) -> tuple[IntArray, int]:
    """The spans of the sentence's tokens, words or characters, and the document's number of the first."""
    if unit == "tokens":
        return sentence.touching, sentence.first_touching
    if unit == "words":
        words = [match.span() for match in _WORD.finditer(sentence.text)] or [(0, len(sentence.text))]
        return np.array(words, np.int64) + sentence.start, n_words
    starts = np.arange(sentence.start, sentence.end, dtype=np.int64)
    return np.stack([starts, starts + 1], axis=1), sentence.start


# Step 2: groups


def _group_none(segments: Iterable[Segment], settings: Settings) -> Iterator[list[Segment]]:
    return _group_while_fitting(segments, settings, across_boundaries=False)


def _group_greedy(segments: Iterable[Segment], settings: Settings) -> Iterator[list[Segment]]:
    return _group_while_fitting(segments, settings, across_boundaries=True)


def _group_while_fitting(
    segments: Iterable[Segment], settings: Settings, *, across_boundaries: bool
) -> Iterator[list[Segment]]:
    members: list[Segment] = []
    for segment in segments:
        joins = across_boundaries or segment.strength is None
        if members and not (joins and _chunk_size(members[0], segment) <= settings.max_size):
            yield members
            members = []
        members.append(segment)
    if members:
        yield members


def _group_optimal(segments: Iterable[Segment], settings: Settings) -> Iterator[list[Segment]]:
    """Dynamic programming over cuts; see the module's docstring for the objective.

    Linear in the number of segments, times the number that fits into one chunk: so far each looks back. A cut is
    settled as soon as all ways to go on share it, at the latest after LOOK_AHEAD_CHUNKS.
    """
    first = 0  # the number of the first segment that is not in a settled chunk
    pending: deque[Segment] = deque()
    value = {0: 0.0}  # value[cut]: that of the best grouping of the segments before the cut
    previous: dict[int, int] = {}  # previous[cut]: where that grouping's last chunk begins
    open_cuts = [0]  # the cuts at which a chunk may begin that reaches the next segment
    for end, segment in zip(count(1), segments, strict=False):
        pending.append(segment)
        if end > 1:
            value[end - 1] += segment.gain
        n_open = len(open_cuts)
        fits = {cut: _chunk_size(pending[cut - first], segment) <= settings.max_size for cut in open_cuts}
        open_cuts = [cut for cut in open_cuts if fits[cut] or cut == end - 1]
        has_closed = len(open_cuts) < n_open
        values = {cut: value[cut] - _cost(pending[cut - first], segment, settings) for cut in open_cuts}
        previous[end] = max(values, key=lambda cut: (values[cut], cut))
        value[end] = values[previous[end]]
        open_cuts.append(end)
        settled = _shared_cut(open_cuts, previous) if has_closed else first
        if settled == first and _span(pending) > LOOK_AHEAD_CHUNKS * settings.max_size:
            settled = _first_cut(end, previous, first)
            open_cuts = [cut for cut in open_cuts if cut >= settled and _shared_cut([cut, end], previous) >= settled]
        if settled > first:
            yield from _settle(pending, settled, previous, first)
            value = {cut: value[cut] for cut in open_cuts}
            previous = {cut: back for cut, back in previous.items() if cut > settled}
            first = settled
    yield from _settle(pending, first + len(pending), previous, first)


def _cost(first: Segment, last: Segment, settings: Settings) -> float:
    return size_cost(min(_chunk_size(first, last), settings.max_size), settings)


def _shared_cut(cuts: list[int], previous: dict[int, int]) -> int:
    """The latest cut that the groupings before all these cuts have in common."""
    remaining = set(cuts)
    latest_first = [-cut for cut in remaining]
    heapq.heapify(latest_first)
    while len(remaining) > 1:
        latest = -heapq.heappop(latest_first)
        remaining.remove(latest)
        if previous[latest] not in remaining:
            remaining.add(previous[latest])
            heapq.heappush(latest_first, -previous[latest])
    return remaining.pop()


def _first_cut(cut: int, previous: dict[int, int], first: int) -> int:
    while previous[cut] != first:
        cut = previous[cut]
    return cut


def _settle(pending: deque[Segment], settled: int, previous: dict[int, int], first: int) -> Iterator[list[Segment]]:
    """Take the chunks before the settled cut out of `pending`."""
    cuts = [settled]
    while cuts[-1] > first:
        cuts.append(previous[cuts[-1]])
    cuts.reverse()
    for begin, end in pairwise(cuts):
        yield [pending.popleft() for _ in range(end - begin)]


# Sizes of groups, and step 3: overlap


def _chunk_size(first: Segment, last: Segment) -> int:
    """The size of a chunk from one segment to another, with what it repeats in front."""
    return _size((first.lead or first.pieces)[0], last.pieces[-1])


def _span(segments: deque[Segment]) -> int:
    return _size(segments[0].pieces[0], segments[-1].pieces[-1])


def _fitting(lead: Iterable[Piece], last: Piece, max_size: int) -> tuple[Piece, ...]:
    """The last of these pieces that still fit into one chunk with what follows them up to `last`."""
    return tuple(piece for piece in lead if _size(piece, last) <= max_size)
