"""GGUF files that are written: loaded by llama.cpp, held against Qwen's own file, and read back to the bit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if "REQUIRE_MODELS" not in os.environ:  # as `make test` has it: there, a skip would be a silent pass
    for package in ("gguf", "safetensors", "torch", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed: it comes with the extra `convert`")

import gguf
import llama_cpp
import torch
import transformers
from safetensors.numpy import load_file, save_file
from strategies import HOSTILE
from tiny import CHAT_TEMPLATE, make_tiny_checkpoint
from tokenizers import Tokenizer

from metachunk_edge.backends import base
from metachunk_edge.backends.hf_tokenizer import HuggingFaceTokenizer
from metachunk_edge.backends.llama_cpp import LlamaCppBackend
from metachunk_edge.cache import ModelFile
from metachunk_edge.catalogue import find_model
from metachunk_edge.convert import gguf as gguf_module
from metachunk_edge.convert.architecture import expected_tensors
from metachunk_edge.convert.checkpoint import Checkpoint, dequantize
from metachunk_edge.convert.gguf import GGUF_PRECISIONS, write_gguf
from metachunk_edge.errors import ConversionError, ModelNotFoundError, SettingsError
from metachunk_edge.tokens import encode

MODEL = "qwen2.5-coder-0.5b-instruct"
UNQUANTIZED = ("f32", "f16", "bf16")


def metadata_of(path: Path) -> dict[str, Any]:
    """What a file says of its model; the count of tensors and the like are those of the container."""
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


def tensors_of(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def load(path: Path) -> LlamaCppBackend:
    return LlamaCppBackend(ModelFile(path, path.stem, None, ""), device="cpu", threads=1, context_length=256)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny"))


@pytest.mark.parametrize("tied", [False, True])
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", tied=tied)
    write_gguf(Checkpoint(folder), tmp_path / "tiny.gguf", "f32", name="tiny")
    ids = np.arange(100, dtype=np.int32)
    backend = load(tmp_path / "tiny.gguf")
    inputs = torch.tensor([backend.tokenizer.prefix_id, *ids[:-1].tolist()])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(inputs[None]).logits[0], dim=1)[range(100), ids]
    np.testing.assert_allclose(backend.score_packed([ids])[0], logprobs, rtol=0, atol=0.01)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", GGUF_PRECISIONS)
def test_every_precision_loads_and_scores(tmp_path: Path, precision: str, tied: bool) -> None:
    checkpoint = Checkpoint(make_tiny_checkpoint(tmp_path / "tiny", tied=tied))
    write_gguf(checkpoint, tmp_path / "f32.gguf", "f32", name="tiny")
    write_gguf(checkpoint, tmp_path / "tiny.gguf", precision, name="tiny")
    ids = np.arange(100, dtype=np.int32)
    exact, found = (load(tmp_path / file).score_packed([ids])[0] for file in ("f32.gguf", "tiny.gguf"))
    assert np.isfinite(found).all()
    bound = 0.1 if precision in UNQUANTIZED else 1 if precision == "q8_0" else 3  # nats; the model is a sharp one
    assert np.abs(found - exact).mean() < bound
    file_type = metadata_of(tmp_path / "tiny.gguf")["general.file_type"]
    assert gguf.LlamaFileType(file_type).name.lower().endswith(precision)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"f32.gguf", "tiny", "tiny.gguf"})


def test_a_tied_checkpoint_has_no_output_matrix_in_its_gguf(tmp_path: Path) -> None:
    names = {}
    for tied in (False, True):
        checkpoint = Checkpoint(make_tiny_checkpoint(tmp_path / f"tied-{tied}", tied=tied))
        write_gguf(checkpoint, tmp_path / "tiny.gguf", "f16", name="tiny")
        names[tied] = set(tensors_of(tmp_path / "tiny.gguf"))
    assert names[False] - names[True] == {"output.weight"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_weights_are_those_of_the_checkpoint_to_the_bit(tmp_path: Path, dtype: str) -> None:
    checkpoint = Checkpoint(make_tiny_checkpoint(tmp_path / "tiny", dtype=dtype, shard_size="2MB"))
    precision = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    write_gguf(checkpoint, tmp_path / "tiny.gguf", precision, name="tiny")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, checkpoint.config["num_hidden_layers"])
    tensors = tensors_of(tmp_path / "tiny.gguf")
    assert len(tensors) == len(expected_tensors(checkpoint.config))
    for name in expected_tensors(checkpoint.config):
        expected = checkpoint.tensor(name)
        tensor = tensors[str(names.get_name(name, (".weight", ".bias")))]
        np.testing.assert_array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), expected)
        assert tensor.tensor_type.name == (precision.upper() if expected.ndim == 2 else "F32")


def test_the_metadata_names_the_model_and_its_tokens(tmp_path: Path, tiny: Checkpoint) -> None:
    write_gguf(tiny, tmp_path / "tiny.gguf", "f16", name="Tiny Test")
    metadata = metadata_of(tmp_path / "tiny.gguf")
    expected = {
        "general.architecture": "qwen2",
        "general.name": "Tiny Test",
        "qwen2.block_count": 2,
        "qwen2.context_length": 1_024,
        "qwen2.embedding_length": 256,
        "qwen2.feed_forward_length": 256,
        "qwen2.attention.head_count": 4,
        "qwen2.attention.head_count_kv": 2,
        "qwen2.rope.freq_base": 1_000_000.0,
        "tokenizer.ggml.bos_token_id": 400,
        "tokenizer.ggml.eos_token_id": 402,
        "tokenizer.ggml.padding_token_id": 400,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    assert {key: metadata[key] for key in expected} == expected
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 512
    named = dict(zip(tokens[398:], types[398:], strict=True))
    assert [*named.values()][:2] == [gguf.TokenType.NORMAL] * 2
    assert named["<|im_end|>"] == gguf.TokenType.CONTROL
    assert named["<tool_call>"] == gguf.TokenType.USER_DEFINED
    assert tokens[404] == "[PAD404]"
    assert set(types[404:]) == {gguf.TokenType.UNUSED}


@pytest.mark.parametrize("precision", ["f32", "q4_k_m"])
def test_the_same_checkpoint_gives_the_same_bytes_wherever_it_lies(
    tmp_path: Path, tiny: Checkpoint, precision: str
) -> None:
    other = Checkpoint(Path(shutil.copytree(tiny.folder, tmp_path / "other" / "Elsewhere-7B")))
    write_gguf(tiny, tmp_path / "one.gguf", precision, name="tiny", threads=1)
    write_gguf(other, tmp_path / "two.gguf", precision, name="tiny", threads=2)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    for path in (tmp_path, tiny.folder, Path.home()):
        assert os.fsencode(path) not in (tmp_path / "one.gguf").read_bytes()


@pytest.mark.parametrize("tied", [False, True])
def test_a_round_trip_changes_no_byte(tmp_path: Path, tied: bool) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    write_gguf(Checkpoint(make_tiny_checkpoint(tmp_path / "tiny", tied=tied)), first, "f32", name="tiny")
    dequantize(first, tmp_path / "made")
    write_gguf(Checkpoint(tmp_path / "made"), second, "f32", name="tiny")
    assert metadata_of(first) == metadata_of(second)
    assert first.read_bytes() == second.read_bytes()


def test_progress_counts_the_tensors_that_are_written_and_quantized(tmp_path: Path, tiny: Checkpoint) -> None:
    steps: list[tuple[str, int, int]] = []
    write_gguf(tiny, tmp_path / "tiny.gguf", "q8_0", name="tiny", on_progress=lambda *step: steps.append(step))
    counts = [(message.split()[0], done, total) for message, done, total in steps]
    assert counts == [(kind, i, 27) for kind in ("Writing", "Quantizing") for i in range(1, 28)]


def test_the_engine_says_why_it_cannot_quantize_and_nothing_is_left(
    tmp_path: Path, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gguf_module._FILE_TYPES, "q4_0", 4)  # a type that llama.cpp no longer knows
    with pytest.raises(ConversionError, match=r"llama.cpp cannot write the model in q4_0: .*invalid output file type"):
        write_gguf(tiny, tmp_path / "tiny.gguf", "q4_0", name="tiny")
    assert list(tmp_path.iterdir()) == []


def test_values_that_half_precision_cannot_hold_are_reported(tmp_path: Path, tiny: Checkpoint) -> None:
    folder = Path(shutil.copytree(tiny.folder, tmp_path / "large"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 70_000
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"layers.1.mlp.up_proj.weight .* no finite numbers in F16"):
        write_gguf(Checkpoint(folder), tmp_path / "large.gguf", "f16", name="large")
    assert [path.name for path in tmp_path.iterdir()] == ["large"]
    write_gguf(Checkpoint(folder), tmp_path / "large.gguf", "bf16", name="large")


def test_a_checkpoint_without_a_first_token_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", bos_token_id=None)
    with pytest.raises(ConversionError, match="name no bos_token_id"):
        write_gguf(Checkpoint(folder), tmp_path / "tiny.gguf", "f16", name="tiny")


def test_an_unknown_precision_and_a_missing_folder_are_refused(tmp_path: Path, tiny: Checkpoint) -> None:
    with pytest.raises(SettingsError, match=r"precision must be one of f32, f16, .*, got 'q3'"):
        write_gguf(tiny, tmp_path / "tiny.gguf", "q3", name="tiny")
    with pytest.raises(ConversionError, match="cannot be written"):
        write_gguf(tiny, tmp_path / "missing" / "tiny.gguf", "f16", name="tiny")


def test_the_engine_log_is_the_backends_again_afterwards(tmp_path: Path, tiny: Checkpoint) -> None:
    write_gguf(tiny, tmp_path / "tiny.gguf", "q8_0", name="tiny")
    (tmp_path / "damaged.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:5_000])
    pointer = llama_cpp.llama_model_load_from_file(
        os.fsencode(tmp_path / "damaged.gguf"), llama_cpp.llama_model_default_params()
    )
    assert not pointer  # and the process has not called a callback that is gone


@pytest.mark.parametrize("text", HOSTILE)
def test_llama_cpp_reads_a_text_as_the_checkpoints_tokenizer_does(
    tmp_path_factory: pytest.TempPathFactory, tiny: Checkpoint, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.gguf"
    if not path.exists():
        write_gguf(tiny, path, "f16", name="tiny")
    assert encode(text, load(path).tokenizer).ids.tolist() == ids_of(text, tiny.tokenizer())


def engines_of(official: Path, remade: Path, checkpoint: Path) -> list[base.Tokenizer]:
    return [load(official).tokenizer, load(remade).tokenizer, HuggingFaceTokenizer(checkpoint, "remade")]


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text as data: control tokens have no meaning, and as everywhere "\\r\\n" is shown as "\\n"."""
    tokenizer.encode_special_tokens = True
    shown = text.replace("\r\n", "\n").encode("utf-8", errors="replace").decode("utf-8")
    return list(tokenizer.encode(shown, add_special_tokens=False).ids)


