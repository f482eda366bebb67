"""The tokenizer of a Hugging Face checkpoint folder, by the library `tokenizers`: for byte-level BPE vocabularies.

It obeys `backends.base.Tokenizer`, so that the same text has the same ids here as through llama.cpp.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from metachunk_edge.errors import MissingExtraError, ModelFileError
from metachunk_edge.types import IntArray, TokenIds

__all__ = ["HuggingFaceTokenizer", "mark_control_tokens"]


class HuggingFaceTokenizer:
    """See `backends.base.Tokenizer`.

    Raises:
        MissingExtraError: the library `tokenizers` is not installed.
        ModelFileError: the folder's tokenizer is missing, damaged, or no byte-level BPE.
    """

    def __init__(self, folder: Path, name: str) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise MissingExtraError(
                "The library `tokenizers` is not installed: run pip install 'metachunk-edge[onnx]'."
            ) from error
        path = folder / "tokenizer.json"
        definition = _read_json(path)
        _check_kind(definition, path)
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            raise ModelFileError(f"{path} is no tokenizer that can be loaded ({error}): copy it again.") from error
        mark_control_tokens(tokenizer)
        tokenizer.encode_special_tokens = True  # control-token strings in a text are ordinary text
        tokenizer.normalizer = None  # texts come in normalized, by `tokens.py`, which keeps track of the offsets
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.name = name
        self.normalizes_to_nfc = definition.get("normalizer") is not None
        self.prefix_id = _prefix_id(tokenizer, folder)
        self._tokenizer = tokenizer
        self._byte_lengths = _byte_lengths(tokenizer)

    def tokenize(self, text: bytes, *, at_start: bool = True) -> tuple[TokenIds, IntArray]:  # noqa: ARG002
        """Encode UTF-8 text as ordinary text. A byte that the vocabulary lacks has no token."""
        encoding = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        return ids, self._byte_lengths[ids]


def mark_control_tokens(tokenizer: Any) -> None:
    """Make every added token of the form <|…|> a control token.

    Some of Qwen2.5's are not marked, such as <|fim_prefix|>. Qwen's own GGUF files mark them all; otherwise such a
    string in a document would get a meaning, and the ids of two files of one model would differ.
    """
    from tokenizers import AddedToken

    for token in tokenizer.get_added_tokens_decoder().values():
        if token.content.startswith("<|") and token.content.endswith("|>") and not token.special:
            tokenizer.add_special_tokens([AddedToken(token.content, special=True, normalized=False)])


def _byte_lengths(tokenizer: Any) -> IntArray:
    """Return how many bytes of text each token stands for, int64 [highest id + 1].

    A byte-level alphabet writes each byte as one character; added tokens are matched as they are written.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    lengths = np.zeros(1 + max([*vocabulary.values(), *added]), np.int64)
    for token, number in vocabulary.items():
        lengths[number] = len(token)
    for number, added_token in added.items():
        lengths[number] = len(added_token.content.encode("utf-8"))
    return lengths


def _prefix_id(tokenizer: Any, folder: Path) -> int:
    """The beginning-of-text token, else the end-of-text token, as llama.cpp chooses it."""
    path = folder / "config.json"
    chosen = _read_json(path).get("bos_token_id")
    if chosen is None:
        chosen = tokenizer.token_to_id("<|endoftext|>")
    if not isinstance(chosen, int):
        raise ModelFileError(
            f"{path} names no token that stands before a text: add its number as bos_token_id (found {chosen!r})."
        )
    return chosen


def _check_kind(definition: dict[str, Any], path: Path) -> None:
    kind = (definition.get("model") or {}).get("type")
    byte_levels = _steps(definition.get("pre_tokenizer"), "ByteLevel")
    normalizer = (definition.get("normalizer") or {}).get("type")
    if kind != "BPE" or not byte_levels or normalizer not in (None, "NFC"):
        raise ModelFileError(
            f"{path} is a tokenizer of the kind {kind} with the normalizer {normalizer}, which does not give every "
            "text back: use a model with byte-level BPE, such as Qwen2.5."
        )
    if any(step.get("add_prefix_space") for step in byte_levels):
        raise ModelFileError(
            f"{path} puts a space before every text, which no text contains: use a model such as Qwen2.5."
        )


def _steps(step: dict[str, Any] | None, kind: str) -> list[dict[str, Any]]:
    """Return all pre-tokenizers of a kind, out of sequences too."""
    if step is None:
        return []
    inner = [found for part in step.get("pretokenizers", []) for found in _steps(part, kind)]
    return [step, *inner] if step.get("type") == kind else inner


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing: a model folder needs it.") from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read ({error}): copy it again.") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} holds no JSON object: copy it again.")
    return content
