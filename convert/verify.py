"""Holds a model that was just written against the float32 reference, on the packaged texts."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from metachunk_edge.backends import load_backend
from metachunk_edge.backends.hf_tokenizer import HuggingFaceTokenizer
from metachunk_edge.cache import ModelFile
from metachunk_edge.convert.files import read_json
from metachunk_edge.convert.reference import ReferenceBackend
from metachunk_edge.errors import ConversionError, MetachunkError
from metachunk_edge.parity import Parity, check, compare, packaged_texts, record, tolerance_of
from metachunk_edge.settings import Settings

__all__ = ["N_TOKENS", "verify_conversion"]

N_TOKENS = 256
"""Of each of the two texts."""

_SETTINGS = Settings(max_size=64)  # the usual 512 tokens would make one chunk of each text, the same for every model


def verify_conversion(
    model: ModelFile, model_format: str, checkpoint: Path, scratch: Path, *, threads: int | None
) -> dict[str, Any]:
    """Return the parity figures of `model` against its checkpoint in float32, and how they were measured.

    Args:
        model: the file that was written.
        model_format: "gguf" or "onnx".
        checkpoint: the folder that it was made from.
        scratch: a folder for the reference's distributions, 4 bytes × vocabulary × 2 × N_TOKENS.
        threads: CPU threads; None: one per physical core.

    Raises:
        ConversionError: a figure is outside the tolerance of the model's format and precision.
    """
    try:
        parity, settings, block_size = _measure(model, checkpoint, scratch, threads)
    except MetachunkError as error:
        raise ConversionError(f"The converted model cannot be used, and was thrown away: {error}") from error
    failures = check(parity, tolerance_of(model_format, str(model.precision)))
    if failures:
        raise ConversionError(
            f"The converted model is too far from its float32 reference, and was thrown away: {'; '.join(failures)}."
        )
    return {**asdict(parity), "settings": settings.as_dict(), "block_size": block_size}


def _measure(model: ModelFile, checkpoint: Path, scratch: Path, threads: int | None) -> tuple[Parity, Settings, int]:
    limit = int(read_json(checkpoint / "config.json")["max_position_embeddings"])
    settings = replace(_SETTINGS, context_length=min(_SETTINGS.context_length, limit))
    reference = ReferenceBackend(
        checkpoint,
        name=model.name,
        sha256=model.sha256,
        threads=threads,
        context_length=settings.context_length,
        tokenizer=HuggingFaceTokenizer(model.path.parent, model.name),
    )
    texts = packaged_texts(reference.tokenizer, N_TOKENS)
    recording = record(reference, texts, settings, block_size=reference.block_size, path=scratch / "distributions.f32")
    del reference
    backend = load_backend(model, device="cpu", threads=threads, context_length=settings.context_length)
    return compare(recording, backend), settings, recording.block_size