@pytest.fixture(scope="session")
def official() -> Path:
    try:
        return find_model(MODEL).path
    except ModelNotFoundError:
        if "REQUIRE_MODELS" in os.environ:
            raise
        pytest.skip(f"the model {MODEL} is not downloaded: run `metachunk-edge models pull {MODEL}`")


@pytest.fixture(scope="session")
def remade(official: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Checkpoint, Path]]:
    """The real model's checkpoint, and the float32 file made of that: 2.5 GB each, deleted at the end."""
    folder = tmp_path_factory.mktemp("remade")
    dequantize(official, folder / "checkpoint")
    checkpoint = Checkpoint(folder / "checkpoint")
    write_gguf(checkpoint, folder / "remade.gguf", "f32", name=MODEL)
    yield checkpoint, folder / "remade.gguf"
    shutil.rmtree(folder)


@pytest.mark.model
@pytest.mark.slow
def test_the_remade_file_is_qwens_own_but_for_its_precision_and_name(
    official: Path, remade: tuple[Checkpoint, Path]
) -> None:
    theirs, ours = gguf.GGUFReader(official), gguf.GGUFReader(remade[1])
    their_metadata, our_metadata = (
        {key: (field.types, field.contents()) for key, field in reader.fields.items()} for reader in (theirs, ours)
    )
    different = {key for key in their_metadata if their_metadata[key] != our_metadata.get(key)}
    assert different == {
        "general.file_type",  # float32, not Q4_K_M
        "general.name",  # ours is the catalogue's
        "general.basename",  # these two are read off the name
        "general.finetune",
    }
    assert their_metadata.keys() == our_metadata.keys()
    ours_by_name = {tensor.name: tensor for tensor in ours.tensors}
    assert {tensor.name for tensor in theirs.tensors} == set(ours_by_name)
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours_by_name[tensor.name].data, expected)


