"""The llama.cpp backend: its arithmetic, its devices, and files that are no good."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from metachunk_edge import (
    BackendError,
    Chunker,
    DeviceError,
    MetachunkError,
    ModelFile,
    ModelFileError,
    Settings,
    SettingsError,
    find_model,
)
from metachunk_edge.backends import devices, llama_cpp, load_backend
from metachunk_edge.backends.base import Backend
from metachunk_edge.backends.reduce import reduce_logits

SMALL_MODEL = "smollm2-135m-instruct"


def file_at(path: Path) -> ModelFile:
    return ModelFile(path, path.stem, None, "")


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_the_log_softmax_is_exact_for_any_number_of_rows(rows: int) -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 8, (rows, 1_001)).astype(np.float32)
    targets = generator.integers(0, 1_001, rows).astype(np.int32)
    double = logits.astype(np.float64)
    expected = double[np.arange(rows), targets] - np.log(np.exp(double).sum(axis=1))
    found = reduce_logits(logits, targets, np.empty((4, 1_001), np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_log_softmax_does_not_overflow() -> None:
    logits = np.array([[1e4, 1e4, -1e4]], np.float32)
    found = reduce_logits(logits, np.array([0], np.int32), np.empty((1, 3), np.float32))
    np.testing.assert_allclose(found, [-np.log(2)], rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_reported(value: float) -> None:
    logits = np.array([[0.0, value, 1.0]], np.float32)
    with pytest.raises(BackendError, match="not numbers"):
        reduce_logits(logits, np.array([0], np.int32), np.empty((1, 3), np.float32))


def test_threads_are_at_least_one_and_within_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert devices.default_threads() == 1


@pytest.mark.skipif(bool(devices.gpu_devices()), reason="this machine has a GPU")
@pytest.mark.model
def test_a_gpu_that_is_not_there_is_named_in_one_sentence(small_backend: Backend) -> None:
    assert small_backend.model["device"] == "cpu"
    with pytest.raises(DeviceError, match=r"There is no GPU to use: .*; or use --device cpu\."):
        load_backend(find_model(SMALL_MODEL), device="gpu")


@pytest.mark.model
def test_wrong_devices_threads_and_contexts_are_refused(small_backend: Backend) -> None:
    assert small_backend
    with pytest.raises(SettingsError, match="device must be one of auto, cpu, gpu"):
        load_backend(find_model(SMALL_MODEL), device="tpu")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="threads must be at least 1"):
        load_backend(find_model(SMALL_MODEL), threads=0)
    with pytest.raises(SettingsError, match="context_length must be at most 8192"):
        load_backend(find_model(SMALL_MODEL), context_length=10_000)


@pytest.mark.model
def test_the_default_is_found_by_a_path_with_cyrillic_and_chinese_letters(
    small_backend: Backend, tmp_path: Path
) -> None:
    assert small_backend
    path = tmp_path / "модели 模型" / "маленькая.gguf"
    path.parent.mkdir()
    path.symlink_to(find_model(SMALL_MODEL).path)
    assert Chunker.from_pretrained(str(path)).chunk("Short text.")[0].text == "Short text."


def _load(path: str, results: multiprocessing.SimpleQueue[str]) -> None:
    try:
        load_backend(file_at(Path(path)))
        results.put("loaded")
    except MetachunkError as error:
        results.put(f"{type(error).__name__}: {error}")


def outcome(path: Path) -> str:
    """Load a file in a process of its own, since an engine that aborts takes its process with it."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    process = context.Process(target=_load, args=(str(path), results))
    process.start()
    process.join(120)
    return results.get() if process.exitcode == 0 else f"the process ended with code {process.exitcode}"


@pytest.fixture
def model_copy(tmp_path: Path, small_backend: Backend) -> Path:
    assert small_backend
    return Path(shutil.copy(find_model(SMALL_MODEL).path, tmp_path / "model.gguf"))


@pytest.mark.model
@pytest.mark.parametrize("share", [0.999, 0.5, 0.01, 0.00001])
def test_a_model_file_cut_short_is_refused_in_one_sentence(model_copy: Path, share: float) -> None:
    with model_copy.open("r+b") as file:
        file.truncate(int(model_copy.stat().st_size * share))
    found = outcome(model_copy)
    assert found.startswith("ModelFileError: ")
    assert str(model_copy) in found


@pytest.mark.model
@pytest.mark.parametrize("position", [4, 9, 16, 25, 40, 200, 1_000, 100_000, 900_000])
def test_a_flipped_byte_in_the_header_never_takes_the_process_down(model_copy: Path, position: int) -> None:
    with model_copy.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))
    assert outcome(model_copy).startswith(("ModelFileError: ", "loaded"))


@pytest.mark.model
def test_an_unsupported_architecture_is_named(model_copy: Path) -> None:
    data = model_copy.read_bytes()
    key = data.index(b"general.architecture") + len("general.architecture") + 4 + 8
    assert data[key : key + 5] == b"llama"
    model_copy.write_bytes(data[:key] + b"zlama" + data[key + 5 :])
    found = outcome(model_copy)
    assert found.startswith("ModelFileError: ")
    assert "zlama" in found


@pytest.mark.model
def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("This is no model. " * 1_000)
    with pytest.raises(ModelFileError, match=r"text\.gguf"):
        load_backend(file_at(path))


@pytest.mark.model
def test_a_tokenizer_outlives_its_backend(small_backend: Backend) -> None:
    text = b"A tokenizer needs the vocabulary of its model."
    tokenizer = load_backend(find_model(SMALL_MODEL), context_length=512).tokenizer
    gc.collect()
    np.testing.assert_array_equal(tokenizer.tokenize(text)[0], small_backend.tokenizer.tokenize(text)[0])


@pytest.mark.model
def test_a_model_can_be_loaded_and_dropped_many_times(small_backend: Backend) -> None:
    """Contexts and weights are freed: the memory of the process does not grow with every load."""
    import psutil

    assert small_backend
    sizes = []
    for _ in range(6):
        Chunker.from_pretrained(SMALL_MODEL, Settings(context_length=512)).chunk("A short text. Another sentence.")
        sizes.append(psutil.Process().memory_info().rss)
    assert sizes[-1] - sizes[1] < 100e6


@pytest.mark.skipif(sys.platform == "win32", reason="signals cannot be sent to oneself on Windows")
def test_an_interrupt_while_a_model_loads_is_raised_afterwards() -> None:
    finished = False
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), llama_cpp.interrupts_after():
            os.kill(os.getpid(), signal.SIGINT)
            finished = True
    finally:
        signal.signal(signal.SIGINT, previous)
    assert finished


@pytest.mark.skipif(sys.platform == "win32", reason="signals cannot be sent to oneself on Windows")
def test_a_host_programs_own_handling_of_interrupts_stays_in_force() -> None:
    heard: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    try:
        with llama_cpp.interrupts_after():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert heard == [signal.SIGINT]
