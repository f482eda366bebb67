"""Vocabularies other than Qwen's: a small SentencePiece one, written by the test."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from strategies import TEXTS

from metachunk_edge.backends.llama_cpp import LlamaModel, LlamaTokenizer
from metachunk_edge.tokens import encode

SPACE = "▁"
WORDS = ("the", "and", "word", "this", "that", "river", "stone")


def write_vocabulary(path: Path) -> None:
    """A vocabulary of bytes, letters, and words with a space in front, as Llama 2's is made."""
    beginnings = {f"{SPACE}{word[:length]}" for word in WORDS for length in range(1, len(word) + 1)}
    beginnings |= {word[:length] for word in WORDS for length in range(2, len(word) + 1)}
    pieces = [SPACE, SPACE * 2, *"abcdefghijklmnopqrstuvwxyz.,", *sorted(beginnings)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    kinds += [gguf.TokenType.NORMAL] * len(pieces)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(len(token)) if place > 258 else 0.0 for place, token in enumerate(tokens)])
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(_level: int, _text: bytes, _user_data: ctypes.c_void_p) -> None:
    pass


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LlamaTokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "sentencepiece.gguf"
    write_vocabulary(path)
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = LlamaModel(llama_cpp.llama_model_load_from_file(str(path).encode(), parameters))
    return LlamaTokenizer(model, "sentencepiece")


def test_the_space_in_front_belongs_to_no_character(tokenizer: LlamaTokenizer) -> None:
    encoding = encode("the river", tokenizer)
    np.testing.assert_array_equal(encoding.offsets, [[0, 3], [3, 9]])


def test_a_long_document_has_the_ids_that_it_has_when_encoded_at_once(tokenizer: LlamaTokenizer) -> None:
    text = "the river and this stone, that word.\n\nand  the\tword " * 2_000
    np.testing.assert_array_equal(encode(text, tokenizer).ids, tokenizer.tokenize(text.encode())[0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_offsets_cover_any_text(tokenizer: LlamaTokenizer, text: str) -> None:
    offsets = encode(text, tokenizer).offsets
    if text:
        assert offsets[0, 0] == 0
        assert offsets[-1, 1] == len(text)
        assert (offsets[1:, 0] <= offsets[:-1, 1]).all()
