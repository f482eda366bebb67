"""Which file of a model runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from conftest import DATA

from metachunk_edge import ModelFile, ModelNotFoundError, SettingsError, modes
from metachunk_edge.backends import ort
from metachunk_edge.modes import choose_model

NAME = "qwen2.5-coder-0.5b-instruct"


@pytest.fixture(autouse=True)
def all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has every file, and everything that the fast mode needs."""
    monkeypatch.setattr(modes, "find_model", lambda name: ModelFile(Path(name), name, None, ""))
    monkeypatch.setattr(modes, "open_converted", lambda name: name)
    monkeypatch.setattr(ort, "multiplies_integers_exactly", lambda: True)
    monkeypatch.setattr("metachunk_edge.backends.devices.gpu_devices", dict)


def test_the_fast_model_runs_unless_the_exact_one_is_asked_for() -> None:
    assert choose_model(NAME).name == f"{NAME}-int8_fused"
    assert choose_model(NAME, "fast", "cpu").name == f"{NAME}-int8_fused"
    assert choose_model(NAME, "exact").name == NAME


def test_a_path_stands_for_itself() -> None:
    assert choose_model("some/model.gguf").name == "some/model.gguf"
    with pytest.raises(SettingsError, match=r"mode 'fast' goes with the models of the catalogue only, got some/model"):
        choose_model("some/model.gguf", "fast")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(SettingsError, match="mode must be one of auto, fast, exact, got 'slow'"):
        choose_model(NAME, "slow")  # type: ignore[arg-type]


def test_the_exact_model_runs_where_the_fast_one_was_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "open_converted", lambda _: None)
    assert choose_model(NAME).name == NAME
    with pytest.raises(ModelNotFoundError, match=f"there is no such file yet, .*`metachunk-edge models pull {NAME}`"):
        choose_model(NAME, "fast")


def test_the_exact_model_runs_on_processors_whose_products_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "multiplies_integers_exactly", lambda: False)
    assert choose_model(NAME).name == NAME
    with pytest.raises(ModelNotFoundError, match="no 8-bit dot products"):
        choose_model(NAME, "fast")


def test_the_exact_model_runs_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_model(NAME, "auto", "gpu").name == NAME
    monkeypatch.setattr("metachunk_edge.backends.devices.gpu_devices", lambda: {"Vulkan0": "a GPU"})
    assert choose_model(NAME).name == NAME
    assert choose_model(NAME, "auto", "cpu").name == f"{NAME}-int8_fused"


def test_the_packaged_product_is_the_one_that_the_script_makes() -> None:
    pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
    make = runpy.run_path(str(DATA / "make_products.py"))["products_model"]

    assert Path(ort.__file__).with_name("products.onnx").read_bytes() == make()
