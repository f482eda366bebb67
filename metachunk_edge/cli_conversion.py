"""The commands around conversion: parse, call, print."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, get_args

import click

from metachunk_edge.backends import Device, load_backend
from metachunk_edge.cache import ModelFile
from metachunk_edge.catalogue import find_model
from metachunk_edge.console import is_terminal
from metachunk_edge.documents import Document, find_documents, read_document
from metachunk_edge.errors import DocumentError, MetachunkError, MissingExtraError, SettingsError
from metachunk_edge.output import new_file
from metachunk_edge.parity import Recording, check, compare, first_tokens, packaged_texts, record
from metachunk_edge.parity_report import ParityRow, to_markdown, to_table
from metachunk_edge.settings import Settings, Window
from metachunk_edge.tolerances import tolerances

__all__ = ["convert_command", "parity_command"]

_MAX_SIZE = 64  # tokens: with the usual 512, a short text would be a single chunk, and that the same for every model
_DEFAULTS = Settings()
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("parity")
@click.argument("models", nargs=-1, required=True, metavar="MODELS…")
@click.option(
    "--reference",
    required=True,
    help="Checkpoint folder, or a GGUF model, whose weights are dequantized first; scored in float32.",
)
@click.option("--text", "texts", multiple=True, help="A text to compare on. [default: English and Chinese excerpts]")
@click.option(
    "--tokens", "n_tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Of each text, at most."
)
@click.option("--window", type=click.Choice(get_args(Window)), default=_DEFAULTS.window, show_default=True)
@click.option("--context-length", type=int, default=_DEFAULTS.context_length, show_default=True, help="Tokens in view.")
@click.option("--block-size", type=int, default=128, show_default=True, help="Tokens per call, the same for all.")
@click.option("--device", type=click.Choice(get_args(Device)), default="auto", show_default=True, help="Of the models.")
@click.option("--threads", type=int, help="CPU threads. [default: the physical cores]")
@click.option("--json", "json_path", type=_FILE, help="Write everything to this file, as JSON.")
@click.option("--markdown", "markdown_path", type=_FILE, help="Write the table to this file, as Markdown.")
@click.pass_context
def parity_command(
    context: click.Context,
    /,
    models: tuple[str, ...],
    reference: str,
    texts: tuple[str, ...],
    n_tokens: int,
    json_path: Path | None,
    markdown_path: Path | None,
    **options: Any,
) -> None:
    """Measure how far models are from a float32 reference, in scores, boundaries and chunks.

    The exit code is 1 if a model is outside the tolerance of its precision.
    """
    threads = options["threads"]
    if threads is not None and threads < 1:
        raise SettingsError(f"threads must be at least 1, got {threads}")
    files = [find_model(model) for model in models]
    settings = Settings(max_size=_MAX_SIZE, window=options["window"], context_length=options["context_length"])
    contents = [_read(document) for document in find_documents(texts)] if texts else None
    source = _source_path(reference)
    with tempfile.TemporaryDirectory(prefix="metachunk-edge-parity-", ignore_cleanup_errors=True) as folder:
        recording = _record_reference(source, contents, n_tokens, settings, Path(folder), options)
        rows = []
        for model_file in files:
            try:
                rows.append(_compare(recording, model_file, options))
            except MetachunkError as error:  # noqa: PERF203 - the others are compared all the same
                click.echo(f"{model_file.name}: {error}", err=True)
    note = (
        "The reference is dequantized: its weights are those of the GGUF file in float32, not the original ones."
        if source.is_file()
        else "The reference is the checkpoint in float32."
    )
    if rows:
        click.echo(to_table(rows))
    click.echo(f"\n{note}")
    for row in rows:
        for failure in row.failures or ():
            click.echo(f"{row.model['name']} ({row.model['precision']}): {failure}", err=True)
    if json_path is not None:
        report = {
            "reference": {**recording.model, "dequantized": source.is_file()},
            "comparisons": [row.as_dict() for row in rows],
        }
        with new_file(json_path) as file:
            file.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    if markdown_path is not None:
        with new_file(markdown_path) as file:
            file.write(f"{to_markdown(rows)}\n{note}\n")
    if len(rows) < len(files) or any(row.failures for row in rows):
        context.exit(1)


def _source_path(reference: str) -> Path:
    try:
        from metachunk_edge.convert.conversion import source_path
    except ImportError as error:
        raise MissingExtraError(
            f"The reference needs libraries that are not installed ({error}): run "
            "pip install 'metachunk-edge[convert]'."
        ) from error
    return source_path(reference)


def _record_reference(
    path: Path, texts: list[str] | None, n_tokens: int, settings: Settings, folder: Path, options: dict[str, Any]
) -> Recording:
    """Score the texts with the reference; its weights are freed when this returns."""
    from metachunk_edge.convert.checkpoint import dequantize, open_source
    from metachunk_edge.convert.reference import ReferenceBackend

    source = open_source(path)
    checkpoint = path
    if source.kind == "gguf":
        click.echo(f"Dequantizing {path} …", err=True)
        checkpoint = folder / "checkpoint"
        dequantize(path, checkpoint)
    backend = ReferenceBackend(
        checkpoint,
        name=source.name,
        sha256=source.sha256,
        threads=options["threads"],
        context_length=settings.context_length,
    )
    click.echo("Scoring with the float32 reference …", err=True)
    if texts is None:
        shortened = packaged_texts(backend.tokenizer, n_tokens)
    else:
        shortened = [first_tokens(text, backend.tokenizer, n_tokens) for text in texts]
    return record(backend, shortened, settings, block_size=options["block_size"], path=folder / "distributions.f32")


def _compare(recording: Recording, file: ModelFile, options: dict[str, Any]) -> ParityRow:
    click.echo(f"Comparing {file.name} …", err=True)
    context_length = recording.settings.context_length
    backend = load_backend(file, device=options["device"], threads=options["threads"], context_length=context_length)
    parity = compare(recording, backend)
    model = {**backend.model, "block_size": recording.block_size}
    tolerance = tolerances().get((file.format, str(file.precision).lower()))
    failures = None if tolerance is None else tuple(check(parity, tolerance))
    return ParityRow(model, recording.settings, parity, failures)


def _read(document: Document | DocumentError) -> str:
    if isinstance(document, DocumentError):
        raise document
    return "".join(read_document(document))


@click.command("convert")
@click.argument("source")
@click.option(
    "-p",
    "--precision",
    required=True,
    help="GGUF: f32, f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m, q4_0. ONNX: float32, float16, int8, int4.",
)
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder. [default: in the cache]"
)
@click.option("--name", help="What results call the model. [default: the source's name and the precision]")
@click.option("--threads", type=int, help="CPU threads. [default: the physical cores]")
def convert_command(source: str, output: Path | None, precision: str, name: str | None, threads: int | None) -> None:
    """Convert a Qwen2 checkpoint folder or GGUF file, hold it against its float32 reference, and print its folder.

    `--precision` decides the format, too. Nothing is left behind if the result is outside the tolerance.
    """
    from metachunk_edge.convert import convert_model

    with _ProgressLine() as line:
        model = convert_model(
            source, output, precision=precision, name=name, threads=threads, on_progress=line.on_progress
        )
    click.echo(
        f"{model.name}: within the tolerance of {model.precision} against its source in float32; "
        f"SHA-256 {model.sha256}.",
        err=True,
    )
    click.echo(str(model.path.parent))


class _ProgressLine:
    """Progress on standard error: on one line for a person, once per message for a log."""

    def __init__(self) -> None:
        self._to_person = is_terminal()
        self._shown = ""

    def __enter__(self) -> _ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._to_person:
            click.echo(err=True)

    def on_progress(self, message: str, done: int, total: int) -> None:
        """Show a step; `total` is 1 where the steps within it are not known."""
        count = f" {done} of {total}" if total > 1 else ""
        if self._to_person:
            start = "\n" if message != self._shown and self._shown else "\r\033[K"
            click.echo(f"{start}{message} …{count}", err=True, nl=False)
        elif message != self._shown:
            click.echo(f"{message} …", err=True)
        self._shown = message
