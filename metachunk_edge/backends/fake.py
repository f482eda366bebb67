"""A backend without weights: deterministic scores from the last few token ids in its cache.

For the tests of this project and of those that embed it. It obeys the same contract as the real ones, counts its
work, and remembers only `memory` tokens, so that windowed scores can be compared with full-context scores exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from metachunk_edge.backends.base import N_SINKS
from metachunk_edge.errors import BackendError
from metachunk_edge.types import FloatArray, IntArray, TokenIds

__all__ = ["FakeBackend", "FakeTokenizer"]

_PREFIX_ID = 0
_MIXER = np.uint64(0x9E3779B97F4A7C15)


class FakeTokenizer:
    """Cuts UTF-8 into tokens of at most four bytes, behind every space too, even in the middle of a character."""

    name = "fake"
    normalizes_to_nfc = True
    prefix_id = _PREFIX_ID

    def tokenize(self, text: bytes, *, at_start: bool = True) -> tuple[TokenIds, IntArray]:  # noqa: ARG002
        """See `backends.base.Tokenizer`. A token's id is made from its bytes."""
        data = np.frombuffer(text, np.uint8)
        if not len(data):
            return np.empty(0, np.int32), np.empty(0, np.int64)
        starts_word = np.concatenate([[True], (data[1:] == 0x20) | (data[1:] == 0x0A)])
        word_start = np.maximum.accumulate(np.where(starts_word, np.arange(len(data)), 0))
        starts = np.flatnonzero((np.arange(len(data)) - word_start) % 4 == 0)
        lengths = np.diff(np.concatenate([starts, [len(data)]]))
        padded = np.concatenate([data, np.zeros(4, np.uint8)]).astype(np.int64)
        ids = np.zeros(len(starts), np.int64)
        for place in range(4):
            ids = ids * 257 + np.where(lengths > place, padded[starts + place] + 1, 0)
        return (ids % 1_000_003 + 1).astype(np.int32), lengths.astype(np.int64)


class FakeBackend:
    """See `backends.base.Backend`.

    `n_decoded`, `n_scored` and `n_calls` count the work of all sessions; `longest_cache` is the largest number of
    cache entries that any session has held.
    """

    def __init__(
        self, *, context_length: int = 2_048, block_size: int = 32, position_limit: int = 4_096, memory: int = 3
    ) -> None:
        self.tokenizer = FakeTokenizer()
        self.context_length = context_length
        self.block_size = block_size
        self.row_multiple = 1
        self.position_limit = position_limit
        self.memory = memory
        self.n_decoded = 0
        self.n_scored = 0
        self.n_calls = 0
        self.longest_cache = 0

    @property
    def model(self) -> dict[str, Any]:
        """The identity that results carry."""
        return {"name": "fake", "precision": None, "sha256": None, "backend": "fake", "memory": self.memory}

    def open_session(self) -> FakeSession:
        """Return a session with an empty cache."""
        return FakeSession(self)

    def score_packed(self, documents: Sequence[TokenIds]) -> list[FloatArray]:
        """Score each document as a session of its own would; see `backends.base.Backend`."""
        if sum(map(len, documents)) > self.block_size:
            raise BackendError("the documents do not fit one batch")
        scores = []
        for ids in documents:
            inputs = np.concatenate([[self.tokenizer.prefix_id], ids[:-1]]).astype(np.int32)
            scores.append(self.open_session().advance(inputs, ids, position=0, keep_from=0, shift=0))
        return scores


class FakeSession:
    """See `backends.base.Session`. Its cache is a list of ids and positions, kept to the letter of the contract."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self.restart()

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restart()

    def restart(self) -> None:
        """Empty the cache."""
        self._ids = np.empty(0, np.int32)
        self._positions = np.empty(0, np.int64)

    def advance(self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int) -> FloatArray:
        """Score the targets by a hash of each and of the last `memory` cache entries before it."""
        backend = self._backend
        kept = (self._positions < N_SINKS) | (self._positions >= keep_from)
        self._ids, self._positions = self._ids[kept], self._positions[kept]
        self._positions = np.where(self._positions >= N_SINKS, self._positions - shift, self._positions)
        last = int(self._positions[-1]) if len(self._positions) else -1
        if position != last + 1 or position + len(ids) > backend.position_limit:
            raise BackendError(f"position {position} does not follow {last} within {backend.position_limit}")
        self._ids = np.concatenate([self._ids, ids])
        self._positions = np.concatenate([self._positions, np.arange(position, position + len(ids))])
        if len(self._ids) > backend.context_length:
            raise BackendError(f"the cache overflows: {len(self._ids)} entries")
        backend.n_calls += 1
        backend.n_decoded += len(ids)
        backend.n_scored += len(targets)
        backend.longest_cache = max(backend.longest_cache, len(self._ids))
        return self._logprobs(targets)

    def _logprobs(self, targets: TokenIds) -> FloatArray:
        history = np.concatenate([np.zeros(self._backend.memory, np.int32), self._ids]).astype(np.uint64)
        mixed = targets.astype(np.uint64) * _MIXER
        for distance in range(self._backend.memory):
            end = len(history) - distance
            mixed = (mixed ^ history[end - len(targets) : end]) * _MIXER
        logprobs: FloatArray = ((mixed >> np.uint64(40)) % np.uint64(9_973)).astype(np.float32) / np.float32(-1_000)
        return logprobs
