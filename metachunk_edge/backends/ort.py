"""ONNX models through ONNX Runtime. What the graph takes and gives stands in `convert/onnx.py`.

The KV cache is a pair of arrays per layer that goes in and comes out with every block; a session drops and moves
entries by slicing it. The log-probabilities are computed in the graph, so the logits stay in the runtime.
"""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from metachunk_edge.backends.base import N_SINKS
from metachunk_edge.backends.device_check import check_device
from metachunk_edge.backends.hf_tokenizer import HuggingFaceTokenizer
from metachunk_edge.backends.reduce import check_finite
from metachunk_edge.errors import (
    BackendError,
    DeviceError,
    DeviceWarning,
    MissingExtraError,
    ModelFileError,
    SettingsError,
)
from metachunk_edge.types import FloatArray, TokenIds

if TYPE_CHECKING:
    from metachunk_edge.backends import Device
    from metachunk_edge.cache import ModelFile

__all__ = ["PREFIX_FILE", "OnnxBackend", "describe_runtime", "multiplies_integers_exactly", "onnx_devices"]

BLOCK_SIZE = 128
"""Tokens per call."""

FUSED_BLOCK_SIZE = 256
"""Tokens per call of a fused model, where the context is long enough for two of them."""

PREFIX_FILE = "prefix.npz"
"""Beside a fused model: what the prefix token leaves behind. `keys` and `values` are its cache entries, float32
[layers, key-value heads, head size], and `logits` its prediction, float32 [vocabulary]. It is never read itself."""

_PROVIDERS = {
    "cuda": "CUDAExecutionProvider",
    "directml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
}
_NOT_BY_ITSELF = ("coreml", "webgpu")  # they take part of such a graph only, and are no faster for it: on request
_PAST, _PRESENT = "past_key_values.", "present."


def onnx_devices() -> list[str]:
    """Return the devices that this build of ONNX Runtime has a provider for: "cpu" and keys such as "cuda"."""
    available = _runtime().get_available_providers()
    return ["cpu", *(device for device, provider in _PROVIDERS.items() if provider in available)]


def describe_runtime() -> str:
    """Return ONNX Runtime's version and devices, or that it is not installed."""
    try:
        return f"onnxruntime {_runtime().__version__}, with {', '.join(onnx_devices())}"
    except MissingExtraError:
        return "onnxruntime is not installed: pip install 'metachunk-edge[onnx]'"


@cache
def multiplies_integers_exactly() -> bool:
    """Whether 8-bit products come out right on this processor, which takes VNNI, or ARM's dot products.

    Older x86 instructions add pairs of products in 16 bits, and what is too large for them is cut off without a word.
    `products.onnx` multiplies the largest values that there are.
    """
    session = _load(Path(__file__).with_name("products.onnx"), "cpu", 1)
    (products,) = session.run(None, {"rows": np.full((8, 64), 255, np.uint8)})
    return bool((products == 255 * 127 * 64).all())


