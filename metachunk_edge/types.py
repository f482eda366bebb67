"""The values that each stage hands to the next.

All spans are half-open and count characters (Unicode code points) of the original text; all scores are
natural logarithms (nats). Everything here is frozen: a stage makes new values and changes none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Alignment",
    "Block",
    "Chunk",
    "Encoding",
    "Sentence",
    "SentenceScores",
    "TokenScores",
    "Trace",
    "WindowPlan",
]

IntArray = NDArray[np.int64]
TokenIds = NDArray[np.int32]
FloatArray = NDArray[np.float32]
DoubleArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sentence:
    """A span of the text. The sentences of a text tile it: no gap, no overlap, white space included."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Encoding:
    """The tokens of a text.

    `ids` is int32 [n_tokens]. `offsets` is int64 [n_tokens, 2]: the characters that the token's bytes belong
    to; a character made of several tokens is the span of each of them. `anchors` is int64 [n_tokens]: the
    token's last character that is not white space, which decides the sentence that owns the token.
    """

    ids: TokenIds
    offsets: IntArray
    anchors: IntArray


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which token belongs to which sentence.

    Sentence i owns the tokens [token_bounds[i], token_bounds[i + 1]); `token_bounds` is int64 [n_sentences + 1].
    """

    sentences: tuple[Sentence, ...]
    token_bounds: IntArray


@dataclass(frozen=True, slots=True)
class Block:
    """One call to the backend: which tokens it scores, and what the KV cache holds while it does.

    The document's tokens [start, end) become the targets; the inputs are the tokens one place before them (the
    prefix token stands before token 0). The last `end - score_from` targets are scored; the ones before are only
    read, for context. The first input gets the position `position`. Before that, the cache is emptied if
    `restart`; otherwise the entries at positions [N_SINKS, keep_from) are dropped and the later ones move back
    by `shift` positions.
    """

    start: int
    end: int
    score_from: int
    position: int
    keep_from: int
    shift: int
    restart: bool


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The blocks that score a document once, in order. No token sees more than `context_length` entries."""

    context_length: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """`logprobs`, float32 [n_tokens]: ln p(token | what its block may see)."""

    logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class SentenceScores:
    """`mean_nll`, float64 [n_sentences]: mean negative log-likelihood per token (the paper's Equation 1)."""

    mean_nll: DoubleArray


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of the source: `text == source[start:end]`, always.

    `n_tokens` counts the tokens of the document that touch the chunk. `boundary_strength` is the strength, in
    nats, of the boundary where the chunk begins: the largest threshold at which the paper's rule would still cut
    there; 0 where the cut was made for size alone, None for the first chunk. With overlap, `start` lies before
    the previous chunk's `end`, and the boundary is at that `end`.
    """

    index: int
    text: str
    start: int
    end: int
    n_tokens: int
    boundary_strength: float | None


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything between one text and its chunks, to be looked at or cut again.

    `boundaries` holds one entry per sentence: the strength of the boundary at its start, None where there is none.
    `model` is the identity of the model file, `settings` the settings that were used.
    """

    encoding: Encoding
    alignment: Alignment
    plan: WindowPlan
    token_scores: TokenScores
    sentence_scores: SentenceScores
    boundaries: tuple[float | None, ...]
    chunks: tuple[Chunk, ...]
    model: dict[str, Any]
    settings: dict[str, Any]
