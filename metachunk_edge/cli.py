"""The command line: parse, call, print. Results go to stdout, everything else to stderr.

Every error that the package raises on purpose ends here as one sentence and exit code 1.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, get_args

import click

from metachunk_edge import __version__
from metachunk_edge.backends import Device
from metachunk_edge.batch import Batch, BatchReport, ChunkCount, DirectorySink, StreamSink, progress_in_bytes
from metachunk_edge.cache import cache_folder
from metachunk_edge.catalogue import DEFAULT_MODEL, catalogue, find_model, is_pulled, remove, verify
from metachunk_edge.chunker import Chunker, cut
from metachunk_edge.cli_conversion import convert_command, parity_command
from metachunk_edge.console import Console, is_terminal
from metachunk_edge.convert import convert_model
from metachunk_edge.converted import converted_models, open_converted
from metachunk_edge.documents import (
    STANDARD_INPUT,
    TEXT_PATTERNS,
    Document,
    check_document,
    find_documents,
    read_document,
)
from metachunk_edge.download import pull
from metachunk_edge.errors import (
    ConversionError,
    DeviceWarning,
    DocumentError,
    MetachunkError,
    MissingExtraError,
    SettingsError,
)
from metachunk_edge.modes import Mode, choose_model, fast_name, why_not_fast
from metachunk_edge.output import Format, Writer, new_file
from metachunk_edge.scores import StoredScores, read_scores, write_scores
from metachunk_edge.settings import Merge, Method, Settings, Unit, Window

__all__ = ["main"]


class _Group(click.Group):
    """Turns errors into one sentence and exit code 1, and Ctrl-C into exit code 130, in one place."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except MetachunkError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:  # the reader of our output has enough, and click ends quietly
            raise
        except OSError as error:
            _forget_unwritten_output()
            where = error.filename or "standard output"
            raise click.ClickException(f"{where}: {error.strerror or error}.") from error
        except KeyboardInterrupt:
            _forget_unwritten_output()
            click.echo("Interrupted.", err=True)
            context.exit(130)


def _forget_unwritten_output() -> None:
    """What standard output did not take would fail again, or wait again, when the interpreter ends."""
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """What the user should know is a note; warnings for programmers look as Python prints them."""
    if issubclass(category, DeviceWarning):
        click.echo(f"Note: {message}", err=True)
    else:
        click.echo(warnings.formatwarning(message, category, filename, lineno, line), file=file, err=True, nl=False)


