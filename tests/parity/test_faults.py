"""Planted faults: that a model is within the tolerance says something only because these are far outside of it.

Each is planted in the tiny model, in its windows or in its checkpoint, and held against the sound model with the
tightest tolerance, that of float32 through another engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from conftest import DATA
from tiny import make_tiny_checkpoint, tiny_tolerance

from metachunk_edge import Backend, BackendError, ModelFile, Settings
from metachunk_edge.backends import load_backend
from metachunk_edge.backends.base import LogitsSession
from metachunk_edge.parity import Parity, Recording, check, compare, record, tolerance_of
from metachunk_edge.types import FloatArray, TokenIds

if TYPE_CHECKING:
    from metachunk_edge.convert.reference import ReferenceBackend

CONTEXT_LENGTH = 64
BLOCK_SIZE = 16
POSITION_LIMIT = 96  # positions end after six blocks, so that entries are moved back, too
MARGIN = 20  # times what the tolerance allows
SETTINGS = Settings(context_length=CONTEXT_LENGTH, max_size=48)


@dataclass(frozen=True)
class Call:
    """The arguments of `Session.advance`, for a fault to change."""

    ids: TokenIds
    targets: TokenIds
    position: int
    keep_from: int
    shift: int


Fault = Callable[[Call], Call]


class FaultyBackend:
    """A sound backend whose sessions are asked for something else than they should be."""

    def __init__(self, backend: Backend, fault: Fault) -> None:
        self.tokenizer = backend.tokenizer
        self.model = backend.model
        self.block_size = backend.block_size
        self.row_multiple = backend.row_multiple
        self.context_length = backend.context_length
        self.position_limit = backend.position_limit
        self._backend = backend
        self._fault = fault

    def open_session(self) -> FaultySession:
        return FaultySession(cast("LogitsSession", self._backend.open_session()), self._fault)

    def score_packed(self, documents: Sequence[TokenIds]) -> list[FloatArray]:
        return self._backend.score_packed(documents)


class FaultySession:
    def __init__(self, session: LogitsSession, fault: Fault) -> None:
        self._session = session
        self._fault = fault

    def __enter__(self) -> FaultySession:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._session.__exit__(exception_type, exception, traceback)

    def restart(self) -> None:
        self._session.restart()

    def advance(self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int) -> FloatArray:
        return self.advance_with_logits(ids, targets, position=position, keep_from=keep_from, shift=shift)[0]

    def advance_with_logits(
        self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int
    ) -> tuple[FloatArray, FloatArray]:
        call = self._fault(Call(ids, targets, position, keep_from, shift))
        return self._session.advance_with_logits(
            call.ids, call.targets, position=call.position, keep_from=call.keep_from, shift=call.shift
        )


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert tiny_checkpoint  # or the skip that says what is missing
    folder = tmp_path_factory.mktemp("short_positions")
    return make_tiny_checkpoint(folder, max_position_embeddings=POSITION_LIMIT)


def opened(checkpoint: Path) -> ReferenceBackend:
    from metachunk_edge.convert.reference import ReferenceBackend

    return ReferenceBackend(checkpoint, name="tiny", sha256="", threads=1, context_length=CONTEXT_LENGTH)


@pytest.fixture(scope="module")
def sound(checkpoint: Path) -> ReferenceBackend:
    return opened(checkpoint)


@pytest.fixture(scope="module")
def recording(sound: ReferenceBackend, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    text = (DATA / "origin_of_species.txt").read_text(encoding="utf-8")[1_053:1_700]
    path = tmp_path_factory.mktemp("recording") / "distributions"
    recording = record(sound, [text], SETTINGS, block_size=BLOCK_SIZE, path=path)
    calls = recording.texts[0].calls
    assert sum(call.keep_from > 0 for call in calls) > 8
    assert sum(call.shift > 0 for call in calls) > 3
    return recording


def assert_distributions_are_far_outside(parity: Parity) -> None:
    allowed = tolerance_of("onnx", "float32")
    assert parity.mean_abs > MARGIN * allowed.mean_abs
    assert parity.max_abs > MARGIN * allowed.max_abs
    assert parity.kl_mean > MARGIN * allowed.kl_mean
    assert parity.kl_p999 > MARGIN * allowed.kl_p999
    assert len(check(parity, allowed)) >= 5


def test_the_sound_model_is_within_the_tolerance(recording: Recording, sound: ReferenceBackend) -> None:
    assert check(compare(recording, sound), tolerance_of("onnx", "float32")) == []
    unchanged = FaultyBackend(sound, lambda call: call)
    assert check(compare(recording, unchanged), tolerance_of("onnx", "float32")) == []


def test_targets_that_are_off_by_one_are_caught(recording: Recording, sound: ReferenceBackend) -> None:
    """The distributions are right, and read at the wrong tokens: only the figures of the texts' tokens tell."""
    faulty = FaultyBackend(sound, lambda call: replace(call, targets=call.ids[len(call.ids) - len(call.targets) :]))
    parity = compare(recording, faulty)
    allowed = tolerance_of("onnx", "float32")
    assert parity.kl_max < 1e-9
    assert parity.same_top == 1
    assert parity.mean_abs > MARGIN * allowed.mean_abs
    assert parity.rms_delta_p > MARGIN * allowed.rms_delta_p