@pytest.mark.model
@pytest.mark.slow
def test_all_tokenizers_of_a_model_agree_on_hostile_strings(official: Path, remade: tuple[Checkpoint, Path]) -> None:
    checkpoint, path = remade
    tokenizer = checkpoint.tokenizer()
    engines: list[Tokenizer] = [
        load(official).tokenizer,
        load(path).tokenizer,
        HuggingFaceTokenizer(checkpoint.folder, "remade"),
    ]
    golden = json.loads((Path(__file__).parent / "data" / f"golden_{MODEL}.json").read_text(encoding="utf-8"))
    for text in [*HOSTILE, *(string["text"] for string in golden["strings"])]:
        expected = ids_of(text, tokenizer)
        assert [encode(text, engine).ids.tolist() for engine in engines] == [expected] * 3


@pytest.mark.model
@pytest.mark.slow
def test_all_tokenizers_of_a_model_agree_on_the_evaluation_texts(
    official: Path, remade: tuple[Checkpoint, Path], shared_data: Path
) -> None:
    texts = pytest.importorskip("benchmarks.texts", reason="benchmarks/ is not beside the tests")

    checkpoint, path = remade
    tokenizer = checkpoint.tokenizer()
    engines: list[Tokenizer] = [
        load(official).tokenizer,
        load(path).tokenizer,
        HuggingFaceTokenizer(checkpoint.folder, "remade"),
    ]
    for documents in texts.evaluation_texts(shared_data).values():
        for document in documents:
            expected = ids_of(document.text, tokenizer)
            for engine in engines:
                assert encode(document.text, engine).ids.tolist() == expected, document.name
