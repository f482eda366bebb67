"""A checkpoint → one GGUF file, in the layout of Qwen's own files.

float32, float16 and bfloat16 are written here, one tensor in memory at a time. For the other precisions llama.cpp
quantizes a float32 file that is deleted afterwards. The same checkpoint and name give the same bytes.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from metachunk_edge.backends.devices import default_threads
from metachunk_edge.backends.llama_cpp import engine_lock, interrupts_after, keep_message
from metachunk_edge.convert import Progress
from metachunk_edge.convert.architecture import expected_tensors, gguf_names
from metachunk_edge.convert.checkpoint import Checkpoint
from metachunk_edge.convert.files import writing_to
from metachunk_edge.convert.tokenizer import merges_of
from metachunk_edge.errors import ConversionError, SettingsError

__all__ = ["GGUF_PRECISIONS", "write_gguf"]

_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q6_k": gguf.LlamaFileType.MOSTLY_Q6_K,
    "q5_k_m": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "q4_k_m": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
GGUF_PRECISIONS: tuple[str, ...] = tuple(_FILE_TYPES)
"""What a GGUF file can be written in, from the largest to the smallest."""

_MATRIX_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
}
_TENSOR_COUNT = re.compile(r"\[ *(\d+)/ *(\d+)\]")
_ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR


def write_gguf(
    checkpoint: Checkpoint,
    path: Path,
    precision: str,
    *,
    name: str,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Write a checkpoint as a GGUF file. `path` is there when it is complete, and not before.

    Args:
        checkpoint: the model.
        path: the file to write; a present one is replaced.
        precision: one of GGUF_PRECISIONS. Vectors stay in float32.
        name: the model's name in the file.
        threads: for the quantization; None: one per physical core that this process may use.
        on_progress: called after every tensor.

    Raises:
        SettingsError: the precision is unknown.
        ConversionError: the tokenizer is not Qwen2's, a weight is no finite number in this precision, llama.cpp
            cannot quantize the model, or the file cannot be written.
    """
    if precision not in GGUF_PRECISIONS:
        raise SettingsError(f"precision must be one of {', '.join(GGUF_PRECISIONS)}, got {precision!r}")
    with (
        writing_to(path),
        tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True) as folder,
    ):
        unquantized, finished = Path(folder) / "unquantized.gguf", Path(folder) / "finished.gguf"
        if precision in _MATRIX_TYPES:
            _write_unquantized(checkpoint, finished, precision, name, on_progress)
        else:
            _write_unquantized(checkpoint, unquantized, "f32", name, on_progress)
            _quantize(unquantized, finished, precision, threads or default_threads(), on_progress)
        finished.replace(path)


def _write_unquantized(
    checkpoint: Checkpoint, path: Path, precision: str, name: str, on_progress: Progress | None
) -> None:
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN2])
    try:
        _add_model(writer, checkpoint, precision, name)
        _add_tokenizer(writer, checkpoint)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        types = {}
        for tensor, shape in expected_tensors(checkpoint.config).items():
            types[tensor] = _MATRIX_TYPES[precision] if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        _write_tensors(writer, checkpoint, types, on_progress)
    finally:
        writer.close()


def _add_model(writer: gguf.GGUFWriter, checkpoint: Checkpoint, precision: str, name: str) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    # Only the last part of this "path" is looked at, for words such as "0.5B" and "Instruct".
    metadata = gguf.Metadata(name=name)
    metadata = gguf.Metadata.apply_metadata_heuristic(
        metadata, model_path=Path(name), total_params=checkpoint.n_parameters
    )
    metadata.size_label = metadata.size_label or gguf.size_label(checkpoint.n_parameters, 0, 0, 0)
    metadata.set_gguf_meta_model(writer)
    config = checkpoint.config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(_FILE_TYPES[precision])


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> None:
    tokenizer = checkpoint.tokenizer()
    added = tokenizer.get_added_tokens_decoder()
    tokens, types = [], []
    for token_id in range(checkpoint.config["vocab_size"]):
        token = tokenizer.id_to_token(token_id)
        if token is None:
            kind = gguf.TokenType.UNUSED
        elif token_id not in added:
            kind = gguf.TokenType.NORMAL
        else:
            kind = gguf.TokenType.CONTROL if added[token_id].special else gguf.TokenType.USER_DEFINED
        tokens.append(f"[PAD{token_id}]" if token is None else token)
        types.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges_of(tokenizer))
    beginning, end, padding = (checkpoint.special_token_id(role) for role in ("bos", "eos", "pad"))
    if beginning is None or end is None:
        # llama.cpp would take the token 11, a comma.
        raise ConversionError(
            f"The config and tokenizer in {checkpoint.folder} name no bos_token_id or no eos_token_id: set both in "
            "config.json, to the id of <|endoftext|> if in doubt."
        )
    writer.add_eos_token_id(end)
    if padding is not None:
        writer.add_pad_token_id(padding)
    writer.add_bos_token_id(beginning)
    writer.add_add_bos_token(False)
    if checkpoint.chat_template:
        writer.add_chat_template(checkpoint.chat_template)


def _write_tensors(
    writer: gguf.GGUFWriter,
    checkpoint: Checkpoint,
    types: dict[str, gguf.GGMLQuantizationType],
    on_progress: Progress | None,
) -> None:
    """Write the header, then the data of one tensor after the other."""
    names = gguf_names(checkpoint.config)
    for tensor, shape in expected_tensors(checkpoint.config).items():
        bytes_per_weight = gguf.GGML_QUANT_SIZES[types[tensor]][1]
        n_bytes = int(np.prod(shape)) * bytes_per_weight
        writer.add_tensor_info(names[tensor], shape, np.dtype(np.float32), n_bytes, raw_dtype=types[tensor])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, (tensor, kind) in enumerate(types.items(), 1):
        with np.errstate(over="ignore"):  # reported below
            data = gguf.quants.quantize(checkpoint.tensor(tensor), kind)
        if not np.isfinite(gguf.quants.dequantize(data, kind)).all():
            raise ConversionError(
                f"The tensor {tensor} in {checkpoint.folder} has values that are no finite numbers in {kind.name}: "
                "choose f32 or bf16, or check the checkpoint."
            )
        writer.write_tensor_data(data)
        if on_progress:
            on_progress("Writing the weights", done, len(types))


def _quantize(source: Path, target: Path, precision: str, threads: int, on_progress: Progress | None) -> None:
    """Let llama.cpp write `target` from `source`."""
    errors: list[str] = []

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def follow(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
        line = text.decode("utf-8", errors="replace").strip()
        count = _TENSOR_COUNT.match(line)
        if count and on_progress:
            on_progress("Quantizing", int(count[1]), int(count[2]))
        if level == _ERROR_LEVEL and line:
            errors.append(line)

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = int(_FILE_TYPES[precision])
    parameters.nthread = threads
    with engine_lock, interrupts_after():
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(follow, ctypes.c_void_p(0))
        try:
            failed = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(parameters))
        finally:
            llama_cpp.llama_log_set(keep_message, ctypes.c_void_p(0))
    if failed:
        reason = errors[-1].split(": ", 1)[-1] if errors else "it gives no reason"
        raise ConversionError(f"llama.cpp cannot write the model in {precision}: {reason}. Choose another precision.")
