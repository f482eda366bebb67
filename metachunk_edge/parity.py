"""How far a model is from a reference: same texts, same window plan, through the pipeline that users run.

    reference ──record──► Recording ──┐
    model ────────────────────────────┴─compare──► Parity ──check──► what is outside the tolerance

Backends are wrapped so that every block they score is watched, with its whole distributions; those of the reference
lie in a file (4 bytes × vocabulary per token), those of the model are reduced at once, block by block.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from metachunk_edge.backends.base import Backend, Tokenizer
from metachunk_edge.backends.watched import BlockCall, WatchedBackend
from metachunk_edge.boundaries import find_boundaries
from metachunk_edge.chunker import Chunker, cut
from metachunk_edge.errors import ParityError
from metachunk_edge.parity_figures import (
    Parity,
    boundary_f1,
    kl_divergence,
    log_softmax,
    rank_correlation,
    share_found,
)
from metachunk_edge.scoring import ScoredSentence
from metachunk_edge.settings import Settings
from metachunk_edge.tokens import encode
from metachunk_edge.tolerances import Tolerance, check, tolerance_of
from metachunk_edge.types import DoubleArray, FloatArray, TokenIds

__all__ = [
    "Parity",
    "RecordedText",
    "Recording",
    "Tolerance",
    "check",
    "compare",
    "first_tokens",
    "packaged_texts",
    "record",
    "tolerance_of",
]

_ROWS_AT_ONCE = 16  # distributions in float64 at a time
_SAME_TOKENIZER = "compare models with the same tokenizer."


def packaged_texts(tokenizer: Tokenizer, n_tokens: int) -> list[str]:
    """Return the beginnings, of `n_tokens` tokens each, of an English and a Chinese text in the public domain."""
    folder = importlib.resources.files("metachunk_edge") / "parity_texts"
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("english.txt", "chinese.txt")]
    return [first_tokens(text, tokenizer, n_tokens) for text in texts]


def first_tokens(text: str, tokenizer: Tokenizer, n_tokens: int) -> str:
    """Return the beginning of a text that its first `n_tokens` tokens make up."""
    offsets = encode(text, tokenizer).offsets
    return text[: offsets[n_tokens, 0]] if len(offsets) > n_tokens else text


@dataclass(frozen=True, slots=True, eq=False)
class RecordedText:
    """The reference's pass over one text. `logprobs` is float32 [n_tokens]: ln p of the tokens `ids`."""

    text: str
    calls: tuple[BlockCall, ...]
    ids: TokenIds
    logprobs: FloatArray
    sentences: tuple[ScoredSentence, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The reference's pass over all texts.

    `distributions` is float32 [n_tokens, vocabulary], ln softmax of the logits, in a memory-mapped file.
    """

    model: dict[str, Any]
    settings: Settings
    block_size: int
    texts: tuple[RecordedText, ...]
    distributions: FloatArray


def record(backend: Backend, texts: Iterable[str], settings: Settings, *, block_size: int, path: Path) -> Recording:
    """Run the reference over the texts once, and write its distributions to the file `path`.

    Raises:
        ParityError: the backend cannot hand out logits, or the texts have no tokens.
        SettingsError: the backend does not take blocks of `block_size`, or not the settings' context.
    """
    with path.open("wb") as file:
        recorded = tuple(_record_text(backend, text, settings, block_size, file) for text in texts)
    n_tokens = sum(len(text.ids) for text in recorded)
    if n_tokens == 0:
        raise ParityError("There is nothing to compare: the texts are empty or blank.")
    n_vocabulary = path.stat().st_size // n_tokens // np.dtype(np.float32).itemsize
    distributions = np.memmap(path, np.float32, mode="r", shape=(n_tokens, n_vocabulary))
    model = {**backend.model, "block_size": block_size}
    return Recording(model, settings, block_size, recorded, distributions)


def _record_text(backend: Backend, text: str, settings: Settings, block_size: int, file: BinaryIO) -> RecordedText:
    calls: list[BlockCall] = []
    scores: list[FloatArray] = []

    def keep(call: BlockCall, logprobs: FloatArray, logits: FloatArray) -> None:
        calls.append(call)
        scores.append(logprobs)
        for start in range(0, len(logits), _ROWS_AT_ONCE):
            file.write(log_softmax(logits[start : start + _ROWS_AT_ONCE]).astype(np.float32).tobytes())

    sentences = tuple(Chunker(WatchedBackend(backend, block_size, keep), settings).score_iter([text]))
    ids = np.concatenate([np.empty(0, np.int32), *(call.targets for call in calls)])
    return RecordedText(text, tuple(calls), ids, np.concatenate([np.empty(0, np.float32), *scores]), sentences)


def compare(recording: Recording, backend: Backend) -> Parity:
    """Run a model over the recorded texts, with the same settings and block size, and measure how far it is off.

    Raises:
        ParityError: the model has other token ids, another vocabulary, other blocks, or cannot hand out logits.
        SettingsError: the backend does not take blocks of the recorded size, or not the settings' context.
    """
    passes: list[_ModelPass] = []
    first_row = 0
    for text in recording.texts:
        rows = recording.distributions[first_row : first_row + len(text.ids)]
        model_pass = _ModelPass(text, rows)
        watched = WatchedBackend(backend, recording.block_size, model_pass.compare_block)
        model_pass.sentences = tuple(Chunker(watched, recording.settings).score_iter([text.text]))
        model_pass.check_complete()
        passes.append(model_pass)
        first_row += len(text.ids)
    return _summarize(recording, passes)


class _ModelPass:
    """The model's pass over one text, held against the reference's as it goes."""

    def __init__(self, reference: RecordedText, distributions: FloatArray) -> None:
        self.sentences: tuple[ScoredSentence, ...] = ()
        self.logprobs = np.empty(len(reference.ids), np.float32)
        self.kl = np.empty(len(reference.ids), np.float64)
        self.same_top = np.empty(len(reference.ids), bool)
        self._reference = reference
        self._distributions = distributions
        self._n_calls = 0
        self._n_scored = 0

    def compare_block(self, call: BlockCall, logprobs: FloatArray, logits: FloatArray) -> None:
        """Compare one block: first what was asked for, then the distributions."""
        self._check_call(call)
        if logits.shape[1] != self._distributions.shape[1]:
            raise ParityError(
                f"The vocabularies differ: the model has {logits.shape[1]:,} tokens and the reference "
                f"{self._distributions.shape[1]:,}; compare models that were made from the same checkpoint."
            )
        begin = self._n_scored
        self.logprobs[begin : begin + len(logprobs)] = logprobs
        for start in range(0, len(logits), _ROWS_AT_ONCE):
            rows = logits[start : start + _ROWS_AT_ONCE]
            span = slice(begin + start, begin + start + len(rows))
            self.kl[span] = kl_divergence(self._distributions[span], rows)
            self.same_top[span] = self._distributions[span].argmax(axis=1) == rows.argmax(axis=1)
        self._n_calls += 1
        self._n_scored += len(logprobs)

    def check_complete(self) -> None:
        """Raise ParityError if the model has scored fewer tokens than the reference."""
        if self._n_calls < len(self._reference.calls):
            raise ParityError(
                f"The token ids differ: the model's end at token {self._n_scored} and the reference's go on; "
                f"{_SAME_TOKENIZER}"
            )

    def _check_call(self, call: BlockCall) -> None:
        scored = self._n_scored
        expected_ids = self._reference.ids[scored : scored + len(call.targets)]
        found_ids = call.targets[: len(expected_ids)]
        differing = np.flatnonzero(found_ids != expected_ids[: len(found_ids)])
        if len(differing):
            place = int(differing[0])
            raise ParityError(
                f"The token ids differ: token {scored + place} is {found_ids[place]} for the model and "
                f"{expected_ids[place]} for the reference; {_SAME_TOKENIZER}"
            )
        expected = self._reference.calls[self._n_calls] if self._n_calls < len(self._reference.calls) else None
        if expected is None or len(call.targets) != len(expected.targets):
            raise ParityError(
                f"The token ids differ: from token {scored} on, the model and the reference have different numbers of "
                f"tokens; {_SAME_TOKENIZER}"
            )
        if not np.array_equal(call.ids, expected.ids):
            raise ParityError(
                f"The tokens read before token {scored} differ: they begin with {call.ids[0]} for the model and "
                f"{expected.ids[0]} for the reference; compare models that put the same token before a text."
            )
        if _place(call) != _place(expected):
            raise ParityError(
                f"The window plans differ: the block that scores token {scored} has {_place(call)} for the model and "
                f"{_place(expected)} for the reference; compare models with the same trained context length."
            )


def _place(call: BlockCall) -> dict[str, int]:
    return {name: getattr(call, name) for name in ("position", "keep_from", "shift", "restarted")}


def _summarize(recording: Recording, passes: Sequence[_ModelPass]) -> Parity:
    settings = replace(recording.settings, threshold=0.0)
    reference = np.concatenate([text.logprobs for text in recording.texts]).astype(np.float64)
    model = np.concatenate([model_pass.logprobs for model_pass in passes]).astype(np.float64)
    kl = np.concatenate([model_pass.kl for model_pass in passes])
    off = np.abs(model - reference)
    reference_sentences = [text.sentences for text in recording.texts]
    model_sentences = [model_pass.sentences for model_pass in passes]
    return Parity(
        n_tokens=len(reference),
        n_sentences=sum(map(len, reference_sentences)),
        mean_abs=float(off.mean()),
        p999_abs=float(np.percentile(off, 99.9)),
        max_abs=float(off.max()),
        rms_delta_p=float(np.sqrt(np.mean((np.exp(model) - np.exp(reference)) ** 2))),
        kl_mean=float(kl.mean()),
        kl_p999=float(np.percentile(kl, 99.9)),
        kl_max=float(kl.max()),
        same_top=float(np.concatenate([model_pass.same_top for model_pass in passes]).mean()),
        nll_difference=float((reference.sum() - model.sum()) / -reference.sum()),
        rank_correlation=rank_correlation(_scores(reference_sentences), _scores(model_sentences)),
        boundary_f1=boundary_f1(_boundaries(reference_sentences), _boundaries(model_sentences)),
        identical_chunks=share_found(_chunks(reference_sentences, settings), _chunks(model_sentences, settings)),
    )


def _scores(texts: Sequence[Sequence[ScoredSentence]]) -> DoubleArray:
    return np.array([sentence.mean_nll for sentences in texts for sentence in sentences], np.float64)


def _boundaries(texts: Sequence[Sequence[ScoredSentence]]) -> set[tuple[int, int]]:
    """The text and the character of every boundary at threshold 0."""
    return {
        (number, sentence.start)
        for number, sentences in enumerate(texts)
        for sentence, strength in zip(
            sentences, find_boundaries((sentence.mean_nll for sentence in sentences), threshold=0.0), strict=True
        )
        if strength is not None
    }


def _chunks(texts: Sequence[Sequence[ScoredSentence]], settings: Settings) -> set[tuple[int, int, int]]:
    return {
        (number, chunk.start, chunk.end) for number, sentences in enumerate(texts) for chunk in cut(sentences, settings)
    }
