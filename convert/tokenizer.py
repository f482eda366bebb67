"""Qwen2's tokenizer: a byte-level BPE of NFC text, built from the metadata of a GGUF file or checked to be one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from metachunk_edge.errors import ConversionError

__all__ = ["SPLIT_PATTERN", "check_tokenizer", "merges_of", "tokenizer_of_gguf"]

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Qwen2 cuts a text into words; no token reaches across."""


def tokenizer_of_gguf(metadata: Mapping[str, Any], source: Path) -> Tokenizer:
    """Build the tokenizer of a GGUF file from its metadata. Unused tokens, which pad the vocabulary, are left out.

    Raises:
        ConversionError: the file has another kind of tokenizer, or one with gaps.
    """
    kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "qwen2"):
        raise ConversionError(
            f"{source} has a tokenizer of kind {kind}: only Qwen2's, ('gpt2', 'qwen2'), is converted."
        )
    tokens, types, merges = (metadata.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "token_type", "merges"))
    if not all(isinstance(values, list) and values for values in (tokens, types, merges)) or len(types) != len(tokens):
        raise ConversionError(f"The vocabulary of {source} is incomplete: tokens, token types or merges are missing.")
    by_type = {kind: [i for i, of in enumerate(types) if of == kind] for kind in gguf.TokenType}
    vocabulary = {tokens[i]: i for i in by_type[gguf.TokenType.NORMAL]}
    try:
        tokenizer = _byte_level_bpe(vocabulary, [tuple(merge.split(" ", 1)) for merge in merges])
    except Exception as error:  # the library raises nothing more specific
        raise ConversionError(f"The vocabulary of {source} is damaged: {error}.") from error
    added = sorted(by_type[gguf.TokenType.CONTROL] + by_type[gguf.TokenType.USER_DEFINED])
    for i in added:
        is_control = types[i] == gguf.TokenType.CONTROL
        add = tokenizer.add_special_tokens if is_control else tokenizer.add_tokens
        add([AddedToken(tokens[i], special=is_control, normalized=False)])
    for i in [*vocabulary.values(), *added]:
        if tokenizer.token_to_id(tokens[i]) != i:
            raise ConversionError(
                f"The token {tokens[i]!r} of {source} has the id {i}, which the tokenizers library cannot give it: the "
                "vocabulary has gaps or doubles."
            )
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, source: Path) -> None:
    """Raise a `ConversionError` unless llama.cpp's "qwen2" tokenizer works like this one."""
    found, expected = _rules(tokenizer), _rules(_byte_level_bpe({}, []))
    for key, rule in expected.items():
        if found[key] != rule:
            raise ConversionError(
                f"The tokenizer of {source} is not Qwen2's: its {key} is {found[key]}, and it must be {rule}."
            )


def _byte_level_bpe(vocabulary: dict[str, int], merges: list[Any]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _rules(tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides the ids of a text, apart from the vocabulary."""
    settings = json.loads(tokenizer.to_str())
    for step in (settings["pre_tokenizer"] or {}).get("pretokenizers", []):
        step.pop("trim_offsets", None)  # changes offsets only
    model = settings["model"]
    return {
        "model": model["type"],
        "normalizer": settings["normalizer"],
        "pre-tokenizer": settings["pre_tokenizer"],
        "unknown token": model.get("unk_token"),
        "dropout": model.get("dropout") or None,
        "subword prefix": model.get("continuing_subword_prefix") or "",
        "word suffix": model.get("end_of_word_suffix") or "",
        "byte fallback": model.get("byte_fallback", False),
        "ignoring of merges": model.get("ignore_merges", False),
    }


def merges_of(tokenizer: Tokenizer) -> list[str]:
    """Return the merges of a byte-pair encoding in order, each as its two parts with a space between."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
