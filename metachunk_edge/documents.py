"""Paths → texts. Goes in: files, directories and "-". Comes out: documents, each a checked stream of text.

A text is never changed: line ends, control characters and everything else arrive as they are in the file; only a
byte-order mark is taken off. Every problem is one sentence about one file.
"""

from __future__ import annotations

import codecs
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from metachunk_edge.errors import DocumentError, SettingsError

__all__ = ["TEXT_PATTERNS", "Document", "DocumentFacts", "check_document", "find_documents", "read_document"]

TEXT_PATTERNS = ("*.txt", "*.text", "*.md", "*.markdown", "*.rst", "*.adoc", "*.org", "*.tex", "*.log")
"""Which files of a directory are taken for texts."""

_OnBytes = Callable[[bytes], None]
_STANDARD_INPUT = "-"
_READ_BYTES = 65_536
_MARKS = (  # the longer ones first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_KNOWN_BINARIES = (
    (b"%PDF-", "a PDF file"),
    (b"PK\x03\x04", "a ZIP archive (such as a Word or OpenDocument file)"),
    (b"\xd0\xcf\x11\xe0", "an old Microsoft Office file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GGUF", "a model file"),
    (b"SQLite format 3", "a database"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """An input: the name that results carry, its file (None: standard input), and its place below the directory."""

    source: str
    path: Path | None
    relative: PurePosixPath


@dataclass(frozen=True, slots=True)
class DocumentFacts:
    """What one reading of a file tells: its length in characters and the SHA-256 of its bytes."""

    n_characters: int
    sha256: str


def find_documents(
    inputs: Sequence[str], *, patterns: Sequence[str] = TEXT_PATTERNS
) -> Iterator[Document | DocumentError]:
    """Yield the documents that the inputs stand for, in order; where there is none, the error that says why.

    A directory stands for the files below it that match one of the patterns, hidden ones left out, sorted by path.
    """
    for name in inputs:
        path = Path(name)
        if name == _STANDARD_INPUT:
            yield Document("-", None, PurePosixPath("standard-input"))
        elif path.is_dir():
            yield from _in_directory(path, patterns)
        elif path.exists():
            yield Document(name, path, PurePosixPath(path.name))
        else:
            yield DocumentError(f"{name}: there is no such file or directory.")


def _in_directory(directory: Path, patterns: Sequence[str]) -> Iterator[Document | DocumentError]:
    found = sorted(
        path
        for path in directory.rglob("*")
        if path.is_file()
        and any(path.match(pattern) for pattern in patterns)
        and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    )
    if not found:
        yield DocumentError(f"{directory}: no files in this directory match {', '.join(patterns)} (see --glob).")
    for path in found:
        yield Document(str(path), path, PurePosixPath(path.relative_to(directory).as_posix()))


def check_document(document: Document, *, encoding: str | None = None) -> DocumentFacts:
    """Read a file once from beginning to end, so that every fault in it is known before anything is written.

    Raises:
        DocumentError: the file cannot be read, is not text, or not in the encoding; the message has the byte position.
        SettingsError: the encoding is unknown.
    """
    content_hash = hashlib.sha256()
    n_characters = sum(map(len, _decoded(document, encoding, content_hash.update)))
    return DocumentFacts(n_characters, content_hash.hexdigest())


def read_document(document: Document, *, encoding: str | None = None) -> Iterator[str]:
    """Yield the text of a document, piece by piece.

    Args:
        document: a file or standard input.
        encoding: None: UTF-8, or what a byte-order mark says.

    Raises:
        DocumentError: see `check_document`.
        SettingsError: the encoding is unknown.
    """
    return _decoded(document, encoding, lambda data: None)


def _decoded(document: Document, encoding: str | None, on_bytes: _OnBytes) -> Iterator[str]:
    try:
        if document.path is None:
            yield from _decode(sys.stdin.buffer, document.source, encoding, on_bytes)
        else:
            with document.path.open("rb") as file:
                yield from _decode(file, document.source, encoding, on_bytes)
    except OSError as error:
        raise DocumentError(f"{document.source}: cannot be read ({error.strerror or error}).") from error


def _decode(file: BinaryIO, source: str, encoding: str | None, on_bytes: _OnBytes) -> Iterator[str]:
    data = file.read(_READ_BYTES)
    on_bytes(data)
    mark, name = next(((mark, name) for mark, name in _MARKS if data.startswith(mark)), (b"", "utf-8"))
    if encoding is None:
        _refuse_binary(data, source, marked=bool(mark))
        encoding, data, position = name, data[len(mark) :], len(mark)
    else:
        position = 0
    try:
        decoder = codecs.getincrementaldecoder(encoding)(errors="strict")
    except LookupError as error:
        raise SettingsError(
            f"encoding must be one that Python knows, such as utf-8 or gb18030, got {encoding!r}"
        ) from error
    while True:
        held = len(decoder.getstate()[0])
        try:
            yield decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            at = position - held + error.start
            raise DocumentError(
                f"{source}: not {encoding.upper()} text at byte {at} (0x{error.object[error.start]:02x}): "
                "name the file's encoding with --encoding, or convert it to UTF-8."
            ) from error
        if not data:
            return
        position += len(data)
        data = file.read(_READ_BYTES)
        on_bytes(data)


def _refuse_binary(data: bytes, source: str, *, marked: bool) -> None:
    for magic, kind in _KNOWN_BINARIES:
        if data.startswith(magic):
            raise DocumentError(f"{source}: not text but {kind}; export its text first.")
    n_control = sum(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in data[:8_192])
    if not marked and n_control * 10 > len(data[:8_192]) * 3:
        raise DocumentError(
            f"{source}: not text but binary data ({n_control} of its first {len(data[:8_192])} bytes are control "
            "characters); if it is text, name its encoding with --encoding."
        )
