"""A wrapper around a backend that reports every block it scores, with the whole distributions: for the parity suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

from metachunk_edge.backends.base import Backend, LogitsSession, Session
from metachunk_edge.errors import ParityError, SettingsError
from metachunk_edge.types import FloatArray, TokenIds

__all__ = ["BlockCall", "OnBlock", "WatchedBackend"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockCall:
    """What one call of `Session.advance` was asked for; `restarted` tells whether the cache was emptied before it."""

    ids: TokenIds
    targets: TokenIds
    position: int
    keep_from: int
    shift: int
    restarted: bool


OnBlock = Callable[[BlockCall, FloatArray, FloatArray], None]
"""Called for each block with what was asked for, the log-probabilities and the logits."""


class WatchedBackend:
    """A backend whose sessions report every block they score, and whose blocks have a size of the caller's choice."""

    def __init__(self, backend: Backend, block_size: int, on_block: OnBlock) -> None:
        if not 1 <= block_size <= backend.block_size:
            raise SettingsError(
                f"block_size must be in [1, {backend.block_size}] for {backend.model['name']}, got {block_size}"
            )
        self.tokenizer = backend.tokenizer
        self.model = backend.model
        self.block_size = block_size
        self.row_multiple = backend.row_multiple
        self.context_length = backend.context_length
        self.position_limit = backend.position_limit
        self._backend = backend
        self._on_block = on_block

    def open_session(self) -> Session:
        """Return a session that reports.

        Raises:
            ParityError: the backend's sessions cannot hand out logits.
        """
        session = self._backend.open_session()
        if not hasattr(session, "advance_with_logits"):
            raise ParityError(f"The backend of {self.model['name']} cannot hand out logits, which parity compares.")
        return _WatchedSession(cast("LogitsSession", session), self._on_block)

    def score_packed(self, documents: Sequence[TokenIds]) -> list[FloatArray]:
        """See `backends.base.Backend`. Packed documents are not watched."""
        return self._backend.score_packed(documents)


class _WatchedSession:
    """See `backends.base.Session`."""

    def __init__(self, session: LogitsSession, on_block: OnBlock) -> None:
        self._session = session
        self._on_block = on_block
        self._restarted = False

    def __enter__(self) -> Session:
        self._session.__enter__()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._session.__exit__(exception_type, exception, traceback)

    def restart(self) -> None:
        """Empty the KV cache."""
        self._session.restart()
        self._restarted = True

    def advance(self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int) -> FloatArray:
        """Score a block and report it."""
        call = BlockCall(ids, targets, position, keep_from, shift, self._restarted)
        logprobs, logits = self._session.advance_with_logits(
            ids, targets, position=position, keep_from=keep_from, shift=shift
        )
        self._restarted = False
        self._on_block(call, logprobs, logits)
        return logprobs
