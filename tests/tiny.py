"""A tiny Qwen2 with random weights, as a Hugging Face checkpoint folder: enough for the logic of conversion.

Its weights are large enough for its predictions to be sharp, so that a fault shows. It needs the extra `convert`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from metachunk_edge.parity import Tolerance

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)


def make_tiny_checkpoint(
    folder: Path, *, tied: bool = False, dtype: str = "float32", shard_size: str = "5GB", seed: int = 0, **config: Any
) -> Path:
    """Write config, weights and tokenizer of a two-layer Qwen2 into `folder`; `config` overrides single values."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    write_tokenizer(folder)
    values: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,  # k-quants take rows of 256 weights
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1_024,
        "rope_theta": 1_000_000.0,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "bos_token_id": 400,
        "eos_token_id": 402,
    }
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**{**values, **config}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # they are zero at first
                parameter.normal_(0, 0.3)
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE with Qwen2's rules: ids [0, 400) are pieces of text, 400 to 402 the control tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [path.read_text(encoding="utf-8") for path in sorted((Path(__file__).parent / "data").glob("*.txt"))]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 1_024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def tiny_tolerance(model_format: str, precision: str) -> Tolerance:
    """The tolerance of the tiny model, whose random weights lose more in quantization than trained ones."""
    text = (Path(__file__).parent / "parity" / "tiny_tolerances.toml").read_text(encoding="utf-8")
    return Tolerance(**tomllib.loads(text)[model_format][precision])
