"""From a file to chunks on real models: the default one for every output format, the small one for odd input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from conftest import DATA, DEFAULT_MODEL, require_exact_products
from strategies import HOSTILE

from metachunk_edge import Chunk, Chunker, Settings
from metachunk_edge.backends.base import Backend
from metachunk_edge.modes import Mode, choose_model

ENGLISH = (DATA / "origin_of_species.txt").read_text(encoding="utf-8")[:1_400]
CHINESE = (DATA / "kong_yiji.txt").read_text(encoding="utf-8")[:200]

pytestmark = pytest.mark.model


def command(*arguments: str, folder: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "metachunk_edge", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONUTF8": "1"},
        capture_output=True,
        check=True,
    )
    return run.stdout.decode("utf-8")


def check(text: str, chunks: list[dict[str, Any]], max_tokens: int) -> None:
    assert "".join(chunk["text"] for chunk in chunks) == text
    for place, chunk in enumerate(chunks):
        assert chunk["index"] == place
        assert text[chunk["start"] : chunk["end"]] == chunk["text"]
        assert 0 < chunk["n_tokens"] <= max_tokens


@pytest.fixture
def folder(tmp_path: Path, default_backend: Backend) -> Path:
    assert default_backend
    (tmp_path / "english.txt").write_text(ENGLISH, encoding="utf-8", newline="")
    (tmp_path / "中文.txt").write_text(CHINESE, encoding="utf-8", newline="")
    return tmp_path


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_json_lines_of_two_documents_from_the_default_model(mode: Mode, folder: Path) -> None:
    if mode == "fast":
        require_exact_products()
    model = choose_model(DEFAULT_MODEL, mode)
    arguments = ("chunk", "english.txt", "中文.txt", "--max-size", "120", "--mode", mode)
    lines = command(*arguments, folder=folder).splitlines()
    chunks = [json.loads(line) for line in lines]
    for name, text in (("english.txt", ENGLISH), ("中文.txt", CHINESE)):
        own = [chunk for chunk in chunks if chunk["source"] == name]
        check(text, own, 120)
        assert len(own) > 1
        assert [chunk["boundary_strength"] is None for chunk in own] == [True, *[False] * (len(own) - 1)]
        assert all(chunk["model"] == f"{model.name}@{model.sha256[:12]}" for chunk in own)


def test_json_from_the_default_model_says_which_model_and_settings(folder: Path) -> None:
    found = json.loads(command("chunk", "中文.txt", "--format", "json", "--max-size", "60", folder=folder))
    assert found["model"]["name"] == choose_model(DEFAULT_MODEL).name
    assert len(found["model"]["sha256"]) == 64
    assert found["settings"]["max_size"] == 60
    check(CHINESE, found["documents"][0]["chunks"], 60)


def test_readable_text_from_the_default_model_has_every_sentence(folder: Path) -> None:
    shown = command("chunk", "中文.txt", "--format", "text", folder=folder)
    assert "中文.txt · chunk 0" in shown
    assert "穿长衫的" in shown


def test_scores_of_the_default_model_give_the_chunks_without_it(folder: Path) -> None:
    command("score", "english.txt", "-o", "scores.jsonl", folder=folder)
    stored = command("chunk", "english.txt", "--scores", "scores.jsonl", "--max-size", "120", folder=folder)
    assert stored == command("chunk", "english.txt", "--max-size", "120", folder=folder)


def chunks_of(text: str, backend: Backend, **settings: object) -> list[Chunk]:
    return Chunker(backend, Settings(**settings)).chunk(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_size", [1, 7, 64])
def test_hostile_texts_keep_every_promise_on_a_real_tokenizer(small_backend: Backend, max_size: int) -> None:
    text = "\n".join(HOSTILE)
    chunks = chunks_of(text, small_backend, max_size=max_size)
    assert "".join(chunk.text for chunk in chunks) == text
    starts = {match.start() for match in regex.finditer(r"\X", text)}
    for chunk in chunks:
        assert chunk.text == text[chunk.start : chunk.end] != ""
        assert chunk.start in starts
        assert chunk.n_tokens <= max_size or regex.fullmatch(r"\X", chunk.text)


def test_windows_line_ends_are_cut_where_line_feeds_are(small_backend: Backend) -> None:
    text = "First line here.\nSecond line, longer.\n\nA new paragraph begins.\n- item one\n- item two\nLast words."
    unix = chunks_of(text, small_backend, max_size=12)
    windows = chunks_of(text.replace("\n", "\r\n"), small_backend, max_size=12)
    assert [chunk.text.replace("\r\n", "\n") for chunk in windows] == [chunk.text for chunk in unix]
    assert [chunk.boundary_strength for chunk in windows] == [chunk.boundary_strength for chunk in unix]


def test_control_characters_and_code_stay_to_the_letter(small_backend: Backend) -> None:
    text = "Before\x00 and\x07 after.\n\n```\n\tif\u00a0x:\n\t\treturn  1\n```\nDone.\x1b[0m"
    assert "".join(chunk.text for chunk in chunks_of(text, small_backend, max_size=8)) == text


def test_a_sentence_longer_than_the_context_is_scored_once(small_backend: Backend) -> None:
    text = "and so they went on and on over hills and rivers " * 60
    trace = Chunker(small_backend, Settings(context_length=260, max_size=50)).analyze(text)
    assert len(trace.encoding.ids) > 600
    assert np.isfinite(trace.token_scores.logprobs).all()
    assert "".join(chunk.text for chunk in trace.chunks) == text


def test_windows_that_keep_their_first_tokens_stay_close_to_full_context(small_backend: Backend) -> None:
    text = (DATA / "origin_of_species.txt").read_text(encoding="utf-8")[:4_000]

    def mean_nll(context_length: int, window: str) -> float:
        settings = Settings(context_length=context_length, window=window)  # type: ignore[arg-type]
        return -float(Chunker(small_backend, settings).analyze(text).token_scores.logprobs.mean())

    full = mean_nll(2_048, "rolling")
    assert mean_nll(384, "rolling") < 1.06 * full  # measured: see benchmarks/README.md
    assert mean_nll(384, "strided") < 1.08 * full


def test_two_threads_get_the_chunks_that_one_gets(small_backend: Backend) -> None:
    chunker = Chunker(small_backend, Settings(max_size=40))
    texts = [ENGLISH[:400], ENGLISH[400:800]]
    expected = [chunker.chunk(text) for text in texts]
    found: dict[int, list[Chunk]] = {}

    def work(place: int) -> None:
        found[place] = chunker.chunk(texts[place]) if place else list(chunker.chunk_iter([texts[place]]))

    threads = [threading.Thread(target=work, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == expected


def test_short_documents_have_the_same_chunks_together_as_alone(small_backend: Backend) -> None:
    chunker = Chunker(small_backend, Settings(max_size=20))
    texts = [ENGLISH[:150], "", "One. Two.", ENGLISH[150:700], CHINESE[:40], "Short again. And again."]
    assert list(chunker.chunk_many(texts)) == [chunker.chunk(text) for text in texts]


def test_the_same_call_twice_gives_the_same_bytes(small_backend: Backend) -> None:
    chunker = Chunker(small_backend, Settings(max_size=40))
    assert repr(chunker.chunk(ENGLISH[:600])) == repr(chunker.chunk(ENGLISH[:600]))
