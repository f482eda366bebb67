"""Checkpoints and GGUF files → models for the edge, each held against its float32 reference.

    source ──checkpoint.py──► float32 checkpoint ──gguf.py or onnx.py──► model file ──verify.py──► finished folder
                                       └──reference.py──► what the model must agree with ──┘

`conversion.py` is the whole way. The dependencies come with the extra `convert`; this module needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from metachunk_edge.cache import ModelFile
from metachunk_edge.errors import MissingExtraError

if __name__ == "convert":
    raise ImportError("import it as `metachunk_edge.convert`: a second copy under this name would be another package")

__all__ = ["Progress", "convert_model"]

Progress = Callable[[str, int, int], None]
"""Called with a message, how many steps are done, and how many there are; 1 where that is not known."""


def convert_model(
    source: str | Path,
    output: str | Path | None = None,
    *,
    precision: str,
    name: str | None = None,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> ModelFile:
    """Convert a Qwen2 checkpoint or GGUF file, verify the result, and return it.

    Args:
        source: a Hugging Face checkpoint folder, or a GGUF file or its name in the catalogue, which is dequantized.
        output: the folder to make; None: in the cache, where `find_model` knows it by its name.
        precision: "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m" or "q4_0" for a GGUF file; "float32",
            "float16", "int8" or "int4" for an ONNX model; "int8_fused" for that of the fast mode, made without PyTorch
            if the source is a GGUF file, and is then held against that file.
        name: what results call the model; None: the source's name and the precision.
        threads: CPU threads; None: one per physical core.
        on_progress: told of every step.

    Raises:
        MissingExtraError: the extra `convert`, or `onnx` for int8_fused, is not installed.
        SettingsError: the precision is unknown, or the name is not one for a folder.
        ModelNotFoundError: there is no source.
        ConversionError: the source cannot be converted, there is no room, the output exists, or the result is outside
            the tolerance of its precision; nothing is left behind. If the process is killed, a hidden folder with
            the end .partial stays, and goes with the next conversion to the same name.
    """
    extra = "onnx" if precision.lower() == "int8_fused" else "convert"
    try:
        from metachunk_edge.convert.conversion import convert

        return convert(source, output, precision=precision, name=name, threads=threads, on_progress=on_progress)
    except ImportError as error:
        raise MissingExtraError(
            f"The conversion needs libraries that are not installed ({error}): run pip install "
            f"'metachunk-edge[{extra}]'."
        ) from error
