"""Fixtures: the fake backend, the real models of the cache, and the shared evaluation texts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from metachunk_edge import Chunker, FakeBackend, ModelNotFoundError, Settings, find_model
from metachunk_edge.backends import load_backend
from metachunk_edge.backends.base import Backend

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


@pytest.fixture(scope="session")
def small_backend() -> Backend:
    return real_backend(SMALL_MODEL)


@pytest.fixture(scope="session")
def default_backend() -> Backend:
    return real_backend(DEFAULT_MODEL)


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
