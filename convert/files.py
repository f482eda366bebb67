"""Files in and out, with the system's errors turned into `ConversionError`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from metachunk_edge.errors import ConversionError

__all__ = ["read_json", "write_json", "writing_to"]


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn the system's errors while `path` is written into a `ConversionError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConversionError(
            f"{path} cannot be written: {error}. Free some space, or choose another folder."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, or raise a `ConversionError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConversionError(f"There is no {path.name} in {path.parent}: give a checkpoint folder.") from error
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path} must hold a JSON object.")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as a JSON file."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
