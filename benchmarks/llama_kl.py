"""Our figures beside those of llama.cpp's own tool, `llama-perplexity`: same tokens, same context, same rows.

BASE is the model in float32, for instance from `metachunk-edge convert … --precision f32`; MODEL the quantized file.
With llama.cpp's tool, of the same release as the installed llama-cpp-python and built with GGML_NATIVE=ON:

    TEXT=tests/data/origin_of_species.txt
    OPTIONS="-f $TEXT -c 256 -b 256 -ub 128 -fa off --no-warmup"
    llama-perplexity -m BASE.gguf $OPTIONS --kl-divergence-base base.kld
    llama-perplexity -m MODEL.gguf $OPTIONS --kl-divergence-base base.kld --kl-divergence > statistics.txt
    python -m benchmarks.llama_kl BASE.gguf MODEL.gguf base.kld statistics.txt $TEXT

The tool cuts the text into chunks of as many tokens as the context has, and counts the second half of each: what
comes after the token at n/2, up to the chunk's last. It keeps the base's log-probabilities in 16 bits, from 16 nats
below the highest on, so that agreement is to about that.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from metachunk_edge.backends.base import Backend
from metachunk_edge.backends.llama_cpp import LlamaCppBackend
from metachunk_edge.catalogue import find_model
from metachunk_edge.parity_figures import kl_divergence, log_softmax
from metachunk_edge.tokens import encode
from metachunk_edge.types import DoubleArray, FloatArray, IntArray, TokenIds

_PRINTED = {
    "Mean PPL(base)": "perplexity of the base",
    "Mean PPL(Q)": "perplexity of the model",
    "Mean ln(PPL(Q)/PPL(base))": "difference of mean NLL, nats",
    "Mean    KLD": "KL divergence, mean, nats",
    "99.9%   KLD": "KL divergence, 99.9th percentile",
    "Maximum KLD": "KL divergence, maximum",
    "Median  KLD": "KL divergence, median",
    "Mean    Δp": "Δp, mean, %",
    "RMS Δp": "Δp, root mean square, %",
    "Same top p": "same most likely token, %",
}


@dataclass(frozen=True, slots=True)
class Rows:
    """One value per counted token, float64 [n_tokens]."""

    kl: DoubleArray
    base_logprobs: DoubleArray
    model_logprobs: DoubleArray
    same_top: DoubleArray

    def figures(self) -> dict[str, float]:
        """Return the statistics under the names that llama-perplexity prints."""
        delta_p = np.exp(self.model_logprobs) - np.exp(self.base_logprobs)
        values = {
            "Mean PPL(base)": np.exp(-self.base_logprobs.mean()),
            "Mean PPL(Q)": np.exp(-self.model_logprobs.mean()),
            "Mean ln(PPL(Q)/PPL(base))": self.base_logprobs.mean() - self.model_logprobs.mean(),
            "Mean    KLD": self.kl.mean(),
            "99.9%   KLD": np.quantile(self.kl, 0.999),
            "Maximum KLD": self.kl.max(),
            "Median  KLD": np.median(self.kl),
            "Mean    Δp": 100 * delta_p.mean(),
            "RMS Δp": 100 * np.sqrt((delta_p**2).mean()),
            "Same top p": 100 * self.same_top.mean(),
        }
        return {name: float(value) for name, value in values.items()}


def read_base(path: Path) -> IntArray:
    """Return the tokens of a `--kl-divergence-base` file, int64 [chunks, n]."""
    with path.open("rb") as file:
        magic, n_context, _n_vocabulary, n_chunks = struct.unpack("<8sIii", file.read(20))
        if magic != b"_logits_":
            raise click.ClickException(f"{path} is no file of llama-perplexity's --kl-divergence-base.")
        return np.fromfile(file, "<i4", n_chunks * n_context).reshape(n_chunks, n_context).astype(np.int64)


def read_printed(path: Path) -> dict[str, float]:
    """Return the statistics that llama-perplexity printed."""
    lines = (re.match(r"(.+?) *: *(-?[\d.]+)", line) for line in path.read_text(encoding="utf-8").splitlines())
    return {line[1]: float(line[2]) for line in lines if line and line[1] in _PRINTED}


def measure(base: Backend, model: Backend, chunks: IntArray) -> Rows:
    parts = [compare(logits_of(base, chunk), logits_of(model, chunk), targets_of(chunk)) for chunk in chunks]
    return Rows(*map(np.concatenate, zip(*parts, strict=True)))


def targets_of(chunk: IntArray) -> TokenIds:
    return chunk[len(chunk) // 2 + 1 :].astype(np.int32)


def logits_of(backend: Backend, chunk: IntArray) -> FloatArray:
    """Logits of the rows that predict the targets, without a prefix token: float32 [n_targets, vocabulary]."""
    ids, first = chunk.astype(np.int32), len(chunk) // 2
    parts = []
    with backend.open_session() as session:
        for start in range(0, first, backend.block_size):
            ids_before = ids[start : min(first, start + backend.block_size)]
            session.advance(ids_before, ids[:0], position=start, keep_from=0, shift=0)
        for start in range(first, len(ids) - 1, backend.block_size):
            end = min(len(ids) - 1, start + backend.block_size)
            _, logits = session.advance_with_logits(  # type: ignore[attr-defined]
                ids[start:end], ids[start + 1 : end + 1], position=start, keep_from=0, shift=0
            )
            parts.append(logits)
    return np.concatenate(parts)


def compare(base: FloatArray, model: FloatArray, targets: TokenIds) -> tuple[DoubleArray, ...]:
    rows = np.arange(len(targets))
    same_top = (base.argmax(axis=1) == model.argmax(axis=1)).astype(np.float64)
    return kl_divergence(base, model), log_softmax(base)[rows, targets], log_softmax(model)[rows, targets], same_top


@click.command()
@click.argument("base")
@click.argument("model")
@click.argument("base_kld", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("statistics", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(base: str, model: str, base_kld: Path, statistics: Path, text: Path) -> None:
    """Print both tools' statistics side by side."""
    chunks = read_base(base_kld)
    base_backend, model_backend = (LlamaCppBackend(find_model(name), device="cpu") for name in (base, model))
    ids = encode(text.read_text(encoding="utf-8"), base_backend.tokenizer).ids
    if ids[: chunks.size].tolist() != chunks.ravel().tolist():
        raise click.ClickException(f"{text} has other tokens here than in {base_kld}.")
    rows = measure(base_backend, model_backend, chunks)
    printed = read_printed(statistics)
    click.echo(f"{len(rows.kl)} tokens in {len(chunks)} chunks of {chunks.shape[1]}\n")
    click.echo("| figure | llama-perplexity | metachunk-edge |\n|---|---|---|")
    for name, value in rows.figures().items():
        click.echo(f"| {_PRINTED[name]} | {printed[name]:.6f} | {value:.6f} |")


if __name__ == "__main__":
    main()
