"""Every document of the shared evaluation texts, English, Chinese and Arabic, keeps the promises."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from metachunk_edge import Chunker, FakeBackend, Settings, cut
from metachunk_edge.backends.base import Backend

sys.path.insert(0, str(REPOSITORY))
corpus = pytest.importorskip("benchmarks.corpus", reason="benchmarks/ is not beside the tests")


def run(backend: Backend, folder: Path, *, n_characters: int, n_documents: int | None) -> int:
    """Check documents of every folder and return how many tokens they had."""
    chunker = Chunker(backend, Settings(context_length=min(2_048, backend.context_length)))
    n_tokens = 0
    for place, document in enumerate(corpus.interleaved(corpus.evaluation_texts(folder))):
        if place == n_documents:
            break
        text = document.text[:n_characters]
        sentences = list(chunker.score_iter([text]))
        n_tokens += sum(len(sentence.tokens.ids) for sentence in sentences)
        for settings in corpus.WAYS:
            corpus.check(text, list(cut(sentences, settings)), settings)
    return n_tokens


@pytest.mark.slow
def test_all_documents_on_the_fake_backend(shared_data: Path) -> None:
    backend = FakeBackend(context_length=2_048, block_size=512, position_limit=32_768)
    assert run(backend, shared_data, n_characters=20_000, n_documents=None) > 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gguf_backend", "onnx_backend", "reference_backend"])
def test_the_beginning_of_every_document_on_every_engine(
    backend: str, shared_data: Path, request: pytest.FixtureRequest
) -> None:
    """On the tiny model, whose contexts are short: every document moves its window."""
    found: Backend = request.getfixturevalue(backend)
    assert run(found, shared_data, n_characters=500, n_documents=None) > 60_000


@pytest.mark.slow
@pytest.mark.model
def test_a_sample_of_every_folder_on_a_real_model(shared_data: Path, small_backend: Backend) -> None:
    assert run(small_backend, shared_data, n_characters=400, n_documents=10) > 1_000
