"""Converted models: folders with a `manifest.json`, made by `metachunk-edge convert`, wherever they lie.

Those in the cache have a name, as the entries of the catalogue have; any other is given by the path of its folder.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metachunk_edge.cache import ModelFile, cache_folder, read_json, recorded_sha256
from metachunk_edge.errors import ModelFileError

__all__ = ["MANIFEST", "ConvertedModel", "converted_models", "converted_models_folder", "identity", "open_converted"]

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

    def remove(self) -> list[Path]:
        """Delete the files that the manifest lists, and the manifest, and say which; files of anybody else stay."""
        removed = []
        for file in (MANIFEST, *self.manifest["files"]):  # without its manifest, what is left does not look whole
            path = self.folder / file
            if path.is_file():
                path.unlink()
                removed.append(path)
        if not any(self.folder.iterdir()):
            shutil.rmtree(self.folder)
        return removed


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


def open_converted(name_or_path: str) -> ConvertedModel | None:
    """The conversion of that name in the cache, or in the folder of that path; None if there is none."""
    in_cache = converted_models_folder() / name_or_path
    folder = Path(name_or_path)
    if in_cache.parent == converted_models_folder() and (in_cache / MANIFEST).is_file():
        return _read(in_cache)
    return _read(folder.absolute()) if (folder / MANIFEST).is_file() else None


def _read(folder: Path) -> ConvertedModel | None:
    manifest = read_json(folder / MANIFEST)
    is_whole = {"name", "precision", "model_file", "files"} <= manifest.keys()
    return ConvertedModel(folder, manifest) if is_whole else None
