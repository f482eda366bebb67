"""Many documents through one loaded model: one bad file never stops the others, and short ones share batches.

Goes in: documents and a place for the results. Comes out: a report, and sentences about what went wrong.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from metachunk_edge.chunker import Chunker
from metachunk_edge.documents import Document, DocumentFacts, check_document, read_document
from metachunk_edge.errors import BackendError, DocumentError
from metachunk_edge.output import SUFFIXES, Format, Writer, new_file, read_record, record_completed
from metachunk_edge.scoring import OnTokens
from metachunk_edge.settings import Settings
from metachunk_edge.types import Chunk

__all__ = ["Batch", "BatchReport", "ChunkCount", "DirectorySink", "Listener", "StreamSink", "progress_in_bytes"]

_SHORT_CHARACTERS = 2_048  # a document up to this length may share a batch with others
_SHORT_AT_ONCE = 64
_AHEAD = 4  # documents per worker whose results may wait


class _StoppedError(Exception):
    """The run has ended before this document."""


class Listener(Protocol):
    """Hears what happens while the documents are worked on."""

    def on_problem(self, sentence: str) -> None:
        """A document failed."""

    def on_note(self, sentence: str) -> None:
        """Something that the user should know, and no failure."""

    def on_progress(self, n_tokens: int, n_bytes: int) -> None:
        """So many more tokens were scored, and so many more bytes of the files are done with."""


def progress_in_bytes(on_progress: Callable[[int, int], None], facts: DocumentFacts | None) -> OnTokens:
    """Return what the scoring calls after each block, so that `on_progress` hears of it as `Listener` describes.

    Without the facts of a document nothing is known about bytes.
    """
    bytes_per_character = facts.n_bytes / facts.n_characters if facts and facts.n_characters else 0.0
    reached = 0

    def on_tokens(n_tokens: int, character: int) -> None:
        nonlocal reached
        now = round(character * bytes_per_character)
        on_progress(n_tokens, now - reached)
        reached = now

    return on_tokens


@dataclass(slots=True)
class BatchReport:
    """What became of the documents."""

    n_written: int = 0
    n_skipped: int = 0
    n_failed: int = 0
    n_chunks: int = 0
    n_tokens: int = 0


@dataclass(slots=True)
class ChunkCount:
    """Counts the chunks of a document while they pass through."""

    n_chunks: int = 0
    n_at_boundaries: int = 0

    def watch(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks as they come."""
        for chunk in chunks:
            self.n_chunks += 1
            self.n_at_boundaries += bool(chunk.boundary_strength)
            yield chunk

    def note(self, source: str, settings: Settings) -> str | None:
        """Return what the user should know about the chunks, once they have passed."""
        if self.n_chunks == 0:
            return f"{source}: empty or blank, so there are no chunks."
        if self.n_chunks > 1 and self.n_at_boundaries == 0 and settings.threshold != 0:
            return (
                f"{source}: cut for size alone; no boundary above the threshold of {settings.threshold} lies at a cut "
                "(a lower --threshold finds more)."
            )
        return None


class StreamSink:
    """All results on one stream."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def has(self, document: Document, content: str) -> bool:  # noqa: ARG002
        """A stream has nothing yet."""
        return False

    def write(self, document: Document, content: str | None, chunks: Iterable[Chunk], model: dict[str, Any]) -> None:  # noqa: ARG002
        """Write a document's chunks."""
        self._writer.write(document.source, chunks, model=model)


class DirectorySink:
    """One file per document in a directory, each named like its input.

    None of `inputs`, which are resolved paths, is written over. With `resume`, results that the directory's record
    calls complete are kept: `fingerprint` stands for the model and the settings, and a record with another one does
    not count.

    Raises:
        DocumentError: the directory cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        output_format: Format,
        *,
        settings: Settings,
        fingerprint: str,
        resume: bool,
        inputs: Container[Path] = (),
    ) -> None:
        self._directory = directory
        self._format = output_format
        self._settings = settings
        self._fingerprint = fingerprint
        self._inputs = inputs
        self._sources: dict[str, str] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DocumentError(f"{directory}: cannot be made a directory ({error.strerror or error}).") from error
        self._record = read_record(directory) if resume else {}

    def has(self, document: Document, content: str) -> bool:
        """Whether the complete result of this content with these settings is already there."""
        entry = self._record.get(self._name(document))
        made_from = None if entry is None else (entry.content, entry.fingerprint)
        wanted = (_content(document, content), self._fingerprint)
        return entry is not None and made_from == wanted and entry.is_unchanged(self._directory)

    def write(self, document: Document, content: str | None, chunks: Iterable[Chunk], model: dict[str, Any]) -> None:
        """Write a document's file, and the record of it."""
        name = self._name(document)
        with new_file(self._directory / name) as file:
            writer = Writer(file, self._format, settings=self._settings.as_dict())
            writer.write(document.source, chunks, model=model)
            writer.close()
        if content is not None:
            content = _content(document, content)
            record_completed(self._directory, name, content=content, fingerprint=self._fingerprint)

    def _name(self, document: Document) -> str:
        name = f"{document.relative}{SUFFIXES[self._format]}"
        source = self._sources.setdefault(name, document.source)
        if source != document.source:
            raise DocumentError(
                f"{document.source}: its result would overwrite that of {source}; chunk them into separate directories."
            )
        if Path(os.path.realpath(self._directory / name)) in self._inputs:
            raise DocumentError(
                f"{document.source}: its result would overwrite the input {self._directory / name}; "
                "choose another --output-dir."
            )
        return name


