"""Every format, precision, window policy and block size against float32: all of them on the tiny model, a sample on a
real one.

`make test` runs them on the CPU; test_gpu.py is their counterpart for GPUs. The tolerances of the tiny model stand in
tiny_tolerances.toml, those of real ones in the package's tolerances.toml; `python -m benchmarks.parity` measures all
that the latter are made from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from conftest import DEFAULT_MODEL, require_exact_products
from tiny import tiny_tolerance

from metachunk_edge import ModelFile, ModelNotFoundError, Settings, find_model
from metachunk_edge.backends import load_backend
from metachunk_edge.backends.base import Backend
from metachunk_edge.backends.hf_tokenizer import HuggingFaceTokenizer
from metachunk_edge.parity import Parity, Recording, check, compare, packaged_texts, record, tolerance_of

GGUF = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0")
ONNX = ("float32", "float16", "int8", "int4", "int8_fused")
WINDOWS = (("rolling", 512), ("rolling", 264), ("strided", 264))  # tokens: the second and third are moved
N_TOKENS = 400

Window = Literal["rolling", "strided"]


@pytest.fixture(scope="module")
def recorded(reference_backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recording]:
    """The reference's pass over the texts, once for each window plan."""
    recordings: dict[tuple[str, int, int], Recording] = {}

    def get(window: Window, context_length: int, block_size: int) -> Recording:
        key = (window, context_length, block_size)
        if key not in recordings:
            path = tmp_path_factory.mktemp("recordings") / "distributions"
            texts = packaged_texts(reference_backend.tokenizer, N_TOKENS)
            settings = Settings(max_size=64, window=window, context_length=context_length)
            recordings[key] = record(reference_backend, texts, settings, block_size=block_size, path=path)
        return recordings[key]

    return get


@dataclass(frozen=True)
class RealModel:
    """The default model, the pass of its dequantized weights in float32, and a way to convert these."""

    downloaded: ModelFile
    recording: Recording
    convert: Callable[[str], ModelFile]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealModel]:
    try:
        downloaded = find_model(DEFAULT_MODEL)
    except ModelNotFoundError as error:
        if "REQUIRE_MODELS" in os.environ:
            raise
        pytest.skip(str(error))
    if "REQUIRE_MODELS" not in os.environ:
        pytest.importorskip("transformers", reason="the extra `convert` is not installed")
    from metachunk_edge import convert_model
    from metachunk_edge.convert.checkpoint import dequantize
    from metachunk_edge.convert.reference import ReferenceBackend

    folder = tmp_path_factory.mktemp("real")
    dequantize(downloaded.path, folder / "checkpoint")
    reference = ReferenceBackend(folder / "checkpoint", name=downloaded.name, sha256=downloaded.sha256)
    texts = packaged_texts(reference.tokenizer, 128)
    recording = record(reference, texts, Settings(max_size=64), block_size=128, path=folder / "distributions")
    del reference

    def convert(precision: str) -> ModelFile:
        return convert_model(folder / "checkpoint", folder / precision, precision=precision)

    yield RealModel(downloaded, recording, convert)
    shutil.rmtree(folder)  # several GB


def loaded(model: ModelFile) -> Backend:
    return load_backend(model, device="cpu", threads=1, context_length=512)


def assert_within(parity: Parity, model_format: str, precision: str) -> None:
    assert check(parity, tiny_tolerance(model_format, precision)) == []


@pytest.mark.parametrize(("window", "context_length"), WINDOWS)
@pytest.mark.parametrize("precision", [*GGUF, *ONNX])
def test_every_precision_is_within_its_tolerance_in_every_window(
    precision: str,
    window: Window,
    context_length: int,
    tiny_model: Callable[[str], ModelFile],
    recorded: Callable[..., Recording],
) -> None:
    model = tiny_model(precision)
    parity = compare(recorded(window, context_length, 128), loaded(model))
    assert_within(parity, model.format, precision)


@pytest.mark.parametrize("precision", ["f32", "q8_0", "float32", "int8", "int8_fused"])
def test_the_block_size_changes_nothing(
    precision: str, tiny_model: Callable[[str], ModelFile], recorded: Callable[..., Recording]
) -> None:
    model = tiny_model(precision)
    assert_within(compare(recorded("rolling", 264, 33), loaded(model)), model.format, precision)


@pytest.mark.parametrize(
    ("claimed", "actual"),
    [
        ("f32", "f16"),
        ("f16", "bf16"),
        ("bf16", "q8_0"),
        ("q8_0", "q6_k"),
        ("q6_k", "q5_k_m"),
        ("q5_k_m", "q4_k_m"),
        ("float32", "float16"),
        ("float16", "int8"),
        ("int8", "int4"),
    ],
)
def test_a_precision_that_got_worse_is_caught(
    claimed: str, actual: str, tiny_model: Callable[[str], ModelFile], recorded: Callable[..., Recording]
) -> None:
    """The next worse precision under the better one's name is what a regression looks like.

    Q4_0 and Q4_K_M are left out: on random weights they are too close to each other.
    """
    model = tiny_model(actual)
    parity = compare(recorded("rolling", 512, 128), loaded(model))
    assert check(parity, tiny_tolerance(model.format, claimed)) != []


@pytest.mark.parametrize("precision", [*GGUF, *ONNX])
def test_a_wrong_rotary_base_is_caught_in_every_precision(
    precision: str, misread_model: Callable[[str], ModelFile], recorded: Callable[..., Recording]
) -> None:
    model = misread_model(precision)
    parity = compare(recorded("rolling", 512, 128), loaded(model))
    assert len(check(parity, tiny_tolerance(model.format, precision))) >= 3


@pytest.fixture(scope="module")
def misread_model(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFile]:
    """Convert the tiny checkpoint as one that forgets `rope_theta` would, to the default of Qwen2's first version."""
    folder = tmp_path_factory.mktemp("misread")
    source = Path(shutil.copytree(tiny_checkpoint, folder / "source"))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps({**config, "rope_theta": 10_000.0}), encoding="utf-8")

    def convert(precision: str) -> ModelFile:
        from metachunk_edge.convert.checkpoint import Checkpoint
        from metachunk_edge.convert.fused import write_fused
        from metachunk_edge.convert.gguf import write_gguf
        from metachunk_edge.convert.onnx import write_onnx

        target = folder / precision
        target.mkdir()
        if precision in ONNX:
            if precision == "int8_fused":
                require_exact_products()
                checkpoint = Checkpoint(source)
                prefix_id = HuggingFaceTokenizer(source, "misread").prefix_id
                write_fused(checkpoint.config, checkpoint.tensor, prefix_id, target)
            else:
                write_onnx(Checkpoint(source), target, precision)
            for name in ("config.json", "tokenizer.json"):
                shutil.copyfile(source / name, target / name)
            return ModelFile(target / "model.onnx", "misread", precision, "")
        write_gguf(Checkpoint(source), target / "model.gguf", precision, name="misread", threads=1)
        return ModelFile(target / "model.gguf", "misread", precision, "")

    return convert


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("precision", ["Q4_K_M", "q8_0", "int8"])
def test_a_real_model_is_within_the_tolerance(precision: str, real: RealModel) -> None:
    """As downloaded; and dequantized, converted and verified, as `convert` does it."""
    if precision == real.downloaded.precision:
        parity = compare(real.recording, load_backend(real.downloaded, device="cpu"))
        assert check(parity, tolerance_of("gguf", precision)) == []
    else:
        assert real.convert(precision).precision == precision