class OnnxBackend:
    """See `backends.base.Backend`.

    Where another device cannot load the model or gives wrong values, it runs on the CPU, with a DeviceWarning.

    Raises:
        MissingExtraError: onnxruntime or tokenizers is not installed.
        ModelFileError: ONNX Runtime cannot load the file, or its folder lacks a part.
        DeviceError: the asked-for device has no provider in this build of ONNX Runtime.
    """

    def __init__(
        self, model: ModelFile, *, device: Device = "auto", threads: int | None = None, context_length: int = 2_048
    ) -> None:
        from metachunk_edge.backends.devices import default_threads

        self.row_multiple = 1
        self.context_length = context_length
        self._file = model
        self._device = _choose_device(device)
        self._threads = threads or default_threads()
        config = _config(model.path.parent)
        self.position_limit = int(config["max_position_embeddings"])
        if context_length > self.position_limit:
            raise SettingsError(
                f"context_length must be at most {self.position_limit} for {model.name}, got {context_length}"
            )
        self.rotary_base = float(config["rope_theta"])
        self._lock = threading.Lock()
        self.prefix = _prefix(model.path.parent)
        is_long_enough = context_length >= 2 * FUSED_BLOCK_SIZE + N_SINKS
        self.block_size = FUSED_BLOCK_SIZE if self.prefix is not None and is_long_enough else BLOCK_SIZE
        if self.prefix is not None and self._device == "cpu" and not multiplies_integers_exactly():
            raise DeviceError(
                f"The model {model.name} needs a processor with 8-bit dot products (VNNI on Intel and AMD), which this "
                "one lacks: use a GGUF model."
            )
        with ThreadPoolExecutor(1) as pool:  # of a cold start, the tokenizer is the larger half
            tokenizer = pool.submit(HuggingFaceTokenizer, model.path.parent, model.name)
            self.engine = self._load_engine()
            self.tokenizer = tokenizer.result()
        if self._device != "cpu":
            self._check_device()

    @property
    def model(self) -> dict[str, Any]:
        """What is recorded with each result."""
        return {
            "name": self._file.name,
            "precision": self._file.precision,
            "sha256": self._file.sha256,
            "backend": f"onnxruntime {_runtime().__version__}",
            "device": self._device,
            "threads": self._threads,
            "block_size": self.block_size,
        }

    @cached_property
    def engine_with_logits(self) -> Any:
        """The same weights with a graph that gives the logits, too; loaded on first use."""
        return _load(self._file.path.with_name("model_with_logits.onnx"), self._device, self._threads)

    def run(self, engine: Any, outputs: list[str], inputs: dict[str, Any]) -> list[FloatArray]:
        """Run an engine. Away from the CPU, one call at a time: not every provider takes several at once."""
        with contextlib.nullcontext() if self._device == "cpu" else self._lock:
            results: list[FloatArray] = engine.run(outputs, inputs)
        return results

    def _load_engine(self) -> Any:
        if self._device != "cpu":
            try:
                return _load(self._file.path, self._device, self._threads)
            except ModelFileError as error:
                fault = f"The model {self._file.name} runs on the CPU, since {self._device!r} does not take it: {error}"
            on_cpu = _load(self._file.path, "cpu", self._threads)  # or the error that any device has
            warnings.warn(fault, DeviceWarning, stacklevel=4)
            self._device = "cpu"
            return on_cpu
        return _load(self._file.path, "cpu", self._threads)

    def _check_device(self) -> None:
        on_cpu = OnnxBackend(self._file, device="cpu", threads=self._threads, context_length=self.context_length)
        fault = check_device(self, on_cpu)
        if fault:
            warnings.warn(fault, DeviceWarning, stacklevel=3)
            self._device, self.engine = "cpu", on_cpu.engine

    def open_session(self) -> OnnxSession:
        """Return a session. Sessions may be open at the same time: the engine is shared, a cache is not."""
        return OnnxSession(self)

    def score_packed(self, documents: Sequence[TokenIds]) -> list[FloatArray]:
        """See `backends.base.Backend`. One document is read after the other."""
        scores = []
        with self.open_session() as session:
            for ids in documents:
                session.restart()
                inputs = np.concatenate([[self.tokenizer.prefix_id], ids[:-1]]).astype(np.int32)
                scores.append(session.advance(inputs, ids, position=0, keep_from=0, shift=0))
        return scores


class OnnxSession:
    """See `backends.base.LogitsSession`."""

    def __init__(self, backend: OnnxBackend) -> None:
        self._backend = backend
        inputs = backend.engine.get_inputs()
        self._inputs = [item.name for item in inputs]
        self._shapes = {item.name: item.shape for item in inputs if item.name.startswith(_PAST)}
        self._cache_outputs = [name.replace(_PAST, _PRESENT) for name in self._shapes]
        self.restart()

    def __enter__(self) -> OnnxSession:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restart()

    def restart(self) -> None:
        """Empty the KV cache."""
        self._positions = np.empty(0, np.int64)
        self._cache = {name: np.empty((1, shape[1], 0, shape[3]), np.float32) for name, shape in self._shapes.items()}

    def advance(self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int) -> FloatArray:
        """See `backends.base.Session`."""
        self._make_room(keep_from, shift)
        return self._run(self._backend.engine, ["logprobs"], ids, targets, position)[0]

    def advance_with_logits(
        self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int
    ) -> tuple[FloatArray, FloatArray]:
        """See `backends.base.LogitsSession`."""
        self._make_room(keep_from, shift)
        engine = self._backend.engine_with_logits
        logprobs, logits = self._run(engine, ["logprobs", "logits"], ids, targets, position)
        return logprobs, logits

    def _make_room(self, keep_from: int, shift: int) -> None:
        """Drop and move cache entries; see `backends.base.Session.advance`."""
        kept = (self._positions < N_SINKS) | (self._positions >= keep_from)
        if not kept.all():
            self._positions = self._positions[kept]
            for name in self._cache:  # one at a time, so that there are never two whole caches
                self._cache[name] = self._cache[name][:, :, kept]
        if shift:
            n_sinks = int((self._positions < N_SINKS).sum())
            self._positions[n_sinks:] -= shift
            for name, values in self._cache.items():
                if name.endswith(".key"):
                    values[:, :, n_sinks:] = _turned_back(values[:, :, n_sinks:], shift, self._backend.rotary_base)

    def _run(
        self, engine: Any, outputs: list[str], ids: TokenIds, targets: TokenIds, position: int
    ) -> list[FloatArray]:
        prefix = self._backend.prefix
        if prefix is None or position or ids[0] != self._backend.tokenizer.prefix_id:
            return self._compute(engine, outputs, ids, targets, position)
        self._positions = np.zeros(1, np.int64)
        self._cache = dict(zip(self._shapes, prefix.cache, strict=True))
        known = prefix.score(targets[:1] if len(targets) == len(ids) else targets[:0])  # what stands right behind it
        if len(ids) == 1:
            return known[: len(outputs)]
        rest = self._compute(engine, outputs, ids[1:], targets[len(known[0]) :], position=1)
        return [np.concatenate(pair) for pair in zip(known, rest, strict=False)]

    def _compute(
        self, engine: Any, outputs: list[str], ids: TokenIds, targets: TokenIds, position: int
    ) -> list[FloatArray]:
        positions = np.arange(position, position + len(ids))
        inputs = {
            "input_ids": ids[None].astype(np.int64),
            "attention_mask": np.ones((1, len(self._positions) + len(ids)), np.int64),
            "position_ids": positions[None],
            "targets": targets.astype(np.int64),
            **self._cache,
        }
        inputs = {name: inputs[name] for name in self._inputs}
        try:
            results = self._backend.run(engine, [*outputs, *self._cache_outputs], inputs)
        except Exception as error:  # ONNX Runtime's own have no common type but this
            raise BackendError(f"ONNX Runtime failed on {len(ids)} tokens: {_reason(error)}.") from error
        self._positions = np.concatenate([self._positions, positions])
        self._cache = dict(zip(self._cache, results[len(outputs) :], strict=True))
        check_finite(results[0])
        return results[: len(outputs)]


