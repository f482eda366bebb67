"""ONNX: the exported graph and its scoring head, and what the ONNX Runtime backend makes of folders and devices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from metachunk_edge import BackendError, ConversionError, DeviceError, DeviceWarning, ModelFileError, SettingsError
from metachunk_edge.backends import load_backend
from metachunk_edge.backends.base import Backend
from metachunk_edge.backends.ort import OnnxSession
from metachunk_edge.cache import ModelFile
from metachunk_edge.types import FloatArray, TokenIds

IDS = np.random.default_rng(1).integers(0, 400, 200).astype(np.int32)


@pytest.fixture
def folder(tiny_model: Callable[[str], ModelFile], tmp_path: Path) -> Path:
    """A copy of the tiny float32 model, to be damaged."""
    return Path(shutil.copytree(tiny_model("float32").path.parent, tmp_path / "model"))


def load(folder: Path, **options: Any) -> Backend:
    return load_backend(ModelFile(folder / "model.onnx", "tiny", "float32", "0"), **{"context_length": 512, **options})


def advance(backend: Backend, ids: TokenIds, targets: TokenIds) -> FloatArray:
    with backend.open_session() as session:
        return session.advance(ids, targets, position=0, keep_from=0, shift=0)


def test_the_graph_gives_log_probabilities_and_the_cache_and_no_logits(onnx_backend: Any) -> None:
    cache = [f"present.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    assert [output.name for output in onnx_backend.engine.get_outputs()] == ["logprobs", *cache]
    assert [output.name for output in onnx_backend.engine_with_logits.get_outputs()] == ["logprobs", "logits", *cache]


def test_the_graph_for_the_parity_suite_shares_the_weights(tiny_model: Callable[[str], ModelFile]) -> None:
    sizes = {file.name: file.stat().st_size for file in tiny_model("float32").path.parent.iterdir()}
    assert sizes["model.onnx.data"] > 4 * 150_000
    assert sizes["model.onnx"] + sizes["model_with_logits.onnx"] < 500_000


@pytest.mark.parametrize("precision", ["float32", "float16", "int8", "int4"])
def test_every_precision_gives_distributions(precision: str, tiny_model: Callable[[str], ModelFile]) -> None:
    backend: Any = load_backend(tiny_model(precision), device="cpu", context_length=512)
    scores = []
    with backend.open_session() as session:
        for target in range(512):
            session.restart()
            target_ids = np.array([target], np.int32)
            scores.append(session.advance(IDS[:3], target_ids, position=0, keep_from=0, shift=0)[0])
    assert np.exp(np.array(scores, np.float64)).sum() == pytest.approx(1, abs=1e-5)


def test_the_scoring_head_is_the_log_softmax_of_the_logits_at_every_target(onnx_backend: Any) -> None:
    targets = np.arange(0, 512, 4, dtype=np.int32)  # in all slices of the vocabulary, at their edges too
    for first in range(4):
        with onnx_backend.open_session() as session:
            logprobs, logits = session.advance_with_logits(IDS[:128], targets + first, position=0, keep_from=0, shift=0)
        wide = logits.astype(np.float64)
        expected = wide[np.arange(128), targets + first] - np.log(np.exp(wide).sum(axis=1))
        np.testing.assert_allclose(logprobs, expected, atol=2e-5, rtol=0)


def test_the_log_probabilities_are_to_the_bit_the_same_with_and_without_logits(onnx_backend: Any) -> None:
    with onnx_backend.open_session() as session:
        with_logits, _ = session.advance_with_logits(IDS[:50], IDS[1:51], position=0, keep_from=0, shift=0)
    assert with_logits.tobytes() == advance(onnx_backend, IDS[:50], IDS[1:51]).tobytes()


def test_memory_does_not_grow_with_the_number_of_shapes(onnx_backend: Any) -> None:
    process = psutil.Process()

    def read_blocks_of_every_size() -> int:
        for size in range(1, 129):
            with onnx_backend.open_session() as session:
                session.advance(IDS[: 129 - size], IDS[:0], position=0, keep_from=0, shift=0)
                session.advance(IDS[:size], IDS[:size], position=129 - size, keep_from=0, shift=0)
        return int(process.memory_info().rss)

    after_once = read_blocks_of_every_size()
    for _ in range(3):
        after_all = read_blocks_of_every_size()
    assert after_all - after_once < 8_000_000


def test_values_that_are_not_numbers_are_reported(folder: Path) -> None:
    weights = np.fromfile(folder / "model.onnx.data", np.float32)
    weights[:] = np.nan
    weights.tofile(folder / "model.onnx.data")
    with pytest.raises(BackendError, match="not numbers"):
        advance(load(folder), IDS[:4], IDS[:4])


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data", "tokenizer.json", "config.json"])
def test_a_folder_without_one_of_its_files_gets_a_sentence(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(ModelFileError, match=file if file != "model.onnx" else "cannot be loaded"):
        load(folder)


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data", "tokenizer.json", "config.json"])
def test_a_file_that_is_cut_short_gets_a_sentence(folder: Path, file: str) -> None:
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFileError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_config_without_the_rotary_base_gets_a_sentence(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelFileError, match="rope_theta"):
        load(folder)


def test_a_context_beyond_the_training_is_refused(folder: Path) -> None:
    with pytest.raises(SettingsError, match="at most 1024 for tiny, got 2000"):
        load(folder, context_length=2_000)


@pytest.mark.parametrize("device", ["cuda", "directml", "coreml", "webgpu"])
def test_a_device_without_provider_says_what_there_is(folder: Path, device: str) -> None:
    from metachunk_edge.backends.ort import onnx_devices

    if device in onnx_devices():
        pytest.skip(f"this build of ONNX Runtime has {device}")
    with pytest.raises(DeviceError, match=f"no provider for '{device}', only cpu"):
        load(folder, device=device)


@pytest.mark.parametrize("device", ["vulkan", "metal"])
def test_a_device_for_gguf_models_says_so(folder: Path, device: str) -> None:
    with pytest.raises(DeviceError, match=f"The device '{device}' is for GGUF models"):
        load(folder, device=device)


def test_the_model_says_who_it_is_and_where_it_runs(folder: Path) -> None:
    model = load(folder, threads=1, device="cpu").model
    assert model["device"] == "cpu"
    assert model["threads"] == 1
    assert model["backend"].startswith("onnxruntime ")


def test_a_device_that_the_machine_does_not_provide_is_replaced_by_the_cpu_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build may have a provider that finds no GPU."""
    monkeypatch.setattr("metachunk_edge.backends.ort._choose_device", lambda _device: "cuda")
    with pytest.warns(DeviceWarning, match="tiny runs on the CPU, since 'cuda' does not take it"):
        backend = load(folder)
    assert backend.model["device"] == "cpu"
    assert np.isfinite(advance(backend, IDS[:4], IDS[:4])).all()
    assert capsys.readouterr().out == ""


