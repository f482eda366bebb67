"""The user's model cache: where it lies, what a model file is, and the small records kept beside the files."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import platformdirs

from metachunk_edge.errors import DownloadError, ModelError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["ModelFile", "cache_folder", "locked", "read_json", "recorded_sha256", "sha256_of", "write_json"]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One model file, one identity: results carry `name`, `precision` and `sha256`.

    `precision` is None for a file that is neither in the catalogue nor converted.
    """

    path: Path
    name: str
    precision: str | None
    sha256: str

    @property
    def format(self) -> Literal["gguf", "onnx"]:
        """What kind of file it is, which decides the engine that runs it."""
        return "onnx" if self.path.suffix == ".onnx" else "gguf"


def cache_folder() -> Path:
    """The folder that models are kept in: $METACHUNK_EDGE_CACHE, else the user's cache folder; it need not exist."""
    chosen = os.environ.get("METACHUNK_EDGE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("metachunk-edge", appauthor=False)


def recorded_sha256(path: Path, status: os.stat_result, *, trust_records: bool) -> str:
    """The sha256 of a file, from the cache's records if its size and time are those of the last time."""
    # The status is from before hashing: a file that is being written meanwhile gets a record that never fits.
    seen = {"n_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    records = cache_folder() / "sha256.json"
    record = read_json(records).get(str(path))
    if trust_records and isinstance(record, dict) and record == {**seen, "sha256": record.get("sha256")}:
        return str(record["sha256"])
    sha256 = sha256_of(path)
    with suppress(OSError):
        write_json(records, {**read_json(records), str(path): {**seen, "sha256": sha256}})
    return sha256


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def locked(folder: Path, error_type: type[ModelError] = DownloadError, doing: str = "downloaded") -> Iterator[None]:
    """Hold the lock of a model's folder. The system releases it when the process ends, however it ends.

    Raises:
        ModelError, of the type asked for: the folder cannot be written to, or another process holds the lock.
    """
    name = folder.name.removeprefix(".").removesuffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a", encoding="utf-8")
    except OSError as error:
        what = "the model cache " if folder.is_relative_to(cache_folder()) else ""
        where = cache_folder() if what else folder.parent
        raise error_type(
            f"Nothing can be written to {what}{where} ({error.strerror}): "
            f"{'set METACHUNK_EDGE_CACHE to a folder' if what else 'name a folder'} that can be written to."
        ) from error
    with lock:
        try:
            if sys.platform == "win32":
                msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock.fileno()), (folder / ".lock").stat()):
                raise FileNotFoundError  # the one that held the lock has just deleted it
        except OSError as error:
            raise error_type(
                f"The model {name} is being {doing} by another process: try again when that has finished."
            ) from error
        yield


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where none can be read: all of them can be made again."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace the file at once: whoever reads it meanwhile gets the old object or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    try:
        draft.write_text(json.dumps(value, indent=1), encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
