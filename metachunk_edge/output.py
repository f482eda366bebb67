"""Chunks → JSON Lines, JSON or readable text, on a stream or in files that are either whole or not there.

A file is written beside its place under another name and moved there when it is complete. In an output directory a
record of what is complete (`documents.RECORD_NAME`) lets a later run skip it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import psutil

from metachunk_edge.documents import RECORD_NAME
from metachunk_edge.errors import DocumentError
from metachunk_edge.types import Chunk

__all__ = ["SUFFIXES", "Completed", "Format", "Writer", "new_file", "read_record", "record_completed"]

Format = Literal["jsonl", "json", "text"]
SUFFIXES: dict[Format, str] = {"jsonl": ".jsonl", "json": ".json", "text": ".txt"}


class Writer:
    """Writes the chunks of several documents to one stream, in one format. `close` completes it.

    With `can_cut_back` the stream is a file of its own, and a document whose chunks end in an error is taken out of
    it again. Elsewhere, as on standard output, what was written stays.
    """

    def __init__(
        self, file: TextIO, output_format: Format, *, settings: dict[str, Any], can_cut_back: bool = False
    ) -> None:
        self._file = file
        self._write = {"jsonl": self._lines, "json": self._json, "text": self._text}[output_format]
        self._is_json = output_format == "json"
        self._header: dict[str, Any] = {"format": "metachunk-edge", "version": 1, "model": None, "settings": settings}
        self._can_cut_back = can_cut_back and file.seekable()
        self._n_documents = 0

    def write(self, source: str, chunks: Iterable[Chunk], *, model: dict[str, Any]) -> None:
        """Write one document's chunks as they come. `model` is the identity of the model that scored them."""
        self._header["model"] = model
        begin = self._file.tell() if self._can_cut_back else None
        try:
            self._write(source, chunks)
        except BaseException:
            if begin is not None:
                with contextlib.suppress(OSError):  # the fault that led here is the one to tell about
                    self._file.seek(begin)
                    self._file.truncate()
            raise
        self._n_documents += 1
        self._file.flush()

    def close(self) -> None:
        """Write what stands behind the last document."""
        if self._is_json:
            self._file.write("\n]}\n" if self._n_documents else self._opening() + "]}\n")
        self._file.flush()

    def _opening(self) -> str:
        return json.dumps(self._header, ensure_ascii=False)[:-1] + ', "documents": [\n'

    def _model_label(self) -> str:
        """The identity of the model in one short string: name and the beginning of the file's SHA-256."""
        model = self._header["model"]
        return f"{model['name']}@{model['sha256'][:12]}" if model["sha256"] else str(model["name"])

    def _lines(self, source: str, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            record = {"source": source, **asdict(chunk), "model": self._model_label()}
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()

    def _json(self, source: str, chunks: Iterable[Chunk]) -> None:
        record = {"source": source, "chunks": [asdict(chunk) for chunk in chunks]}
        self._file.write(",\n" if self._n_documents else self._opening())
        self._file.write(json.dumps(record, ensure_ascii=False))

    def _text(self, source: str, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            strength = "" if chunk.boundary_strength is None else f" · boundary {chunk.boundary_strength:.2f} nats"
            title = f"── {source} · chunk {chunk.index} · {chunk.n_tokens} tokens{strength} "
            self._file.write(f"{title:─<100}\n{chunk.text.rstrip()}\n\n")
            self._file.flush()


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[TextIO]:
    """Open a file for writing that takes its place only when the block ends without an error.

    A lone surrogate, as in a file name that is not UTF-8, is written as an escape that JSON understands. A pipe or a
    device is written to as it is.

    Raises:
        DocumentError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            with _opened(path) as file:
                yield file
            return
        place = Path(os.path.realpath(path))  # what a link leads to is replaced, not the link
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(place)
        try:
            with _opened(partial) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(place)
        finally:
            partial.unlink(missing_ok=True)
    except BrokenPipeError:
        raise
    except FileExistsError as error:
        raise DocumentError(f"{path}: cannot be written ({error.filename} is no directory).") from error
    except OSError as error:
        raise DocumentError(f"{path}: cannot be written ({error.strerror or error}).") from error


def _opened(path: Path) -> TextIO:
    return path.open("w", encoding="utf-8", errors="backslashreplace", newline="")


def _partial(place: Path) -> Path:
    """The name under which this process writes; those that killed processes left for the same place are removed."""
    stem = f".metachunk-edge-{hashlib.sha256(os.fsencode(place.name)).hexdigest()[:16]}"
    for left in place.parent.glob(f"{stem}.*.partial"):
        process = left.name.split(".")[-2]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            left.unlink(missing_ok=True)
    return place.with_name(f"{stem}.{os.getpid()}.partial")


@dataclass(frozen=True, slots=True)
class Completed:
    """A complete result: its name, from which content and settings it was made, and the file's own SHA-256."""

    output: str
    content: str
    fingerprint: str
    sha256: str

    def is_unchanged(self, directory: Path) -> bool:
        """Whether the result still lies in the directory as it was written."""
        try:
            return _sha256(directory / self.output) == self.sha256
        except OSError:
            return False


def read_record(directory: Path) -> dict[str, Completed]:
    """Return what the record of a directory says, by the results' names.

    A line that a killed run left unfinished is passed over, and so is a record that cannot be read.
    """
    completed: dict[str, Completed] = {}
    with contextlib.suppress(OSError):
        for line in (directory / RECORD_NAME).read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, TypeError):
                entry = Completed(**json.loads(line))
                completed[entry.output] = entry
    return completed


def record_completed(directory: Path, name: str, *, content: str, fingerprint: str) -> None:
    """Add a result that is complete to the directory's record.

    Raises:
        DocumentError: the record cannot be written.
    """
    path = directory / RECORD_NAME
    try:
        entry = Completed(name, content, fingerprint, _sha256(directory / name))
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(asdict(entry)))
    except OSError as error:
        raise DocumentError(f"{path}: cannot be written ({error.strerror or error}).") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        content_hash = hashlib.sha256()
        while data := file.read(1 << 20):
            content_hash.update(data)
    return content_hash.hexdigest()
