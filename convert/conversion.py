"""The whole way from a source to a finished folder. Nothing has the final name until everything has been checked."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metachunk_edge.backends.hf_tokenizer import HuggingFaceTokenizer
from metachunk_edge.cache import ModelFile, locked, sha256_of
from metachunk_edge.catalogue import catalogue, find_model
from metachunk_edge.convert import Progress
from metachunk_edge.convert.architecture import gguf_names
from metachunk_edge.convert.checkpoint import Checkpoint, Source, dequantize, open_source
from metachunk_edge.convert.dequantize import open_gguf, tokenizer_config_of_gguf
from metachunk_edge.convert.files import read_json, write_json, writing_to
from metachunk_edge.convert.fused import Weights, recipe, write_fused
from metachunk_edge.convert.gguf import GGUF_PRECISIONS, write_gguf
from metachunk_edge.convert.manifest import write_manifest
from metachunk_edge.convert.tokenizer import tokenizer_of_gguf
from metachunk_edge.convert.verify import N_TOKENS, verify_against_file, verify_conversion
from metachunk_edge.converted import MANIFEST, converted_models_folder, identity, open_converted, staging_of
from metachunk_edge.errors import ConversionError, SettingsError

__all__ = ["PRECISIONS", "Needs", "convert", "needs_of", "source_path"]

EXPORTED_PRECISIONS = ("float32", "float16", "int8", "int4")
"""ONNX, by optimum's exporter."""

FUSED = "int8_fused"
"""ONNX, built from the weights; from a GGUF file it needs no PyTorch."""

PRECISIONS = (*GGUF_PRECISIONS, *EXPORTED_PRECISIONS, FUSED)

_FLOAT32 = 4  # bytes
_OVERHEAD_BYTES = 600_000_000  # the libraries, one block's logits, a document's KV cache


@dataclass(frozen=True, slots=True)
class Needs:
    """An upper estimate of what a conversion takes at its peak, in bytes."""

    disk: int
    memory: int


