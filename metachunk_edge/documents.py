"""Paths → texts. Goes in: files, directories and "-". Comes out: documents, each a checked stream of text.

A text is never changed: line ends, control characters and everything else arrive as they are in the file; only a
byte-order mark is taken off. Every problem is one sentence about one file.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Protocol, cast

from metachunk_edge.errors import DocumentError, SettingsError

__all__ = [
    "RECORD_NAME",
    "STANDARD_INPUT",
    "TEXT_PATTERNS",
    "Document",
    "DocumentFacts",
    "check_document",
    "find_documents",
    "read_document",
]

TEXT_PATTERNS = ("*.txt", "*.text", "*.md", "*.markdown", "*.rst", "*.adoc", "*.org", "*.tex", "*.log")
"""Which files of a directory are taken for texts."""

RECORD_NAME = ".metachunk-edge.jsonl"
"""The file that marks a directory of results (see `output.py`): nothing in it is taken for a text."""

STANDARD_INPUT = "-"

_FIRST_BYTES = 8_192  # enough to tell text from binary data
_READ_BYTES = 65_536
_MARKS = (  # the longer ones first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_KNOWN_BINARIES = (
    (b"%PDF-", "a PDF file"),
    (b"PK\x03\x04", "a ZIP archive (such as a Word or OpenDocument file)"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1", "an old Microsoft Office file"),
    (b"\x1f\x8b\x08", "a gzip archive"),
    (b"\x89PNG\r\n", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GGUF\x02\0", "a model file"),
    (b"GGUF\x03\0", "a model file"),
    (b"SQLite format 3\0", "a database"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """An input: the name that results carry, its file (None: standard input), and its place below the directory."""

    source: str
    path: Path | None
    relative: PurePosixPath


@dataclass(frozen=True, slots=True)
class DocumentFacts:
    """What one reading of a file tells: its length in characters and bytes, and the SHA-256 of its bytes."""

    n_characters: int
    n_bytes: int
    sha256: str


def find_documents(
    inputs: Sequence[str], *, patterns: Sequence[str] = TEXT_PATTERNS
) -> Iterator[Document | DocumentError]:
    """Yield the documents that the inputs stand for, in order; where there is none, the error that says why.

    A directory stands for the files below it that match one of the patterns, in upper or lower case, sorted by path.
    A pattern without a slash is held against a file's name, one with a slash against its path below the directory.
    Left out are hidden files, directories behind links, and directories of results.

    Raises:
        SettingsError: a pattern is empty.
    """
    if not all(patterns):
        raise SettingsError("glob must be a pattern such as '*.txt', got ''")
    for place, name in enumerate(inputs):
        if name == STANDARD_INPUT and name in inputs[:place]:
            yield DocumentError("-: standard input was named before and can be read only once.")
        elif name == STANDARD_INPUT:
            yield Document(STANDARD_INPUT, None, PurePosixPath("standard-input"))
        elif not name:
            yield DocumentError("'': an empty name; name a file or a directory ('.' is the current one).")
        else:
            yield from _at(Path(name), name, PurePosixPath(Path(name).name), patterns)


def _at(
    path: Path, source: str, relative: PurePosixPath, patterns: Sequence[str]
) -> Iterator[Document | DocumentError]:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        what = "this link leads to a file that is not there" if path.is_symlink() else "there is no such file"
        yield DocumentError(f"{source}: {what}.")
    except OSError as error:
        yield DocumentError(f"{source}: cannot be read ({error.strerror or error}).")
    else:
        if stat.S_ISDIR(mode):
            yield from _in_directory(path, patterns)
        elif stat.S_ISREG(mode):
            yield Document(source, path, relative)
        else:
            yield DocumentError(f"{source}: a pipe, socket or device and no file; send its text to standard input (-).")


def _in_directory(directory: Path, patterns: Sequence[str]) -> Iterator[Document | DocumentError]:
    unreadable: list[OSError] = []
    found: list[Path] = []
    for folder, subfolders, names in os.walk(directory, onerror=unreadable.append):
        if RECORD_NAME in names and Path(folder) != directory:
            subfolders.clear()
            continue
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if _matches(path.relative_to(directory), patterns)]
    for error in unreadable:
        yield DocumentError(f"{error.filename}: cannot be read ({error.strerror}).")
    if not found and not unreadable:
        yield DocumentError(f"{directory}: no files in this directory match {', '.join(patterns)} (see --glob).")
    for path in sorted(found):
        yield from _at(path, str(path), PurePosixPath(path.relative_to(directory).as_posix()), patterns)


def _matches(relative: Path, patterns: Sequence[str]) -> bool:
    name, path = relative.name.lower(), relative.as_posix().lower()
    plain = [pattern.lower().removeprefix("**/") for pattern in patterns]
    return any(fnmatchcase(path if "/" in pattern else name, pattern) for pattern in plain)


def check_document(document: Document, *, encoding: str | None = None) -> DocumentFacts:
    """Read a file once from beginning to end, so that every fault in it is known before anything is written.

    Raises:
        DocumentError: the file cannot be read, is not text, or not in the encoding; the message has the byte position.
        SettingsError: the encoding is unknown.
    """
    content_hash = hashlib.sha256()
    n_characters = n_bytes = 0
    for data, text in _decoded(document, encoding):
        content_hash.update(data)
        n_bytes += len(data)
        n_characters += len(text)
    return DocumentFacts(n_characters, n_bytes, content_hash.hexdigest())


def read_document(document: Document, *, encoding: str | None = None) -> Iterator[str]:
    """Yield the text of a document, piece by piece.

    Args:
        document: a file or standard input.
        encoding: None: UTF-8, or what a byte-order mark says.

    Raises:
        DocumentError: see `check_document`.
        SettingsError: the encoding is unknown.
    """
    return (text for _, text in _decoded(document, encoding))


def _decoded(document: Document, encoding: str | None) -> Iterator[tuple[bytes, str]]:
    """Yield block by block what was read and the text that came out of it."""
    try:
        if document.path is not None:
            with document.path.open("rb") as file:
                yield from _decode(file, document.source, encoding)
        elif sys.stdin is not None:
            yield from _decode(cast("_Readable", sys.stdin.buffer), document.source, encoding)
        else:
            raise DocumentError("-: standard input is closed.")
    except OSError as error:
        raise DocumentError(f"{document.source}: cannot be read ({error.strerror or error}).") from error


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def read1(self, size: int, /) -> bytes: ...


def _decode(file: _Readable, source: str, encoding: str | None) -> Iterator[tuple[bytes, str]]:
    data = file.read(_FIRST_BYTES)
    marked = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    _refuse_binary(data, source, stated=encoding is not None or marked is not None)
    encoding = (marked or "utf-8") if encoding is None else encoding
    decoder = _decoder(encoding)
    n_bytes = 0
    begun = False
    while True:
        n_bytes += len(data)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            at = n_bytes - len(error.object) + error.start  # the decoder may hold bytes of the block before
            raise DocumentError(
                f"{source}: not {encoding.upper()} text at byte offset {at} (0x{error.object[error.start]:02x}, "
                f"{error.reason}): name the file's encoding with --encoding, or convert it to UTF-8."
            ) from error
        except UnicodeError as error:
            raise DocumentError(f"{source}: not {encoding.upper()} text ({error}).") from error
        yield data, (text if begun else text.removeprefix("\ufeff"))
        begun = True
        if not data:
            return
        data = file.read1(_READ_BYTES)  # what a live pipe has so far, without waiting for more


def _decoder(encoding: str) -> codecs.IncrementalDecoder:
    try:
        " ".encode(encoding)  # refuses codecs between bytes and bytes, such as hex
        return codecs.getincrementaldecoder(encoding)(errors="strict")
    except (LookupError, ValueError) as error:
        raise SettingsError(
            f"encoding must be one that Python knows, such as utf-8 or gb18030, got {encoding!r}"
        ) from error


def _refuse_binary(data: bytes, source: str, *, stated: bool) -> None:
    """Refuse what is no text in any encoding and, where none is stated, what is mostly control characters."""
    for magic, kind in _KNOWN_BINARIES:
        if data.startswith(magic):
            raise DocumentError(f"{source}: not text but {kind}; export its text first.")
    beginning = data[:_FIRST_BYTES]
    n_control = sum(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in beginning)
    if not stated and n_control * 10 > len(beginning) * 3:
        raise DocumentError(
            f"{source}: not text but binary data ({n_control} of its first {len(beginning)} bytes are control "
            "characters); if it is text, name its encoding with --encoding."
        )