def _word_or_number(number: type[int] | type[float], *words: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if value in words:
            return value
        try:
            return number(value)
        except ValueError as error:
            kind = "a whole number" if number is int else "a number"
            raise click.BadParameter(f"must be {', '.join(words)} or {kind}, got {value!r}.") from error

    return convert


_DEFAULTS = Settings()
_OUTPUT = click.Path(dir_okay=False, allow_dash=True, path_type=Path)


def _model_options(command: Any) -> Any:
    options = (
        click.option(
            "-m",
            "--model",
            default=DEFAULT_MODEL,
            show_default=True,
            help="Name, or GGUF file or converted folder.",
        ),
        click.option(
            "--mode",
            type=click.Choice(get_args(Mode)),
            default="auto",
            show_default=True,
            help="fast: the int8 model that pull makes; exact: the model as downloaded; auto: fast where it can run.",
        ),
        click.option(
            "--device",
            type=click.Choice(get_args(Device)),
            default="auto",
            show_default=True,
            help="Where the model runs; auto: on a GPU where this build and machine have one.",
        ),
        click.option("--threads", type=int, help="CPU threads. [default: the physical cores]"),
        click.option(
            "--context-length", type=int, default=_DEFAULTS.context_length, show_default=True, help="Tokens in view."
        ),
        click.option(
            "--window",
            type=click.Choice(get_args(Window)),
            default=_DEFAULTS.window,
            show_default=True,
            help="How the context moves through a long text.",
        ),
        click.option("--language", default=_DEFAULTS.language, show_default=True, help="Code for splitting sentences."),
        click.option("--encoding", help="Of the inputs. [default: UTF-8, or what a byte-order mark says]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="metachunk-edge")
@click.pass_context
def main(context: click.Context) -> None:
    """Cut documents into chunks for retrieval, where a small language model says so; offline."""
    context.with_resource(warnings.catch_warnings())
    warnings.showwarning = _print_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="")


@main.command("chunk")
@click.argument("inputs", nargs=-1, required=True, metavar="FILES… | DIRECTORIES… | -")
@click.option("--max-size", type=int, default=_DEFAULTS.max_size, show_default=True, help="No chunk is larger.")
@click.option("--min-size", type=int, help="For --merge optimal. [default: a quarter of --max-size]")
@click.option("--unit", type=click.Choice(get_args(Unit)), default=_DEFAULTS.unit, show_default=True, help="Of sizes.")
@click.option(
    "--method",
    type=click.Choice(get_args(Method)),
    default=_DEFAULTS.method,
    show_default=True,
    help="How boundaries are found.",
)
@click.option(
    "--threshold",
    type=_word_or_number(float, "auto"),
    metavar="NATS|auto",
    default=_DEFAULTS.threshold,
    show_default=True,
    help="How far a score must drop for a boundary; auto moves with the text.",
)
@click.option(
    "--merge",
    type=click.Choice(get_args(Merge)),
    default=_DEFAULTS.merge,
    show_default=True,
    help="none: the bare meta-chunks; greedy: the paper's rule; optimal: the best that fit.",
)
@click.option(
    "--overlap",
    type=_word_or_number(int, "none", "dynamic"),
    metavar="none|dynamic|N",
    default=_DEFAULTS.overlap,
    show_default=True,
    help="Sentences repeated in the next chunk; dynamic: the one at the minimum.",
)
@click.option(
    "--scores",
    "scores_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Cut from a file that `score` wrote, without a model.",
)
@click.option(
    "-f",
    "--format",
    "output_format",
    type=click.Choice(get_args(Format)),
    default="jsonl",
    show_default=True,
    help="jsonl: one object per chunk and line; json: one object; text: to be read.",
)
@click.option("-o", "--output", type=_OUTPUT, help="A file. [default: standard output]")
@click.option("-d", "--output-dir", type=click.Path(file_okay=False, path_type=Path), help="One file per input.")
@click.option("--resume", is_flag=True, help="With --output-dir: skip inputs whose complete result is there.")
@click.option(
    "--glob", "patterns", multiple=True, help=f"Files to take from directories. [default: {' '.join(TEXT_PATTERNS)}]"
)
@click.option("--workers", type=int, default=1, show_default=True, help="Documents read at once; they share --threads.")
@_model_options
@click.pass_context
def chunk_command(context: click.Context, /, inputs: tuple[str, ...], scores_path: Path | None, **options: Any) -> None:
    """Chunk texts and write the chunks with their exact offsets.

    Each chunk has source, index, text, start, end (characters), n_tokens, the strength of the boundary before it (0
    where the text was cut for size alone), and model.
    """
    settings = Settings(**{name: options[name] for name in Settings.__dataclass_fields__})
    if scores_path is not None:
        _chunk_from_scores(context, inputs, scores_path, settings, options)
        return
    if options["resume"] and options["output_dir"] is None:
        raise SettingsError("--resume needs --output-dir, where complete results can be found")
    if options["workers"] < 1:
        raise SettingsError(f"workers must be at least 1, got {options['workers']}")
    if options["output"] is not None and options["output_dir"] is not None:
        raise SettingsError("--output and --output-dir exclude each other: leave one of them out")
    found = list(find_documents(inputs, patterns=options["patterns"] or TEXT_PATTERNS))
    with Console(found) as console:
        report = _run(found, settings, console, options)
    console.summarize(report)
    if report.n_failed:
        context.exit(1)


def _load(options: dict[str, Any], settings: Settings) -> Chunker:
    names = ("mode", "device", "threads", "workers")
    chosen = {name: options[name] for name in names if name in options}
    return Chunker.from_pretrained(options["model"], settings, **chosen)


def _run(
    found: list[Document | DocumentError], settings: Settings, console: Console, options: dict[str, Any]
) -> BatchReport:
    def load() -> Chunker:
        return _load(options, settings)

    output, output_format, directory = options["output"], options["output_format"], options["output_dir"]
    inputs = [item.path for item in found if isinstance(item, Document) and item.path is not None]
    if directory is not None:
        model = choose_model(options["model"], options["mode"], options["device"])
        made_with = {"sha256": model.sha256, "version": __version__}
        sink = DirectorySink(
            directory,
            output_format,
            settings=settings,
            fingerprint=settings.fingerprint(
                made_with | {name: options[name] for name in ("device", "threads", "workers", "encoding")}
            ),
            resume=options["resume"],
            inputs=frozenset(map(_resolved, inputs)),
        )
        return Batch(load, sink, console, encoding=options["encoding"], workers=options["workers"]).run(found)
    with _opened(output, inputs) as file:
        writer = Writer(file, output_format, settings=settings.as_dict(), can_cut_back=file is not sys.stdout)
        batch = Batch(load, StreamSink(writer), console, encoding=options["encoding"], workers=options["workers"])
        report = batch.run(found)
        writer.close()
    return report


def _chunk_from_scores(
    context: click.Context, inputs: tuple[str, ...], scores_path: Path, settings: Settings, options: dict[str, Any]
) -> None:
    for name in ("model", "mode", "device", "threads", "context_length", "window", "language", "output_dir", "resume"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise SettingsError(
                f"--{name.replace('_', '-')} does not go with --scores, where the model has done its part and there is "
                "one text: leave it out"
            )
    if len(inputs) != 1:
        raise SettingsError(f"--scores takes one text, got {len(inputs)}")
    document = _one_document(inputs[0])
    text = "".join(read_document(document, encoding=options["encoding"]))
    stored = _read_scores(scores_path, text)
    settings = replace(settings, **stored.scoring)
    count = ChunkCount()
    with _opened(options["output"], [document.path, scores_path]) as file:
        writer = Writer(file, options["output_format"], settings=settings.as_dict())
        writer.write(document.source, count.watch(cut(stored.sentences, settings)), model=stored.model)
        writer.close()
    if note := count.note(document.source, settings):
        click.echo(f"Note: {note}", err=True)


def _read_scores(path: Path, text: str) -> StoredScores:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return read_scores(lines, text)
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read ({error.strerror or error}).") from error


def _one_document(name: str) -> Document:
    if Path(name).is_dir():
        raise DocumentError(f"{name}: a directory; name one file.")
    (document,) = find_documents([name])
    if isinstance(document, DocumentError):
        raise document
    return document


@main.command("score")
@click.argument("document_name", metavar="FILE | -")
@click.option("-o", "--output", type=_OUTPUT, help="A file. [default: standard output]")
@_model_options
def score_command(document_name: str, output: Path | None, **options: Any) -> None:
    """Write the score of every sentence and token of a text, with their offsets.

    `metachunk-edge chunk FILE --scores SCORES` cuts from them at once.
    """
    settings = Settings(**{name: options[name] for name in ("context_length", "window", "language")})
    document = _one_document(document_name)
    encoding = options["encoding"]
    facts = None if document.path is None else check_document(document, encoding=encoding)
    with Console([document]) as console, _opened(output, [document.path]) as file:
        chunker = _load(options, settings)
        sentences = chunker.score_iter(
            read_document(document, encoding=encoding), on_tokens=progress_in_bytes(console.on_progress, facts)
        )
        n_sentences = write_scores(
            sentences, file, source=document.source, model=chunker.backend.model, scoring=settings.scoring()
        )
    if n_sentences == 0:
        click.echo(f"Note: {document.source}: empty or blank, so there are no sentences.", err=True)


@main.group("models")
def models_group() -> None:
    """List, download, check and remove models. Only `pull` opens a connection."""


@models_group.command("list")
def models_list() -> None:
    """List the catalogue, what of it is downloaded or was run by this project, and the converted models."""
    for entry in catalogue().values():
        state = "downloaded" if is_pulled(entry) else "not run here" if not entry.run else ""
        size = "?" if entry.n_bytes is None else f"{entry.n_bytes / 1e6:,.0f} MB"
        default = "*" if entry.name == DEFAULT_MODEL else " "
        click.echo(f"{default} {entry.name:<30} {entry.precision:<8} {size:>9}  {state:<12} {entry.description}")
    for model in converted_models():
        origin = f"from {model.manifest['source']['name']}"
        size = f"{model.n_bytes / 1e6:,.0f} MB"
        click.echo(f"  {model.name:<30} {model.precision:<8} {size:>9}  {'converted':<12} {origin}")


@models_group.command("pull")
@click.argument("name", default=DEFAULT_MODEL)
@click.option("--fast/--no-fast", default=True, show_default=True, help="Make its int8 model for the CPU, too.")
def models_pull(name: str, fast: bool) -> None:
    """Download a model, check its SHA-256, print its path, and make its fast mode of it."""
    to_person = is_terminal()
    shown = ""

    def on_progress(message: str, done: int, total: int) -> None:
        nonlocal shown
        if to_person:
            click.echo(f"\r\033[K{message}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", err=True, nl=False)
        elif message != shown:
            click.echo(f"{message} ({total / 1e6:,.0f} MB)", err=True)
        shown = message

    try:
        model = pull(name, on_progress=on_progress)
    finally:
        if shown and to_person:
            click.echo(err=True)
    click.echo(f"{model.name}: SHA-256 is right ({model.sha256}).", err=True)
    click.echo(str(model.path))
    if fast and open_converted(fast_name(name)) is None:
        try:
            convert_model(name, precision="int8_fused", name=fast_name(name), on_progress=_echo_step)
        except (ConversionError, MissingExtraError) as error:
            click.echo(f"Note: no fast mode of {name}: {error}", err=True)


def _echo_step(message: str, _done: int, _total: int) -> None:
    click.echo(f"fast mode: {message} …", err=True)


@models_group.command("path")
@click.argument("name", default=DEFAULT_MODEL)
def models_path(name: str) -> None:
    """Print where a downloaded or converted model lies."""
    click.echo(str(find_model(name).path))


@models_group.command("verify")
@click.argument("name", default=DEFAULT_MODEL)
def models_verify(name: str) -> None:
    """Compute a model file's SHA-256 again and compare it."""
    model = verify(name)
    click.echo(f"{model.name}: {model.sha256}  {model.path}")


@models_group.command("remove")
@click.argument("name")
def models_remove(name: str) -> None:
    """Remove a downloaded or converted model: the files that pull or convert wrote, nothing else."""
    for path in remove(name):
        click.echo(f"removed {path}", err=True)


@main.command("info")
def info_command() -> None:
    """Show versions, backends, devices, CPU features and the cache folder."""
    import llama_cpp

    from metachunk_edge.backends.devices import default_threads, gpu_devices
    from metachunk_edge.backends.ort import describe_runtime

    features = llama_cpp.llama_print_system_info().decode("utf-8", errors="replace")
    default_state = "downloaded" if is_pulled(catalogue()[DEFAULT_MODEL]) else "not downloaded"
    obstacle = why_not_fast(DEFAULT_MODEL, "auto")
    rows = {
        "metachunk-edge": __version__,
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "GGUF models": f"llama-cpp-python {llama_cpp.__version__}, with "
        + ", ".join(["cpu", *(f"gpu: {text}" for text in gpu_devices().values())]),
        "ONNX models": describe_runtime(),
        "other versions": ", ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "sentencex", "regex")
        ),
        "threads": f"{default_threads()} by default",
        "CPU features": ", ".join(
            part.split("=")[0].split(":")[-1].strip() for part in features.split("|") if part.strip().endswith("= 1")
        ),
        "cache folder": str(cache_folder()),
        "default model": f"{DEFAULT_MODEL} ({default_state})",
        "its mode": "fast" if obstacle is None else f"exact, since {obstacle}",
    }
    for name, value in rows.items():
        click.echo(f"{name:<15} {value}")


main.add_command(convert_command)
main.add_command(parity_command)


@contextlib.contextmanager
def _opened(output: Path | None, inputs: list[Path] | list[Path | None]) -> Iterator[TextIO]:
    """Open the output, standard output by default; none of the inputs is written over."""
    if output is not None and str(output) != STANDARD_INPUT:
        if _resolved(output) in [_resolved(path) for path in inputs if path is not None]:
            raise SettingsError(f"--output must not be one of the inputs, got {output}")
        with new_file(output) as file:
            yield file
    elif sys.stdout is None:
        raise DocumentError("Standard output is closed: name a file with --output.")
    else:
        yield sys.stdout


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))
