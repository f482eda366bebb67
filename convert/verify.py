"""Holds a model that was just written against what it was made from, on the packaged texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from metachunk_edge.backends import load_backend
from metachunk_edge.backends.base import Backend
from metachunk_edge.backends.hf_tokenizer import HuggingFaceTokenizer
from metachunk_edge.cache import ModelFile
from metachunk_edge.convert.checkpoint import Source
from metachunk_edge.convert.files import read_json
from metachunk_edge.errors import ConversionError, MetachunkError
from metachunk_edge.parity import check, compare, packaged_texts, record, tolerance_of
from metachunk_edge.settings import Settings
from metachunk_edge.tolerances import Tolerance

__all__ = ["N_TOKENS", "verify_against_file", "verify_conversion"]

N_TOKENS = 256
"""Of each of the two texts."""

_SETTINGS = Settings(max_size=64)  # the usual 512 tokens would make one chunk of each text, the same for every model


def verify_conversion(model: ModelFile, checkpoint: Path, scratch: Path, *, threads: int | None) -> dict[str, Any]:
    """Return the parity figures of `model` against its checkpoint in float32, and how they were measured.

    Args:
        model: the file that was written.
        checkpoint: the folder that it was made from.
        scratch: a folder for the reference's distributions, 4 bytes × vocabulary × 2 × N_TOKENS.
        threads: CPU threads; None: one per physical core.

    Raises:
        ConversionError: a figure is outside the tolerance of the model's format and precision.
    """
    from metachunk_edge.convert.reference import ReferenceBackend

    def open_reference(context_length: int) -> Backend:
        return ReferenceBackend(
            checkpoint,
            name=model.name,
            sha256=model.sha256,
            threads=threads,
            context_length=context_length,
            tokenizer=HuggingFaceTokenizer(model.path.parent, model.name),
        )

    tolerance = tolerance_of(model.format, str(model.precision))
    return _verify(model, open_reference, "its float32 reference", tolerance, scratch, threads)


def verify_against_file(model: ModelFile, source: Source, scratch: Path, *, threads: int | None) -> dict[str, Any]:
    """Do the same against the GGUF file that the model was made from, as llama.cpp runs it: no PyTorch is needed.

    Both are off from the weights' float32 values, so the tolerances of both are allowed.
    """

    def open_reference(context_length: int) -> Backend:
        file = ModelFile(source.path, source.name, None, source.sha256)
        return load_backend(file, device="cpu", threads=threads, context_length=context_length)

    tolerance = tolerance_of(model.format, str(model.precision)) + tolerance_of("gguf", "q4_k_m")
    return _verify(model, open_reference, "the file it was made from", tolerance, scratch, threads)


def _verify(
    model: ModelFile,
    open_reference: Callable[[int], Backend],
    reference_is: str,
    tolerance: Tolerance,
    scratch: Path,
    threads: int | None,
) -> dict[str, Any]:
    limit = int(read_json(model.path.parent / "config.json")["max_position_embeddings"])
    settings = replace(_SETTINGS, context_length=min(_SETTINGS.context_length, limit))
    try:
        reference = open_reference(settings.context_length)
        texts = packaged_texts(reference.tokenizer, N_TOKENS)
        recording = record(reference, texts, settings, block_size=128, path=scratch / "distributions.f32")
        del reference
        backend = load_backend(model, device="cpu", threads=threads, context_length=settings.context_length)
        parity = compare(recording, backend)
    except MetachunkError as error:
        raise ConversionError(f"The converted model cannot be used, and was thrown away: {error}") from error
    failures = check(parity, tolerance)
    if failures:
        raise ConversionError(
            f"The converted model is too far from {reference_is}, and was thrown away: {'; '.join(failures)}."
        )
    return {
        **asdict(parity),
        "reference": recording.model,
        "settings": settings.as_dict(),
        "block_size": recording.block_size,
    }
