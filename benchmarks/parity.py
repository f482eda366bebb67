"""Every precision of a model against its float32 reference, in several window plans; size, memory and speed beside it.

    python -m benchmarks.parity qwen2.5-coder-0.5b-instruct --work FOLDER --output benchmarks/parity.json
    python -m benchmarks.parity --speed --work FOLDER --output benchmarks/parity.json
    python -m benchmarks.parity --tables benchmarks/parity.json
    python -m benchmarks.parity --tolerances benchmarks/parity.json      # metachunk_edge/tolerances.toml
    python -m benchmarks.parity --tiny --work FOLDER --output tiny.json  # then: --tolerances tiny.json

The model is a checkpoint folder, or a name or GGUF file, which is dequantized. Each precision is converted, compared in
every plan, and timed in a process of its own, by --speed, when nothing else runs. What --output has already is not
measured again. The whole matrix of the 0.5B model takes an hour on two cores, and 20 GB of disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import click

from benchmarks.texts import evaluation_texts
from metachunk_edge import ModelFile, Settings, convert_model, find_model
from metachunk_edge.backends import load_backend
from metachunk_edge.convert.checkpoint import dequantize, open_source
from metachunk_edge.convert.conversion import PRECISIONS
from metachunk_edge.convert.reference import ReferenceBackend
from metachunk_edge.converted import MANIFEST
from metachunk_edge.parity import Recording, compare, first_tokens, packaged_texts, record
from metachunk_edge.tolerances import Tolerance

MAX_SIZE = 64  # tokens, so that there are chunks to compare


@dataclass(frozen=True, slots=True)
class Plan:
    """How the texts are read, and how many of them, each up to `n_tokens`."""

    window: Literal["rolling", "strided"]
    context_length: int
    block_size: int
    n_texts: int
    n_tokens: int

    def __str__(self) -> str:
        return f"{self.window} {self.context_length:,}, blocks of {self.block_size}"


PLANS = (
    Plan("rolling", 2_048, 128, 4, 320),
    Plan("rolling", 264, 48, 2, 320),
    Plan("strided", 264, 128, 2, 320),
)
TINY_PLANS = (
    Plan("rolling", 512, 128, 2, 400),
    Plan("rolling", 264, 128, 2, 400),
    Plan("strided", 264, 128, 2, 400),
    Plan("rolling", 264, 33, 2, 400),
)


@click.command()
@click.argument("model", required=False)
@click.option("--tiny", is_flag=True, help="The tiny random model of the tests.")
@click.option("--speed", is_flag=True, help="Of what was converted before.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="A folder with room for the weights.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--precision", "precisions", multiple=True, default=PRECISIONS)
@click.option("--tables", type=click.Path(exists=True, path_type=Path), help="Print the Markdown tables of a result.")
@click.option("--tolerances", type=click.Path(exists=True, path_type=Path), help="Print what a result allows, as TOML.")
def main(
    model: str | None,
    tiny: bool,
    speed: bool,
    work: Path | None,
    output: Path | None,
    precisions: tuple[str, ...],
    tables: Path | None,
    tolerances: Path | None,
) -> None:
    """Measure, or print what was measured."""
    if tables is not None:
        click.echo(_tables(_read(tables)))
    elif tolerances is not None:
        click.echo(_tolerances(_read(tolerances)))
    elif work is None or output is None or sum((model is not None, tiny, speed)) != 1:
        raise click.UsageError("Give MODEL, --tiny or --speed, with --work and --output; or --tables; or --tolerances.")
    elif speed:
        _time(work, output)
    else:
        work.mkdir(parents=True, exist_ok=True)
        _measure(_tiny(work) if model is None else _checkpoint(model, work), work, output, precisions, tiny=tiny)


def _tiny(work: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from tiny import make_tiny_checkpoint

    return make_tiny_checkpoint(work / "checkpoint")


def _checkpoint(model: str, work: Path) -> Path:
    if Path(model).is_dir():
        return Path(model)
    folder = work / "checkpoint"
    if not folder.exists():
        dequantize(find_model(model).path, folder)
    return folder


def _measure(checkpoint: Path, work: Path, output: Path, precisions: tuple[str, ...], *, tiny: bool) -> None:
    rows = _read(output) if output.exists() else []
    missing = [name for name in precisions if name not in {row["precision"] for row in rows}]
    recordings = [_record(checkpoint, plan, work, tiny=tiny) for plan in (TINY_PLANS if tiny else PLANS)]
    for precision in missing:
        click.echo(f"{precision} …", err=True)
        folder = work / precision
        if not (folder / MANIFEST).exists():
            # All figures are wanted, good or bad, and of a new precision, too.
            with patch.multiple("metachunk_edge.convert.verify", check=lambda *_: [], tolerance_of=lambda *_: None):
                convert_model(checkpoint, folder, precision=precision)
        converted = find_model(str(folder))
        rows.append(
            {
                "precision": precision,
                "format": converted.format,
                "n_bytes": sum(file.stat().st_size for file in folder.iterdir()),
                "plans": {str(plan): _compare(recording, converted) for plan, recording in recordings},
            }
        )
        output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _time(work: Path, output: Path) -> None:
    rows = _read(output)
    for row in rows:
        click.echo(f"{row['precision']} …", err=True)
        row["speed"] = _speed(work / row["precision"])
        output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _record(checkpoint: Path, plan: Plan, work: Path, *, tiny: bool) -> tuple[Plan, Recording]:
    click.echo(f"reference, {plan} …", err=True)
    source = open_source(checkpoint)
    context_length = max(plan.context_length, 512)
    reference = ReferenceBackend(checkpoint, name=source.name, sha256=source.sha256, context_length=context_length)
    if tiny:
        texts = packaged_texts(reference.tokenizer, plan.n_tokens)
    else:
        texts = [first_tokens(text, reference.tokenizer, plan.n_tokens) for text in _texts()][: plan.n_texts]
    settings = Settings(max_size=MAX_SIZE, window=plan.window, context_length=plan.context_length)
    path = work / f"{str(plan).replace(' ', '-')}.f32"
    return plan, record(reference, texts, settings, block_size=plan.block_size, path=path)


def _texts() -> Iterator[str]:
    """An encyclopaedia article in English and in Chinese, a speech, and a meeting in Chinese."""
    wanted = ("xquad.en.json: Warsaw", "xquad.zh.json: Warsaw", "state_of_the_union.md", "4_0")
    texts = {text.name: text.text for folder in evaluation_texts().values() for text in folder}
    yield from (texts[name] for name in wanted)


def _compare(recording: Recording, model: ModelFile) -> dict[str, Any]:
    context_length = max(recording.settings.context_length, 512)
    return asdict(compare(recording, load_backend(model, device="cpu", context_length=context_length)))


def _speed(folder: Path) -> dict[str, float]:
    output = folder / "speed.json"
    command = [sys.executable, "-m", "benchmarks.speed", "--model", str(folder), "--tokens", "1000", "--output"]
    subprocess.run([*command, str(output)], check=True, capture_output=True)
    speed: dict[str, float] = json.loads(output.read_text(encoding="utf-8"))["rows"][0]
    output.unlink()
    return speed


def _read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def _tables(rows: list[dict[str, Any]]) -> str:
    lines = []
    for plan in rows[0]["plans"]:
        lines += [f"### {plan[0].upper()}{plan[1:]}", "", _HEADER, "|---|" + "---:|" * (_HEADER.count("|") - 2)]
        lines += [_line(f"{row['format']} {row['precision']}", row["plans"][plan]) for row in rows]
        lines.append("")
    return "\n".join(lines)


_HEADER = (
    "| model | mean abs Δ ln p | 99.9 % | max | RMS Δp | KL mean | KL 99.9 % | same top | NLL | sentence rank | "
    "boundary F1 | identical chunks |"
)


def _line(name: str, parity: dict[str, float]) -> str:
    nats = [f"{parity[key]:.3g}" for key in ("mean_abs", "p999_abs", "max_abs")]
    divergence = [f"{parity[key]:.2g}" for key in ("kl_mean", "kl_p999")]
    cells = [
        name,
        *nats,
        f"{100 * parity['rms_delta_p']:.2g} %",
        *divergence,
        f"{100 * parity['same_top']:.1f} %",
        f"{100 * parity['nll_difference']:+.2f} %",
        *(f"{parity[key]:.4f}" for key in ("rank_correlation", "boundary_f1")),
        f"{100 * parity['identical_chunks']:.0f} %",
    ]
    return f"| {' | '.join(cells)} |"


def _tolerances(rows: list[dict[str, Any]]) -> str:
    """What the worst plan measured, with room for other texts and processors, and no more."""
    tables = []
    for row in rows:
        plans = list(row["plans"].values())
        worst = {name: max(abs(plan[name]) for plan in plans) for name in (*_ROOM, "nll_difference")}
        least = {name: min(plan[name] for plan in plans) for name in _ROOM_BELOW}
        maxima = {name: max(_SMALLEST, worst[name] * room) for name, room in _ROOM.items()}
        nll = max(_SMALLEST, 3 * worst["nll_difference"] + worst["mean_abs"] / 20)  # it is of either sign by chance
        minima = {name: max(0.0, 1 - max((1 - least[name]) * 1.5, room)) for name, room in _ROOM_BELOW.items()}
        tolerance = Tolerance(**maxima, nll=nll, **minima)
        values = "\n".join(f"{name} = {float(f'{value:.3g}')!r}" for name, value in asdict(tolerance).items())
        tables.append(f"[{row['format']}.{row['precision']}]\n{values}\n")
    return "\n".join(tables)


_SMALLEST = 1e-8
# The tails need more: among the 512 tokens that a conversion is verified on, the 99.9th percentile is the largest value
# but one, and with the 1.5B model in q8_0 that of the KL divergence was eight times the 0.5B's.
_ROOM = {"mean_abs": 1.25, "p999_abs": 2.5, "max_abs": 3.0, "rms_delta_p": 1.4, "kl_mean": 1.5, "kl_p999": 10.0}
# Of a text with few sentences, a single one that changes places or loses its boundary takes this much away.
_ROOM_BELOW = {"same_top": 0.005, "rank_correlation": 0.1, "boundary_f1": 0.15, "identical_chunks": 0.3}


if __name__ == "__main__":
    main()
