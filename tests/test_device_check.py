"""A device that gives wrong values is found out before it scores a document, and the CPU takes its place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fake_cli import fake_backend, use_fake_model

from metachunk_edge import Backend, BackendError, Chunker, FakeBackend, Settings, cli, find_model
from metachunk_edge.backends import llama_cpp, load_backend
from metachunk_edge.backends.device_check import ALLOWED_HIGHEST, ALLOWED_MEAN, TEXT, check_device
from metachunk_edge.backends.fake import FakeSession
from metachunk_edge.errors import DeviceWarning
from metachunk_edge.types import FloatArray, TokenIds

SMALL_MODEL = "smollm2-135m-instruct"
Fault = Callable[[FloatArray], FloatArray]


def none(logprobs: FloatArray) -> FloatArray:
    return logprobs


class FakeGpu(FakeBackend):
    """The fake backend's scores with a fault each for sessions and for packed documents."""

    def __init__(self, *, in_session: Fault = none, packed: Fault = none) -> None:
        super().__init__()
        self.in_session = in_session
        self.packed = packed

    @property
    def model(self) -> dict[str, Any]:
        return {**super().model, "device": "gpu: a fake"}

    def open_session(self) -> FakeSession:
        return FakeGpuSession(self, self.in_session)

    def score_packed(self, documents: Sequence[TokenIds]) -> list[FloatArray]:
        return [self.packed(logprobs) for logprobs in FakeBackend().score_packed(documents)]


class FakeGpuSession(FakeSession):
    def __init__(self, backend: FakeGpu, fault: Fault) -> None:
        super().__init__(backend)
        self._fault = fault

    def advance(self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int) -> FloatArray:
        return self._fault(super().advance(ids, targets, position=position, keep_from=keep_from, shift=shift))


def test_right_values_pass() -> None:
    assert check_device(FakeGpu(), FakeBackend()) is None


def test_values_that_differ_by_rounding_pass() -> None:
    noise = np.random.default_rng(0)

    def rounded(logprobs: FloatArray) -> FloatArray:
        return logprobs + noise.normal(0, 0.1, len(logprobs)).astype(np.float32)

    assert check_device(FakeGpu(in_session=rounded, packed=rounded), FakeBackend()) is None


def uniform(logprobs: FloatArray) -> FloatArray:
    return np.full_like(logprobs, -np.log(49_152))


def certain(logprobs: FloatArray) -> FloatArray:
    return np.zeros_like(logprobs)


def shifted(logprobs: FloatArray) -> FloatArray:
    return np.roll(logprobs, 1)


def no_numbers(logprobs: FloatArray) -> FloatArray:
    return np.full_like(logprobs, np.nan)


def wrong_for_one_row(logprobs: FloatArray) -> FloatArray:
    return uniform(logprobs) if len(logprobs) == 1 else logprobs


def wrong_for_eight_rows(logprobs: FloatArray) -> FloatArray:
    return uniform(logprobs) if len(logprobs) == 8 else logprobs


def wrong_for_many_rows(logprobs: FloatArray) -> FloatArray:
    return uniform(logprobs) if len(logprobs) > 8 else logprobs


def refused(_logprobs: FloatArray) -> FloatArray:
    raise BackendError("The model returned values that are not numbers.")


@pytest.mark.parametrize(
    "fault",
    [uniform, certain, shifted, no_numbers, wrong_for_one_row, wrong_for_eight_rows, wrong_for_many_rows, refused],
)
def test_a_fault_in_blocks_is_caught(fault: Fault) -> None:
    assert check_device(FakeGpu(in_session=fault), FakeBackend()) is not None


@pytest.mark.parametrize("fault", [uniform, certain, shifted, no_numbers, wrong_for_many_rows, refused])
def test_a_fault_in_packed_documents_is_caught(fault: Fault) -> None:
    assert check_device(FakeGpu(packed=fault), FakeBackend()) is not None


def test_the_sentence_says_what_was_measured_and_what_is_allowed() -> None:
    sentence = check_device(FakeGpu(in_session=lambda logprobs: logprobs - 2), FakeBackend())
    assert sentence == (
        "The model fake runs on the CPU, since the device 'gpu: a fake' gives wrong values for it: they differ by 2.00 "
        f"nats on average and 2.00 at most, where {ALLOWED_MEAN} and {ALLOWED_HIGHEST} are allowed."
    )


def test_the_sentence_says_why_a_device_failed() -> None:
    sentence = check_device(FakeGpu(in_session=refused), FakeBackend())
    assert sentence == (
        "The model fake runs on the CPU, since it fails on the device 'gpu: a fake': "
        "The model returned values that are not numbers."
    )


def test_the_command_line_prints_the_warning_as_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def backend_with_warnings(*arguments: Any, **options: Any) -> FakeBackend:
        warnings.warn("The model runs on the CPU.", DeviceWarning, stacklevel=1)
        warnings.warn("Something for programmers.", RuntimeWarning, stacklevel=1)
        return fake_backend(*arguments, **options)

    use_fake_model(monkeypatch)
    monkeypatch.setattr("metachunk_edge.chunker.load_backend", backend_with_warnings)
    text = tmp_path / "a.txt"
    text.write_text("A short text.", "utf-8")
    result = CliRunner().invoke(cli.main, ["chunk", str(text), "--format", "text"])
    assert result.exit_code == 0
    assert "Note: The model runs on the CPU.\n" in result.stderr
    assert "RuntimeWarning: Something for programmers." in result.stderr
    assert "runs on the CPU" not in result.stdout
    assert not recwarn.list
    with pytest.warns(DeviceWarning):  # behind the command, warnings are the program's own again
        backend_with_warnings()


# The llama.cpp backend with a device that it takes for a GPU: really the CPU's arithmetic, with a fault put in.


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, small_backend: Backend) -> None:
    assert small_backend
    monkeypatch.setattr(llama_cpp, "choose_device", lambda device: "cpu" if device == "cpu" else "gpu: pretended")


def put_in(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    right = llama_cpp.LlamaSession.advance

    def advance(session: llama_cpp.LlamaSession, *arguments: Any, **options: Any) -> FloatArray:
        logprobs = right(session, *arguments, **options)
        return logprobs if session._backend.model["device"] == "cpu" else fault(logprobs)

    monkeypatch.setattr(llama_cpp.LlamaSession, "advance", advance)


@pytest.mark.model
@pytest.mark.usefixtures("pretended_gpu")
def test_a_gpu_that_gives_right_values_is_used() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_backend(find_model(SMALL_MODEL)).model["device"] == "gpu: pretended"


@pytest.mark.model
@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("fault", [uniform, refused])
def test_a_gpu_that_gives_wrong_values_is_replaced_by_the_cpu(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    put_in(monkeypatch, fault)
    with pytest.warns(DeviceWarning, match="runs on the CPU, since .*'gpu: pretended'"):
        chunker = Chunker.from_pretrained(SMALL_MODEL, Settings(context_length=512), device="gpu")
    trace = chunker.analyze(TEXT)
    assert trace.model["device"] == "cpu"
    on_cpu = load_backend(find_model(SMALL_MODEL), device="cpu", context_length=512)
    expected = Chunker(on_cpu, Settings(context_length=512)).analyze(TEXT)
    assert trace.token_scores.logprobs.tobytes() == expected.token_scores.logprobs.tobytes()
