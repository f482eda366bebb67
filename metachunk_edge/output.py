"""Chunks → JSON Lines, JSON or readable text, on a stream or in files that are either whole or not there.

A file is written beside its place under another name and moved there when it is complete. In an output directory a
record of what is complete (`RECORD_NAME`) lets a later run skip it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TextIO

from metachunk_edge.errors import DocumentError
from metachunk_edge.types import Chunk

__all__ = ["RECORD_NAME", "SUFFIXES", "Format", "Writer", "completed", "new_file", "record_completed"]

Format = Literal["jsonl", "json", "text"]
SUFFIXES: dict[Format, str] = {"jsonl": ".jsonl", "json": ".json", "text": ".txt"}
RECORD_NAME = ".metachunk-edge.jsonl"


class Writer:
    """Writes the chunks of several documents to one stream, in one format. `close` completes it."""

    def __init__(self, file: TextIO, output_format: Format, *, model: dict[str, Any], settings: dict[str, Any]) -> None:
        self._file = file
        self._format = output_format
        self._header = {"format": "metachunk-edge", "version": 1, "model": model, "settings": settings}
        self._n_documents = 0

    def write(self, source: str, chunks: Iterable[Chunk]) -> int:
        """Write one document's chunks as they come, and return how many there were.

        If the chunks end in an error, a file that can be cut is cut back to where the document began.
        """
        begin = self._file.tell() if self._file.seekable() else None
        try:
            n_chunks = {"jsonl": self._lines, "json": self._json, "text": self._text}[self._format](source, chunks)
        except BaseException:
            if begin is not None:
                self._file.seek(begin)
                self._file.truncate()
            raise
        self._n_documents += 1
        self._file.flush()
        return n_chunks

    def close(self) -> None:
        """Write what stands behind the last document."""
        if self._format == "json":
            opening = json.dumps(self._header, ensure_ascii=False)[:-1] + ', "documents": ['
            self._file.write(("\n]}\n" if self._n_documents else opening + "]}\n"))
        self._file.flush()

    def _lines(self, source: str, chunks: Iterable[Chunk]) -> int:
        n_chunks = 0
        for n_chunks, chunk in enumerate(chunks, start=1):
            self._file.write(json.dumps({"source": source, **asdict(chunk)}, ensure_ascii=False) + "\n")
            self._file.flush()
        return n_chunks

    def _json(self, source: str, chunks: Iterable[Chunk]) -> int:
        records = [asdict(chunk) for chunk in chunks]
        opening = json.dumps(self._header, ensure_ascii=False)[:-1] + ', "documents": [\n'
        self._file.write(",\n" if self._n_documents else opening)
        self._file.write(json.dumps({"source": source, "chunks": records}, ensure_ascii=False))
        return len(records)

    def _text(self, source: str, chunks: Iterable[Chunk]) -> int:
        n_chunks = 0
        for n_chunks, chunk in enumerate(chunks, start=1):
            strength = "" if chunk.boundary_strength is None else f" · boundary {chunk.boundary_strength:.2f} nats"
            title = f"── {source} · chunk {chunk.index} · {chunk.n_tokens} tokens{strength} "
            self._file.write(f"{title:─<100}\n{chunk.text.rstrip()}\n\n")
            self._file.flush()
        return n_chunks


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[TextIO]:
    """Open a file for writing that takes its place only when the block ends without an error.

    Raises:
        DocumentError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w+", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise DocumentError(f"{path}: cannot be written ({error.strerror or error}).") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def completed(directory: Path) -> dict[str, dict[str, str]]:
    """Return the record of the complete outputs below a directory, by their relative name.

    A line that a killed run left unfinished is passed over.
    """
    records: dict[str, dict[str, str]] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (directory / RECORD_NAME).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                records[record["output"]] = record
    return {name: record for name, record in records.items() if _unchanged(directory / name, record)}


def record_completed(directory: Path, name: str, *, content: str, fingerprint: str) -> None:
    """Note that an output is complete: from which content and settings it was made, and the file's own SHA-256."""
    record = {"output": name, "content": content, "fingerprint": fingerprint, "sha256": _sha256(directory / name)}
    with (directory / RECORD_NAME).open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(record, ensure_ascii=False))


def _unchanged(path: Path, record: dict[str, str]) -> bool:
    return path.is_file() and _sha256(path) == record.get("sha256")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        content_hash = hashlib.sha256()
        while data := file.read(1 << 20):
            content_hash.update(data)
    return content_hash.hexdigest()
