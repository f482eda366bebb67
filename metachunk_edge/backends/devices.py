"""What llama.cpp can run on here: GPUs of this build and machine, and the CPU cores that this process may use."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import psutil

from metachunk_edge.errors import DeviceError

if TYPE_CHECKING:
    from metachunk_edge.backends import Device

__all__ = ["choose_device", "default_threads", "gpu_devices", "gpu_pointer"]

_GPU_TYPES = (1, 2)  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU; in llama-cpp-python 0.3.16 the second is _ACCEL's, BLAS
_NAMES: dict[str, tuple[str, ...]] = {"auto": ("",), "gpu": ("",), "metal": ("metal", "mtl")}
"""How the names of a kind's devices begin, where not like the kind's own."""


def default_threads() -> int:
    """Return the number of physical cores within this process's CPU affinity and control-group quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or affinity
    return max(1, min(affinity, physical, _quota()))


def _quota() -> int:
    """CPUs that a Linux control group (a container's limit) grants, rounded up; many where there is no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            return -(-int(quota) // int(period))
    except (OSError, ValueError):
        pass  # no control groups of version 2 here
    return 1_024


def gpu_devices() -> dict[str, str]:
    """Return the GPUs that this build of llama.cpp can use: its name for each, e.g. Vulkan0, and their descriptions."""
    library = _library()
    return {
        _text(library.ggml_backend_dev_name(gpu)): _text(library.ggml_backend_dev_description(gpu)) for gpu in _gpus()
    }


def _library() -> Any:
    """The part of llama.cpp that knows the devices, with the types that llama-cpp-python leaves out."""
    from llama_cpp._ggml import libggml

    libggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    libggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    libggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for query in (libggml.ggml_backend_dev_name, libggml.ggml_backend_dev_description):
        query.restype = ctypes.c_char_p
    for query in (libggml.ggml_backend_dev_name, libggml.ggml_backend_dev_description, libggml.ggml_backend_dev_type):
        query.argtypes = [ctypes.c_void_p]
    return libggml


def _gpus() -> list[int]:
    if not llama_cpp.llama_supports_gpu_offload():
        return []
    library = _library()
    devices = [library.ggml_backend_dev_get(number) for number in range(library.ggml_backend_dev_count())]
    return [
        device
        for device in devices
        if int(library.ggml_backend_dev_type(device)) in _GPU_TYPES and library.ggml_backend_dev_name(device) != b"BLAS"
    ]


def gpu_pointer(device: str) -> int | None:
    """Return llama.cpp's handle of the device that `choose_device` has chosen; None for "cpu"."""
    for pointer in _gpus():
        if device == f"gpu: {_text(_library().ggml_backend_dev_description(pointer))}":
            return pointer
    return None


def _text(value: bytes) -> str:
    return value.decode("utf-8", errors="replace")


def choose_device(device: Device) -> str:
    """Return where the model runs: "cpu", or "gpu: " and the GPU's description.

    Raises:
        DeviceError: a GPU was asked for, and there is none, or none of that kind.
    """
    if device == "cpu":
        return "cpu"
    if device in ("directml", "coreml", "webgpu"):
        raise DeviceError(f"The device {device!r} is for ONNX models: use --device gpu, or --device cpu.")
    gpus = gpu_devices()
    wanted = [text for name, text in gpus.items() if name.lower().startswith(_NAMES.get(device, (device,)))]
    if wanted:
        return f"gpu: {wanted[0]}"
    if device == "auto":
        return "cpu"
    if gpus:
        why = f"llama.cpp finds no {device} device here, only {', '.join(gpus)}"
    elif llama_cpp.llama_supports_gpu_offload():
        why = "llama.cpp finds no GPU on this machine"
    else:
        why = (
            "this build of llama-cpp-python has no GPU support or finds no GPU (reinstall it with "
            "CMAKE_ARGS=-DGGML_CUDA=on, "
            "-DGGML_VULKAN=on or -DGGML_METAL=on)"
        )
    raise DeviceError(f"There is no GPU to use: {why}; or use --device cpu.")
