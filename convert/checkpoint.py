"""The source of a conversion: a Hugging Face checkpoint folder, or a GGUF file that becomes one.

`open_source` looks at everything but the weights' values before any work begins. `Checkpoint` reads a folder, one
tensor at a time. `dequantize` turns a GGUF file into a folder in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from metachunk_edge.backends.hf_tokenizer import mark_control_tokens
from metachunk_edge.cache import sha256_of
from metachunk_edge.convert.architecture import (
    check_config,
    check_tensors,
    count_parameters,
    expected_tensors,
    is_tied,
)
from metachunk_edge.convert.dequantize import config_of_gguf, dequantize, open_gguf
from metachunk_edge.convert.files import read_json
from metachunk_edge.convert.tokenizer import check_tokenizer, tokenizer_of_gguf
from metachunk_edge.errors import ConversionError, ModelNotFoundError
from metachunk_edge.types import FloatArray

__all__ = ["Checkpoint", "Source", "dequantize", "open_source"]

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be converted. `config` holds the values of a Hugging Face `config.json`, for a GGUF file too.

    `sha256` is that of the GGUF file, or of the lines "<sha256>  <name>" of the checkpoint's files, sorted.
    """

    path: Path
    kind: Literal["checkpoint", "gguf"]
    name: str
    sha256: str
    config: dict[str, Any]

    @property
    def n_parameters(self) -> int:
        """How many weights the model has; a tied matrix counts once."""
        return count_parameters(self.config)


def open_source(path: Path) -> Source:
    """Check a checkpoint folder or a GGUF file, and say what it is.

    Raises:
        ModelNotFoundError: there is nothing at `path`.
        ConversionError: it cannot be converted; the message says why.
    """
    if not path.exists():
        raise ModelNotFoundError(f"There is no model at {path}: give a checkpoint folder or a GGUF file.")
    if path.is_dir():
        checkpoint = Checkpoint(path)
        checkpoint.tokenizer()
        lines = sorted(f"{sha256_of(file)}  {file.name}\n" for file in checkpoint.files)
        sha256 = hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()
        return Source(path, "checkpoint", path.resolve().name, sha256, checkpoint.config)
    opened = open_gguf(path)
    tokenizer_of_gguf(opened.metadata, path)
    return Source(path, "gguf", path.stem, sha256_of(path), config_of_gguf(opened))


