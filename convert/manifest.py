"""The `manifest.json` of a converted model: where it comes from, what made it, what it is, and how good it is."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from metachunk_edge.cache import sha256_of
from metachunk_edge.convert.checkpoint import Source
from metachunk_edge.converted import MANIFEST

__all__ = ["write_manifest"]

_TOOLS = (
    "metachunk-edge",
    "gguf",
    "llama-cpp-python",
    "numpy",
    "onnx",
    "onnxruntime",
    "optimum",
    "optimum-onnx",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)


def _version(tool: str) -> str | None:
    try:
        return importlib.metadata.version(tool)
    except importlib.metadata.PackageNotFoundError:
        return None  # e.g. onnxruntime-gpu in place of onnxruntime


def write_manifest(
    folder: Path,
    *,
    name: str,
    model_format: str,
    precision: str,
    model_file: str,
    source: Source,
    parity: dict[str, Any],
    quantization: dict[str, Any] | None,
) -> None:
    """Write the manifest of all files in `folder`, and last: a folder without one is not a finished model.

    `quantization` says how a fused model's products are computed.
    """
    manifest = {
        "manifest_version": 1,
        "name": name,
        "format": model_format,
        "precision": precision,
        **({} if quantization is None else {"quantization": quantization}),
        "n_parameters": source.n_parameters,
        "model_file": model_file,
        "source": {"name": source.name, "kind": source.kind, "sha256": source.sha256},
        "is_dequantized": source.kind == "gguf",
        "made_with": {tool: _version(tool) for tool in _TOOLS},
        "parity": parity,
        "files": {
            file.name: {"n_bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in sorted(folder.iterdir())
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
