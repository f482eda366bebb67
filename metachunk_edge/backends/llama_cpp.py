"""GGUF files through llama.cpp, by the low-level interface of llama-cpp-python.

Own batches, own KV cache policy, and log-probabilities reduced a few rows at a time: a document's logits are never
held (151,936 × 4 bytes a token for Qwen). A model can have several contexts; each session has one to itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from metachunk_edge.backends.base import MAX_PACKED, N_SINKS
from metachunk_edge.backends.device_check import check_device
from metachunk_edge.backends.devices import choose_device, default_threads, gpu_pointer
from metachunk_edge.backends.reduce import reduce_logits
from metachunk_edge.errors import BackendError, DeviceWarning, ModelFileError, SettingsError
from metachunk_edge.types import FloatArray, IntArray, TokenIds

if TYPE_CHECKING:
    from metachunk_edge.backends import Device
    from metachunk_edge.cache import ModelFile

__all__ = ["LlamaCppBackend", "engine_lock", "interrupts_after", "keep_message"]

BLOCK_SIZE = 128
"""Tokens per call. 256 is no faster on CPUs without AVX-512 and takes 300 MB more for the 0.5B model."""

ROW_MULTIPLE = 8
"""Every document's last block is padded to a multiple of so many rows. llama.cpp's kernels take rows in groups: with
this, a document's scores are the same to the bit whether it shares a batch or not."""

_ROWS_AT_ONCE = 4  # 4 × 151,936 float32 stay in the processor's cache
_NFC_TOKENIZERS = {"qwen2", "deepseek-r1-qwen"}  # pre-tokenizers whose original normalizes; llama.cpp's does not

_ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR
_ALL_FLOAT32 = "0"  # LLAMA_FTYPE_ALL_F32
engine_lock = threading.Lock()
_engine_messages: deque[str] = deque(maxlen=20)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def keep_message(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    """Keep an error of the engine for the next exception; everything else it says is not for the user."""
    if level == _ERROR_LEVEL:
        _engine_messages.append(text.decode("utf-8", errors="replace").strip())


class LlamaModel:
    """A loaded model. It is freed with the last reference to it: tokenizers and contexts hold one."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self._finalizer = weakref.finalize(self, llama_cpp.llama_model_free, pointer)


class LlamaTokenizer:
    """See `backends.base.Tokenizer`."""

    def __init__(self, model: LlamaModel, name: str) -> None:
        self._model = model
        self._vocabulary = llama_cpp.llama_model_get_vocab(model.pointer)
        self._byte_lengths: dict[int, int] = {}
        self.name = name
        self._adds_space = llama_cpp.llama_vocab_type(self._vocabulary) == llama_cpp.LLAMA_VOCAB_TYPE_SPM and (
            _metadata(model.pointer, "tokenizer.ggml.add_space_prefix") != "false"
        )
        self.normalizes_to_nfc = _metadata(model.pointer, "tokenizer.ggml.pre") in _NFC_TOKENIZERS
        beginning = llama_cpp.llama_vocab_bos(self._vocabulary)
        self.prefix_id: int = beginning if beginning >= 0 else llama_cpp.llama_vocab_eot(self._vocabulary)

    def tokenize(self, text: bytes, *, at_start: bool = True) -> tuple[TokenIds, IntArray]:
        """Encode UTF-8 text as ordinary text; control-token strings in it get no meaning."""
        if not self._adds_space:
            return self._tokenize(text)
        # SentencePiece vocabularies put a space in front, which belongs to the first token but not to the text. In
        # the middle of a document a line feed takes the space up: it is never joined with what follows.
        if at_start:
            ids, lengths = self._tokenize(text)
            lengths[:1] -= 1
            return ids, lengths
        ids, lengths = self._tokenize(b"\n" + text)
        n_before = int(np.searchsorted(np.cumsum(lengths), 2)) + 1  # the space and the line feed
        return ids[n_before:], lengths[n_before:]

    def _tokenize(self, text: bytes) -> tuple[TokenIds, IntArray]:
        buffer = (llama_cpp.llama_token * (len(text) + 2))()
        n_tokens = llama_cpp.llama_tokenize(self._vocabulary, text, len(text), buffer, len(buffer), False, False)
        if n_tokens < 0:
            raise BackendError(f"The tokenizer of {self.name} failed on a text of {len(text)} bytes.")
        ids = np.ctypeslib.as_array(buffer)[:n_tokens].astype(np.int32)
        lengths = np.fromiter(map(self._byte_length, ids.tolist()), np.int64, n_tokens)
        return ids, lengths

    def _byte_length(self, token: int) -> int:
        if token not in self._byte_lengths:
            size = llama_cpp.llama_token_to_piece(self._vocabulary, token, None, 0, 0, True)
            self._byte_lengths[token] = abs(size)
        return self._byte_lengths[token]


class LlamaCppBackend:
    """See `backends.base.Backend`.

    Where a GPU cannot load the model or gives wrong values, it runs on the CPU, with a DeviceWarning.

    Raises:
        ModelFileError: llama.cpp cannot load the file, or it is of a kind that cannot be scored.
        DeviceError: a GPU was asked for, and this build or machine has none of that kind.
    """

    def __init__(
        self, model: ModelFile, *, device: Device = "auto", threads: int | None = None, context_length: int = 2_048
    ) -> None:
        self.block_size = BLOCK_SIZE
        self.row_multiple = ROW_MULTIPLE
        self.context_length = context_length
        self._file = model
        self._device = choose_device(device)
        self._threads = threads or default_threads()
        self._lock = threading.Lock()
        self._idle: list[_Context] = []
        self._model = self._load_model()
        self.tokenizer = LlamaTokenizer(self._model, model.name)
        self.position_limit: int = llama_cpp.llama_model_n_ctx_train(self._model.pointer)
        if context_length > self.position_limit:
            raise SettingsError(
                f"context_length must be at most {self.position_limit} for {model.name}, got {context_length}"
            )
        if self._device != "cpu":
            self._check_device()

    @property
    def model(self) -> dict[str, Any]:
        """What is recorded with each result."""
        return {
            "name": self._file.name,
            "precision": self._file.precision,
            "sha256": self._file.sha256,
            "backend": f"llama-cpp-python {llama_cpp.__version__}",
            "device": self._device,
            "threads": self._threads,
            "block_size": self.block_size,
        }

    def _load_model(self) -> LlamaModel:
        if self._device == "cpu":
            return _load(self._file.path, "cpu")
        try:
            return _load(self._file.path, self._device)
        except ModelFileError as error:
            fault = f"The model {self._file.name} runs on the CPU, since {self._device!r} does not take it: {error}"
        on_cpu = _load(self._file.path, "cpu")  # or the error that any device has
        warnings.warn(fault, DeviceWarning, stacklevel=4)
        self._device = "cpu"
        return on_cpu

    def _check_device(self) -> None:
        on_cpu = LlamaCppBackend(self._file, device="cpu", threads=self._threads, context_length=self.context_length)
        fault = check_device(self, on_cpu)
        if fault:
            warnings.warn(fault, DeviceWarning, stacklevel=3)
            self._device, self._model, self.tokenizer = on_cpu._device, on_cpu._model, on_cpu.tokenizer
            self._idle = on_cpu._idle

    def open_session(self) -> LlamaSession:
        """Return a session. Sessions may be open at the same time; each then holds a context of its own."""
        return LlamaSession(self)

    def score_packed(self, documents: Sequence[TokenIds]) -> list[FloatArray]:
        """See `backends.base.Backend`."""
        # With AVX-512, what else is in a batch changes the last bit of a float32 product.
        batches = [[ids] for ids in documents] if _is_all_float32(self._model) else [documents]
        scores = []
        for batch in batches:
            with self.open_session() as session:
                scores += session.score_packed(batch, self.tokenizer.prefix_id)
        return scores

    def take_context(self) -> _Context:
        """Lend a context, with an empty cache, to a session."""
        with self._lock:
            context = self._idle.pop() if self._idle else None
        return context or _Context(self._model, self.context_length, self.block_size, self._threads, self._device)

    def give_back(self, context: _Context) -> None:
        """Take a context back; one is kept for the next session."""
        context.clear()
        with self._lock:
            if not self._idle:
                self._idle.append(context)


class _Context:
    """A llama.cpp context with its batch; its lock keeps two threads from feeding it at once."""

    def __init__(self, model: LlamaModel, context_length: int, block_size: int, threads: int, device: str) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = context_length + ROW_MULTIPLE
        parameters.n_batch = parameters.n_ubatch = block_size
        parameters.n_seq_max = MAX_PACKED
        parameters.kv_unified = True  # all sequences share the cells; by default each would get a 32nd of them
        parameters.n_threads = parameters.n_threads_batch = threads
        if _is_all_float32(model):  # with half-precision keys it would not be
            parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
        if device == "cpu":
            parameters.op_offload = parameters.offload_kqv = False
            _switch_off_flash_attention(parameters)
        with engine_lock:
            _engine_messages.clear()
            self._pointer = llama_cpp.llama_init_from_model(model.pointer, parameters)
        if not self._pointer:
            raise BackendError(f"llama.cpp made no context of {context_length} tokens: {_reason()}")
        self._model = model
        self._memory = llama_cpp.llama_get_memory(self._pointer)
        self._n_vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model.pointer))
        self._batch = llama_cpp.llama_batch_init(block_size, 0, 1)
        self._scratch = np.empty((_ROWS_AT_ONCE, self._n_vocabulary), np.float32)
        self._lock = threading.Lock()
        self._finalizers = (
            weakref.finalize(self, llama_cpp.llama_free, self._pointer),
            weakref.finalize(self, llama_cpp.llama_batch_free, self._batch),
        )

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    def make_room(self, keep_from: int, shift: int) -> None:
        """Drop and move cache entries of sequence 0; see `backends.base.Session.advance`."""
        with self._lock:
            if keep_from > N_SINKS:
                llama_cpp.llama_memory_seq_rm(self._memory, 0, N_SINKS, keep_from)
            if shift:
                if not llama_cpp.llama_memory_can_shift(self._memory):
                    raise BackendError("This model cannot move its KV cache: use the window policy 'strided'.")
                llama_cpp.llama_memory_seq_add(self._memory, 0, keep_from, -1, -shift)

    def score(self, parts: Sequence[_Part]) -> FloatArray:
        """Decode one batch and return ln p of all parts' targets, one after the other, float32 [n_targets]."""
        with self._lock:
            return reduce_logits(self._decode(parts), _targets_of(parts), self._scratch)

    def score_with_logits(self, parts: Sequence[_Part]) -> tuple[FloatArray, FloatArray]:
        """Do the same, and return a copy of the logits too, float32 [n_targets, vocabulary]."""
        with self._lock:
            logits = self._decode(parts)
            return reduce_logits(logits, _targets_of(parts), self._scratch), logits.copy()

    def _decode(self, parts: Sequence[_Part]) -> FloatArray:
        """Decode one batch and return the logits where llama.cpp keeps them: they are gone with the next batch."""
        ids, positions, sequences, wanted = map(np.concatenate, zip(*map(_padded, count(), parts), strict=True))
        n_rows, n_targets = len(ids), len(_targets_of(parts))
        batch = self._batch
        batch.n_tokens = n_rows
        _view(batch.token, n_rows)[:] = ids
        _view(batch.pos, n_rows)[:] = positions
        _view(batch.n_seq_id, n_rows)[:] = 1
        _view(batch.logits, n_rows)[:] = wanted
        for row, sequence in enumerate(sequences.tolist()):
            batch.seq_id[row][0] = sequence
        _engine_messages.clear()
        status = llama_cpp.llama_decode(self._pointer, batch)
        if status != 0:
            raise BackendError(f"llama.cpp failed to decode {n_rows} tokens (status {status}): {_reason()}")
        for sequence, part in enumerate(parts):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, part.position + len(part.ids), -1)
        if not n_targets:
            return np.empty((0, self._n_vocabulary), np.float32)
        address = ctypes.cast(llama_cpp.llama_get_logits(self._pointer), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (n_targets, self._n_vocabulary))


