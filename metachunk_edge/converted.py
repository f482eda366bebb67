"""Converted models: folders with a `manifest.json`, made by `metachunk-edge convert`, wherever they lie.

Those in the cache have a name, as the entries of the catalogue have; any other is given by the path of its folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metachunk_edge.cache import ModelFile, cache_folder, read_json, recorded_sha256
from metachunk_edge.errors import ModelFileError

__all__ = [
    "MANIFEST",
    "ConvertedModel",
    "converted_models",
    "converted_models_folder",
    "identity",
    "open_converted",
    "remove_converted",
    "staging_of",
]

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """A finished conversion. `manifest` holds what `convert/manifest.py` describes."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        """The model's name, which is also its folder's in the cache."""
        return str(self.manifest["name"])

    @property
    def precision(self) -> str:
        """What the weights are stored in, e.g. q8_0 or int8."""
        return str(self.manifest["precision"])

    @property
    def model_file(self) -> str:
        """The name of the file that is loaded."""
        return str(self.manifest["model_file"])

    @property
    def n_bytes(self) -> int:
        """The size of all files together."""
        return sum(int(facts["n_bytes"]) for facts in self.manifest["files"].values())

    def check(self, *, trust_records: bool) -> ModelFile:
        """Compare every file with the manifest, and return the model.

        A file is hashed again only when its size or time is not the one of the last time, unless records are not
        trusted.

        Raises:
            ModelFileError: a file is missing, cut short or altered.
        """
        repair = f"remove {self.folder} and convert the model again"
        found = {}
        for file, facts in self.manifest["files"].items():
            path = self.folder / file
            try:
                n_bytes = path.stat().st_size
                if n_bytes != facts["n_bytes"]:
                    raise ModelFileError(f"{path} has {n_bytes:,} of {facts['n_bytes']:,} bytes: {repair}.")
                found[file] = recorded_sha256(path, path.stat(), trust_records=trust_records)
            except OSError as error:
                raise ModelFileError(f"{path} cannot be read ({error.strerror}): {repair}.") from error
            if found[file] != facts["sha256"]:
                raise ModelFileError(
                    f"{path} is altered: its sha256 is {found[file]} and must be {facts['sha256']}; {repair}."
                )
        sha256 = identity(self.model_file, found)
        return ModelFile(self.folder / self.model_file, self.name, self.precision, sha256)


def identity(model_file: str, sha256_by_file: dict[str, str]) -> str:
    """The sha256 that stands for a model: that of a GGUF file, else of the lines "<sha256>  <name>" of all files."""
    if model_file.endswith(".gguf"):
        return sha256_by_file[model_file]
    lines = sorted(f"{sha256}  {file}\n" for file, sha256 in sha256_by_file.items())
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def converted_models_folder() -> Path:
    """Where conversions go by default; it need not exist."""
    return cache_folder() / "converted"


def converted_models() -> Iterator[ConvertedModel]:
    """The conversions in the cache, by name; a folder without a readable manifest is none."""
    folder = converted_models_folder()
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")) if folder.is_dir() else ():
        found = _read(manifest.parent)
        if found is not None:
            yield found


def staging_of(folder: Path) -> Path:
    """Where a conversion to `folder` is made; it stays behind only if the process is killed."""
    return folder.parent / f".{folder.name}.partial"


def open_converted(name_or_path: str) -> ConvertedModel | None:
    """The conversion of that name in the cache, or in the folder of that path; None if there is none.

    Raises:
        ModelFileError: the cache has a folder of that name, which is not a finished conversion.
    """
    folder = _folder_of(name_or_path)
    found = None if folder is None else _read(folder)
    if found is None and folder is not None and folder.parent == converted_models_folder() and folder.is_dir():
        raise ModelFileError(
            f"{folder} is damaged: run `metachunk-edge models remove {folder.name}` and convert the model again."
        )
    return found


def remove_converted(name_or_path: str) -> list[Path]:
    """Delete what a conversion has written, and say which files that were; none if there is no such conversion.

    In a finished folder only the files that its manifest lists go. In the cache, what is damaged or unfinished goes
    as a whole.
    """
    folder = _folder_of(name_or_path)
    if folder is None:
        return []
    removed = []
    found = _read(folder)
    is_in_cache = folder.parent == converted_models_folder()
    if found is not None:
        for file in (*found.manifest["files"], MANIFEST):  # the manifest last: till then it can be done again
            path = folder / file
            if path.is_file():
                path.unlink()
                removed.append(path)
    elif is_in_cache:
        removed += _remove_all(folder)
    if is_in_cache:
        removed += _remove_all(staging_of(folder))
    with suppress(OSError):  # not empty: somebody else's file lies in it
        folder.rmdir()
    return removed


def _remove_all(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    if files:
        shutil.rmtree(folder)
    return files


def _folder_of(name_or_path: str) -> Path | None:
    """A name is a folder of the cache; a path has a separator, or there is no such name."""
    in_cache = converted_models_folder() / name_or_path
    is_name = Path(name_or_path).name == name_or_path and name_or_path not in (os.curdir, os.pardir)
    if is_name and (in_cache.is_dir() or staging_of(in_cache).is_dir()):
        return in_cache
    folder = Path(name_or_path).absolute()
    return folder if (folder / MANIFEST).is_file() else None


def _read(folder: Path) -> ConvertedModel | None:
    """None if there is no manifest, or one that no conversion has written."""
    manifest = read_json(folder / MANIFEST)
    files, source = manifest.get("files"), manifest.get("source")
    is_sound = (
        all(isinstance(manifest.get(key), str) for key in ("name", "precision", "model_file"))
        and isinstance(source, dict)
        and isinstance(source.get("name"), str)
        and isinstance(files, dict)
        and manifest["model_file"] in files
        and all(_is_sound(file, facts) for file, facts in files.items())
    )
    return ConvertedModel(folder, manifest) if is_sound else None


def _is_sound(file: str, facts: Any) -> bool:
    """A plain name: no file outside the folder is ever looked at, or deleted."""
    return (
        Path(file).name == file
        and isinstance(facts, dict)
        and isinstance(facts.get("n_bytes"), int)
        and isinstance(facts.get("sha256"), str)
    )
