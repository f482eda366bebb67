"""What a person sees on stderr while documents are worked on: a progress bar, problems, notes, a summary.

The bar is there only where stderr is a terminal.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from metachunk_edge.batch import BatchReport
from metachunk_edge.documents import Document
from metachunk_edge.errors import DocumentError

__all__ = ["Console", "is_terminal"]


def is_terminal() -> bool:
    """Whether a person is reading stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


class Console:
    """Listens to a `Batch` (see `batch.Listener`). As a context manager it begins and ends the bar."""

    def __init__(self, found: Sequence[Document | DocumentError]) -> None:
        self._n_inputs = len(found)
        self._started = time.monotonic()
        self._n_tokens = 0
        self._bar: Any = None
        if is_terminal():
            self._bar = click.progressbar(
                iter(int, 1),  # without end: of standard input no length is known
                length=sum(map(_n_bytes, found)) or None,
                file=sys.stderr,
                label="chunking",
                item_show_func=lambda _: self._speed(),
            )

    def __enter__(self) -> Console:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*exception)

    def on_problem(self, sentence: str) -> None:
        """Print why a document failed."""
        self._print(f"Error: {sentence}")

    def on_note(self, sentence: str) -> None:
        """Print what the user should know."""
        self._print(f"Note: {sentence}")

    def on_progress(self, n_tokens: int, n_bytes: int) -> None:
        """Move the bar."""
        self._n_tokens += n_tokens
        if self._bar is not None:
            self._bar.update(n_bytes if self._bar.length else n_tokens)

    def summarize(self, report: BatchReport) -> None:
        """Print one line about several documents."""
        if self._n_inputs < 2:
            return
        seconds = time.monotonic() - self._started
        parts = [f"{report.n_written} of {self._n_inputs} documents, {report.n_chunks} chunks"]
        parts += [f"{report.n_tokens:,} tokens in {seconds:.1f} s"] if report.n_tokens else []
        parts += [f"{report.n_skipped} skipped (complete)"] if report.n_skipped else []
        parts += [f"{report.n_failed} failed"] if report.n_failed else []
        click.echo("; ".join(parts) + ".", err=True)

    def _speed(self) -> str:
        return f"{self._n_tokens / max(time.monotonic() - self._started, 1e-3):,.0f} tokens/s"

    def _print(self, sentence: str) -> None:
        click.echo(sentence if self._bar is None else f"\r\033[K{sentence}", err=True)


def _n_bytes(item: Document | DocumentError) -> int:
    with contextlib.suppress(OSError):  # it may have vanished, and is reported when its turn comes
        if isinstance(item, Document) and item.path is not None:
            return item.path.stat().st_size
    return 0