class _Prefix:
    """What a fused model's folder holds of the prefix token."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as values:
            layers = zip(values["keys"], values["values"], strict=True)
            self.cache = [part[None, :, None] for layer in layers for part in layer]
            self._logits = values["logits"]
        highest = self._logits.max()
        self._normalizer = highest + np.log(np.exp(self._logits - highest, dtype=np.float64).sum())

    def score(self, targets: TokenIds) -> list[FloatArray]:
        """The log-probability and the logits of one target, or of none."""
        logprobs = (self._logits[targets] - self._normalizer).astype(np.float32)
        return [logprobs, np.repeat(self._logits[None], len(targets), axis=0)]


def _prefix(folder: Path) -> _Prefix | None:
    path = folder / PREFIX_FILE
    try:
        return _Prefix(path) if path.exists() else None
    except (OSError, ValueError, KeyError) as error:
        raise ModelFileError(f"{path} cannot be read ({error}): convert the model again.") from error


def _turned_back(keys: FloatArray, shift: int, rotary_base: float) -> FloatArray:
    """Keys of positions p, as they would be at p - shift: rotary embedding turns each pair of features by an angle.

    Source: RoFormer (arXiv 2104.09864), in the form that pairs feature i with feature i + half.
    """
    half = keys.shape[-1] // 2
    angles = shift * rotary_base ** (-np.arange(half) / half)
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = keys[..., :half], keys[..., half:]
    return np.concatenate([first * cosine + second * sine, second * cosine - first * sine], axis=-1)


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(
            "ONNX Runtime is not installed: run pip install 'metachunk-edge[onnx]', or use a GGUF model."
        ) from error
    return onnxruntime


def _choose_device(device: Device) -> str:
    available = onnx_devices()
    if device == "auto":
        return next((name for name in available if name not in ("cpu", *_NOT_BY_ITSELF)), "cpu")
    if device in ("vulkan", "metal"):
        raise DeviceError(f"The device {device!r} is for GGUF models: use --device gpu, or --device cpu.")
    wanted = next((name for name in available if name != "cpu"), "gpu") if device == "gpu" else device
    if wanted not in available:
        raise DeviceError(
            f"This build of ONNX Runtime has no provider for {wanted!r}, only {', '.join(available)}: install "
            "onnxruntime-gpu or onnxruntime-directml in place of onnxruntime, or use --device cpu."
        )
    return wanted


def _load(path: Path, device: str, threads: int) -> Any:
    runtime = _runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False  # it keeps a plan, and memory, for each shape it has seen
    providers = [] if device == "cpu" else [_PROVIDERS[device]]
    try:
        session = runtime.InferenceSession(
            str(path), options, providers=[*providers, "CPUExecutionProvider"], enable_fallback=0
        )
        if providers and session.get_providers()[0] != providers[0]:
            raise RuntimeError(f"this machine does not provide {device!r}")
        return session
    except Exception as error:  # ONNX Runtime's own have no common type but this
        raise ModelFileError(
            f"{path} cannot be loaded: {_reason(error)}. Convert the model again, or update onnxruntime."
        ) from error


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return {name: config[name] for name in ("max_position_embeddings", "rope_theta")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFileError(
            f"{folder} has no config.json that says the model's positions ({error}): convert the model again."
        ) from error


def _reason(error: Exception) -> str:
    """The first line of ONNX Runtime's message, without its codes."""
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return message.rsplit("] : ", 1)[-1].split(" : ", 2)[-1].rstrip(".")
