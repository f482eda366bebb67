"""What a Qwen2 model is made of, in the terms of its Hugging Face checkpoint.

In: the values of a `config.json`, and the names and shapes of the tensors that were found. Out: the tensors that
there must be, or a `ConversionError` for whatever this package would convert wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import gguf

from metachunk_edge.errors import ConversionError

__all__ = ["check_config", "check_tensors", "count_parameters", "expected_tensors", "gguf_names", "is_tied"]

Shape = tuple[int, ...]

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_REALS = ("rms_norm_eps", "rope_theta")
_MOST_LAYERS = 1_000  # a damaged file may ask for more than there is memory to list


def check_config(config: Mapping[str, Any], source: Path) -> None:
    """Raise a `ConversionError` unless `config` describes a plain Qwen2 in full."""
    if config.get("model_type") != "qwen2":
        raise ConversionError(
            f"{source} has the architecture {config.get('model_type')!r}: only Qwen2 models (qwen2) are converted."
        )
    _check_features(config, source)
    for key in _SIZES:
        value = config.get(key)
        if type(value) is not int or value < 1:
            raise ConversionError(f"{key} must be a whole number above 0 in the config of {source}, got {value!r}.")
    for key in _REALS:
        value = config.get(key)
        if not isinstance(value, int | float) or value <= 0:
            raise ConversionError(f"{key} must be a number above 0 in the config of {source}, got {value!r}.")
    if config["num_hidden_layers"] > _MOST_LAYERS:
        raise ConversionError(
            f"num_hidden_layers must be at most {_MOST_LAYERS} in the config of {source}, got "
            f"{config['num_hidden_layers']}."
        )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token_id = config.get(key)
        if isinstance(token_id, int) and not 0 <= token_id < config["vocab_size"]:
            raise ConversionError(
                f"{key} must be in [0, {config['vocab_size']}) in the config of {source}, got {token_id}."
            )
    hidden, heads, groups = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if hidden % heads or heads % groups:
        raise ConversionError(
            f"hidden_size must be a multiple of num_attention_heads, and that of num_key_value_heads, in the config of "
            f"{source}, got {hidden}, {heads} and {groups}."
        )
    if config.get("head_dim", hidden // heads) != hidden // heads:
        raise ConversionError(
            f"head_dim must be hidden_size / num_attention_heads = {hidden // heads} in the config of {source}, got "
            f"{config['head_dim']!r}."
        )


def _check_features(config: Mapping[str, Any], source: Path) -> None:
    activation = config.get("hidden_act", "silu")
    variants = {
        "quantization_config": (config.get("quantization_config"), "convert the model before its quantization"),
        "rope_scaling": (config.get("rope_scaling"), "remove it for a context within the one of the training"),
        "rope_parameters": (config.get("rope_parameters"), "save the checkpoint with transformers 4"),
        "use_sliding_window": (config.get("use_sliding_window"), "only full attention is converted"),
        "layer_types": (set(config.get("layer_types") or ()) - {"full_attention"}, "only full attention is converted"),
        "hidden_act": (None if activation == "silu" else activation, "only silu is converted"),
    }
    for key, (value, advice) in variants.items():
        if value:
            raise ConversionError(f"The config of {source} has {key} {value!r}, which is not supported: {advice}.")


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output matrix is the embedding matrix itself, and not stored."""
    return bool(config.get("tie_word_embeddings", False))


def expected_tensors(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every tensor by its name in the checkpoint, from the embedding to the output matrix.

    >>> tiny = {"vocab_size": 9, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 0}
    >>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    >>> expected_tensors({**tiny, **heads})
    {'model.embed_tokens.weight': (9, 4), 'model.norm.weight': (4,)}
    """
    vocabulary, hidden, intermediate = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    key_value = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.k_proj.bias": (key_value,),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.v_proj.bias": (key_value,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not is_tied(config):
        tensors["lm_head.weight"] = (vocabulary, hidden)
    return tensors


def gguf_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the name in a GGUF file of every tensor of a checkpoint, by its name there."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    return {name: str(names.get_name(name, (".weight", ".bias"))) for name in expected_tensors(config)}


def count_parameters(config: Mapping[str, Any]) -> int:
    """Return how many weights the model has; a tied matrix counts once."""
    return sum(map(prod, expected_tensors(config).values()))


def check_tensors(found: Mapping[str, Shape], expected: Mapping[str, Shape], source: Path) -> None:
    """Raise a `ConversionError` that names the first tensor that is missing, of another shape, or too many."""
    for name, shape in expected.items():
        if name not in found:
            raise ConversionError(f"The tensor {name} is missing in {source}: the checkpoint is incomplete.")
        if found[name] != shape:
            raise ConversionError(
                f"The tensor {name} in {source} has the shape {found[name]}, and by the model's config it must have "
                f"{shape}: the config belongs to another model."
            )
    for name in found:
        if name not in expected:
            raise ConversionError(
                f"The tensor {name} in {source} is none of a Qwen2 with this config: it would be lost in conversion."
            )
