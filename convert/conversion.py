"""The whole way from a source to a finished folder. Nothing has the final name until everything has been checked."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from metachunk_edge.cache import ModelFile, locked, sha256_of
from metachunk_edge.catalogue import catalogue, find_model
from metachunk_edge.convert import Progress
from metachunk_edge.convert.checkpoint import Checkpoint, Source, dequantize, open_source
from metachunk_edge.convert.files import write_json, writing_to
from metachunk_edge.convert.gguf import GGUF_PRECISIONS, write_gguf
from metachunk_edge.convert.manifest import write_manifest
from metachunk_edge.convert.onnx import ONNX_PRECISIONS, write_onnx
from metachunk_edge.convert.verify import N_TOKENS, verify_conversion
from metachunk_edge.converted import MANIFEST, converted_models_folder, identity, open_converted, staging_of
from metachunk_edge.errors import ConversionError, SettingsError

__all__ = ["PRECISIONS", "Needs", "convert", "needs_of", "source_path"]

PRECISIONS = (*GGUF_PRECISIONS, *ONNX_PRECISIONS)

_FLOAT32 = 4  # bytes
_OVERHEAD_BYTES = 600_000_000  # the libraries, one block's logits, a document's KV cache


@dataclass(frozen=True, slots=True)
class Needs:
    """An upper estimate of what a conversion takes at its peak, in bytes."""

    disk: int
    memory: int


def needs_of(source: Source, precision: str) -> Needs:
    """Return what converting `source` takes; the float32 weights are what counts.

    They lie on disk as a dequantized checkpoint, beside it as an unquantized model, and in memory once for the
    reference; the ONNX exporter and quantizer hold them three times.
    """
    weights = _FLOAT32 * source.n_parameters
    distributions = _FLOAT32 * int(source.config["vocab_size"]) * 2 * N_TOKENS
    copies_on_disk = 2 + (source.kind == "gguf")
    copies_in_memory = 3 if precision in ONNX_PRECISIONS else 1
    return Needs(copies_on_disk * weights + distributions, copies_in_memory * weights + _OVERHEAD_BYTES)


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
    model_format = "onnx" if precision in ONNX_PRECISIONS else "gguf"
    name = name or f"{opened.name.lower()}-{model_format}-{precision}"
    if Path(name).name != name or name.startswith(".") or name in catalogue():
        raise SettingsError(f"name must be one that a folder can have, and not in the catalogue, got {name!r}")
    folder = converted_models_folder() / name if output is None else Path(output).absolute()
    with _staging(folder, needs) as staging:
        model_folder = staging / "model"
        model_folder.mkdir()
        checkpoint = Checkpoint(_checkpoint_folder(opened, staging, report))
        if model_format == "gguf":
            model_file = f"{name}.gguf"
            write_gguf(checkpoint, model_folder / model_file, precision, name=name, threads=threads, on_progress=report)
        else:
            model_file = "model.onnx"
            report(f"Exporting to ONNX, {precision}", 0, 1)
            write_onnx(checkpoint, model_folder, precision)
        _add_tokenizer(checkpoint, model_folder)
        report("Verifying against the float32 reference", 0, 1)
        sha256 = identity(model_file, {file.name: sha256_of(file) for file in model_folder.iterdir()})
        written = ModelFile(model_folder / model_file, name, precision, sha256)
        parity = verify_conversion(written, model_format, checkpoint.folder, staging, threads=threads)
        write_manifest(
            model_folder,
            name=name,
            model_format=model_format,
            precision=precision,
            model_file=model_file,
            source=opened,
            parity=parity,
        )
        if folder.is_dir():  # empty; Windows moves no folder onto another
            folder.rmdir()
        model_folder.replace(folder)
    return ModelFile(folder / model_file, name, precision, sha256)


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
