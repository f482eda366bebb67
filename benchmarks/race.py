"""The fast mode against its yardsticks, each pair in turns: ratios, which a noisy machine leaves standing.

    python -m venv PEERS && PEERS/bin/pip install lmchunker==0.5.1 'transformers<4.58'
    python -m benchmarks.race --checkpoint FOLDER --peers PEERS/bin/python --output benchmarks/speed.json
    python -m benchmarks.race --tables benchmarks/speed.json

CHECKPOINT is the dequantized 0.5B model (`benchmarks.parity` leaves it in its folder), for lmchunker and the float32
reference. The fast model is the one of the cache. A row that --output has already is not measured again.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.speed import text_of
from benchmarks.texts import evaluation_texts
from metachunk_edge import Chunker, Settings, find_model
from metachunk_edge.backends import load_backend
from metachunk_edge.modes import fast_name
from metachunk_edge.parity_figures import boundary_f1
from metachunk_edge.tokens import encode

MODEL = "qwen2.5-coder-0.5b-instruct"
FAST = fast_name(MODEL)
OPERATIONS_PER_TOKEN = 0.988e9  # of the products with weights: body and output matrix
SPEECH = "state_of_the_union.md"

Values = dict[str, float]


@click.command()
@click.option("--checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--peers", type=click.Path(exists=True, path_type=Path), help="The Python that has lmchunker.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--row", "names", multiple=True, help="Measure this row only.")
@click.option("--repeats", type=int, default=3, show_default=True)
@click.option("--tables", type=click.Path(exists=True, path_type=Path), help="Print the Markdown table of a result.")
def main(
    checkpoint: Path | None,
    peers: Path | None,
    output: Path | None,
    names: tuple[str, ...],
    repeats: int,
    tables: Path | None,
) -> None:
    """Measure, or print what was measured."""
    if tables is not None:
        click.echo(_table(json.loads(tables.read_text(encoding="utf-8"))))
        return
    if checkpoint is None or peers is None or output is None:
        raise click.UsageError("Give --checkpoint, --peers and --output; or --tables.")
    results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"rows": {}}
    results["machine"] = _machine()
    with tempfile.TemporaryDirectory() as folder:
        for name, row in _rows(checkpoint, peers, Path(folder)).items():
            if (names and name not in names) or (not names and name in results["rows"]):
                continue
            click.echo(f"{name} …", err=True)
            results["rows"][name] = row(repeats)
            output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    click.echo(_table(results))


def _rows(checkpoint: Path, peers: Path, folder: Path) -> dict[str, Callable[[int], dict[str, Any]]]:
    return {
        "a document of 4,112 tokens": lambda repeats: _document(checkpoint, peers, folder, repeats),
        "1,024 tokens": lambda repeats: _against_products(repeats),
        "llama.cpp on 1,024 tokens": lambda repeats: _against_llama_cpp(repeats),
        "100,000 tokens": lambda _repeats: _long_document(folder),
        "200 short documents": lambda repeats: _short_documents(repeats),
        "two processes": lambda repeats: _two_processes(folder, repeats),
        "two workers": lambda repeats: _two_workers(repeats),
        "cold start": lambda repeats: _cold_start(folder, repeats),
    }


def _document(checkpoint: Path, peers: Path, folder: Path, repeats: int) -> dict[str, Any]:
    """File to chunks, model load excluded, each run in a process of its own."""
    backend = load_backend(find_model(FAST))
    text = _speech(4_112, backend)
    path, sentences_path = folder / "document.txt", folder / "sentences.json"
    path.write_text(text, encoding="utf-8", newline="")
    trace = Chunker(backend).analyze(text)
    sentences = [text[sentence.start : sentence.end] for sentence in trace.alignment.sentences]
    sentences_path.write_text(json.dumps(sentences), encoding="utf-8")

    def ours() -> Values:
        found = _run([sys.executable, "-m", "benchmarks.speed", "--model", FAST, "--only", str(path)])
        return {"seconds": found["total_s"], "peak_mb": found["peak_memory_mb"]}

    def theirs() -> Values:
        found: Values = _run(
            [str(peers), str(Path(__file__).with_name("lmchunker_peer.py")), str(checkpoint), str(sentences_path)]
        )
        return found

    from metachunk_edge.convert.reference import ReferenceBackend

    row = _in_turns(ours, theirs, repeats, {"seconds": "theirs / ours", "peak_mb": "ours / theirs"})
    whole = Settings(context_length=6_144)
    reference = ReferenceBackend(checkpoint, name="", sha256="", context_length=whole.context_length)
    expected = Chunker(reference, whole).analyze(text).boundaries
    found, wanted = (
        {number for number, strength in enumerate(boundaries) if strength is not None}
        for boundaries in (trace.boundaries, expected)
    )
    row["boundary_f1"], row["n_boundaries"] = boundary_f1(wanted, found), len(wanted)
    return row


def _against_products(repeats: int) -> dict[str, Any]:
    """Scoring 1,024 tokens, against the fastest 8-bit product of the model's shapes alone."""
    chunker = Chunker(load_backend(find_model(FAST)))
    text = _speech(1_024, chunker.backend)
    peaks = _products()

    def ours() -> Values:
        return {"gops": OPERATIONS_PER_TOKEN * 1_024 / _seconds(lambda: list(chunker.score_iter([text]))) / 1e9}

    def theirs() -> Values:
        return {"gops": max(operations / _seconds(product) / 1e9 for product, operations in peaks for _ in range(5))}

    return _in_turns(ours, theirs, repeats, {"gops": "ours / theirs"})