def needs_of(source: Source, precision: str) -> Needs:
    """Return what converting `source` takes; the weights are what counts.

    In float32 they lie on disk as a dequantized checkpoint, beside it as an unquantized model, and in memory once for
    the reference; the ONNX exporter and quantizer hold them three times. A fused model is written matrix by matrix,
    and the largest is held three times.
    """
    weights = _FLOAT32 * source.n_parameters
    distributions = _FLOAT32 * int(source.config["vocab_size"]) * 2 * N_TOKENS
    if _is_direct(source, precision):
        largest = _FLOAT32 * int(source.config["vocab_size"]) * int(source.config["hidden_size"])
        return Needs(weights // 2 + distributions, weights // 2 + 3 * largest + _OVERHEAD_BYTES)
    copies_on_disk = 2 + (source.kind == "gguf")
    copies_in_memory = 3 if precision in EXPORTED_PRECISIONS else 1
    return Needs(copies_on_disk * weights + distributions, copies_in_memory * weights + _OVERHEAD_BYTES)


def _is_direct(source: Source, precision: str) -> bool:
    """Whether the model is made of a GGUF file itself, with no checkpoint in between."""
    return precision == FUSED and source.kind == "gguf"


def convert(
    source: str | Path,
    output: str | Path | None,
    *,
    precision: str,
    name: str | None,
    threads: int | None,
    on_progress: Progress | None,
) -> ModelFile:
    """Do what `convert_model` promises."""
    precision = precision.lower()
    if precision not in PRECISIONS:
        raise SettingsError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if threads is not None and threads < 1:
        raise SettingsError(f"threads must be at least 1, got {threads}")
    report = on_progress or (lambda _message, _done, _total: None)
    report("Checking the source", 0, 1)
    opened = open_source(source_path(str(source)))
    needs = needs_of(opened, precision)
    report(f"Takes up to {needs.disk / 1e9:.1f} GB of disk and {needs.memory / 1e9:.1f} GB of memory", 0, 1)
    model_format = "gguf" if precision in GGUF_PRECISIONS else "onnx"
    name = name or f"{opened.name.lower()}-{model_format}-{precision}"
    if Path(name).name != name or name.startswith(".") or name in catalogue():
        raise SettingsError(f"name must be one that a folder can have, and not in the catalogue, got {name!r}")
    folder = converted_models_folder() / name if output is None else Path(output).absolute()
    model_file = f"{name}.gguf" if model_format == "gguf" else "model.onnx"
    with _staging(folder, needs) as staging:
        job = _Job(opened, name, precision, staging, staging / "model" / model_file, threads, report)
        job.path.parent.mkdir()
        sha256, parity = job.convert_gguf() if _is_direct(opened, precision) else job.convert_checkpoint()
        write_manifest(
            job.path.parent,
            name=name,
            model_format=model_format,
            precision=precision,
            model_file=model_file,
            source=opened,
            parity=parity,
            quantization=recipe() if precision == FUSED else None,
        )
        if folder.is_dir():  # empty; Windows moves no folder onto another
            folder.rmdir()
        job.path.parent.replace(folder)
    return ModelFile(folder / model_file, name, precision, sha256)


@dataclass(frozen=True, slots=True)
class _Job:
    """One conversion, in a staging folder; `path` is that of the model file there, whose folder will be the model's."""

    source: Source
    name: str
    precision: str
    staging: Path
    path: Path
    threads: int | None
    report: Progress

    def convert_gguf(self) -> tuple[str, dict[str, Any]]:
        """Build a fused model from a GGUF file; return its sha256 and its parity with that file."""
        folder, opened = self.path.parent, open_gguf(self.source.path)
        tokenizer_of_gguf(opened.metadata, self.source.path).save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", tokenizer_config_of_gguf(opened.metadata))
        write_json(folder / "config.json", self.source.config)
        names = gguf_names(self.source.config)
        self._write_fused(lambda tensor: opened.tensor(names[tensor]))
        self.report("Verifying against the file it was made from", 0, 1)
        model = self._written()
        return model.sha256, verify_against_file(model, self.source, self.staging, threads=self.threads)

    def convert_checkpoint(self) -> tuple[str, dict[str, Any]]:
        """Convert a checkpoint, or a GGUF file by way of one; return the sha256 and the parity with float32."""
        folder = self.path.parent
        checkpoint = Checkpoint(_checkpoint_folder(self.source, self.staging, self.report))
        if self.precision in GGUF_PRECISIONS:
            write_gguf(
                checkpoint,
                self.path,
                self.precision,
                name=self.name,
                threads=self.threads,
                on_progress=self.report,
            )
        elif self.precision in EXPORTED_PRECISIONS:
            from metachunk_edge.convert.onnx import write_onnx

            self.report(f"Exporting to ONNX, {self.precision}", 0, 1)
            write_onnx(checkpoint, folder, self.precision)
        _add_tokenizer(checkpoint, folder)
        if self.precision == FUSED:
            self._write_fused(checkpoint.tensor)
        self.report("Verifying against the float32 reference", 0, 1)
        model = self._written()
        return model.sha256, verify_conversion(model, checkpoint.folder, self.staging, threads=self.threads)

    def _write_fused(self, weights: Weights) -> None:
        self.report("Building the fused graph", 0, 1)
        prefix_id = HuggingFaceTokenizer(self.path.parent, self.name).prefix_id
        write_fused(read_json(self.path.parent / "config.json"), weights, prefix_id, self.path.parent)

    def _written(self) -> ModelFile:
        sha256 = identity(self.path.name, {file.name: sha256_of(file) for file in self.path.parent.iterdir()})
        return ModelFile(self.path, self.name, self.precision, sha256)


def source_path(source: str) -> Path:
    """The folder or file of a source: a path, or the name of a downloaded or converted GGUF model.

    Raises:
        ConversionError: it is an ONNX model.
    """
    if source not in catalogue() and open_converted(source) is None:
        return Path(source)
    model = find_model(source)
    if model.format == "onnx":
        raise ConversionError(f"{source} is an ONNX model, which cannot be converted: give what it was made from.")
    return model.path


def _checkpoint_folder(source: Source, staging: Path, report: Progress) -> Path:
    if source.kind == "checkpoint":
        return source.path
    dequantize(source.path, staging / "checkpoint", report)
    return staging / "checkpoint"


def _add_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    checkpoint.tokenizer().save(str(folder / "tokenizer.json"))
    # The file that is read for the token before a text; a checkpoint's tokenizer may name another one.
    write_json(folder / "config.json", {**checkpoint.config, "bos_token_id": checkpoint.special_token_id("bos")})
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (checkpoint.folder / name).exists():
            shutil.copyfile(checkpoint.folder / name, folder / name)


@contextlib.contextmanager
def _staging(folder: Path, needs: Needs) -> Iterator[Path]:
    """A folder to work in beside `folder`, on the same disk; it goes away however the work ends."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        advice = "`metachunk-edge models remove` it" if (folder / MANIFEST).exists() else "choose another folder"
        raise ConversionError(f"{folder} exists already: {advice} first.")
    staging = staging_of(folder)
    with locked(staging, ConversionError, doing="converted"):
        try:
            _clear(staging)
            free = shutil.disk_usage(staging).free
            if free < needs.disk:
                raise ConversionError(
                    f"The conversion needs up to {needs.disk / 1e9:.1f} GB in {folder.parent}, where {free / 1e9:.1f} "
                    "GB are free: make room, or name another folder as the output."
                )
            with writing_to(staging):
                yield staging
        finally:
            with contextlib.suppress(OSError):  # never in place of the error that ended the work
                _clear(staging)
                (staging / ".lock").unlink()
                staging.rmdir()


def _clear(staging: Path) -> None:
    """Delete what is in the folder, also what an interrupted run left there, but for the lock."""
    for path in staging.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()
