"""The command line in a process of its own, with a model that needs no weights.

With FAKE_STOP_AFTER=N in the environment the model stands still after N calls, and says so by making the file
FAKE_STOPPED.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

import metachunk_edge
from metachunk_edge import FakeBackend, ModelFile, cli
from metachunk_edge.backends.fake import FakeSession
from metachunk_edge.types import FloatArray, TokenIds

CONTEXT_LENGTH = 2_048


def fake_model(*_: object) -> ModelFile:
    return ModelFile(Path("fake.gguf"), "fake", None, "0" * 64)


def fake_backend(*_: Any, **__: Any) -> FakeBackend:
    return StoppingBackend(context_length=CONTEXT_LENGTH, position_limit=2 * CONTEXT_LENGTH)


class StoppingBackend(FakeBackend):
    def open_session(self) -> FakeSession:
        return StoppingSession(self)


class StoppingSession(FakeSession):
    def advance(self, ids: TokenIds, targets: TokenIds, *, position: int, keep_from: int, shift: int) -> FloatArray:
        if self._backend.n_calls >= int(os.environ.get("FAKE_STOP_AFTER", sys.maxsize)):
            Path(os.environ["FAKE_STOPPED"]).touch()
            time.sleep(120)
        return super().advance(ids, targets, position=position, keep_from=keep_from, shift=shift)


def start(*arguments: str | Path, environment: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command line with the fake model; all three streams are pipes unless `options` say otherwise."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        env={**child_environment(), **(environment or {})},
        **{**pipes, **options},
    )


def child_environment() -> dict[str, str]:
    """The environment of a child that imports the same package as these tests, and buffers its output as usual."""
    return {**os.environ, "PYTHONPATH": str(Path(metachunk_edge.__file__).parent.parent), "PYTHONUNBUFFERED": ""}


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has made a file."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def use_fake_model(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("metachunk_edge.chunker.choose_model", fake_model)
    patch.setattr("metachunk_edge.chunker.load_backend", fake_backend)
    patch.setattr("metachunk_edge.cli.choose_model", fake_model)


def refuse_sockets(patch: pytest.MonkeyPatch) -> None:
    def no_socket(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a socket was opened")

    patch.setattr("socket.socket", no_socket)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started with it ignored
    use_fake_model(pytest.MonkeyPatch())
    cli.main(prog_name="metachunk-edge")