@dataclass(slots=True)
class Batch:
    """Works through documents.

    `load` is called when the first document needs the model, so that a run with nothing to do loads none. With several
    `workers`, so many documents are read at the same time, in threads that share the model, and their results are kept
    until those of the documents before them are written.
    """

    load: Callable[[], Chunker]
    sink: StreamSink | DirectorySink
    listener: Listener
    encoding: str | None = None
    workers: int = 1
    report: BatchReport = field(default_factory=BatchReport)
    _chunker: Chunker | None = None
    _short: list[tuple[Document, DocumentFacts, str]] = field(default_factory=list)
    _at_work: deque[tuple[Document, DocumentFacts, Future[list[Chunk]]]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_stopped: bool = False

    def run(self, found: Iterable[Document | DocumentError]) -> BatchReport:
        """Chunk all documents, in order. Whatever concerns one document only goes to the listener.

        Raises:
            ModelError: the model cannot be loaded.
            DeviceError: there is no such device.
            SettingsError: the encoding is unknown.
        """
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                for document in found:
                    self._take_or_report(document, pool)
                self._finish_waiting()
            finally:
                self._is_stopped = True  # Ctrl-C: what the workers are at ends with its next block
                pool.shutdown(cancel_futures=True)
        return self.report

    def _take_or_report(self, document: Document | DocumentError, pool: ThreadPoolExecutor) -> None:
        try:
            if isinstance(document, DocumentError):
                raise document
            self._take(document, pool)
        except DocumentError as error:
            if self.workers > 1:
                self._finish_waiting()  # problems, too, are told in the order of the documents
            self._failed(error)

    def _take(self, document: Document, pool: ThreadPoolExecutor) -> None:
        if document.path is None:
            self._finish_waiting()
            self._write(document, None, read_document(document, encoding=self.encoding))
            return
        facts = check_document(document, encoding=self.encoding)
        if self.sink.has(document, facts.sha256):
            self.report.n_skipped += 1
            self._progress(0, facts.n_bytes)
        elif self.workers > 1:
            self._loaded()  # by this thread, whose errors end the run
            self._at_work.append((document, facts, pool.submit(self._chunk, document, facts)))
            if len(self._at_work) > _AHEAD * self.workers:
                self._finish_first()
        elif facts.n_characters <= _SHORT_CHARACTERS:
            text = "".join(read_document(document, encoding=self.encoding))
            self._short.append((document, facts, text))
            if len(self._short) == _SHORT_AT_ONCE:
                self._finish_short()
        else:
            self._finish_short()
            self._write(document, facts, read_document(document, encoding=self.encoding))

    def _finish_waiting(self) -> None:
        """Write the results of all documents that were taken."""
        self._finish_short()
        while self._at_work:
            self._finish_first()

    def _chunk(self, document: Document, facts: DocumentFacts) -> list[Chunk]:
        """What a worker does."""
        on_tokens = progress_in_bytes(self._progress, facts)

        def on_tokens_unless_stopped(n_tokens: int, character: int) -> None:
            if self._is_stopped:
                raise _StoppedError
            on_tokens(n_tokens, character)

        pieces = read_document(document, encoding=self.encoding)
        return list(self._loaded().chunk_iter(pieces, on_tokens=on_tokens_unless_stopped))

    def _finish_first(self) -> None:
        """Write the result of the document that was taken first, once it is there."""
        document, facts, result = self._at_work.popleft()
        try:
            self._put(document, facts, result.result())
        except DocumentError as error:
            self._failed(error)
        except BackendError as error:
            self._failed(DocumentError(f"{document.source}: {error}"))

    def _finish_short(self) -> None:
        """Chunk the short documents that have gathered, in shared batches."""
        waiting, self._short = self._short, []
        if not waiting:
            return
        results = self._loaded().chunk_many(
            [text for _, _, text in waiting], on_tokens=progress_in_bytes(self._progress, None)
        )
        for document, facts, text in waiting:
            try:
                chunks = next(results, None)
            except BackendError:  # one of the documents that share a batch is at fault, and `results` ends here
                chunks = None
            try:
                if chunks is None:
                    self._write(document, facts, [text])
                else:
                    self._put(document, facts, chunks)
                    self._progress(0, facts.n_bytes)
            except DocumentError as error:
                self._failed(error)

    def _write(self, document: Document, facts: DocumentFacts | None, pieces: Iterable[str]) -> None:
        """Chunk a document by itself."""
        chunks = self._loaded().chunk_iter(pieces, on_tokens=progress_in_bytes(self._progress, facts))
        try:
            self._put(document, facts, chunks)
        except BackendError as error:
            raise DocumentError(f"{document.source}: {error}") from error

    def _put(self, document: Document, facts: DocumentFacts | None, chunks: Iterable[Chunk]) -> None:
        chunker = self._loaded()
        count = ChunkCount()
        self.sink.write(document, facts.sha256 if facts else None, count.watch(chunks), chunker.backend.model)
        self.report.n_written += 1
        self.report.n_chunks += count.n_chunks
        if note := count.note(document.source, chunker.settings):
            self.listener.on_note(note)

    def _progress(self, n_tokens: int, n_bytes: int) -> None:
        with self._lock:
            self.report.n_tokens += n_tokens
            self.listener.on_progress(n_tokens, n_bytes)

    def _loaded(self) -> Chunker:
        if self._chunker is None:
            self._chunker = self.load()
        return self._chunker

    def _failed(self, error: DocumentError) -> None:
        self.report.n_failed += 1
        self.listener.on_problem(str(error))


def _content(document: Document, sha256: str) -> str:
    """What a result depends on besides the settings: the bytes, and the name that every chunk carries."""
    return f"{sha256} {document.source}"
