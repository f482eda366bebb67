"""One document, from text to chunks: read this first.

    text ──► sentences and tokens ──► BACKEND ──► scored sentences ──► boundaries ──► chunks
             sentences.py, tokens.py  windows.py  scoring.py           boundaries.py  merge.py

Every stage is a generator that pulls from the one before it, so a stream of any length passes through in constant
memory, and a chunk comes out as soon as no later sentence can change it. `Chunker` binds a loaded model to settings;
`cut` is the part behind the model, for scores that are already there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import chain, tee

import numpy as np

from metachunk_edge.backends import Device, load_backend
from metachunk_edge.backends.base import Backend
from metachunk_edge.boundaries import find_boundaries
from metachunk_edge.catalogue import DEFAULT_MODEL
from metachunk_edge.errors import SettingsError
from metachunk_edge.merge import merge_sentences
from metachunk_edge.modes import Mode, choose_model
from metachunk_edge.scoring import OnTokens, ScoredSentence, score_documents, scored_sentences
from metachunk_edge.settings import Settings
from metachunk_edge.tokens import join_encodings
from metachunk_edge.types import (
    Alignment,
    Block,
    Chunk,
    Encoding,
    Sentence,
    SentenceScores,
    TokenScores,
    Trace,
    WindowPlan,
)
from metachunk_edge.windows import plan_blocks

__all__ = ["Chunker", "cut"]


class Chunker:
    """Cuts texts into chunks with one loaded model.

    Safe to share between threads. Calls of `chunk` and `analyze` take turns, which saves memory; `chunk_iter`,
    `chunk_many` and `score_iter`, which may be left half-way, have a model context of their own while they run.

    >>> from metachunk_edge.backends.fake import FakeBackend
    >>> chunker = Chunker(FakeBackend(), Settings(max_size=4, context_length=256))
    >>> [chunk.text for chunk in chunker.chunk("One. Two words. Three words now.")]
    ['One. ', 'Two words. ', 'Three ', 'words now.']

    Raises:
        SettingsError: the settings ask for a longer context than the backend or the model has.
    """

    def __init__(self, backend: Backend, settings: Settings | None = None) -> None:
        self.backend = backend
        self.settings = settings or Settings()
        self._turn = threading.Lock()
        if self.settings.context_length > backend.context_length:
            raise SettingsError(
                f"context_length must be at most {backend.context_length}, for which the backend was opened, "
                f"got {self.settings.context_length}"
            )
        self._plan(None)  # checks the settings against the model

    @classmethod
    def from_pretrained(
        cls,
        model: str = DEFAULT_MODEL,
        settings: Settings | None = None,
        *,
        mode: Mode = "auto",
        device: Device = "auto",
        threads: int | None = None,
        workers: int = 1,
    ) -> Chunker:
        """Load a model and return its chunker.

        Args:
            model: a name of the catalogue, downloaded before (`metachunk-edge models pull`), or of a conversion; or the
                path of a GGUF file or a converted folder.
            settings: how to score and cut; see `Settings`.
            mode: of a model of the catalogue; see `modes.Mode`.
            device: see `backends.load_backend`.
            threads: CPU threads; None: one per physical core that this process may use.
            workers: how many documents will be read at the same time, in threads of yours; they share the CPU threads.

        Raises:
            ModelNotFoundError: there is no such model, or it is not downloaded.
            ModelFileError: the file is cut short, altered, or of a kind that cannot be scored.
            DeviceError: "gpu" where there is none.
            SettingsError: a value is outside its range.
        """
        settings = settings or Settings()
        backend = load_backend(
            choose_model(model, mode, device),
            device=device,
            threads=threads,
            workers=workers,
            context_length=settings.context_length,
        )
        return cls(backend, settings)

    def chunk(self, text: str) -> list[Chunk]:
        """Return the chunks of a text; none if it is empty or blank.

        Raises:
            BackendError: the model failed on this text.
        """
        with self._turn:
            return list(self.chunk_iter([text]))

    def chunk_many(self, texts: Iterable[str], *, on_tokens: OnTokens | None = None) -> Iterator[list[Chunk]]:
        """Yield the chunks of each text, in order. Short texts share the model's batches; the chunks are the same."""
        filled = (text if text.strip() else "" for text in texts)
        for sentences in score_documents(filled, self.backend, **self.settings.scoring(), on_tokens=on_tokens):
            yield list(cut(sentences, self.settings))

    def chunk_iter(self, stream: Iterable[str], *, on_tokens: OnTokens | None = None) -> Iterator[Chunk]:
        """Yield the chunks of a stream of text, e.g. an open file, as soon as they are settled.

        The chunks are those of `chunk`, however the stream is cut; memory does not grow with the stream's length.
        """
        return cut(self.score_iter(stream, on_tokens=on_tokens), self.settings)

    def score_iter(self, stream: Iterable[str], *, on_tokens: OnTokens | None = None) -> Iterator[ScoredSentence]:
        """Yield the scored sentences of a stream of text; see `cut` for what comes next."""
        text = _from_first_letter(stream)
        return scored_sentences(text, self.backend, **self.settings.scoring(), on_tokens=on_tokens)

    def analyze(self, text: str) -> Trace:
        """Return everything between the text and its chunks: tokens, scores, boundaries."""
        with self._turn:
            sentences = list(self.score_iter([text]))
        parts = [Encoding(part.tokens.ids, part.tokens.offsets, part.tokens.anchors) for part in sentences]
        encoding = join_encodings(parts)
        counts = [0, *(len(part.ids) for part in parts)]
        mean_nll = np.array([sentence.mean_nll for sentence in sentences], np.float64)
        logprobs = [np.empty(0, np.float32), *(sentence.tokens.logprobs for sentence in sentences)]
        return Trace(
            encoding=encoding,
            alignment=Alignment(
                sentences=tuple(Sentence(sentence.start, sentence.end) for sentence in sentences),
                token_bounds=np.cumsum(counts, dtype=np.int64),
            ),
            plan=WindowPlan(self.settings.context_length, tuple(self._plan(len(encoding.ids)))),
            token_scores=TokenScores(np.concatenate(logprobs)),
            sentence_scores=SentenceScores(mean_nll),
            boundaries=tuple(find_boundaries(mean_nll.tolist(), self.settings.threshold)),
            chunks=tuple(cut(sentences, self.settings)),
            model=self.backend.model,
            settings=self.settings.as_dict(),
        )

    def _plan(self, n_tokens: int | None) -> Iterator[Block]:
        return plan_blocks(
            n_tokens,
            policy=self.settings.window,
            context_length=self.settings.context_length,
            block_size=self.backend.block_size,
            position_limit=self.backend.position_limit,
        )


def cut(sentences: Iterable[ScoredSentence], settings: Settings) -> Iterator[Chunk]:
    """Yield the chunks of scored sentences. No model is needed: other settings never score again."""
    sentences, again = tee(sentences)
    boundaries = find_boundaries((sentence.mean_nll for sentence in again), settings.threshold)
    return merge_sentences(sentences, boundaries, settings)


def _from_first_letter(stream: Iterable[str]) -> Iterator[str]:
    """The stream as it is; nothing if it is all blank, which is known before the model is asked."""
    pieces = iter(stream)
    blank = []
    for piece in pieces:
        blank.append(piece)
        if piece.strip():
            yield from chain(blank, pieces)
            return
