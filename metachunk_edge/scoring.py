"""Text and a backend → scored sentences, as a stream. The only stage that calls a model.

`scored_sentences` ties the stages together: text → passages of sentences and, in parallel, tokens → blocks of
log-probabilities → each sentence with the tokens it owns. It holds a few passages and blocks at a time, whatever
the length of the document.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from metachunk_edge.backends.base import MAX_PACKED, Backend, Session
from metachunk_edge.sentences import Passage, passages
from metachunk_edge.tokens import encode, encode_stream, join_encodings
from metachunk_edge.types import Block, Encoding, FloatArray, IntArray, TokenIds
from metachunk_edge.windows import plan_blocks

__all__ = ["OnTokens", "ScoredSentence", "ScoredTokens", "align", "score_documents", "score_tokens", "scored_sentences"]


OnTokens = Callable[[int, int], None]
"""Called after each block with the number of tokens in it, and the character of the document that was reached."""

_LONGEST_TOKEN = 16  # characters; a longer text is taken for a long one without counting its tokens


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """A run of tokens with their scores: an `Encoding`'s fields, and `logprobs`, float32 [n]."""

    ids: TokenIds
    offsets: IntArray
    anchors: IntArray
    logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class ScoredSentence:
    """A sentence with its text, its score and its tokens.

    `mean_nll` is in nats per token. `first_token` is the document's number of the first token it owns, and `tokens`
    are those it owns. `touching` is int64 [m, 2]: the spans of all tokens that have a character in the sentence,
    where `first_touching` is the number of the first; the first and the last may belong to a neighbour.
    """

    start: int
    end: int
    text: str
    mean_nll: float
    first_token: int
    tokens: ScoredTokens
    first_touching: int
    touching: IntArray


def scored_sentences(
    pieces: Iterable[str],
    backend: Backend,
    *,
    language: str,
    window: str,
    context_length: int,
    on_tokens: OnTokens | None = None,
) -> Iterator[ScoredSentence]:
    """Score a stream of text, sentence by sentence.

    Everything but `on_tokens` is described in `Settings`.
    """
    blocks = plan_blocks(
        None,
        policy=window,
        context_length=context_length,
        block_size=backend.block_size,
        position_limit=backend.position_limit,
    )
    waiting: deque[tuple[int, int, str]] = deque()
    texts = _remember_sentences(passages(pieces, language=language), waiting)
    encodings = encode_stream(texts, backend.tokenizer)
    with backend.open_session() as session:
        scored = score_tokens(
            encodings, session, blocks, prefix_id=backend.tokenizer.prefix_id, context_length=context_length
        )
        yield from align(waiting, _reported(scored, on_tokens))


