"""What a window costs in accuracy, and what it gives in speed: scores against those of full context.

    python -m benchmarks.windows --model qwen2.5-coder-0.5b-instruct-int8_fused --tokens 6144

Of a speech, a meeting and a collection of passages, the tokens beyond the longest window are compared, so that every
row is about the same ones. Prints a Markdown table.
"""

from __future__ import annotations

import time

import click
import numpy as np

from benchmarks.texts import evaluation_texts
from metachunk_edge import Chunker, Settings, find_model
from metachunk_edge.backends import load_backend
from metachunk_edge.backends.base import Backend
from metachunk_edge.modes import fast_name
from metachunk_edge.settings import Window
from metachunk_edge.tokens import encode
from metachunk_edge.types import FloatArray

WINDOWS: tuple[tuple[Window, int], ...] = (("rolling", 516), ("rolling", 1_024), ("rolling", 2_048), ("strided", 1_024))
LONGEST = max(length for _, length in WINDOWS)


@click.command()
@click.option("--model", default=fast_name("qwen2.5-coder-0.5b-instruct"), show_default=True)
@click.option("--tokens", "n_tokens", type=click.IntRange(min=LONGEST + 1), default=6_144, show_default=True)
def main(model: str, n_tokens: int) -> None:
    """Measure and print."""
    backend = load_backend(find_model(model), context_length=n_tokens + 512)
    texts = list(_texts(n_tokens, backend))
    whole = [_score(backend, text, Settings(context_length=n_tokens + 512)) for text in texts]
    full = np.concatenate([logprobs[LONGEST:] for logprobs, _ in whole])
    click.echo(f"{model}, {len(full):,} tokens\n")
    click.echo("| window | tokens/s | mean NLL | mean abs Δ ln p |\n|---|---:|---:|---:|")
    click.echo(f"| all {n_tokens:,} | {_speed(whole):.0f} | {-full.mean():.4f} | |")
    for policy, context_length in WINDOWS:
        settings = Settings(window=policy, context_length=context_length)
        scored = [_score(backend, text, settings) for text in texts]
        windowed = np.concatenate([logprobs[LONGEST:] for logprobs, _ in scored])
        drift = 100 * (windowed.mean() / full.mean() - 1)
        difference = np.abs(windowed - full).mean()
        click.echo(f"| {policy} {context_length:,} | {_speed(scored):.0f} | {drift:+.2f} % | {difference:.3f} |")


def _texts(n_tokens: int, backend: Backend) -> list[str]:
    folders = evaluation_texts()
    speech = next(text.text for text in folders["chroma"] if text.name == "state_of_the_union.md")
    candidates = [speech, *(text.text for text in folders["qmsum"][3:4]), folders["minilongbench"][2].text]
    texts = []
    for text in candidates:
        offsets = encode(text, backend.tokenizer).offsets
        texts.append(text[: int(offsets[min(n_tokens, len(offsets)) - 1, 1])])
    return texts


def _score(backend: Backend, text: str, settings: Settings) -> tuple[FloatArray, float]:
    started = time.perf_counter()
    parts = [part.tokens.logprobs for part in Chunker(backend, settings).score_iter([text])]
    return np.concatenate(parts), time.perf_counter() - started


def _speed(scored: list[tuple[FloatArray, float]]) -> float:
    return sum(len(logprobs) for logprobs, _ in scored) / sum(seconds for _, seconds in scored)


if __name__ == "__main__":
    main()
