"""Where log-probabilities come from.

`base` is the protocol, `llama_cpp` runs GGUF files, `ort` runs ONNX models, `fake` needs no weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from metachunk_edge.backends.base import Backend
from metachunk_edge.errors import SettingsError

if TYPE_CHECKING:
    from metachunk_edge.cache import ModelFile

__all__ = ["Device", "load_backend"]

Device = Literal["auto", "cpu", "gpu", "cuda", "directml", "coreml", "webgpu", "vulkan", "metal"]


def load_backend(
    model: ModelFile,
    *,
    device: Device = "auto",
    threads: int | None = None,
    workers: int = 1,
    context_length: int = 2_048,
) -> Backend:
    """Load a model file into the engine that runs it.

    Args:
        model: a GGUF file or an ONNX model, from `catalogue.find_model`.
        device: "gpu" puts the whole model on the GPU, "auto" does so where this build and machine have one; the
            others name the way to it: "cuda", "vulkan" or "metal" for GGUF files; "cuda", "directml", "coreml" or
            "webgpu" for ONNX models, which take the last two on request only.
        threads: CPU threads; None: one per physical core that this process may use.
        workers: how many sessions will be in use at the same time; they share the CPU threads.
        context_length: how many entries the KV cache holds.

    Raises:
        SettingsError: the device is unknown, or `threads` or `workers` is below 1.
        ModelFileError: the engine cannot load the file.
        DeviceError: the device was asked for and there is none.
        MissingExtraError: an ONNX model, and the extra `onnx` is not installed.
    """
    if device not in get_args(Device):
        raise SettingsError(f"device must be one of {', '.join(get_args(Device))}, got {device!r}")
    if threads is not None and threads < 1:
        raise SettingsError(f"threads must be at least 1, got {threads}")
    from metachunk_edge.backends.devices import default_threads

    if workers < 1:
        raise SettingsError(f"workers must be at least 1, got {workers}")
    threads = max(1, (threads or default_threads()) // workers)
    if model.format == "onnx":
        from metachunk_edge.backends.ort import OnnxBackend

        return OnnxBackend(model, device=device, threads=threads, context_length=context_length)
    from metachunk_edge.backends.llama_cpp import LlamaCppBackend

    return LlamaCppBackend(model, device=device, threads=threads, context_length=context_length)