def score_documents(
    texts: Iterable[str],
    backend: Backend,
    *,
    language: str,
    window: str,
    context_length: int,
    on_tokens: OnTokens | None = None,
) -> Iterator[list[ScoredSentence]]:
    """Score many texts, in order. Short ones share a batch; the scores are those of `scored_sentences`."""
    together: list[tuple[str, Encoding]] = []
    room = backend.block_size
    for text in texts:
        encoding = encode(text, backend.tokenizer) if len(text) <= backend.block_size * _LONGEST_TOKEN else None
        n_rows = None if encoding is None else -(-len(encoding.ids) // backend.row_multiple) * backend.row_multiple
        if n_rows is None or n_rows > room or len(together) == MAX_PACKED:
            yield from _score_packed(together, backend, language, on_tokens)
            together, room = [], backend.block_size
        if encoding is not None and n_rows is not None and n_rows <= room:
            together.append((text, encoding))
            room -= n_rows
        else:
            single = scored_sentences(
                [text], backend, language=language, window=window, context_length=context_length, on_tokens=on_tokens
            )
            yield list(single)
    yield from _score_packed(together, backend, language, on_tokens)


def _score_packed(
    documents: list[tuple[str, Encoding]], backend: Backend, language: str, on_tokens: OnTokens | None
) -> Iterator[list[ScoredSentence]]:
    filled = [encoding.ids for _, encoding in documents if len(encoding.ids)]
    scores = iter(backend.score_packed(filled) if filled else [])
    for text, encoding in documents:
        waiting: deque[tuple[int, int, str]] = deque()
        deque(_remember_sentences(passages([text], language=language), waiting), maxlen=0)
        logprobs = next(scores) if len(encoding.ids) else np.empty(0, np.float32)
        tokens = ScoredTokens(encoding.ids, encoding.offsets, encoding.anchors, logprobs)
        yield list(align(waiting, _reported([tokens], on_tokens)))


def _remember_sentences(source: Iterable[Passage], waiting: deque[tuple[int, int, str]]) -> Iterator[str]:
    for passage in source:
        for sentence in passage.sentences:
            text = passage.text[sentence.start - passage.start : sentence.end - passage.start]
            waiting.append((sentence.start, sentence.end, text))
        yield passage.text


def _reported(scored: Iterable[ScoredTokens], on_tokens: OnTokens | None) -> Iterator[ScoredTokens]:
    for tokens in scored:
        if on_tokens is not None and len(tokens.ids):
            on_tokens(len(tokens.ids), int(tokens.offsets[-1, 1]))
        yield tokens


def score_tokens(
    encodings: Iterable[Encoding], session: Session, blocks: Iterator[Block], *, prefix_id: int, context_length: int
) -> Iterator[ScoredTokens]:
    """Score a stream of tokens block by block. Every token is scored once.

    The blocks do not depend on how the stream is cut, so neither do the scores.
    """
    tokens = _TokenBuffer(encodings, prefix_id, context_length)
    scored_to = 0
    for block in blocks:
        available = tokens.read_to(max(block.end, scored_to + 1))
        if available <= scored_to:
            return
        end = min(block.end, available)
        score_from = min(block.score_from, end)
        if block.restart:
            session.restart()
        logprobs = session.advance(
            tokens.ids(block.start - 1, end - 1),
            tokens.ids(score_from, end),
            position=block.position,
            keep_from=block.keep_from,
            shift=block.shift,
        )
        if score_from < end:
            yield tokens.scored(score_from, end, logprobs)
            scored_to = end


class _TokenBuffer:
    """The last tokens of a stream, by their number in the document; number -1 is the prefix token."""

    def __init__(self, encodings: Iterable[Encoding], prefix_id: int, context_length: int) -> None:
        self._encodings = iter(encodings)
        self._context_length = context_length  # no window begins further back
        self._first = -1
        nowhere = np.zeros(1, np.int64)
        self._tokens = Encoding(np.array([prefix_id], np.int32), nowhere.repeat(2)[None], nowhere)

    def read_to(self, end: int) -> int:
        """Read on until token `end` - 1 is there, or the stream ends; return the end of what is there."""
        while (there := self._first + len(self._tokens.ids)) < end:
            encoding = next(self._encodings, None)
            if encoding is None:
                break
            old = max(0, len(self._tokens.ids) - self._context_length)
            self._first += old
            kept = Encoding(self._tokens.ids[old:], self._tokens.offsets[old:], self._tokens.anchors[old:])
            self._tokens = join_encodings([kept, encoding])
        return there

    def ids(self, start: int, end: int) -> TokenIds:
        return self._tokens.ids[start - self._first : end - self._first]

    def scored(self, start: int, end: int, logprobs: FloatArray) -> ScoredTokens:
        span = slice(start - self._first, end - self._first)
        return ScoredTokens(self._tokens.ids[span], self._tokens.offsets[span], self._tokens.anchors[span], logprobs)


def align(waiting: deque[tuple[int, int, str]], scored: Iterable[ScoredTokens]) -> Iterator[ScoredSentence]:
    """Give every token to the sentence that holds its anchor, and yield each sentence once all its tokens are there.

    `waiting` holds (start, end, text) of the sentences that are still to come; the source of `scored` may add to it
    while it is read. A sentence that owns no token, because a neighbour's token spans it, has that token's score.
    """
    first = 0  # the document's number of the first token in the buffer
    owned_from = 0
    buffer = _joined([])
    for tokens in scored:
        buffer = _joined([buffer, tokens])
        while waiting and len(buffer.ids) and buffer.offsets[-1, 0] >= waiting[0][1]:
            sentence = _sentence(*waiting.popleft(), buffer, first, owned_from)
            owned_from = sentence.first_token + len(sentence.tokens.ids)
            yield sentence
        if waiting:  # what neither belongs to nor touches the next sentence is done with
            touching_from = int(np.searchsorted(buffer.offsets[:, 1], waiting[0][0], "right"))
            done = min(owned_from - first, touching_from)
            buffer = _part(buffer, done, len(buffer.ids))
            first += done
    while waiting:
        sentence = _sentence(*waiting.popleft(), buffer, first, owned_from)
        owned_from = sentence.first_token + len(sentence.tokens.ids)
        yield sentence


def _sentence(start: int, end: int, text: str, buffer: ScoredTokens, first: int, owned_from: int) -> ScoredSentence:
    owned_to = int(np.searchsorted(buffer.anchors, end, "left"))
    owned = _part(buffer, owned_from - first, max(owned_to, owned_from - first))
    touching_from = int(np.searchsorted(buffer.offsets[:, 1], start, "right"))
    touching_to = int(np.searchsorted(buffer.offsets[:, 0], end, "left"))
    logprobs = owned.logprobs if len(owned.ids) else buffer.logprobs[touching_from:touching_to]
    return ScoredSentence(
        start=start,
        end=end,
        text=text,
        mean_nll=-float(np.mean(logprobs, dtype=np.float64)),
        first_token=owned_from,
        tokens=owned,
        first_touching=first + touching_from,
        touching=buffer.offsets[touching_from:touching_to],
    )


def _joined(parts: list[ScoredTokens]) -> ScoredTokens:
    encoding = join_encodings([Encoding(part.ids, part.offsets, part.anchors) for part in parts])
    logprobs = np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)])
    return ScoredTokens(encoding.ids, encoding.offsets, encoding.anchors, logprobs)


def _part(tokens: ScoredTokens, start: int, end: int) -> ScoredTokens:
    return ScoredTokens(
        tokens.ids[start:end], tokens.offsets[start:end], tokens.anchors[start:end], tokens.logprobs[start:end]
    )
