"""A model hub and a package index on this machine, and a tiny catalogue entry that comes from them."""

from __future__ import annotations

import hashlib
import http.server
import os
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from metachunk_edge.catalogue import CatalogueEntry, HubSource, WheelSource, catalogue

REVISION = "0123456789abcdef0123456789abcdef01234567"
HUB_PATH = f"/someone/tiny-GGUF/resolve/{REVISION}/tiny-q4_k_m.gguf"
CONTENT = b"GGUF" + b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(40_000))
OTHER_CONTENT = b"GGUF" + CONTENT[4:][::-1]
PART_BYTES = 500_000
# A wheel that asks for something that is not to be had: only its own file may be fetched.
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: not-on-this-index\n"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


HUB_SOURCE = HubSource("someone/tiny-GGUF", REVISION, "tiny-q4_k_m.gguf")
WHEEL_SOURCE = WheelSource(
    tuple((f"tiny-part{number}==1.0", f"tiny_part{number}/data/part{number}.bin") for number in (1, 2, 3)), 600_000
)


def add_entry(monkeypatch: pytest.MonkeyPatch, *sources: HubSource | WheelSource) -> CatalogueEntry:
    entry = CatalogueEntry(
        name="tiny",
        description="for tests",
        architecture="qwen2",
        precision="Q4_K_M",
        parameters=1,
        license="Apache-2.0",
        n_bytes=len(CONTENT),
        sha256=sha256(CONTENT),
        run=True,
        sources=sources,
    )
    monkeypatch.setitem(catalogue(), "tiny", entry)
    return entry


@dataclass
class Server:
    """A model hub and a package index on this machine; its fields say how it behaves, `log` what it was asked."""

    url: str = ""
    content: bytes = CONTENT  # what the hub delivers
    states: dict[str, str] = field(default_factory=dict)  # what the hub says about it in answer to HEAD
    head_status: int = 302
    statuses: list[int] = field(default_factory=list)  # one status for each of the next downloads, then 200
    break_off_after: list[int] = field(default_factory=list)  # bytes after which the next downloads break off
    ranges: bool = True
    go_on: threading.Event = field(default_factory=threading.Event)  # while it is not set, downloads stand still
    wheels: dict[str, bytes] = field(default_factory=dict)  # by file name
    log: list[tuple[str, str, str | None]] = field(default_factory=list)  # (method, path, Range header)

    def asked(self, method: str, path: str) -> list[str | None]:
        """The Range headers of all such requests."""
        return [ranges for got, where, ranges in self.log if got == method and path in where]


class Handler(http.server.BaseHTTPRequestHandler):
    state: Server

    def log_message(self, *_: object) -> None:
        """Keep the tests' output clean."""

    def do_HEAD(self) -> None:
        self.state.log.append(("HEAD", self.path, self.headers.get("Range")))
        self.send_response(self.state.head_status)
        for name, value in {"Location": "/store", "Content-Length": "0", **self.state.states}.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.state.log.append(("GET", self.path, self.headers.get("Range")))
        parts = self.path.strip("/").split("/")
        if self.path == HUB_PATH:
            self.send_response(302)
            self.send_header("Location", "/store")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif parts[0] == "store":
            self.deliver()
        elif parts[0] == "simple":
            prefix = parts[1].replace("-", "_") + "-"
            links = [f'<a href="/files/{name}">{name}</a>' for name in self.state.wheels if name.startswith(prefix)]
            self.answer(200 if links else 404, "text/html", "".join(links).encode())
        else:
            self.answer(200, "application/octet-stream", self.state.wheels[parts[1]])

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        if kind == "application/octet-stream":
            self.state.go_on.wait(20)
        self.wfile.write(body[len(body) // 2 :])

    def deliver(self) -> None:
        self.state.go_on.wait(20)
        if self.state.statuses and (status := self.state.statuses.pop(0)) != 200:
            self.answer(status, "text/plain", b"not now")
            return
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked.group(1)) if asked and self.state.ranges else 0
        if start and start >= len(self.state.content):
            self.answer(416, "text/plain", b"no such range")
            return
        body = self.state.content[start:]
        self.send_response(206 if asked and self.state.ranges else 200)
        self.send_header("Content-Length", str(len(body)))
        if asked and self.state.ranges:
            n_bytes = len(self.state.content)
            self.send_header("Content-Range", f"bytes {start}-{n_bytes - 1}/{n_bytes}")
        self.end_headers()
        self.wfile.write(body[: self.state.break_off_after.pop(0)] if self.state.break_off_after else body)
        self.close_connection = True


class QuietHTTPServer(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that breaks off is what some tests are about."""


@contextmanager
def serve() -> Iterator[Server]:
    """A server that runs as long as the block."""
    state = Server()
    state.go_on.set()
    handler = type("BoundHandler", (Handler,), {"state": state})
    with QuietHTTPServer(("127.0.0.1", 0), handler) as http_server:
        state.url = f"http://127.0.0.1:{http_server.server_address[1]}"
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield state
        state.go_on.set()
        http_server.shutdown()


def wheel_file(name: str, files: dict[str, bytes]) -> tuple[str, bytes]:
    """The name and the bytes of a wheel `name` 1.0 with `files`."""
    information = f"{name}-1.0.dist-info"
    path = Path(os.environ["METACHUNK_EDGE_CACHE"]).with_name(f"{name}.zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in files.items():
            archive.writestr(member, content)
        archive.writestr(f"{information}/METADATA", METADATA.format(name=name))
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return f"{name}-1.0-py3-none-any.whl", path.read_bytes()


def files_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def flip_a_byte(path: Path, *, keep_time: bool) -> None:
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    time_ns = status.st_mtime_ns if keep_time else status.st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(time_ns, time_ns))
