"""Which file of a catalogue model runs: the fast one, which is made of it, or the one that was downloaded."""

from __future__ import annotations

from typing import Literal, get_args

from metachunk_edge.backends import Device
from metachunk_edge.cache import ModelFile
from metachunk_edge.catalogue import catalogue, find_model
from metachunk_edge.converted import open_converted
from metachunk_edge.errors import MissingExtraError, ModelNotFoundError, SettingsError

__all__ = ["Mode", "choose_model", "fast_name", "why_not_fast"]

Mode = Literal["auto", "fast", "exact"]
"""`fast`: the int8 ONNX model that `models pull` makes of the GGUF file. `exact`: the GGUF file itself. `auto`: the
fast one where it is there and the device can run it."""


def fast_name(name: str) -> str:
    """The name of a catalogue model's fast conversion."""
    return f"{name}-int8_fused"


def choose_model(name_or_path: str, mode: Mode = "auto", device: Device = "auto") -> ModelFile:
    """Return the file that runs for a name, or a path, which stands for itself.

    Raises:
        SettingsError: the mode is unknown, or goes with names of the catalogue only.
        ModelNotFoundError: there is no such model, or its fast conversion was asked for and cannot run here.
        ModelFileError: the file is damaged.
    """
    if mode not in get_args(Mode):
        raise SettingsError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    if mode == "exact" or name_or_path not in catalogue():
        if mode == "fast":
            raise SettingsError(f"mode 'fast' goes with the models of the catalogue only, got {name_or_path}")
        return find_model(name_or_path)
    obstacle = why_not_fast(name_or_path, device)
    if obstacle is None:
        return find_model(fast_name(name_or_path))
    if mode == "fast":
        raise ModelNotFoundError(f"The fast mode of {name_or_path} cannot run: {obstacle}.")
    return find_model(name_or_path)


def why_not_fast(name: str, device: Device) -> str | None:
    """Say what keeps a catalogue model from running in its fast mode; None if nothing does."""
    from metachunk_edge.backends.devices import gpu_devices
    from metachunk_edge.backends.ort import multiplies_integers_exactly

    if open_converted(fast_name(name)) is None:
        return f"there is no such file yet, which `metachunk-edge models pull {name}` makes"
    try:
        is_exact = multiplies_integers_exactly()
    except MissingExtraError as error:
        return str(error).rstrip(".")
    if not is_exact:
        return "this processor has no 8-bit dot products (VNNI on Intel and AMD)"
    if device not in ("auto", "cpu") or (device == "auto" and gpu_devices()):
        return "it runs on the CPU, and the device is a GPU"
    return None