def drop_one_more(call: Call) -> Call:
    return replace(call, keep_from=call.keep_from + 1) if call.keep_from else call


def one_position_ahead(call: Call) -> Call:
    return replace(call, position=call.position + 1) if call.keep_from else call


def move_one_too_far(call: Call) -> Call:
    return replace(call, shift=call.shift + 1) if call.shift else call


def do_not_move(call: Call) -> Call:
    return replace(call, shift=0)


@pytest.mark.parametrize("fault", [drop_one_more, one_position_ahead, move_one_too_far, do_not_move])
def test_a_fault_in_the_window_is_caught(recording: Recording, sound: ReferenceBackend, fault: Fault) -> None:
    assert_distributions_are_far_outside(compare(recording, FaultyBackend(sound, fault)))


def test_a_dropped_sink_is_caught(
    recording: Recording, sound: ReferenceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metachunk_edge.convert.reference.N_SINKS", 3)
    assert_distributions_are_far_outside(compare(recording, sound))


def with_config(checkpoint: Path, folder: Path, **values: float) -> Path:
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert values.keys() <= config.keys()
    (folder / "config.json").write_text(json.dumps({**config, **values}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("values", [{"rope_theta": 10_000.0}, {"rms_norm_eps": 1e-3}])
def test_a_wrong_constant_is_caught(
    recording: Recording, checkpoint: Path, tmp_path: Path, values: dict[str, float]
) -> None:
    faulty = opened(with_config(checkpoint, tmp_path / "faulty", **values))
    assert_distributions_are_far_outside(compare(recording, faulty))


def test_a_lost_bias_is_caught(recording: Recording, checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = with_config(checkpoint, tmp_path / "faulty")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.bias"
    weights[name] = np.zeros_like(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_distributions_are_far_outside(compare(recording, opened(folder)))


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Backend]:
    """The same model in float32 through llama.cpp and ONNX Runtime."""
    from metachunk_edge.convert.checkpoint import Checkpoint
    from metachunk_edge.convert.gguf import write_gguf
    from metachunk_edge.convert.onnx import write_onnx

    folder = tmp_path_factory.mktemp("engines")
    write_gguf(Checkpoint(checkpoint), folder / "model.gguf", "f32", name="tiny", threads=1)
    (folder / "onnx").mkdir()
    write_onnx(Checkpoint(checkpoint), folder / "onnx", "float32")
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(checkpoint / name, folder / "onnx" / name)
    files = {"f32": folder / "model.gguf", "float32": folder / "onnx" / "model.onnx"}
    return {
        precision: load_backend(
            ModelFile(file, "tiny", precision, ""), device="cpu", threads=1, context_length=CONTEXT_LENGTH
        )
        for precision, file in files.items()
    }


PRECISIONS = pytest.mark.parametrize(("model_format", "precision"), [("gguf", "f32"), ("onnx", "float32")])


@PRECISIONS
def test_a_sound_engine_is_within_the_tolerance(
    model_format: str, precision: str, recording: Recording, engines: dict[str, Backend]
) -> None:
    parity = compare(recording, engines[precision])
    assert check(parity, tiny_tolerance(model_format, precision)) == []


@PRECISIONS
@pytest.mark.parametrize("fault", [drop_one_more, one_position_ahead, move_one_too_far, do_not_move])
def test_a_fault_in_the_window_of_every_engine_is_caught(
    fault: Fault, model_format: str, precision: str, recording: Recording, engines: dict[str, Backend]
) -> None:
    try:
        parity = compare(recording, FaultyBackend(engines[precision], fault))
    except BackendError as error:  # llama.cpp takes no position that does not follow the last one
        assert "llama.cpp failed to decode" in str(error)
    else:
        allowed = tiny_tolerance(model_format, precision)
        assert parity.mean_abs > MARGIN * allowed.mean_abs
        assert parity.kl_mean > MARGIN * allowed.kl_mean


@PRECISIONS
def test_targets_that_are_off_by_one_are_caught_in_every_engine(
    model_format: str, precision: str, recording: Recording, engines: dict[str, Backend]
) -> None:
    faulty = FaultyBackend(
        engines[precision], lambda call: replace(call, targets=call.ids[len(call.ids) - len(call.targets) :])
    )
    assert compare(recording, faulty).mean_abs > MARGIN * tiny_tolerance(model_format, precision).mean_abs