@dataclass(frozen=True, slots=True)
class _Part:
    """One sequence's share of a batch: inputs from `position` on, and the targets behind the last of them."""

    ids: TokenIds
    targets: TokenIds
    position: int


def _padded(sequence: int, part: _Part) -> tuple[TokenIds, IntArray, IntArray, IntArray]:
    """Ids, positions, sequences, and which rows are wanted; padding stands behind the part, where nothing sees it."""
    n_rows = -(-len(part.ids) // ROW_MULTIPLE) * ROW_MULTIPLE
    rows = np.arange(n_rows)
    ids = np.concatenate([part.ids, np.repeat(part.ids[:1], n_rows - len(part.ids))])
    wanted = (rows >= len(part.ids) - len(part.targets)) & (rows < len(part.ids))
    return ids, part.position + rows, np.full(n_rows, sequence), wanted.astype(np.int64)


def _targets_of(parts: Sequence[_Part]) -> TokenIds:
    return np.concatenate([part.targets for part in parts])


class LlamaSession:
    """See `backends.base.LogitsSession`."""

    def __init__(self, backend: LlamaCppBackend) -> None:
        self._backend = backend
        self._context = backend.take_context()

    def __enter__(self) -> LlamaSession:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._backend.give_back(self._context)

    def restart(self) -> None:
        """Empty the KV cache."""
        self._context.clear()

    def advance(self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int) -> FloatArray:
        """See `backends.base.Session`."""
        self._context.make_room(keep_from, shift)
        return self._context.score([_Part(ids, targets, position)])

    def advance_with_logits(
        self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int
    ) -> tuple[FloatArray, FloatArray]:
        """See `backends.base.LogitsSession`."""
        self._context.make_room(keep_from, shift)
        return self._context.score_with_logits([_Part(ids, targets, position)])

    def score_packed(self, documents: Sequence[TokenIds], prefix_id: int) -> list[FloatArray]:
        """See `LlamaCppBackend.score_packed`."""
        parts = [_Part(np.concatenate([[prefix_id], ids[:-1]]).astype(np.int32), ids, 0) for ids in documents]
        logprobs = self._context.score(parts)
        return np.split(logprobs, np.cumsum([len(ids) for ids in documents])[:-1])


def _load(path: Path, device: str) -> LlamaModel:
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0 if device == "cpu" else 999
    # A list that ends with nothing: the chosen GPU alone, or none; by default llama.cpp would take all there are, even
    # on the CPU, for the large products.
    devices = (ctypes.c_void_p * 2)(gpu_pointer(device))
    parameters.devices = ctypes.addressof(devices)
    parameters.use_extra_bufts = not _has_amx()
    with engine_lock, interrupts_after():
        llama_cpp.llama_log_set(keep_message, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        _engine_messages.clear()
        pointer = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
    if not pointer:
        raise ModelFileError(
            f"{path} cannot be loaded: {_reason()}. The file is cut short, damaged, or of a kind that this llama.cpp "
            "does not know: download it again, or use another model."
        )
    model = LlamaModel(pointer)
    _check_kind(pointer, path)
    return model


def _has_amx() -> bool:
    """Whether this build would use AMX, Intel's matrix unit, whose code in llama.cpp ends the process.

    GCC drops the stores that prepare the unit, and the first product is an illegal instruction; see
    https://github.com/ggml-org/llama.cpp/pull/26954.
    """
    return b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info()


@contextlib.contextmanager
def interrupts_after() -> Iterator[None]:
    """Raise Ctrl-C behind the block: inside the engine's log callback it would be printed and lost."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # a host program's own handling of interrupts stays in force
        return
    interrupted = False

    def remember(_signal: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt


def _check_kind(model: Any, path: Path) -> None:
    if llama_cpp.llama_model_has_encoder(model) or not llama_cpp.llama_model_has_decoder(model):
        raise ModelFileError(f"{path} is no language model that predicts the next token: use a decoder such as Qwen2.")
    if llama_cpp.llama_model_is_recurrent(model) or _is_hybrid(model):
        raise ModelFileError(
            f"{path} is a recurrent model, whose memory has no windows: use a transformer such as Qwen2."
        )
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    if llama_cpp.llama_vocab_type(vocabulary) not in (llama_cpp.LLAMA_VOCAB_TYPE_BPE, llama_cpp.LLAMA_VOCAB_TYPE_SPM):
        raise ModelFileError(
            f"{path} has a tokenizer that does not give every text back: use a model such as Qwen2 or SmolLM2."
        )


def _is_all_float32(model: LlamaModel) -> bool:
    return _metadata(model.pointer, "general.file_type") == _ALL_FLOAT32


def _is_hybrid(model: Any) -> bool:
    # llama-cpp-python 0.3.16 cannot tell.
    return hasattr(llama_cpp, "llama_model_is_hybrid") and bool(llama_cpp.llama_model_is_hybrid(model))


def _metadata(model: Any, key: str) -> str:
    buffer = ctypes.create_string_buffer(256)
    size = llama_cpp.llama_model_meta_val_str(model, key.encode("ascii"), buffer, len(buffer))
    return buffer.value.decode("utf-8", errors="replace") if size >= 0 else ""


def _reason() -> str:
    """The engine's first error message since the call began, without the name of the function that wrote it."""
    message = _engine_messages[0].splitlines()[0] if _engine_messages else "llama.cpp gives no reason"
    return message.split(": ", 1)[-1].removeprefix("error loading model: ").rstrip(".")


def _switch_off_flash_attention(parameters: Any) -> None:
    # On the CPU its kernel depends on the number of rows, one of them sums in half precision, and it is no faster.
    if hasattr(parameters, "flash_attn_type"):
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    else:  # llama-cpp-python 0.3.16
        parameters.flash_attn = False


def _view(pointer: Any, length: int) -> Any:
    return np.ctypeslib.as_array(pointer, (length,))
