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

__all__ = ["choose_device", "default_threads", "gpu_devices"]


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


def gpu_devices() -> list[str]:
    """Return the descriptions of the GPUs that this build of llama.cpp can use."""
    if not llama_cpp.llama_supports_gpu_offload():
        return []
    from llama_cpp._ggml import libggml

    libggml.ggml_backend_dev_get.restype = libggml.ggml_backend_dev_description.restype = ctypes.c_void_p
    libggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    libggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    libggml.ggml_backend_dev_description.argtypes = libggml.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    libggml.ggml_backend_dev_description.restype = ctypes.c_char_p
    devices = [libggml.ggml_backend_dev_get(number) for number in range(libggml.ggml_backend_dev_count())]
    names = [libggml.ggml_backend_dev_description(device) for device in devices if _is_gpu(libggml, device)]
    return [name.decode("utf-8", errors="replace") for name in names]


def _is_gpu(library: Any, device: int) -> bool:
    return int(library.ggml_backend_dev_type(device)) in (1, 2)  # GPU, integrated GPU


def choose_device(device: Device) -> str:
    """Return where the model runs: "cpu", or "gpu: " and the GPU's name.

    Raises:
        DeviceError: "gpu" was asked for and there is none.
    """
    if device == "cpu":
        return "cpu"
    gpus = gpu_devices()
    if gpus:
        return f"gpu: {gpus[0]}"
    if device == "gpu":
        why = (
            "llama.cpp finds no GPU on this machine"
            if llama_cpp.llama_supports_gpu_offload()
            else "this build of llama-cpp-python has no GPU support (reinstall it with CMAKE_ARGS=-DGGML_CUDA=on, "
            "-DGGML_VULKAN=on or -DGGML_METAL=on)"
        )
        raise DeviceError(f"There is no GPU to use: {why}; or use --device cpu.")
    return "cpu"