def _products() -> list[tuple[Callable[[], object], float]]:
    """The model's products of 256 rows as ONNX Runtime computes them, and how many operations each takes."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    generator = np.random.default_rng(0)
    products: list[tuple[Callable[[], object], float]] = []
    for n_inputs, n_outputs in ((896, 1_152), (896, 896), (896, 4_864), (4_864, 896), (896, 4_748)):
        weights = generator.integers(-127, 128, (n_inputs, n_outputs)).astype(np.int8)
        rows = generator.integers(0, 256, (256, n_inputs)).astype(np.uint8)
        graph = helper.make_graph(
            [helper.make_node("MatMulInteger", ["rows", "weights"], ["products"])],
            "product",
            [helper.make_tensor_value_info("rows", TensorProto.UINT8, rows.shape)],
            [helper.make_tensor_value_info("products", TensorProto.INT32, [256, n_outputs])],
            [numpy_helper.from_array(weights, "weights")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

        product = partial(session.run, None, {"rows": rows})
        product()
        products.append((product, 2.0 * 256 * n_inputs * n_outputs))
    return products


def _against_llama_cpp(repeats: int) -> dict[str, Any]:
    """The fast mode against the exact one, on the same text."""
    fast, exact = (Chunker(load_backend(find_model(name))) for name in (FAST, MODEL))
    text = _speech(1_024, fast.backend)

    def of(chunker: Chunker) -> Callable[[], Values]:
        return lambda: {"tokens_per_second": 1_024 / _seconds(lambda: list(chunker.score_iter([text])))}

    return _in_turns(of(fast), of(exact), repeats, {"tokens_per_second": "ours / theirs"})


def _long_document(folder: Path) -> dict[str, Any]:
    """Each length in a process of its own; the speed may not fall behind the first 4,000 tokens, nor memory rise."""
    found = {}
    for n_tokens in (4_000, 100_000):
        path = folder / f"{n_tokens}.txt"
        path.write_text(text_of(n_tokens, MODEL), encoding="utf-8", newline="")
        found[n_tokens] = _run([sys.executable, "-m", "benchmarks.speed", "--model", FAST, "--only", str(path)])
    short, long = found[4_000], found[100_000]
    return {
        "ours": {"tokens_per_second": long["tokens_per_second"], "peak_mb": long["peak_memory_mb"]},
        "theirs": {"tokens_per_second": short["tokens_per_second"], "peak_mb": short["peak_memory_mb"]},
        "ratios": {
            "tokens_per_second, ours / theirs": long["tokens_per_second"] / short["tokens_per_second"],
            "peak_mb, ours / theirs": long["peak_memory_mb"] / short["peak_memory_mb"],
        },
    }


def _short_documents(repeats: int) -> dict[str, Any]:
    """200 documents of 50 to 300 tokens, against one long document of as many tokens."""
    chunker = Chunker(load_backend(find_model(FAST)))
    whole = _speech(10_000, chunker.backend)
    offsets = encode(whole, chunker.backend.tokenizer).offsets
    lengths = np.random.default_rng(0).integers(50, 301, 200)
    starts = np.random.default_rng(1).integers(0, len(offsets) - 301, 200)
    texts = [
        whole[offsets[start, 0] : offsets[start + length, 0]] for start, length in zip(starts, lengths, strict=True)
    ]
    long = text_of(int(lengths.sum()), MODEL)

    def of(work: Callable[[], object]) -> Callable[[], Values]:
        return lambda: {"tokens_per_second": float(lengths.sum()) / _seconds(work)}

    ours, theirs = of(lambda: list(chunker.chunk_many(texts))), of(lambda: list(chunker.chunk_iter([long])))
    return _in_turns(ours, theirs, repeats, {"tokens_per_second": "ours / theirs"})


def _two_processes(folder: Path, repeats: int) -> dict[str, Any]:
    """Two processes with one thread each, against one with two threads."""
    path = folder / "half.txt"
    path.write_text(text_of(4_000, MODEL), encoding="utf-8", newline="")
    command = [sys.executable, "-m", "benchmarks.speed", "--model", FAST, "--only", str(path), "--threads"]

    def ours() -> Values:
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(_run, [[*command, "1"]] * 2))
        return {"tokens_per_second": sum(found["tokens_per_second"] for found in both)}

    def theirs() -> Values:
        return {"tokens_per_second": _run([*command, "2"])["tokens_per_second"]}

    return _in_turns(ours, theirs, repeats, {"tokens_per_second": "ours / theirs"})


def _two_workers(repeats: int) -> dict[str, Any]:
    """Four documents, two at a time with a thread each, against one after the other with two threads."""
    together, alone = (Chunker(load_backend(find_model(FAST), threads=2, workers=workers)) for workers in (2, 1))
    texts = [text_of(1_500, MODEL)] * 4
    n_tokens = 4 * 1_500

    def ours() -> Values:
        with ThreadPoolExecutor(2) as pool:
            return {"tokens_per_second": n_tokens / _seconds(lambda: list(pool.map(_chunked(together), texts)))}

    def theirs() -> Values:
        return {"tokens_per_second": n_tokens / _seconds(lambda: list(map(_chunked(alone), texts)))}

    return _in_turns(ours, theirs, repeats, {"tokens_per_second": "ours / theirs"})


def _chunked(chunker: Chunker) -> Callable[[str], object]:
    return lambda text: list(chunker.chunk_iter([text]))


def _cold_start(folder: Path, repeats: int) -> dict[str, Any]:
    """From the command to the first chunk of a file of 1 MB, against the import of ONNX Runtime."""
    path = folder / "large.txt"
    path.write_text(text_of(220_000, MODEL)[:1_000_000], encoding="utf-8", newline="")

    def ours() -> Values:
        started = time.perf_counter()
        command = [sys.executable, "-m", "metachunk_edge", "chunk", str(path), "--mode", "fast"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            process.stdout.readline()
            seconds = time.perf_counter() - started
            process.kill()
        return {"seconds": seconds}

    def theirs() -> Values:
        return {"seconds": _seconds(lambda: subprocess.run([sys.executable, "-c", "import onnxruntime"], check=True))}

    row = _in_turns(ours, theirs, repeats, {})
    row["ratios"] = {"seconds, ours - theirs": row["ours"]["seconds"] - row["theirs"]["seconds"]}
    return row


def _in_turns(
    ours: Callable[[], Values], theirs: Callable[[], Values], repeats: int, ratios: dict[str, str]
) -> dict[str, Any]:
    """Run both in turns; medians of the values, and the median and range of the ratios of neighbours."""
    pairs = [(ours(), theirs()) for _ in range(repeats)]
    row: dict[str, Any] = {
        "ours": {key: statistics.median(pair[0][key] for pair in pairs) for key in pairs[0][0]},
        "theirs": {key: statistics.median(pair[1][key] for pair in pairs) for key in pairs[0][1]},
        "ratios": {},
    }
    for key, direction in ratios.items():
        values = [a[key] / b[key] if direction == "ours / theirs" else b[key] / a[key] for a, b in pairs]
        row["ratios"][f"{key}, {direction}"] = statistics.median(values)
        row.setdefault("ranges", {})[f"{key}, {direction}"] = [min(values), max(values)]
    return row


def _speech(n_tokens: int, backend: Any) -> str:
    text = next(text.text for text in evaluation_texts()["chroma"] if text.name == SPEECH)
    return text[: int(encode(text, backend.tokenizer).offsets[n_tokens - 1, 1])]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _run(command: list[str]) -> Any:
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _machine() -> dict[str, str]:
    versions = ("metachunk-edge", "llama-cpp-python", "onnxruntime", "numpy")
    return {"processor": _processor(), "system": platform.platform()} | {
        name: importlib.metadata.version(name) for name in versions
    }


def _processor() -> str:
    """The processor's kind, and those of its features that decide about speed."""
    path = Path("/proc/cpuinfo")
    lines = dict(_fields(path.read_text(encoding="utf-8"))) if path.exists() else {}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
    features = [feature for feature in wanted if feature in lines.get("flags", "").split()]
    return f"{lines.get('model name', platform.processor())} ({', '.join(features)})"


def _fields(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, separator, value = line.partition(":")
        if separator:
            yield name.strip(), value.strip()


def _table(results: dict[str, Any]) -> str:
    lines = ["| row | ours | yardstick | ratio (range) |", "|---|---|---|---|"]
    for name, row in results["rows"].items():
        ours, theirs = (
            "; ".join(f"{key} {value:,.4g}" for key, value in row[side].items()) for side in ("ours", "theirs")
        )
        ratios = []
        for key, value in row["ratios"].items():
            low, high = row.get("ranges", {}).get(key, (None, None))
            ratios.append(f"{key}: {value:.3g}" + ("" if low is None else f" ({low:.3g}-{high:.3g})"))
        if "boundary_f1" in row:
            ratios.append(f"boundary F1: {row['boundary_f1']:.4f}")
        lines.append(f"| {name} | {ours} | {theirs} | {'; '.join(ratios)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
