"""The fused graph of the fast mode: what it computes, and what stays exact in it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import require_exact_products

from metachunk_edge import ConversionError, ModelFileError, Settings
from metachunk_edge.backends import load_backend
from metachunk_edge.backends.base import Backend
from metachunk_edge.backends.hf_tokenizer import HuggingFaceTokenizer
from metachunk_edge.backends.ort import PREFIX_FILE
from metachunk_edge.cache import ModelFile
from metachunk_edge.parity import compare, packaged_texts, record
from metachunk_edge.types import FloatArray, TokenIds

IDS = np.random.default_rng(1).integers(0, 400, 60).astype(np.int32)


@pytest.fixture(scope="module")
def unquantized(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """The same graph with float32 products, in which nothing but rounding is lost."""
    from metachunk_edge.convert import fused
    from metachunk_edge.convert.checkpoint import Checkpoint

    require_exact_products()
    folder = tmp_path_factory.mktemp("unquantized")
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(tiny_checkpoint / name, folder / name)
    checkpoint = Checkpoint(tiny_checkpoint)
    prefix_id = HuggingFaceTokenizer(folder, "tiny").prefix_id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_EMBEDDING_TYPE", np.float32)
        patch.setattr(fused, "quantized", lambda matrix: (matrix.T, np.ones(len(matrix), np.float32)))
        patch.setattr(fused._Model, "_quantized_rows", rows_as_they_are)
        patch.setattr(fused._Model, "_integer_product", float_product)
        fused.write_fused(checkpoint.config, checkpoint.tensor, prefix_id, folder)
    return load_backend(ModelFile(folder / "model.onnx", "tiny", None, ""), device="cpu", context_length=512)


def rows_as_they_are(model: Any, rows: str, **_options: Any) -> Any:
    from metachunk_edge.convert import fused

    return fused._Rows(rows, model.graph.constant("no_scale", [[1.0]], np.float32), has_16_bits=False)


def float_product(model: Any, rows: str, columns: str, _scales: str) -> str:
    product: str = model.graph.node("MatMul", [rows, columns])
    return product


def advance(backend: Backend, ids: TokenIds, targets: TokenIds) -> FloatArray:
    with backend.open_session() as session:
        return session.advance(ids, targets, position=0, keep_from=0, shift=0)


@pytest.mark.parametrize(("window", "context_length"), [("rolling", 512), ("rolling", 264), ("strided", 264)])
def test_without_quantization_the_graph_is_the_model(
    window: Any, context_length: int, unquantized: Backend, reference_backend: Backend, tmp_path: Path
) -> None:
    texts = packaged_texts(reference_backend.tokenizer, 400)
    settings = Settings(max_size=64, window=window, context_length=context_length)
    recording = record(reference_backend, texts, settings, block_size=128, path=tmp_path / "distributions")
    parity = compare(recording, unquantized)
    assert parity.max_abs < 1e-4
    assert parity.identical_chunks == 1


def test_the_rotation_is_orthogonal_and_spreads_a_single_feature_evenly() -> None:
    pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
    from metachunk_edge.convert.fused import rotation

    for size in (7, 64, 896):
        turn = rotation(size)
        np.testing.assert_allclose(turn @ turn.T, np.eye(size), atol=1e-5)
        assert np.abs(turn).max() <= np.sqrt(2 / size) + 1e-6


def test_weights_are_rounded_to_127_steps_of_each_output() -> None:
    pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
    from metachunk_edge.convert.fused import quantized

    integers, scales = quantized(np.array([[0.5, -1.0], [0.0, 0.0]], np.float32))
    assert (integers.dtype, integers.tolist()) == (np.int8, [[64, 0], [-127, 0]])
    np.testing.assert_allclose(scales, [1 / 127, 1], rtol=1e-6)


def test_the_first_token_is_scored_in_float32(fused_backend: Backend, reference_backend: Backend) -> None:
    prefix = np.array([fused_backend.tokenizer.prefix_id], np.int32)
    for target in (1, 77, 400):
        expected = advance(reference_backend, prefix, np.array([target], np.int32))
        np.testing.assert_allclose(advance(fused_backend, prefix, np.array([target], np.int32)), expected, atol=1e-4)


def test_the_prefix_token_leaves_the_cache_entries_of_a_float32_pass(
    tiny_model: Callable[[str], ModelFile], unquantized: Any
) -> None:
    stored = np.load(tiny_model("int8_fused").path.with_name(PREFIX_FILE))
    unquantized_prefix = np.load(unquantized._file.path.with_name(PREFIX_FILE))
    for name in ("keys", "values", "logits"):
        np.testing.assert_array_equal(stored[name], unquantized_prefix[name])


def test_blocks_that_begin_with_the_prefix_token_are_scored_like_any(fused_backend: Backend) -> None:
    inputs = np.concatenate([[fused_backend.tokenizer.prefix_id], IDS[:-1]]).astype(np.int32)
    whole = advance(fused_backend, inputs, IDS)
    with fused_backend.open_session() as session:
        first = session.advance(inputs[:1], IDS[:0], position=0, keep_from=0, shift=0)
        rest = session.advance(inputs[1:], IDS[1:], position=1, keep_from=0, shift=0)
    assert first.shape == (0,)
    np.testing.assert_allclose(rest, whole[1:], atol=1e-5)
    assert advance(fused_backend, inputs[:1], IDS[:1]) == pytest.approx(whole[0])
    for n_targets in (3, 40, 59):
        np.testing.assert_allclose(advance(fused_backend, inputs, IDS[-n_targets:]), whole[-n_targets:], atol=1e-5)


def test_the_manifest_says_how_the_model_is_quantized(tiny_model: Callable[[str], ModelFile]) -> None:
    manifest = json.loads((tiny_model("int8_fused").path.parent / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["quantization"]["weight_bits"] == 8
    assert manifest["quantization"]["products"]["down"]["activation_bits"] == 16


def test_an_odd_size_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from metachunk_edge.convert.checkpoint import Checkpoint
    from metachunk_edge.convert.fused import write_fused

    checkpoint = Checkpoint(tiny_checkpoint)
    with pytest.raises(ConversionError, match="intermediate_size must be even for int8_fused, got 7: choose int8"):
        write_fused({**checkpoint.config, "intermediate_size": 7}, checkpoint.tensor, 0, tmp_path)


def test_the_same_weights_give_the_same_files(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from metachunk_edge.convert.checkpoint import Checkpoint
    from metachunk_edge.convert.fused import write_fused

    checkpoint = Checkpoint(tiny_checkpoint)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_fused(checkpoint.config, checkpoint.tensor, 0, tmp_path / name)
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()


def test_a_damaged_prefix_file_is_one_sentence(tiny_model: Callable[[str], ModelFile], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("int8_fused").path.parent, tmp_path / "model"))
    (folder / PREFIX_FILE).write_bytes(b"damaged")
    with pytest.raises(ModelFileError, match=r"prefix\.npz cannot be read .* convert the model again"):
        load_backend(ModelFile(folder / "model.onnx", "tiny", None, ""), device="cpu", context_length=512)


@pytest.fixture
def gguf_without_pytorch(tiny_model: Callable[[str], ModelFile], monkeypatch: pytest.MonkeyPatch) -> ModelFile:
    """A GGUF file in an installation without the extra `convert`."""
    require_exact_products()
    made_before = tiny_model("q8_0")
    for name in list(sys.modules):
        if name.split(".")[0] in ("torch", "transformers", "optimum"):
            monkeypatch.delitem(sys.modules, name)
    for name in ("torch", "transformers", "optimum"):
        monkeypatch.setitem(sys.modules, name, None)
    return made_before


def test_a_gguf_file_becomes_a_fused_model_without_pytorch(
    gguf_without_pytorch: ModelFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tiny import tiny_tolerance

    from metachunk_edge import convert_model

    monkeypatch.setattr("metachunk_edge.convert.verify.tolerance_of", tiny_tolerance)
    made = convert_model(gguf_without_pytorch.path, tmp_path / "fused", precision="int8_fused", threads=1)
    manifest = json.loads((made.path.parent / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["parity"]["reference"]["backend"].startswith("llama-cpp-python")
    assert manifest["parity"]["mean_abs"] < 0.2
    assert (made.path.parent / PREFIX_FILE).exists()


def test_a_fused_model_that_is_far_from_its_file_is_refused(
    tiny_model: Callable[[str], ModelFile], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tiny import tiny_tolerance

    from metachunk_edge import convert_model
    from metachunk_edge.convert import fused

    require_exact_products()
    monkeypatch.setattr("metachunk_edge.convert.verify.tolerance_of", tiny_tolerance)
    monkeypatch.setattr(fused._Model, "_writing", lambda _model, matrix: matrix)  # a rotation that is forgotten
    with pytest.raises(ConversionError, match="too far from the file it was made from"):
        convert_model(tiny_model("f32").path, tmp_path / "fused", precision="int8_fused", threads=1)
    assert list(tmp_path.iterdir()) == []
