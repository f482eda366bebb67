"""Behaviour of output: three formats that parse, and files that are whole or not there."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cli import child_environment, wait_for

from metachunk_edge import BackendError, Chunk, DocumentError
from metachunk_edge.output import Format, Writer, new_file

MODEL = {"name": "fake", "sha256": "0" * 64}
SETTINGS = {"max_size": 3, "threshold": "auto"}
FIRST = [
    Chunk(0, "“é—ü”\u2028 \x00one\r\n", 0, 13, 4, None),
    Chunk(1, "\tcode()\n\n\n", 13, 23, 3, 0.1 + 0.2),
]
SECOND = [Chunk(0, 'with "quotes" and \\', 0, 19, 5, None)]

FORMATS: tuple[Format, ...] = ("jsonl", "json", "text")


def failing(chunks: list[Chunk]) -> Iterator[Chunk]:
    yield from chunks
    raise BackendError("the model failed")


def record(chunk: Chunk) -> dict[str, Any]:
    return {name: getattr(chunk, name) for name in Chunk.__dataclass_fields__}


def written(output_format: Format, *documents: tuple[str, list[Chunk]]) -> str:
    file = io.StringIO()
    writer = Writer(file, output_format, settings=SETTINGS)
    for source, chunks in documents:
        writer.write(source, chunks, model=MODEL)
    writer.close()
    return file.getvalue()


# Formats


def test_json_lines_hold_one_whole_chunk_each() -> None:
    lines = written("jsonl", ("a b.txt", FIRST), ("童话.txt", SECOND)).split("\n")
    assert lines.pop() == ""
    assert [json.loads(line) for line in lines] == [
        *({"source": "a b.txt", **record(chunk), "model": "fake@000000000000"} for chunk in FIRST),
        *({"source": "童话.txt", **record(chunk), "model": "fake@000000000000"} for chunk in SECOND),
    ]
    assert list(json.loads(lines[0])) == [
        "source",
        "index",
        "text",
        "start",
        "end",
        "n_tokens",
        "boundary_strength",
        "model",
    ]


def test_json_is_one_object_with_model_settings_and_documents() -> None:
    assert json.loads(written("json", ("a.txt", FIRST), ("empty.txt", []), ("b.txt", SECOND))) == {
        "format": "metachunk-edge",
        "version": 1,
        "model": MODEL,
        "settings": SETTINGS,
        "documents": [
            {"source": "a.txt", "chunks": [record(chunk) for chunk in FIRST]},
            {"source": "empty.txt", "chunks": []},
            {"source": "b.txt", "chunks": [record(chunk) for chunk in SECOND]},
        ],
    }


def test_text_shows_where_each_chunk_is_from_and_how_strong_its_boundary_is() -> None:
    text = written("text", ("a.txt", FIRST))
    first, second = text.split("── a.txt · ")[1:]
    assert first.startswith("chunk 0 · 4 tokens ───")
    assert first.endswith("─\n“é—ü”\u2028 \x00one\n\n")
    assert second.startswith("chunk 1 · 3 tokens · boundary 0.30 nats ───")
    assert second.endswith("─\n\tcode()\n\n")


def test_without_documents_every_format_is_complete() -> None:
    assert written("jsonl") == written("text") == ""
    assert json.loads(written("json"))["documents"] == []


@pytest.mark.parametrize("output_format", ["jsonl", "text"])
def test_a_chunk_is_written_before_the_next_one_is_asked_for(output_format: Format) -> None:
    file = io.StringIO()
    seen: list[bool] = []

    def chunks() -> Iterator[Chunk]:
        yield FIRST[0]
        seen.append("one" in file.getvalue())
        yield FIRST[1]

    Writer(file, output_format, settings=SETTINGS).write("a.txt", chunks(), model=MODEL)
    assert seen == [True]


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_document_that_fails_leaves_no_trace_in_a_file(tmp_path: Path, output_format: Format, place: int) -> None:
    good = [("a.txt", FIRST), ("b.txt", SECOND)]
    with new_file(tmp_path / "out") as file:
        writer = Writer(file, output_format, settings=SETTINGS, can_cut_back=True)
        for number in range(3):
            if number == place:
                with pytest.raises(BackendError):
                    writer.write("bad.txt", failing(FIRST * 500), model=MODEL)
            if number < 2:
                writer.write(*good[number], model=MODEL)
        writer.close()
    assert (tmp_path / "out").read_bytes().decode() == written(output_format, *good)


def test_a_document_that_fails_takes_nothing_back_from_a_file_that_others_write_to(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("what was there\n")
    with path.open("r+") as file:  # like standard output behind `>>`: its position says nothing about the file
        writer = Writer(file, "jsonl", settings=SETTINGS)
        with pytest.raises(BackendError):
            writer.write("a.txt", failing([]), model=MODEL)
    assert path.read_text() == "what was there\n"


# Files


def test_a_file_has_its_content_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "новая папка" / "童话.jsonl"
    with new_file(path) as file:
        file.write("“é”\r\n\n")
    assert path.read_bytes() == "“é”\r\n\n".encode()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [BackendError("failed"), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [True, False])
def test_after_an_error_the_place_is_as_it_was(tmp_path: Path, error: BaseException, existing: bool) -> None:
    path = tmp_path / "out.jsonl"
    if existing:
        path.write_text("the result before")
    with pytest.raises(type(error)), new_file(path) as file:
        file.write("half a res")
        file.flush()
        raise error
    assert [item.read_text() for item in tmp_path.iterdir()] == (["the result before"] if existing else [])


def test_until_it_is_complete_a_file_does_not_have_its_name(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with new_file(path) as file:
        file.write("half a res")
        file.flush()
        assert not path.exists()
    assert path.exists()


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    with new_file(tmp_path / ("ж" * 127)) as file:
        file.write("text")
    assert (tmp_path / ("ж" * 127)).read_text() == "text"


def test_lone_surrogates_become_escapes_that_json_understands(tmp_path: Path) -> None:
    with new_file(tmp_path / "out.jsonl") as file:
        Writer(file, "jsonl", settings={}).write("caf\udce9.txt", SECOND, model=MODEL)
    assert json.loads((tmp_path / "out.jsonl").read_text("utf-8"))["source"] == "caf\udce9.txt"


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/real.jsonl").write_text("before")
    (tmp_path / "link.jsonl").symlink_to("folder/real.jsonl")
    with new_file(tmp_path / "link.jsonl") as file:
        file.write("after")
    assert (tmp_path / "link.jsonl").is_symlink()
    assert (tmp_path / "folder/real.jsonl").read_text() == "after"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes on Windows")
def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    with new_file(pipe) as file:
        Writer(file, "jsonl", settings={}, can_cut_back=True).write("a.txt", SECOND, model=MODEL)
    reader.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert json.loads(received[0])["source"] == "a.txt"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.txt/out.jsonl", "{}/a.txt is no directory"),
        ("a.txt/folder/out.jsonl", "Not a directory"),
        ("folder", "Is a directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_one_sentence(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DocumentError) as refused, new_file(tmp_path / name) as file:
        file.write("text")
    assert str(refused.value) == f"{tmp_path / name}: cannot be written ({reason.format(tmp_path)})."
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.txt", "folder"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full, as Linux has")
def test_a_full_disk_is_one_sentence() -> None:
    with pytest.raises(DocumentError) as refused, new_file(Path("/dev/full")) as file:
        file.write("text")
    assert str(refused.value) == "/dev/full: cannot be written (No space left on device)."


WRITE_AND_STAND_STILL = """
import sys, time
from pathlib import Path
from metachunk_edge.output import new_file
with new_file(Path(sys.argv[1])) as file:
    file.write("half a res")
    file.flush()
    Path(sys.argv[2]).touch()
    sys.stdin.read()
"""


def writing_child(path: Path, flag: Path) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_STAND_STILL, str(path), str(flag)],
        env=child_environment(),
        stdin=subprocess.PIPE,
    )
    wait_for(flag, child)
    return child


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal on Windows")
def test_what_a_killed_process_left_has_not_the_name_and_is_cleaned_up_by_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    for _ in range(2):
        child = writing_child(folder / "out.jsonl", tmp_path / "flag")
        child.send_signal(signal.SIGKILL)
        child.communicate()
        (tmp_path / "flag").unlink()
        (left,) = folder.iterdir()  # that of the first process is gone when the second one has been killed
        assert left.name.startswith(".")
        assert left.suffix == ".partial"
    with new_file(folder / "out.jsonl") as file:
        file.write("whole")
    assert [item.name for item in folder.iterdir()] == ["out.jsonl"]


def test_what_a_running_process_is_writing_stays(tmp_path: Path) -> None:
    path = tmp_path / "results/out.jsonl"
    child = writing_child(path, tmp_path / "flag")
    with new_file(path) as file:
        file.write("ours")
    assert path.read_text() == "ours"
    child.communicate(b"go on")
    assert child.returncode == 0
    assert path.read_text() == "half a res"
    assert list(path.parent.iterdir()) == [path]
