"""Run a sample of the evaluation texts through a real model and check every promise about the chunks.

    python -m benchmarks.corpus --model smollm2-135m-instruct --tokens 200000

The documents of all folders take turns until the token budget is used up; each counts up to --characters of its
beginning, so that two long ones do not fill the sample. Every document is scored once and cut in five ways.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from typing import Any

import click
import psutil
import regex

from benchmarks.texts import evaluation_texts, interleaved
from metachunk_edge import Chunk, Chunker, Settings, cut

WAYS = (
    Settings(),
    Settings(max_size=200, merge="greedy", overlap="dynamic"),
    Settings(max_size=100, merge="none", threshold="auto"),
    Settings(max_size=60, unit="words", overlap=1),
    Settings(max_size=300, unit="characters"),
)


def check(text: str, chunks: list[Chunk], settings: Settings) -> None:
    """Raise AssertionError unless the chunks cover the text exactly and keep to the limit."""
    covered = 0
    for chunk in chunks:
        assert chunk.text == text[chunk.start : chunk.end] != "", "offsets"
        assert chunk.start == covered if settings.overlap == "none" else chunk.start <= covered, "coverage"
        if settings.unit == "tokens":
            assert chunk.n_tokens <= settings.max_size or regex.fullmatch(r"\X", chunk.text), "limit"
        if settings.unit == "characters":
            assert len(chunk.text) <= settings.max_size or regex.fullmatch(r"\X", chunk.text), "limit"
        covered = chunk.end
    assert covered == len(text), "loss"
    starts = {chunk.start for chunk in chunks}
    assert starts <= {match.start() for match in regex.finditer(r"\X", text)}, "grapheme"


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--tokens", default=200_000, show_default=True, help="Budget.")
@click.option("--characters", default=12_000, show_default=True, help="Of each document at most.")
@click.option("--threads", type=int)
def main(model: str, tokens: int, characters: int, threads: int | None) -> None:
    """Print a JSON report."""
    chunker = Chunker.from_pretrained(model, threads=threads)
    rows: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    started = time.perf_counter()
    n_tokens = 0
    for document in interleaved(evaluation_texts()):
        text = document.text[:characters]
        begin = time.perf_counter()
        sentences = list(chunker.score_iter([text]))
        seconds = time.perf_counter() - begin
        n_scored = sum(len(sentence.tokens.ids) for sentence in sentences)
        for settings in WAYS:
            chunks = list(cut(sentences, settings))
            check(text, chunks, settings)
            rows[document.folder][f"chunks, {settings.unit} {settings.max_size} {settings.merge}"] += len(chunks)
        counted = {"documents": 1, "characters": len(text), "tokens": n_scored, "seconds": seconds}
        for name, value in counted.items():
            rows[document.folder][name] += value
        n_tokens += n_scored
        click.echo(f"\r{n_tokens:,} tokens", err=True, nl=False)
        if n_tokens >= tokens:
            break
    total = time.perf_counter() - started
    report: dict[str, Any] = {
        "model": chunker.backend.model,
        "tokens": n_tokens,
        "documents": sum(row["documents"] for row in rows.values()),
        "tokens_per_second": round(n_tokens / sum(row["seconds"] for row in rows.values()), 1),
        "seconds_with_all_checks": round(total, 1),
        "peak_memory_mb": round(peak_memory_bytes() / 1e6),
        "folders": {name: {key: round(value, 1) for key, value in row.items()} for name, row in rows.items()},
    }
    json.dump(report, sys.stdout, indent=1)
    click.echo()


def peak_memory_bytes() -> int:
    """The largest resident memory that this process has had."""
    if sys.platform != "win32":
        import resource

        scale = 1 if sys.platform == "darwin" else 1_024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    return int(psutil.Process().memory_info().peak_wset)


if __name__ == "__main__":
    main()
