"""The command line: parse, call, print. Results go to stdout, everything else to stderr.

Every error that the package raises on purpose ends here as one sentence and exit code 1.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, get_args

import click

from metachunk_edge import __version__
from metachunk_edge.batch import Batch, BatchReport, DirectorySink, StreamSink
from metachunk_edge.catalogue import DEFAULT_MODEL, cache_folder, catalogue, find_model, is_pulled, remove, verify
from metachunk_edge.documents import TEXT_PATTERNS, Document, check_document, find_documents, read_document
from metachunk_edge.errors import DocumentError, MetachunkError, SettingsError
from metachunk_edge.output import Format, Writer, new_file
from metachunk_edge.settings import Merge, Method, Settings, Unit, Window

__all__ = ["main"]


class _Group(click.Group):
    """Turns the package's errors into one sentence and exit code 1, in one place."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except MetachunkError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:  # the reader of our output has enough
            sys.stderr.close()
            context.exit(0)


class _Threshold(click.ParamType):
    name = "nats|auto"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        return value if value == "auto" else click.FLOAT.convert(value, parameter, context)


class _Overlap(click.ParamType):
    name = "none|dynamic|N"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        return value if value in ("none", "dynamic") else click.INT.convert(value, parameter, context)


_DEFAULTS = Settings()


def _model_options(command: Any) -> Any:
    for option in (
        click.option("-m", "--model", default=DEFAULT_MODEL, show_default=True, help="Catalogue name or GGUF file."),
        click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True),
        click.option("--threads", type=int, help="CPU threads. [default: the physical cores]"),
        click.option(
            "--context-length", type=int, default=_DEFAULTS.context_length, show_default=True, help="Tokens in view."
        ),
        click.option(
            "--window", type=click.Choice(get_args(Window)), default=_DEFAULTS.window, show_default=True,
            help="How the context moves through a long text.",
        ),
        click.option("--language", default=_DEFAULTS.language, show_default=True, help="Code for splitting sentences."),
        click.option("--encoding", help="Of the inputs. [default: UTF-8, or what a byte-order mark says]"),
    ):  # fmt: skip
        command = option(command)
    return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="metachunk-edge")
