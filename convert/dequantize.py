"""A GGUF file → a Hugging Face checkpoint folder in float32, with config, weights and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from metachunk_edge.convert import Progress
from metachunk_edge.convert.architecture import (
    check_config,
    check_tensors,
    count_parameters,
    expected_tensors,
    gguf_names,
)
from metachunk_edge.convert.files import write_json, writing_to
from metachunk_edge.convert.gguf_file import GgufFile, read_gguf
from metachunk_edge.convert.tokenizer import tokenizer_of_gguf
from metachunk_edge.errors import ConversionError

__all__ = ["config_of_gguf", "dequantize", "open_gguf", "tokenizer_config_of_gguf"]

_SHARD_BYTES = 1 << 30  # the library copies a shard in memory while it writes it


def dequantize(gguf_path: Path, folder: Path, on_progress: Progress | None = None) -> None:
    """Write the Qwen2 of a GGUF file as a complete float32 checkpoint into `folder`.

    At most one tensor and one shard of the weights, 1 GiB, are in memory, and the shard twice while it is written.

    Raises:
        ConversionError: the file cannot be converted, or the folder cannot be written.
    """
    opened = open_gguf(gguf_path)
    config = config_of_gguf(opened)
    tokenizer = tokenizer_of_gguf(opened.metadata, gguf_path)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        tokenizer.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", tokenizer_config_of_gguf(opened.metadata))
        _write_weights(opened, config, folder, on_progress)


def _write_weights(opened: GgufFile, config: dict[str, Any], folder: Path, on_progress: Progress | None) -> None:
    shapes = expected_tensors(config)
    names = gguf_names(config)
    shards: list[list[str]] = [[]]
    for name, shape in shapes.items():
        if shards[-1] and 4 * (sum(prod(shapes[other]) for other in shards[-1]) + prod(shape)) > _SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    file_of = {}
    done = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {}
        for name in shard:
            tensors[name] = opened.tensor(names[name])
            file_of[name] = file
            done += 1
            if on_progress:
                on_progress("Dequantizing", done, len(shapes))
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": 4 * count_parameters(config)}, "weight_map": file_of}
        write_json(folder / "model.safetensors.index.json", index)


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file of a Qwen2.

    Raises:
        ConversionError: it is another model, not supported, incomplete or damaged.
    """
    opened = read_gguf(path)
    config = config_of_gguf(opened)
    check_config(config, path)
    names = gguf_names(config)
    shapes = {names[name]: shape for name, shape in expected_tensors(config).items()}
    check_tensors({name: tensor.shape for name, tensor in opened.tensors.items()}, shapes, path)
    return opened


def config_of_gguf(opened: GgufFile) -> dict[str, Any]:
    """Return the metadata of a GGUF file as the values of a `config.json`, with llama.cpp's defaults filled in."""
    metadata = opened.metadata

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"qwen2.{key}", default)

    heads = value("attention.head_count")
    head_size = value("embedding_length", 0) // (heads or 1)
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        if value(key, head_size) != head_size:
            raise ConversionError(
                f"{opened.path} has qwen2.{key} {value(key)}, which is not supported: it must be the size of a head, "
                f"{head_size}."
            )
    scaling = value("rope.scaling.type", "none")
    tokens = metadata.get("tokenizer.ggml.tokens")
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": metadata.get("general.architecture"),
        "vocab_size": len(tokens) if isinstance(tokens, list) else None,
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _decimal(value("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(value("rope.freq_base", 10_000.0)),
        "rope_scaling": None if scaling == "none" else {"rope_type": scaling},
        "hidden_act": "silu",
        "use_sliding_window": False,
        "tie_word_embeddings": "output.weight" not in opened.tensors,
        "torch_dtype": "float32",
        "transformers_version": "4.57.0",  # whose format this is; from 4.57.3 on, a false warning comes with it
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{role}_token_id"] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def _decimal(value: Any) -> Any:
    """The shortest decimal of a float32: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def tokenizer_config_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a GGUF file as the values of a `tokenizer_config.json`."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["qwen2.context_length"],
        "unk_token": None,
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{role}_token"] = tokens[token_id] if isinstance(token_id, int) else None
    return config
