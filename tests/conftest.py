"""Fixtures: the fake backend, the real models of the cache, and the shared evaluation texts."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tiny import make_tiny_checkpoint, tiny_tolerance

from metachunk_edge import Chunker, FakeBackend, ModelNotFoundError, Settings, find_model
from metachunk_edge.backends import load_backend, ort
from metachunk_edge.backends.base import Backend
from metachunk_edge.cache import ModelFile

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
SMALL_MODEL = "smollm2-135m-instruct"
DEFAULT_MODEL = "qwen2.5-coder-0.5b-instruct"


def real_backend(name: str) -> Backend:
    """A model of the cache, or a skip that says how to get it."""
    try:
        return load_backend(find_model(name))
    except ModelNotFoundError:
        if "REQUIRE_MODELS" in os.environ:  # as `make test` has it: there, a skip would be a silent pass
            raise
        pytest.skip(f"the model {name} is not downloaded: run `metachunk-edge models pull {name}`")


def require_exact_products() -> None:
    """Skip where the fast mode refuses to run."""
    if not ort.multiplies_integers_exactly():
        pytest.skip("this processor has no 8-bit dot products (VNNI), which the fast mode needs")


@pytest.fixture(scope="session")
def small_backend() -> Backend:
    return real_backend(SMALL_MODEL)


@pytest.fixture(scope="session")
def default_backend() -> Backend:
    return real_backend(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen2 of two layers and random weights."""
    if "REQUIRE_MODELS" not in os.environ:
        pytest.importorskip("transformers", reason="the extra `convert` is not installed")
        pytest.importorskip("torch", reason="the extra `convert` is not installed")
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference_backend(tiny_checkpoint: Path) -> Backend:
    from metachunk_edge.convert.reference import ReferenceBackend

    # With more threads than free cores, so small a model mostly waits.
    return ReferenceBackend(tiny_checkpoint, name="tiny", sha256="", threads=1, context_length=512)


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFile]:
    """Convert the tiny checkpoint to a precision, once."""
    from metachunk_edge.convert import convert_model

    folder = tmp_path_factory.mktemp("converted")

    @cache
    def convert(precision: str) -> ModelFile:
        if precision == "int8_fused":
            require_exact_products()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("metachunk_edge.convert.verify.tolerance_of", tiny_tolerance)
            return convert_model(tiny_checkpoint, folder / precision, precision=precision, name="tiny", threads=1)

    return convert


@pytest.fixture(scope="session")
def gguf_backend(tiny_model: Callable[[str], ModelFile]) -> Backend:
    return load_backend(tiny_model("f32"), device="cpu", threads=1, context_length=512)


@pytest.fixture(scope="session")
def onnx_backend(tiny_model: Callable[[str], ModelFile]) -> Backend:
    return load_backend(tiny_model("float32"), device="cpu", threads=1, context_length=512)


@pytest.fixture(scope="session")
def fused_backend(tiny_model: Callable[[str], ModelFile]) -> Backend:
    return load_backend(tiny_model("int8_fused"), device="cpu", threads=1, context_length=512)


@pytest.fixture
def fake() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def fake_chunker() -> Callable[..., Chunker]:
    """Make a chunker on a fake backend from settings."""

    def make(**settings: object) -> Chunker:
        return Chunker(FakeBackend(), Settings(**{"context_length": 256, **settings}))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the evaluation texts are not there ({folder.name} beside the checkout)")
    return folder