def main() -> None:
    """Cut documents into chunks for retrieval, where a small language model says so; offline."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", newline="")
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(encoding="utf-8", errors="replace")


@main.command("chunk")
@click.argument("inputs", nargs=-1, required=True, metavar="FILES… | DIRECTORIES… | -")
@click.option("--max-size", type=int, default=_DEFAULTS.max_size, show_default=True, help="No chunk is larger.")
@click.option("--min-size", type=int, help="For --merge optimal. [default: a quarter of --max-size]")
@click.option("--unit", type=click.Choice(get_args(Unit)), default=_DEFAULTS.unit, show_default=True, help="Of sizes.")
@click.option("--method", type=click.Choice(get_args(Method)), default=_DEFAULTS.method, show_default=True)
@click.option("--threshold", type=_Threshold(), default=_DEFAULTS.threshold, show_default=True,
              help="How far a score must drop for a boundary; auto moves with the text.")  # fmt: skip
@click.option("--merge", type=click.Choice(get_args(Merge)), default=_DEFAULTS.merge, show_default=True,
              help="none: the bare meta-chunks; greedy: the paper's rule; optimal: the best boundaries that fit.")  # fmt: skip
@click.option("--overlap", type=_Overlap(), default=_DEFAULTS.overlap, show_default=True,
              help="Sentences repeated in the next chunk; dynamic: the one at the minimum.")  # fmt: skip
@click.option("--scores", "scores_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Cut from a file that `score` wrote, without a model.")  # fmt: skip
@click.option(
    "-f", "--format", "output_format", type=click.Choice(get_args(Format)), default="jsonl", show_default=True
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="A file. [default: stdout]")
@click.option("-d", "--output-dir", type=click.Path(file_okay=False, path_type=Path), help="One file per input.")
@click.option("--resume", is_flag=True, help="With --output-dir: skip inputs whose complete result is there.")
@click.option(
    "--glob", "patterns", multiple=True, help=f"Files to take from directories. [default: {' '.join(TEXT_PATTERNS)}]"
)
@_model_options
@click.pass_context
def chunk_command(context: click.Context, inputs: tuple[str, ...], scores_path: Path | None, **options: Any) -> None:
    """Chunk texts and write the chunks with their exact offsets.

    Each chunk has source, index, text, start, end (characters), n_tokens, and the strength of the boundary before it.
    """
    settings = Settings(**{name: options[name] for name in Settings.__dataclass_fields__})
    if scores_path is not None:
        _chunk_from_scores(context, inputs, scores_path, settings, options)
        return
    if options["resume"] and options["output_dir"] is None:
        raise SettingsError("resume needs an output directory (--output-dir), where complete results can be found")
    if options["output"] is not None and options["output_dir"] is not None:
        raise SettingsError("give either --output or --output-dir, not both")
    found = list(find_documents(inputs, patterns=options["patterns"] or TEXT_PATTERNS))
    with _Console(found) as console:
        report = _run(found, settings, console, options)
    console.summarize(report)
    if report.n_failed:
        context.exit(1)


def _run(
    found: list[Document | DocumentError], settings: Settings, console: _Console, options: dict[str, Any]
) -> BatchReport:
    from metachunk_edge.chunker import Chunker

    model = find_model(options["model"])
    identity = {"name": model.name, "precision": model.precision, "sha256": model.sha256}
    identity |= {"device": options["device"], "threads": options["threads"]}

    def load() -> Chunker:
        return Chunker.from_pretrained(options["model"], settings, device=options["device"], threads=options["threads"])

    if options["output_dir"] is not None:
        sink = DirectorySink(
            options["output_dir"],
            options["output_format"],
            model=identity,
            settings=settings,
            fingerprint=settings.fingerprint(identity | {"version": __version__}),
            resume=options["resume"],
        )
        return Batch(load, sink, console, encoding=options["encoding"]).run(found)
    with _opened(options["output"]) as file:
        writer = Writer(file, options["output_format"], model=identity, settings=settings.as_dict())
        report = Batch(load, StreamSink(writer), console, encoding=options["encoding"]).run(found)
        writer.close()
    return report


def _chunk_from_scores(
    context: click.Context, inputs: tuple[str, ...], scores_path: Path, settings: Settings, options: dict[str, Any]
) -> None:
    from metachunk_edge.chunker import cut
    from metachunk_edge.scores import read_scores

    for name in ("model", "device", "threads", "context_length", "window", "language"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise SettingsError(f"{name} is fixed by the scores file: leave it out, or score the document again")
    documents = list(find_documents(inputs, patterns=options["patterns"] or TEXT_PATTERNS))
    document = documents[0]
    if len(documents) != 1:
        raise SettingsError(f"--scores takes one document, got {len(documents)}")
    if isinstance(document, DocumentError):
        raise document
    text = "".join(read_document(document, encoding=options["encoding"]))
    try:
        with scores_path.open(encoding="utf-8") as lines:
            stored = read_scores(lines, text)
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"{scores_path}: cannot be read ({error}).") from error
    settings = replace(settings, **stored.scoring)
    with _opened(options["output"]) as file:
        writer = Writer(file, options["output_format"], model=stored.model, settings=settings.as_dict())
        writer.write(document.source, cut(stored.sentences, settings))
        writer.close()


@main.command("score")
@click.argument("document_name", metavar="FILE | -")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="A file. [default: stdout]")
@_model_options
def score_command(document_name: str, output: Path | None, **options: Any) -> None:
    """Write the score of every sentence and token of a text, with their offsets.

    `metachunk-edge chunk FILE --scores SCORES` cuts from them in milliseconds.
    """
    from metachunk_edge.chunker import Chunker
    from metachunk_edge.scores import write_scores

    settings = Settings(**{name: options[name] for name in ("context_length", "window", "language")})
    if Path(document_name).is_dir():
        raise DocumentError(f"{document_name}: a directory; `score` takes one file.")
    (document,) = find_documents([document_name])
    if isinstance(document, DocumentError):
        raise document
    if document.path is not None:
        check_document(document, encoding=options["encoding"])
    chunker = Chunker.from_pretrained(options["model"], settings, device=options["device"], threads=options["threads"])
    with _Console([document]) as console, _opened(output) as file:
        sentences = chunker.score_iter(
            read_document(document, encoding=options["encoding"]), on_tokens=console.on_tokens
        )
        n_sentences = write_scores(
            sentences, file, source=document.source, model=chunker.backend.model, scoring=settings.scoring()
        )
    if n_sentences == 0:
        click.echo(f"{document.source}: empty or blank, so there are no sentences.", err=True)


@main.group("models")
def models_group() -> None:
    """List, download, check and remove models. Only `pull` opens a connection."""


@models_group.command("list")
def models_list() -> None:
    """List the catalogue: what is downloaded, and what has been run by this project."""
    for entry in catalogue().values():
        state = "downloaded" if is_pulled(entry) else "not run here" if not entry.run else ""
        size = "?" if entry.n_bytes is None else f"{entry.n_bytes / 1e6:,.0f} MB"
        default = "*" if entry.name == DEFAULT_MODEL else " "
        click.echo(f"{default} {entry.name:<30} {entry.precision:<8} {size:>9}  {state:<12} {entry.description}")


@models_group.command("pull")
@click.argument("name", default=DEFAULT_MODEL)
def models_pull(name: str) -> None:
    """Download a model, check its SHA-256, and print its path."""
    from metachunk_edge.download import pull

    shown = ""

    def on_progress(message: str, done: int, total: int) -> None:
        nonlocal shown
        if sys.stderr.isatty():
            click.echo(f"\r\033[K{message}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", err=True, nl=False)
        elif message != shown:
            click.echo(f"{message} ({total / 1e6:,.0f} MB)", err=True)
        shown = message

    model = pull(name, on_progress=on_progress)
    if shown and sys.stderr.isatty():
        click.echo(err=True)
    click.echo(f"{model.name}: SHA-256 is right ({model.sha256}).", err=True)
    click.echo(str(model.path))


@models_group.command("path")
@click.argument("name", default=DEFAULT_MODEL)
def models_path(name: str) -> None:
    """Print where a downloaded model lies."""
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
    """Remove a downloaded model: the files that pull wrote, nothing else."""
    for path in remove(name):
        click.echo(f"removed {path}", err=True)


@main.command("info")
def info_command() -> None:
    """Show versions, backends, devices, CPU features and the cache folder."""
    import llama_cpp

    from metachunk_edge.backends.llama_cpp import default_threads, gpu_devices

    features = llama_cpp.llama_print_system_info().decode("utf-8", errors="replace")
    rows = {
        "metachunk-edge": __version__,
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "backend": f"llama.cpp (llama-cpp-python {llama_cpp.__version__})",
        "other versions": ", ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "sentencex", "regex")
        ),
        "devices": ", ".join(["cpu", *(f"gpu: {name}" for name in gpu_devices())]),
        "threads": f"{default_threads()} by default",
        "CPU features": ", ".join(
            part.split("=")[0].split(":")[-1].strip() for part in features.split("|") if part.strip().endswith("= 1")
        ),
        "cache folder": str(cache_folder()),
        "default model": f"{DEFAULT_MODEL} ({'downloaded' if is_pulled(catalogue()[DEFAULT_MODEL]) else 'not downloaded'})",
    }
    for name, value in rows.items():
        click.echo(f"{name:<15} {value}")


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
    else:
        with new_file(path) as file:
            yield file


class _Console:
    """What a person sees on stderr: a progress bar where it is a terminal, problems, notes, a summary."""

    def __init__(self, found: list[Document | DocumentError]) -> None:
        self._n_inputs = len(found)
        self._started = time.monotonic()
        self._n_tokens = 0
        self._reached = 0
        sizes = [item.path.stat().st_size for item in found if isinstance(item, Document) and item.path is not None]
        self._bar = click.progressbar(
            length=max(1, sum(sizes)),
            file=sys.stderr,
            label="chunking",
            show_pos=False,
            item_show_func=lambda _: f"{self._n_tokens / max(time.monotonic() - self._started, 1e-3):,.0f} tokens/s",
            hidden=not sys.stderr.isatty(),
        )

    def __enter__(self) -> _Console:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.__exit__(*exception)

    def on_problem(self, sentence: str) -> None:
        """Print why a document failed."""
        self._print(f"Error: {sentence}")

    def on_note(self, sentence: str) -> None:
        """Print what the user should know."""
        self._print(f"Note: {sentence}")

    def on_progress(self, n_tokens: int, n_characters: int) -> None:
        """Move the bar."""
        self._n_tokens += n_tokens
        self._bar.update(n_characters)

    def on_tokens(self, n_tokens: int, character: int) -> None:
        """Move the bar to a character of the only document."""
        self.on_progress(n_tokens, character - self._reached)
        self._reached = character

    def summarize(self, report: BatchReport) -> None:
        """Print one line about several documents, or about failures."""
        if self._n_inputs < 2 and not report.n_failed:
            return
        seconds = time.monotonic() - self._started
        parts = [f"{report.n_written} of {self._n_inputs} documents, {report.n_chunks} chunks"]
        parts += [f"{report.n_tokens:,} tokens in {seconds:.1f} s"] if report.n_tokens else []
        parts += [f"{report.n_skipped} skipped (complete)"] if report.n_skipped else []
        parts += [f"{report.n_failed} failed"] if report.n_failed else []
        click.echo("; ".join(parts) + ".", err=True)

    def _print(self, sentence: str) -> None:
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        click.echo(f"{clear}{sentence}", err=True)
