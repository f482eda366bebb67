"""GGUF files opened for reading: their metadata, and their tensors in float32.

`gguf.GGUFReader` takes 15 s for a vocabulary of 151,936 tokens, since it makes several arrays for each. Here a second
does, and every length is checked against the size of the file.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from metachunk_edge.errors import ConversionError
from metachunk_edge.types import FloatArray

__all__ = ["GgufFile", "GgufTensor", "read_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: `offset` and `n_bytes` count bytes of the file; `shape` has the rows first."""

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file. Arrays of the metadata are lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def tensor(self, name: str) -> FloatArray:
        """Return a tensor of any type in float32, in its own shape."""
        tensor = self.tensors[name]
        data = np.memmap(self.path, np.uint8, "r", offset=tensor.offset, shape=(tensor.n_bytes,))
        rows = np.asarray(data).reshape(*tensor.shape[:-1], -1)
        return np.ascontiguousarray(gguf.quants.dequantize(rows, tensor.type), np.float32)


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file.

    Raises:
        ConversionError: the file is no GGUF file, cut short, damaged, or holds tensors of a type that `gguf` cannot
            dequantize.
    """
    try:
        n_bytes = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ConversionError(f"{path} is no GGUF file: give a GGUF file, or the folder of a checkpoint.")
            opened = _read_header(path, _Cursor(file.read, n_bytes), file.tell)
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, EOFError) as error:  # among them UnicodeDecodeError
        raise ConversionError(
            f"{path} cannot be read: {error}. The file is cut short, damaged or not little-endian GGUF: "
            "download it again."
        ) from error
    for name, tensor in opened.tensors.items():
        if tensor.offset + tensor.n_bytes > n_bytes:
            raise ConversionError(
                f"{path} is cut short: the tensor {name} ends at byte {tensor.offset + tensor.n_bytes:,} and the file "
                f"at byte {n_bytes:,}. Download it again."
            )
    _check_types(opened)
    return opened


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, read: Callable[[int], bytes], limit: int) -> None:
        self._read = read
        self._limit = limit

    def bytes(self, n_bytes: int) -> bytes:
        # A damaged length may ask for more than there is memory.
        data = self._read(n_bytes) if n_bytes <= self._limit else b""
        if len(data) != n_bytes:
            raise EOFError("it ends inside its header")
        return data

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.bytes(count * struct.calcsize(code)))

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8")

    def value(self, kind: gguf.GGUFValueType) -> Any:
        if kind == gguf.GGUFValueType.STRING:
            return self.text()
        if kind != gguf.GGUFValueType.ARRAY:
            return self.number(_SCALARS[kind])
        kind, count = gguf.GGUFValueType(self.number("I")), self.number("Q")
        if kind in _SCALARS:
            return list(self.numbers(_SCALARS[kind], count))
        return [self.value(kind) for _ in range(count)]


def _read_header(path: Path, cursor: _Cursor, position: Callable[[], int]) -> GgufFile:
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, and only 2 and 3 are known")
    n_tensors, n_values = cursor.numbers("Q", 2)
    metadata = {cursor.text(): cursor.value(gguf.GGUFValueType(cursor.number("I"))) for _ in range(n_values)}
    places = {}
    for _ in range(n_tensors):
        name = cursor.text()
        shape = cursor.numbers("Q", cursor.number("I"))[::-1]
        places[name] = shape, gguf.GGMLQuantizationType(cursor.number("I")), cursor.number("Q")
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    data_start = -(-position() // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in places.items():
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block_size:
            raise ValueError(f"the tensor {name} has the shape {shape}, which {kind.name} cannot hold")
        tensors[name] = GgufTensor(shape, kind, data_start + offset, prod(shape) // block_size * block_bytes)
    return GgufFile(path, metadata, tensors)


def _check_types(opened: GgufFile) -> None:
    for kind in {tensor.type for tensor in opened.tensors.values()}:
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        try:
            gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            raise ConversionError(
                f"{opened.path} holds {kind.name} tensors, which the gguf library cannot dequantize: use another "
                "precision of the model, such as Q8_0."
            ) from error
