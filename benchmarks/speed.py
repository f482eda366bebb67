"""Speed and memory by document length: tokens per second, time to the first chunk, peak memory.

    python -m benchmarks.speed --model qwen2.5-coder-0.5b-instruct --tokens 1000 --tokens 10000 --output results.json

Every length is measured in a process of its own, so that one's peak memory is not another's; the text is read from a
file piece by piece, as the command line does. Prints a Markdown table and, with --output, writes JSON.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import llama_cpp

from benchmarks.corpus import peak_memory_bytes
from benchmarks.texts import long_text
from metachunk_edge import Chunker, find_model
from metachunk_edge.backends import load_backend
from metachunk_edge.tokens import encode


@dataclass(frozen=True, slots=True)
class Measurement:
    n_tokens: int
    n_chunks: int
    load_s: float
    first_chunk_s: float
    total_s: float
    tokens_per_second: float
    peak_memory_mb: float


def measure(model: str, path: Path, threads: int | None) -> Measurement:
    started = time.perf_counter()
    chunker = Chunker.from_pretrained(model, threads=threads)
    loaded = time.perf_counter()
    n_tokens = n_chunks = 0
    first = 0.0

    def count(more: int, _character: int) -> None:
        nonlocal n_tokens
        n_tokens += more

    with path.open(encoding="utf-8", newline="") as file:
        for _ in chunker.chunk_iter(iter(lambda: file.read(65_536), ""), on_tokens=count):
            n_chunks += 1
            first = first or time.perf_counter() - loaded
    total = time.perf_counter() - loaded
    return Measurement(
        n_tokens=n_tokens,
        n_chunks=n_chunks,
        load_s=round(loaded - started, 2),
        first_chunk_s=round(first, 2),
        total_s=round(total, 2),
        tokens_per_second=round(n_tokens / total, 1),
        peak_memory_mb=round(peak_memory_bytes() / 1e6),
    )


def text_of(n_tokens: int, model: str) -> str:
    """Prose of so many tokens of the model."""
    text = long_text(n_tokens * 8)
    tokenizer = load_backend(find_model(model), context_length=512).tokenizer
    return text[: int(encode(text, tokenizer).offsets[n_tokens - 1, 1])]


@click.command()
@click.option("--model", default="qwen2.5-coder-0.5b-instruct", show_default=True)
@click.option("--tokens", "lengths", type=int, multiple=True, default=[1_000, 4_000, 10_000], show_default=True)
@click.option("--threads", type=int)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--only", type=click.Path(path_type=Path), hidden=True, help="Measure this file in this process.")
def main(model: str, lengths: tuple[int, ...], threads: int | None, output: Path | None, only: Path | None) -> None:
    """Measure and print."""
    if only is not None:
        click.echo(json.dumps(asdict(measure(model, only, threads))))
        return
    click.echo(f"{model}, llama-cpp-python {llama_cpp.__version__}, {platform.machine()}\n")
    click.echo("| tokens | chunks | load (s) | first chunk (s) | all (s) | tokens/s | peak memory (MB) |")
    click.echo("|---:|---:|---:|---:|---:|---:|---:|")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n_tokens in lengths:
            path = Path(folder) / f"{n_tokens}.txt"
            path.write_text(text_of(n_tokens, model), encoding="utf-8", newline="")
            command = [sys.executable, "-m", "benchmarks.speed", "--model", model, "--only", str(path)]
            command += ["--threads", str(threads)] if threads else []
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append(found)
            click.echo(f"| {' | '.join(f'{value:,}' for value in found.values())} |")
    if output is not None:
        output.write_text(json.dumps({"model": model, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
