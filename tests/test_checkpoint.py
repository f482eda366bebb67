"""What is converted: checkpoint folders and GGUF files that are opened, refused, or turned into each other."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if "REQUIRE_MODELS" not in os.environ:  # as `make test` has it: there, a skip would be a silent pass
    for package in ("gguf", "safetensors", "torch", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed: it comes with the extra `convert`")

import gguf
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tiny import CHAT_TEMPLATE, make_tiny_checkpoint

from metachunk_edge.convert import dequantize as dequantize_module
from metachunk_edge.convert.architecture import expected_tensors
from metachunk_edge.convert.checkpoint import Checkpoint, dequantize, open_source
from metachunk_edge.convert.gguf import write_gguf
from metachunk_edge.errors import ConversionError, ModelNotFoundError

TEXT = "He wrote <|im_end|> and <tool_call>, e\u0301 and 12,  it's\n\n<|fim_prefix|>x"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def tiny_gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "tiny.gguf"
    write_gguf(Checkpoint(tiny), path, "f32", name="tiny")
    return path


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def change_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pretrained_model(folder: Path) -> Any:
    """The model as transformers loads it, if it finds just the tensors it needs."""
    loader: Any = transformers.AutoModelForCausalLM
    model, report = loader.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model


def pretrained_tokenizer(folder: Path) -> Any:
    loader: Any = transformers.AutoTokenizer
    return loader.from_pretrained(folder)


def ids(folder: Path, text: str = TEXT) -> list[int]:
    tokenizer = Checkpoint(folder).tokenizer()
    tokenizer.encode_special_tokens = True
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("shard_size", ["5GB", "2MB"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_is_read_from_one_file_or_from_shards(tmp_path: Path, shard_size: str, tied: bool) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", tied=tied, shard_size=shard_size)
    checkpoint = Checkpoint(folder)
    model = pretrained_model(folder)
    assert (len(checkpoint.files) == 4) == (shard_size == "5GB")
    assert checkpoint.is_tied == tied
    assert checkpoint.n_parameters == model.num_parameters()
    assert open_source(folder).n_parameters == model.num_parameters()
    assert set(expected_tensors(checkpoint.config)) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(checkpoint.tensor(name), parameter.detach().numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_of_every_dtype_are_exact_in_float32(tmp_path: Path, dtype: str) -> None:
    checkpoint = Checkpoint(make_tiny_checkpoint(tmp_path / "tiny", dtype=dtype))
    for name in expected_tensors(checkpoint.config):
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == np.float32
        torch.testing.assert_close(
            torch.from_numpy(tensor).to(getattr(torch, dtype)).float(), torch.from_numpy(tensor), rtol=0, atol=0
        )


def test_a_tokenizer_of_vocabulary_and_merges_is_the_same(copy: Path) -> None:
    expected = ids(copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    (copy / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(merge) for merge in tokenizer["model"]["merges"])]
    (copy / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (copy / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    decoder = {token["id"]: {key: token[key] for key in token if key != "id"} for token in tokenizer["added_tokens"]}
    change_json(copy / "tokenizer_config.json", added_tokens_decoder=decoder)
    (copy / "tokenizer.json").unlink()
    assert ids(copy) == expected


def test_a_token_of_the_form_of_a_control_token_is_one_whatever_the_checkpoint_says(copy: Path) -> None:
    tokenizer = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    before = ids(copy)
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 404, "content": "<|fim_prefix|>"})
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert ids(copy) == before
    special = {
        token.content for token in Checkpoint(copy).tokenizer().get_added_tokens_decoder().values() if token.special
    }
    assert special == {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>"}


def test_the_identity_of_a_checkpoint_is_its_content_and_not_its_place(tiny: Path, copy: Path) -> None:
    source = open_source(tiny)
    (copy / "README.md").write_text("notes", encoding="utf-8")
    assert (source.kind, source.name) == ("checkpoint", "tiny")
    assert open_source(copy).sha256 == source.sha256
    names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    lines = sorted(f"{hashlib.sha256((tiny / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    assert source.sha256 == hashlib.sha256("".join(lines).encode()).hexdigest()
    change_json(copy / "tokenizer_config.json", model_max_length=7)
    assert open_source(copy).sha256 != source.sha256


def test_the_identity_of_a_gguf_file_is_its_sha256(tiny_gguf: Path) -> None:
    source = open_source(tiny_gguf)
    assert (source.kind, source.name) == ("gguf", "tiny")
    assert source.sha256 == hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()


def test_nothing_at_the_path_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no model at"):
        open_source(tmp_path / "missing")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "llama"}, "architecture 'llama'"),
        ({"model_type": None}, "architecture None"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number"),
        ({"num_key_value_heads": None}, "num_key_value_heads must be a whole number"),
        ({"rope_theta": 0}, "rope_theta must be a number above 0"),
        ({"num_attention_heads": 3}, "must be a multiple"),
        ({"head_dim": 32}, "head_dim must be"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers must be at most"),
        ({"eos_token_id": 512}, r"eos_token_id must be in \[0, 512\)"),
        ({"intermediate_size": 128}, r"mlp.gate_proj.weight .* has the shape \(256, 256\)"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.* is none of a Qwen2"),
        ({"tie_word_embeddings": True}, "lm_head.weight .* is none of a Qwen2"),
    ],
)
def test_a_config_that_would_be_converted_wrongly_is_refused(copy: Path, values: dict[str, Any], reason: str) -> None:
    change_json(copy / "config.json", **values)
    with pytest.raises(ConversionError, match=reason):
        open_source(copy)


def test_weights_in_pickles_are_refused(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"only pytorch_model.bin: save it with safe_serialization=True"):
        open_source(copy)


def test_a_folder_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"There is no config.json in"):
        open_source(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_a_damaged_config_is_refused(copy: Path, content: str) -> None:
    (copy / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConversionError, match=r"config.json (cannot be read|must hold)"):
        open_source(copy)


@pytest.mark.parametrize("size", [0, 7, 100, 300_000])
def test_weights_cut_short_are_refused(copy: Path, size: int) -> None:
    os.truncate(copy / "model.safetensors", size)
    with pytest.raises(ConversionError, match="cut short or damaged"):
        open_source(copy)


def test_a_missing_tensor_is_named(copy: Path) -> None:
    change_weights(copy, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ConversionError, match=r"model.norm.weight is missing"):
        open_source(copy)


def test_a_tensor_too_many_is_named(copy: Path) -> None:
    change_weights(copy, lambda tensors: tensors.update({"adapter.weight": np.zeros(3, np.float32)}))
    with pytest.raises(ConversionError, match=r"adapter.weight .* would be lost"):
        open_source(copy)


def test_weights_of_another_type_are_refused(copy: Path) -> None:
    change_weights(copy, lambda tensors: tensors.update({"model.norm.weight": np.ones(256, np.float64)}))
    with pytest.raises(ConversionError, match=r"model.norm.weight .* of type F64"):
        open_source(copy)


def test_a_missing_shard_and_a_shard_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", shard_size="2MB")
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    wrong = {**index["weight_map"], "model.norm.weight": index["weight_map"]["model.embed_tokens.weight"]}
    change_json(folder / "model.safetensors.index.json", weight_map=wrong)
    with pytest.raises(ConversionError, match=r"model.norm.weight lies in .* different checkpoints"):
        open_source(folder)
    change_json(folder / "model.safetensors.index.json", weight_map=["model.norm.weight"])
    with pytest.raises(ConversionError, match="does not say which tensor lies in which file"):
        open_source(folder)
    change_json(folder / "model.safetensors.index.json", weight_map=index["weight_map"])
    next(folder.glob("model-00002-of-*")).unlink()
    with pytest.raises(ConversionError, match=r"The shard model-00002-of-\d+.safetensors is missing"):
        open_source(folder)


def test_a_missing_tokenizer_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ConversionError, match="There is no tokenizer"):
        open_source(copy)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("normalizer", None, "its normalizer is None"),
        ("normalizer", {"type": "NFKC"}, "its normalizer is"),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}, "its pre-tokenizer"),
    ],
)
def test_a_tokenizer_with_other_rules_is_refused(copy: Path, key: str, value: Any, reason: str) -> None:
    change_json(copy / "tokenizer.json", **{key: value})
    with pytest.raises(ConversionError, match=f"is not Qwen2's: {reason}"):
        open_source(copy)


def test_a_damaged_tokenizer_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").write_text('{"model": 3}', encoding="utf-8")
    with pytest.raises(ConversionError, match=r"The tokenizer in .* cannot be read"):
        open_source(copy)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", vocab_size=403, pad_token_id=None)
    with pytest.raises(ConversionError, match="has 404 tokens, and the model 403"):
        open_source(folder)


QWEN2 = (5).to_bytes(8, "little") + b"qwen2"


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (QWEN2, QWEN2.replace(b"qwen2", b"llama"), "architecture 'llama'"),
        (b"tokenizer.ggml.pre", b"tokenizer.ggml.prx", r"tokenizer of kind \('gpt2', None\)"),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.mergex", "merges are missing"),
        (b"qwen2.block_count", b"qwen2.block_counx", "num_hidden_layers must be"),
        (b"blk.0.attn_q.bias", b"blk.0.attn_x.bias", r"blk.0.attn_q.bias is missing"),
        (b"GGUF", b"GGML", "is no GGUF file"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "its version is"),
    ],
)
def test_a_gguf_file_of_another_kind_is_refused(
    tiny_gguf: Path, tmp_path: Path, before: bytes, after: bytes, reason: str
) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(tiny_gguf.read_bytes().replace(before, after, 1))
    with pytest.raises(ConversionError, match=reason):
        open_source(path)


def test_a_gguf_file_with_scaled_positions_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    n_values = int.from_bytes(content[16:24], "little")
    key, value = b"qwen2.rope.scaling.type", b"yarn"
    string = int(gguf.GGUFValueType.STRING).to_bytes(4, "little")
    entry = len(key).to_bytes(8, "little") + key + string + len(value).to_bytes(8, "little") + value
    path = tmp_path / "scaled.gguf"
    path.write_bytes(content[:16] + (n_values + 1).to_bytes(8, "little") + entry + content[24:] + bytes(32))
    with pytest.raises(ConversionError, match=r"rope_scaling .*yarn"):
        open_source(path)


def test_a_gguf_file_cut_short_anywhere_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    path = tmp_path / "short.gguf"
    for size in [*range(64), *np.linspace(64, len(content) - 1, 60, dtype=int).tolist()]:
        path.write_bytes(content[:size])
        with pytest.raises(ConversionError):
            open_source(path)


def test_a_damaged_header_is_refused_or_harmless(tiny_gguf: Path, tmp_path: Path) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    generator = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for place in generator.integers(0, 6_000, 300):
        changed = content.copy()
        changed[place] ^= int(generator.integers(1, 256))
        path.write_bytes(changed)
        try:
            open_source(path)
        except ConversionError:
            refused += 1
    assert refused > 30


def test_a_checkpoint_made_of_a_gguf_file_is_complete(tiny: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    dequantize(tiny_gguf, tmp_path / "made", lambda *step: steps.append(step))
    assert [(done, total) for _, done, total in steps] == [(i, 27) for i in range(1, 28)]
    made, model = pretrained_model(tmp_path / "made"), pretrained_model(tiny)
    tokens = torch.arange(50)[None]
    with torch.inference_mode():
        assert torch.equal(made(tokens).logits, model(tokens).logits)
    for key in ("rms_norm_eps", "rope_theta", "max_position_embeddings", "bos_token_id", "eos_token_id"):
        assert getattr(made.config, key) == getattr(model.config, key)
    tokenizer, original = pretrained_tokenizer(tmp_path / "made"), pretrained_tokenizer(tiny)
    assert tokenizer(TEXT).input_ids == original(TEXT).input_ids
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == original.decode(original(TEXT).input_ids)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert ids(tmp_path / "made") == ids(tiny)
    open_source(tmp_path / "made")


def test_large_weights_are_written_in_shards(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dequantize(tiny_gguf, tmp_path / "whole")
    monkeypatch.setattr(dequantize_module, "_SHARD_BYTES", 200_000)
    dequantize(tiny_gguf, tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    whole, shards = Checkpoint(tmp_path / "whole"), Checkpoint(tmp_path / "shards")
    for name in expected_tensors(whole.config):
        np.testing.assert_array_equal(whole.tensor(name), shards.tensor(name))


@pytest.mark.parametrize("precision", ["f16", "bf16", "q8_0", "q6_k", "q4_k_m", "q4_0"])
def test_every_precision_is_dequantized_as_the_gguf_library_does(tmp_path: Path, precision: str) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", tied=True)
    write_gguf(Checkpoint(folder), tmp_path / "tiny.gguf", precision, name="tiny")
    dequantize(tmp_path / "tiny.gguf", tmp_path / "made")
    made = Checkpoint(tmp_path / "made")
    assert made.is_tied
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    expected = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors
    }
    for name in expected_tensors(made.config):
        np.testing.assert_array_equal(made.tensor(name), expected[str(names.get_name(name, (".weight", ".bias")))])


def test_a_folder_that_cannot_be_written_is_reported(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConversionError, match="cannot be written"):
        dequantize(tiny_gguf, tmp_path / "file")