class Checkpoint:
    """A Hugging Face folder of a Qwen2 model, opened for reading.

    Raises:
        ConversionError: files or tensors are missing, damaged, or not those of a Qwen2 that can be converted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json")
        check_config(self.config, folder)
        self._file_of = _weight_files(folder)
        shapes, self._dtypes = {}, {}
        for name, file in self._file_of.items():
            with _opened(file) as weights:
                tensor = weights.get_slice(name)
                shapes[name], self._dtypes[name] = tuple(tensor.get_shape()), tensor.get_dtype()
        if self.is_tied and "lm_head.weight" in shapes and self._has_copy_of_embedding():
            for found in (shapes, self._dtypes, self._file_of):
                del found["lm_head.weight"]
        check_tensors(shapes, expected_tensors(self.config), folder)
        for name, dtype in self._dtypes.items():
            if dtype not in _DTYPES:
                raise ConversionError(
                    f"The tensor {name} in {folder} is of type {dtype}: save the model in float32, float16 or bfloat16."
                )

    def _has_copy_of_embedding(self) -> bool:
        """Some trainers store a tied output matrix, too."""
        embedding = "model.embed_tokens.weight"
        return embedding in self._file_of and np.array_equal(self.tensor("lm_head.weight"), self.tensor(embedding))

    @property
    def is_tied(self) -> bool:
        """Whether the output matrix is the embedding matrix itself."""
        return is_tied(self.config)

    @property
    def n_parameters(self) -> int:
        """How many weights the model has; a tied matrix counts once."""
        return count_parameters(self.config)

    @property
    def files(self) -> list[Path]:
        """The files that make up the model: config, weights, their index, and the tokenizer."""
        weights = set(self._file_of.values())
        others = (self.folder / name for name in ("config.json", _INDEX, *_TOKENIZER_FILES))
        return sorted(weights | {file for file in others if file.exists()})

    def tensor(self, name: str) -> FloatArray:
        """Return a tensor in float32; float16 and bfloat16 are converted exactly."""
        with _opened(self._file_of[name]) as weights:
            values: FloatArray = weights.get_tensor(name).float().numpy()
        return values

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, with every token of the form <|…|> a control token.

        Raises:
            ConversionError: there is none, or it is not Qwen2's.
        """
        tokenizer = self._pretrained_tokenizer.backend_tokenizer
        check_tokenizer(tokenizer, self.folder)
        mark_control_tokens(tokenizer)
        size = tokenizer.get_vocab_size()
        if size > self.config["vocab_size"]:
            raise ConversionError(
                f"The tokenizer in {self.folder} has {size:,} tokens, and the model {self.config['vocab_size']:,}: the "
                "tokenizer belongs to another model."
            )
        return tokenizer

    @property
    def chat_template(self) -> str | None:
        """The template of a conversation, if there is one, as a Jinja text."""
        template = self._pretrained_tokenizer.chat_template
        return template if isinstance(template, str) else None

    def special_token_id(self, role: Literal["bos", "eos", "pad"]) -> int | None:
        """Return the id of the token that begins a text, ends it, or fills up: the tokenizer's, else the config's."""
        chosen = getattr(self._pretrained_tokenizer, f"{role}_token_id")
        token_id = self.config.get(f"{role}_token_id") if chosen is None else chosen
        return token_id if isinstance(token_id, int) else None

    @cached_property
    def _pretrained_tokenizer(self) -> Any:
        names = {file.name for file in self.files}
        if not (names >= {"tokenizer.json"} or names >= {"vocab.json", "merges.txt"}):
            raise ConversionError(f"There is no tokenizer in {self.folder}: put the model's tokenizer.json there.")
        from transformers import AutoTokenizer

        try:
            # transformers 4.57 takes every large vocabulary for one of Mistral's and warns, unless it is told.
            tokenizer = AutoTokenizer.from_pretrained(  # type: ignore[no-untyped-call, unused-ignore]
                self.folder, local_files_only=True, fix_mistral_regex=False
            )
        except Exception as error:  # the libraries raise nothing more specific
            raise ConversionError(f"The tokenizer in {self.folder} cannot be read: {error}.") from error
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ConversionError(f"The tokenizer in {self.folder} is not Qwen2's but a {type(tokenizer).__name__}.")
        return tokenizer


def _weight_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor, by its name."""
    if (folder / _WEIGHTS).exists():
        return dict.fromkeys(_names_in(folder / _WEIGHTS), folder / _WEIGHTS)
    if not (folder / _INDEX).exists():
        kept = "only pytorch_model.bin: save it" if (folder / "pytorch_model.bin").exists() else "no weights: save them"
        raise ConversionError(f"There is no {_WEIGHTS} in {folder}, {kept} with safe_serialization=True.")
    stated = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(stated, dict) or not all(isinstance(shard, str) for shard in stated.values()):
        raise ConversionError(f"{folder / _INDEX} does not say which tensor lies in which file: download it again.")
    shards = sorted(set(stated.values()))
    for shard in shards:
        if not (folder / shard).exists():
            raise ConversionError(f"The shard {shard} is missing in {folder}: the checkpoint is incomplete.")
    found = {name: shard for shard in shards for name in _names_in(folder / shard)}
    for name in sorted(found.keys() | stated.keys()):
        if found.get(name) != stated.get(name):
            raise ConversionError(
                f"The tensor {name} lies in {found.get(name)}, and {folder / _INDEX} says {stated.get(name)}: the "
                "shards are of different checkpoints."
            )
    return {name: folder / shard for name, shard in found.items()}


def _names_in(file: Path) -> list[str]:
    with _opened(file) as weights:
        return list(weights.keys())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise ConversionError(
            f"{file} cannot be read: {error}. It is cut short or damaged: download it again."
        ) from error
