"""The one impure seam: what a backend is to the rest of the package.

A backend knows token ids and log-probabilities, and nothing about text, sentences or chunks. `Backend` holds a
loaded model, `Session` its only state (a KV cache), `Tokenizer` the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

from metachunk_edge.types import FloatArray, IntArray, TokenIds

__all__ = ["MAX_PACKED", "N_SINKS", "Backend", "LogitsSession", "Session", "Tokenizer"]

N_SINKS = 4
"""The first cache entries that are never dropped: attention sinks (arXiv 2309.17453). Without them scores drift."""

MAX_PACKED = 32
"""How many short documents share a batch at most."""


class Tokenizer(Protocol):
    """The vocabulary of a model."""

    @property
    def name(self) -> str:
        """The model's name, for messages."""

    @property
    def normalizes_to_nfc(self) -> bool:
        """Whether the model's own tokenizer brings a text into NFC before it encodes it."""

    @property
    def prefix_id(self) -> int:
        """The token that stands before every document: the model's BOS, else its end-of-text token."""

    def tokenize(self, text: bytes, *, at_start: bool = True) -> tuple[TokenIds, IntArray]:
        """Encode UTF-8 text as ordinary text. Return ids, int32 [n_tokens], and byte lengths, int64 [n_tokens].

        `at_start` tells whether the text begins its document; some vocabularies put a space in front there.
        """


class Session(Protocol):
    """One document on its way through the model. Not to be shared by threads."""

    def __enter__(self) -> Session: ...

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def restart(self) -> None:
        """Empty the KV cache."""

    def advance(self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int) -> FloatArray:
        """Read `ids` and return how likely the last of them make the `targets`.

        Args:
            ids: int32 [n], 1 <= n <= the backend's block size.
            targets: int32 [m], m <= n. targets[-1] is what follows ids[-1], and so on backwards.
            position: that of ids[0], after the shift.
            keep_from: the cache entries at positions [N_SINKS, keep_from) are dropped first …
            shift: … and those behind them move back by so many positions.

        Returns:
            float32 [m]: ln p(target | the cache and the ids before it).

        Raises:
            BackendError: the engine failed, or returned a value that is not a finite number.
        """


class LogitsSession(Session, Protocol):
    """A session that can also hand out the whole distributions: for the parity suite, which compares them."""

    def advance_with_logits(
        self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int
    ) -> tuple[FloatArray, FloatArray]:
        """Do what `advance` does. Return its log-probabilities, and the logits, float32 [m, vocabulary].

        Row i holds the logits that targets[i] was scored with. The array is the caller's own.
        """


class Backend(Protocol):
    """A loaded model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's vocabulary."""

    @property
    def model(self) -> dict[str, Any]:
        """What is recorded with each result: name, precision, sha256, backend and its version, device, threads."""

    @property
    def block_size(self) -> int:
        """How many tokens `Session.advance` takes at most."""

    @property
    def row_multiple(self) -> int:
        """In a packed batch a document's length counts as the next multiple of this."""

    @property
    def context_length(self) -> int:
        """How many entries the KV cache holds."""

    @property
    def position_limit(self) -> int:
        """The number of positions the model was trained on."""

    def open_session(self) -> Session:
        """Return a session with an empty cache, for one document."""

    def score_packed(self, documents: Sequence[TokenIds]) -> list[FloatArray]:
        """Score short documents in one batch, as separate sequences, each behind the prefix token.

        None of the documents is empty. They must fit together: at most MAX_PACKED of them, and their lengths, each
        rounded up to a multiple of `row_multiple`, add up to at most `block_size`. The scores are to the bit those
        of a session of their own.
        """