def test_a_device_with_wrong_values_is_replaced_by_the_cpu_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metachunk_edge.backends.ort._choose_device", lambda device: device)
    monkeypatch.setattr("metachunk_edge.backends.ort._PROVIDERS", {"cuda": "CPUExecutionProvider"})
    right = OnnxSession.advance

    def advance_wrongly(session: OnnxSession, *arguments: Any, **options: Any) -> FloatArray:
        values = right(session, *arguments, **options)
        return values if session._backend.model["device"] == "cpu" else np.full_like(values, -9)

    with pytest.MonkeyPatch.context() as sound:
        sound.setattr(OnnxSession, "advance", advance_wrongly)
        with pytest.warns(DeviceWarning, match="since the device 'cuda' gives wrong values"):
            backend = load(folder, device="cuda")
    assert backend.model["device"] == "cpu"
    assert load(folder, device="cuda").model["device"] == "cuda"  # without the fault, the device is kept


def scaled_checkpoint(tiny_checkpoint: Path, folder: Path, factor: float) -> Path:
    """The tiny model with so much larger up and down projections."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(tiny_checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "up_proj" in name or "down_proj" in name:
            tensors[name] = tensors[name] * np.float32(factor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_values_whose_squares_do_not_fit_in_half_precision_are_normalized_right(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """As in trained models, where single features of a document's first token reach thousands."""
    from metachunk_edge.convert.checkpoint import Checkpoint
    from metachunk_edge.convert.onnx import write_onnx
    from metachunk_edge.convert.reference import ReferenceBackend

    source = scaled_checkpoint(tiny_checkpoint, tmp_path / "source", 40)
    (tmp_path / "model").mkdir()
    write_onnx(Checkpoint(source), tmp_path / "model", "float16")
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(source / name, tmp_path / "model" / name)
    reference = ReferenceBackend(source, name="tiny", sha256="", threads=1, context_length=512)
    expected = advance(reference, IDS[:64], IDS[1:65])
    assert np.abs(advance(load(tmp_path / "model"), IDS[:64], IDS[1:65]) - expected).mean() < 0.02


def test_weights_that_do_not_fit_in_half_precision_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from metachunk_edge.convert.checkpoint import Checkpoint
    from metachunk_edge.convert.onnx import write_onnx

    source = scaled_checkpoint(tiny_checkpoint, tmp_path / "source", 1e6)
    (tmp_path / "model").mkdir()
    with pytest.raises(ConversionError, match="do not fit in float16: choose float32"):
        write_onnx(Checkpoint(source), tmp_path / "model", "float16")
