"""Many documents through one loaded model: one bad file never stops the others, and short ones share batches.

Goes in: documents and a place for the results. Comes out: a report, and sentences about what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from metachunk_edge.chunker import Chunker
from metachunk_edge.documents import Document, DocumentFacts, check_document, read_document
from metachunk_edge.errors import DocumentError, MetachunkError
from metachunk_edge.output import SUFFIXES, Format, Writer, completed, new_file, record_completed
from metachunk_edge.settings import Settings
from metachunk_edge.types import Chunk

__all__ = ["Batch", "BatchReport", "DirectorySink", "Listener", "StreamSink"]

_SHORT_CHARACTERS = 2_048  # a document up to this length may share a batch with others
_SHORT_AT_ONCE = 64


class Listener(Protocol):
    """Hears what happens while the documents are worked on."""

    def on_problem(self, sentence: str) -> None:
        """A document failed."""

    def on_note(self, sentence: str) -> None:
        """Something that the user should know, and no failure."""

    def on_progress(self, n_tokens: int, n_characters: int) -> None:
        """So many more tokens were scored, and so many more characters are done with."""


@dataclass(slots=True)
class BatchReport:
    """What became of the documents."""

    n_written: int = 0
    n_skipped: int = 0
    n_failed: int = 0
    n_chunks: int = 0
    n_tokens: int = 0


class StreamSink:
    """All results on one stream."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def has(self, document: Document, content: str) -> bool:  # noqa: ARG002
        """A stream has nothing yet."""
        return False

    def write(self, document: Document, content: str | None, chunks: Iterable[Chunk]) -> int:  # noqa: ARG002
        """Write a document's chunks and return how many there were."""
        return self._writer.write(document.source, chunks)


class DirectorySink:
    """One file per document in a directory, each named like its input."""

    def __init__(
        self,
        directory: Path,
        output_format: Format,
        *,
        model: dict[str, Any],
        settings: Settings,
        fingerprint: str,
        resume: bool,
    ) -> None:
        self._directory = directory
        self._format = output_format
        self._model = model
        self._settings = settings
        self._fingerprint = fingerprint
        self._completed = completed(directory) if resume else {}
        self._names: dict[str, str] = {}

    def has(self, document: Document, content: str) -> bool:
        """Whether the complete result of this content with these settings is already there."""
        record = self._completed.get(self._name(document))
        return record is not None and (record["content"], record["fingerprint"]) == (content, self._fingerprint)

    def write(self, document: Document, content: str | None, chunks: Iterable[Chunk]) -> int:
        """Write a document's file and return the number of its chunks."""
        name = self._name(document)
        with new_file(self._directory / name) as file:
            writer = Writer(file, self._format, model=self._model, settings=self._settings.as_dict())
            n_chunks = writer.write(document.source, chunks)
            writer.close()
        if content is not None:
            record_completed(self._directory, name, content=content, fingerprint=self._fingerprint)
        return n_chunks

    def _name(self, document: Document) -> str:
        name = f"{document.relative}{SUFFIXES[self._format]}"
        owner = self._names.setdefault(name, document.source)
        if owner != document.source:
            raise DocumentError(
                f"{document.source}: its result would overwrite that of {owner}; chunk them into separate directories."
            )
        return name


@dataclass(slots=True)
class Batch:
    """Works through documents.

    `load` is called when the first document needs the model, so that a run with nothing to do loads none.
    """

    load: Callable[[], Chunker]
    sink: StreamSink | DirectorySink
    listener: Listener
    encoding: str | None = None
    report: BatchReport = field(default_factory=BatchReport)
    _chunker: Chunker | None = None
    _short: list[tuple[Document, DocumentFacts]] = field(default_factory=list)

    def run(self, found: Iterable[Document | DocumentError]) -> BatchReport:
        """Chunk all documents, in order.

        Raises:
            ModelError: the model cannot be loaded. Whatever concerns one document only goes to the listener.
        """
        for document in found:
            if isinstance(document, DocumentError):
                self._failed(document)
                continue
            try:
                self._take(document)
            except DocumentError as error:
                self._failed(error)
        self._finish_short()
        return self.report

    def _take(self, document: Document) -> None:
        if document.path is None:
            self._finish_short()
            self._write(document, None, read_document(document, encoding=self.encoding))
            return
        facts = check_document(document, encoding=self.encoding)
        if self.sink.has(document, facts.sha256):
            self.report.n_skipped += 1
            self.listener.on_progress(0, facts.n_characters)
        elif facts.n_characters <= _SHORT_CHARACTERS:
            self._short.append((document, facts))
            if len(self._short) == _SHORT_AT_ONCE:
                self._finish_short()
        else:
            self._finish_short()
            self._write(document, facts, read_document(document, encoding=self.encoding))

    def _write(self, document: Document, facts: DocumentFacts | None, pieces: Iterator[str]) -> None:
        reached = 0

        def on_tokens(n_tokens: int, character: int) -> None:
            nonlocal reached
            self.report.n_tokens += n_tokens
            self.listener.on_progress(n_tokens, character - reached)
            reached = character

        chunker = self._loaded()
        try:
            self._note_result(document, facts, chunker.chunk_iter(pieces, on_tokens=on_tokens))
        except DocumentError:
            raise
        except MetachunkError as error:
            raise DocumentError(f"{document.source}: {error}") from error

    def _finish_short(self) -> None:
        """Chunk the short documents that have gathered, in shared batches."""
        waiting, self._short = self._short, []
        if not waiting:
            return
        chunker = self._loaded()
        texts = ("".join(read_document(document, encoding=self.encoding)) for document, _ in waiting)
        results = chunker.chunk_many(texts, on_tokens=self._count_tokens)
        for position, (document, facts) in enumerate(waiting):
            try:
                chunks = next(results)
            except MetachunkError as error:
                for unfinished, _ in waiting[position:]:
                    self._failed(DocumentError(f"{unfinished.source}: {error}"))
                return
            try:
                self._note_result(document, facts, chunks)
            except DocumentError as error:
                self._failed(error)
            self.listener.on_progress(0, facts.n_characters)

    def _count_tokens(self, n_tokens: int, _character: int) -> None:
        self.report.n_tokens += n_tokens
        self.listener.on_progress(n_tokens, 0)

    def _note_result(self, document: Document, facts: DocumentFacts | None, chunks: Iterable[Chunk]) -> None:
        strengths: list[float] = []
        n_chunks = self.sink.write(document, facts.sha256 if facts else None, _watched(chunks, strengths))
        self.report.n_written += 1
        self.report.n_chunks += n_chunks
        if n_chunks == 0:
            self.listener.on_note(f"{document.source}: empty or blank, so there are no chunks.")
        elif n_chunks > 1 and not any(strengths):
            self.listener.on_note(
                f"{document.source}: cut for size alone; no boundary reached the threshold (a lower --threshold finds more)."
            )

    def _loaded(self) -> Chunker:
        if self._chunker is None:
            self._chunker = self.load()
        return self._chunker

    def _failed(self, error: DocumentError) -> None:
        self.report.n_failed += 1
        self.listener.on_problem(str(error))


def _watched(chunks: Iterable[Chunk], strengths: list[float]) -> Iterator[Chunk]:
    for chunk in chunks:
        if len(strengths) < 1_000:  # enough to tell whether there is any boundary; memory stays bounded
            strengths.append(chunk.boundary_strength or 0.0)
        yield chunk
