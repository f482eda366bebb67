"""Behaviour of a batch: many documents, one model, and no document's fault is another's."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cli import start, wait_for

from metachunk_edge import (
    BackendError,
    Chunk,
    Chunker,
    DeviceError,
    DocumentError,
    FakeBackend,
    ModelNotFoundError,
    Settings,
    SettingsError,
)
from metachunk_edge.backends.fake import FakeTokenizer
from metachunk_edge.batch import Batch, BatchReport, DirectorySink, StreamSink
from metachunk_edge.documents import RECORD_NAME, Document, find_documents
from metachunk_edge.output import Writer, new_file
from metachunk_edge.types import FloatArray, IntArray, TokenIds

SETTINGS = Settings(max_size=16, context_length=256)
SHORT = "One short text. It has three sentences, and here is the third."
LONG = "".join(f"This is sentence number {number} of a long text. " for number in range(200))


class RefusingTokenizer(FakeTokenizer):
    """Fails on a text that has POISON in it."""

    def tokenize(self, text: bytes, **options: Any) -> tuple[TokenIds, IntArray]:
        if b"POISON" in text:
            raise BackendError("the tokenizer failed")
        return super().tokenize(text, **options)


class CountingBackend(FakeBackend):
    """Counts how many batches it got, and how many documents shared them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = RefusingTokenizer()
        self.packed: list[int] = []

    def score_packed(self, documents: Sequence[TokenIds]) -> list[FloatArray]:
        self.packed.append(len(documents))
        return super().score_packed(documents)


@dataclass
class Heard:
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    n_tokens: int = 0
    n_bytes: int = 0

    def on_problem(self, sentence: str) -> None:
        self.problems.append(sentence)

    def on_note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def on_progress(self, n_tokens: int, n_bytes: int) -> None:
        self.n_tokens += n_tokens
        self.n_bytes += n_bytes


@dataclass
class Run:
    """One run over inputs, and what came of it."""

    report: BatchReport
    heard: Heard
    backend: CountingBackend
    n_loads: int


def run(
    sink: StreamSink | DirectorySink, *inputs: Path, encoding: str | None = None, settings: Settings = SETTINGS
) -> Run:
    heard, backend, loads = Heard(), CountingBackend(), []

    def load() -> Chunker:
        loads.append("loaded")
        return Chunker(backend, settings)

    found = list(find_documents([str(path) for path in inputs]))
    report = Batch(load, sink, heard, encoding=encoding).run(found)
    return Run(report, heard, backend, len(loads))


def run_to_directory(out: Path, *inputs: Path, settings: Settings = SETTINGS, resume: bool = False) -> Run:
    fingerprint = settings.fingerprint({"name": "fake"})
    sink = DirectorySink(out, "jsonl", settings=settings, fingerprint=fingerprint, resume=resume)
    return run(sink, *inputs, settings=settings)


def run_to_file(out: Path, *inputs: Path, encoding: str | None = None) -> Run:
    with new_file(out) as file:
        writer = Writer(file, "jsonl", settings=SETTINGS.as_dict(), can_cut_back=True)
        done = run(StreamSink(writer), *inputs, encoding=encoding)
        writer.close()
    return done


def chunks_in(path: Path) -> dict[str, list[Chunk]]:
    """The chunks of a file of JSON Lines, by their source."""
    found: dict[str, list[Chunk]] = {}
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        assert record.pop("model").startswith("fake")
        found.setdefault(record.pop("source"), []).append(Chunk(**record))
    return found


def alone(text: str, settings: Settings = SETTINGS) -> list[Chunk]:
    return Chunker(FakeBackend(), settings).chunk(text)


def results(out: Path) -> list[str]:
    """Everything below a directory of results but its record."""
    return sorted(
        path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file() and path.name != RECORD_NAME
    )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    for name, text in {"a.txt": SHORT, "b/c.md": LONG, "b/童话.txt": "童话。" * 40, "z.txt": SHORT + SHORT}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


# Short documents share batches


def test_short_documents_share_batches_and_get_the_chunks_they_get_alone(tmp_path: Path, out: Path) -> None:
    contents = [f"Text {number}. It is short." + " Word." * (number % 5) for number in range(150)]
    paths = [tmp_path / f"{number}.txt" for number in range(150)]
    for path, text in zip(paths, contents, strict=True):
        path.write_text(text)
    done = run_to_file(out, *paths)
    assert chunks_in(out) == {str(path): alone(text) for path, text in zip(paths, contents, strict=True)}
    assert done.report.n_written == 150
    assert max(done.backend.packed) > 1
    assert len(done.backend.packed) < 150


def test_documents_keep_their_order_whether_short_or_long(tmp_path: Path, out: Path) -> None:
    texts = {"3": SHORT, "1": LONG, "4": SHORT, "2": "Mid. " * 300, "0": LONG, "5": SHORT}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    run_to_file(out, *(tmp_path / name for name in texts))
    assert chunks_in(out) == {str(tmp_path / name): alone(text) for name, text in texts.items()}
    assert list(chunks_in(out)) == [str(tmp_path / name) for name in texts]


def test_the_model_is_loaded_once_and_not_at_all_where_nothing_can_be_read(tmp_path: Path, out: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(LONG)
    assert run_to_file(out, tmp_path / "a.txt", tmp_path / "b.txt").n_loads == 1
    assert run_to_file(out, tmp_path / "gone.txt").n_loads == 0


def test_the_report_and_the_progress_count_every_token_and_byte(texts: Path, out: Path) -> None:
    done = run_to_file(out, texts)
    n_bytes = sum(path.stat().st_size for path in texts.rglob("*") if path.is_file())
    assert (done.report.n_written, done.report.n_failed, done.report.n_skipped) == (4, 0, 0)
    assert done.report.n_chunks == len(out.read_text("utf-8").splitlines())
    assert done.report.n_tokens == done.heard.n_tokens == done.backend.n_scored
    assert done.heard.n_bytes == n_bytes


# One document's fault is not another's


def test_files_that_cannot_be_read_do_not_stop_the_others(texts: Path, tmp_path: Path, out: Path) -> None:
    (texts / "bad.txt").write_bytes(b"caf\xe9")
    (texts / "binary.txt").write_bytes(b"%PDF-1.7")
    (texts / "link.txt").symlink_to("gone")
    done = run_to_file(out, tmp_path / "gone.txt", texts)
    assert [sentence.split(": ")[0] for sentence in done.heard.problems] == [
        str(tmp_path / "gone.txt"),
        *(str(texts / name) for name in ("bad.txt", "binary.txt", "link.txt")),
    ]
    assert (done.report.n_written, done.report.n_failed) == (4, 4)
    assert list(chunks_in(out)) == [str(texts / name) for name in ("a.txt", "b/c.md", "b/童话.txt", "z.txt")]


def test_a_short_document_that_the_model_fails_on_does_not_stop_those_in_its_batch(tmp_path: Path, out: Path) -> None:
    names = [f"{number}.txt" for number in range(9)]
    for name in names:
        (tmp_path / name).write_text("POISON" if name == "4.txt" else f"Text {name}. It is short.")
    done = run_to_file(out, *(tmp_path / name for name in names))
    good = [name for name in names if name != "4.txt"]
    assert done.heard.problems == [f"{tmp_path / '4.txt'}: the tokenizer failed"]
    assert chunks_in(out) == {str(tmp_path / name): alone(f"Text {name}. It is short.") for name in good}


def test_a_long_document_that_fails_half_way_leaves_no_trace(tmp_path: Path, out: Path) -> None:
    for name, text in {"1": LONG, "2": LONG * 5 + "POISON", "3": LONG}.items():
        (tmp_path / name).write_text(text)
    done = run_to_file(out, *(tmp_path / name for name in "123"))
    assert done.backend.n_scored > 5 * len(LONG.split())
    assert done.heard.problems == [f"{tmp_path / '2'}: the tokenizer failed"]
    assert chunks_in(out) == {str(tmp_path / name): alone(LONG) for name in "13"}


def test_a_document_that_changes_between_checking_and_reading_fails_alone(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "123":
        (tmp_path / name).write_text(LONG)
    with new_file(out) as file:
        writer = Writer(file, "jsonl", settings={}, can_cut_back=True)
        sink = StreamSink(writer)

        def has_and_spoil(document: Document, _content: str) -> bool:
            if document.source.endswith("2"):
                (tmp_path / "2").write_bytes(LONG.encode() + b"\xff")
            return False

        monkeypatch.setattr(sink, "has", has_and_spoil)
        done = run(sink, *(tmp_path / name for name in "123"))
    assert [sentence.split(" at ")[0] for sentence in done.heard.problems] == [f"{tmp_path / '2'}: not UTF-8 text"]
    assert list(chunks_in(out)) == [str(tmp_path / name) for name in "13"]


@pytest.mark.parametrize("error", [ModelNotFoundError("no such model"), DeviceError("no GPU")])
def test_a_model_that_cannot_be_loaded_ends_the_run(texts: Path, error: Exception) -> None:
    def load() -> Chunker:
        raise error

    class NoSink(StreamSink):
        def __init__(self) -> None:
            """Nothing gets this far."""

    heard = Heard()
    with pytest.raises(type(error)):
        Batch(load, NoSink(), heard).run(find_documents([str(texts)]))
    assert heard.problems == []


def test_an_unknown_encoding_ends_the_run(texts: Path, out: Path) -> None:
    with pytest.raises(SettingsError, match="encoding must be"):
        run_to_file(out, texts, encoding="klingon")
    assert not out.exists()


# Notes


@pytest.mark.parametrize("text", ["", " \n\t\r\n", "\n" * 5_000])
def test_an_empty_or_blank_document_is_no_failure_and_gets_a_note(tmp_path: Path, out: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    done = run_to_file(out, tmp_path / "a.txt")
    assert (done.report.n_written, done.report.n_chunks, out.read_text()) == (1, 0, "")
    assert done.heard.notes == [f"{tmp_path / 'a.txt'}: empty or blank, so there are no chunks."]


def test_a_threshold_that_no_boundary_reaches_gets_a_note(tmp_path: Path, out: Path) -> None:
    (tmp_path / "a.txt").write_text(LONG)
    settings = Settings(max_size=16, context_length=256, threshold=50)
    done = run_to_directory(out, tmp_path / "a.txt", settings=settings)
    assert done.heard.notes == [
        f"{tmp_path / 'a.txt'}: cut for size alone; no boundary above the threshold of 50 lies at a cut "
        "(a lower --threshold finds more)."
    ]
    assert run_to_directory(out, tmp_path / "a.txt").heard.notes == []


# One file per document


def test_a_directory_of_results_mirrors_the_inputs(texts: Path, tmp_path: Path, out: Path) -> None:
    (tmp_path / "single").write_text(SHORT)
    done = run_to_directory(out, texts, tmp_path / "single")
    assert results(out) == ["a.txt.jsonl", "b/c.md.jsonl", "b/童话.txt.jsonl", "single.jsonl", "z.txt.jsonl"]
    assert chunks_in(out / "b/c.md.jsonl") == {str(texts / "b/c.md"): alone(LONG)}
    assert done.report.n_written == 5


def test_two_inputs_with_the_same_result_are_refused_and_the_first_one_stays(tmp_path: Path, out: Path) -> None:
    for folder, text in {"one": SHORT, "two": LONG}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(text)
    done = run_to_directory(out, tmp_path / "one", tmp_path / "two")
    assert done.heard.problems == [
        f"{tmp_path / 'two/a.txt'}: its result would overwrite that of {tmp_path / 'one/a.txt'}; "
        "chunk them into separate directories."
    ]
    assert chunks_in(out / "a.txt.jsonl") == {str(tmp_path / "one/a.txt"): alone(SHORT)}


def test_a_document_that_fails_has_no_result_and_the_others_have(texts: Path, out: Path) -> None:
    (texts / "b/c.md").write_text(LONG + "POISON")
    (texts / "a.txt").write_bytes(b"\xff")
    done = run_to_directory(out, texts)
    assert done.report.n_failed == 2
    assert results(out) == ["b/童话.txt.jsonl", "z.txt.jsonl"]


def test_a_result_is_never_written_over_an_input(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(SHORT)
    (tmp_path / "a.jsonl").write_text(SHORT)
    inputs = frozenset({tmp_path / "a", tmp_path / "a.jsonl"})
    sink = DirectorySink(tmp_path, "jsonl", settings=SETTINGS, fingerprint="", resume=False, inputs=inputs)
    done = run(sink, tmp_path / "a", tmp_path / "a.jsonl")
    assert done.heard.problems == [
        f"{tmp_path / 'a'}: its result would overwrite the input {tmp_path / 'a.jsonl'}; choose another --output-dir."
    ]
    assert (tmp_path / "a.jsonl").read_text() == SHORT
    assert (tmp_path / "a.jsonl.jsonl").exists()


def test_a_result_that_cannot_be_written_is_a_failure_of_its_document_alone(texts: Path, out: Path) -> None:
    (out / "b/c.md.jsonl").mkdir(parents=True)
    done = run_to_directory(out, texts)
    assert done.heard.problems == [f"{out / 'b/c.md.jsonl'}: cannot be written (Is a directory)."]
    assert done.report.n_written == 3


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DocumentError) as refused:
        run_to_directory(tmp_path / "file/out", tmp_path / "file")
    assert str(refused.value) == f"{tmp_path / 'file/out'}: cannot be made a directory (Not a directory)."


# --resume


def stamps(out: Path) -> dict[str, int]:
    return {name: (out / name).stat().st_ino for name in results(out)}


def test_a_second_run_skips_everything_and_loads_no_model(texts: Path, out: Path) -> None:
    run_to_directory(out, texts)
    before = stamps(out)
    done = run_to_directory(out, texts, resume=True)
    assert (done.report.n_skipped, done.report.n_written, done.n_loads) == (4, 0, 0)
    assert stamps(out) == before


def test_without_resume_everything_is_done_again(texts: Path, out: Path) -> None:
    run_to_directory(out, texts)
    assert run_to_directory(out, texts).report.n_written == 4


def change_content(texts: Path, _out: Path) -> None:
    (texts / "b/c.md").write_text(LONG.replace("number 7 ", "number seven "))


def delete_result(_texts: Path, out: Path) -> None:
    (out / "b/c.md.jsonl").unlink()


def alter_result(_texts: Path, out: Path) -> None:
    content = (out / "b/c.md.jsonl").read_bytes()
    (out / "b/c.md.jsonl").write_bytes(content[:-2] + b"!" + content[-1:])


def cut_result_short(_texts: Path, out: Path) -> None:
    (out / "b/c.md.jsonl").write_bytes((out / "b/c.md.jsonl").read_bytes()[:-100])


def lose_record_line(_texts: Path, out: Path) -> None:
    lines = (out / RECORD_NAME).read_text().split("\n")
    (out / RECORD_NAME).write_text("\n".join(line for line in lines if "c.md" not in line))


def break_record_line(_texts: Path, out: Path) -> None:
    lines = (out / RECORD_NAME).read_text().split("\n")
    broken = [line[: len(line) // 2] if "c.md" in line else line for line in lines]
    (out / RECORD_NAME).write_text("\n".join(broken))


@pytest.mark.parametrize(
    "spoil", [change_content, delete_result, alter_result, cut_result_short, lose_record_line, break_record_line]
)
def test_resuming_does_again_only_what_is_not_complete(
    texts: Path, out: Path, spoil: Callable[[Path, Path], None]
) -> None:
    run_to_directory(out, texts)
    before = stamps(out)
    spoil(texts, out)
    done = run_to_directory(out, texts, resume=True)
    assert (done.report.n_skipped, done.report.n_written) == (3, 1)
    text = (texts / "b/c.md").read_text()
    assert chunks_in(out / "b/c.md.jsonl") == {str(texts / "b/c.md"): alone(text)}
    assert {name for name, stamp in stamps(out).items() if before[name] == stamp} >= set(before) - {"b/c.md.jsonl"}
    assert run_to_directory(out, texts, resume=True).report.n_skipped == 4


@pytest.mark.parametrize(
    "changed",
    [
        Settings(max_size=17, context_length=256),
        Settings(max_size=16, context_length=256, threshold="auto"),
        Settings(max_size=16, context_length=256, overlap=1),
        Settings(max_size=16, context_length=200),
    ],
)
def test_other_settings_make_everything_new(texts: Path, out: Path, changed: Settings) -> None:
    run_to_directory(out, texts)
    done = run_to_directory(out, texts, settings=changed, resume=True)
    assert (done.report.n_skipped, done.report.n_written) == (0, 4)
    assert chunks_in(out / "b/c.md.jsonl") == {str(texts / "b/c.md"): alone(LONG, changed)}


@pytest.mark.parametrize(
    "record", [b"", b"\xff\xfe\x00", b"\n\n[]\n1\nnull\n{}\n" + b'{"output": ["a"]}', b'{"output": "a.txt.jsonl"}\n']
)
def test_a_record_that_says_nothing_is_no_reason_to_fail(texts: Path, out: Path, record: bytes) -> None:
    out.mkdir()
    (out / RECORD_NAME).write_bytes(record)
    done = run_to_directory(out, texts, resume=True)
    assert (done.report.n_written, done.report.n_failed) == (4, 0)
    assert run_to_directory(out, texts, resume=True).report.n_skipped == 4


def test_a_record_that_cannot_be_written_is_one_sentence(texts: Path, out: Path) -> None:
    (out / RECORD_NAME).mkdir(parents=True)
    done = run_to_directory(out, texts / "a.txt", resume=True)
    assert done.heard.problems == [f"{out / RECORD_NAME}: cannot be written (Is a directory)."]


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal on Windows")
def test_a_killed_run_leaves_whole_results_only_and_resuming_completes_them(
    texts: Path, tmp_path: Path, out: Path
) -> None:
    arguments = [
        "chunk",
        str(texts),
        "--output-dir",
        str(out),
        "--max-size",
        "16",
        "--context-length",
        "256",
        "--resume",
    ]
    whole = run_to_directory(tmp_path / "reference", texts)
    assert whole.report.n_written == 4
    for n_calls in (10, 60):
        flag = tmp_path / f"stopped after {n_calls}"
        environment = {"FAKE_STOP_AFTER": str(n_calls), "FAKE_STOPPED": str(flag)}
        process = start(*arguments, environment=environment)
        wait_for(flag, process)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
        named = [name for name in results(out) if not Path(name).name.startswith(".")]
        assert named == ["a.txt.jsonl"]
        assert chunks_in(out / "a.txt.jsonl") == {str(texts / "a.txt"): alone(SHORT)}
        assert len(list(out.rglob("*.partial"))) == 1
    process = start(*arguments)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0
    assert b"3 of 4 documents" in said
    assert b"1 skipped (complete)" in said
    assert results(out) == results(tmp_path / "reference")
    for name in results(out):
        assert (out / name).read_bytes() == (tmp_path / "reference" / name).read_bytes()


def test_scores_of_a_batch_are_those_of_each_document_alone() -> None:
    texts = [SHORT, "", "Two. Words.", "童话。" * 5, " "]
    backend = CountingBackend()
    chunks = list(Chunker(backend, SETTINGS).chunk_many(texts))
    assert chunks == [alone(text) for text in texts]
    assert np.max(backend.packed) > 1


# Several documents at a time


class WaitingBackend(FakeBackend):
    """Counts the sessions that were ever opened, and how many are open at once."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = RefusingTokenizer()
        self.n_opened = self.n_open = self.most_open = 0

    def open_session(self) -> Any:
        self.n_opened += 1
        self.n_open += 1
        self.most_open = max(self.most_open, self.n_open)
        time.sleep(0.002)  # so that others get their turn
        self.n_open -= 1
        return super().open_session()


def many(folder: Path) -> list[Path]:
    paths = [folder / f"{number:03}.txt" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_text("POISON" if number == 20 else f"Text {number}. " + "It goes on and on. " * (number % 7 * 10))
    paths[5].write_bytes(b"\xff\xfe\xfd")
    paths.insert(30, folder / "missing.txt")
    return paths


def run_workers(paths: list[Path], out: Path, workers: int) -> tuple[Heard, BatchReport, WaitingBackend]:
    heard, backend = Heard(), WaitingBackend()
    with new_file(out) as file:
        writer = Writer(file, "jsonl", settings=SETTINGS.as_dict(), can_cut_back=True)
        found = find_documents([str(path) for path in paths])
        batch = Batch(lambda: Chunker(backend, SETTINGS), StreamSink(writer), heard, workers=workers)
        report = batch.run(found)
        writer.close()
    return heard, report, backend


def test_workers_write_what_one_alone_writes_in_the_same_order(tmp_path: Path) -> None:
    paths = many(tmp_path)
    one, one_report, _ = run_workers(paths, tmp_path / "one.jsonl", 1)
    several, report, backend = run_workers(paths, tmp_path / "several.jsonl", 3)
    assert (tmp_path / "several.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert sorted(several.problems) == sorted(one.problems)
    assert (several.notes, several.n_tokens, several.n_bytes) == (one.notes, one.n_tokens, one.n_bytes)
    assert report == one_report
    assert report.n_failed == 3
    assert 1 < backend.most_open <= 3


def test_workers_wait_when_results_do_not_get_written(tmp_path: Path) -> None:
    backend = WaitingBackend()
    paths = [path for path in many(tmp_path) if path.exists()]

    class SlowSink(StreamSink):
        def write(self, *arguments: Any) -> None:
            if not seen:
                time.sleep(0.2)
                seen.append(backend.n_opened)
            super().write(*arguments)

    seen: list[int] = []
    with new_file(tmp_path / "out.jsonl") as file:
        writer = Writer(file, "jsonl", settings=SETTINGS.as_dict(), can_cut_back=True)
        Batch(lambda: Chunker(backend, SETTINGS), SlowSink(writer), Heard(), workers=2).run(
            find_documents([str(path) for path in paths])
        )
        writer.close()
    assert seen[0] <= 2 * 4 + 1


def test_an_interrupt_stops_the_workers_at_their_next_block(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(6)]
    for path in paths:
        path.write_text(LONG * 20)
    paths[0].write_text(SHORT)

    class InterruptedSink(StreamSink):
        def write(self, *_: Any) -> None:
            raise KeyboardInterrupt

    heard = Heard()
    with new_file(tmp_path / "out.jsonl") as file, pytest.raises(KeyboardInterrupt):
        sink = InterruptedSink(Writer(file, "jsonl", settings=SETTINGS.as_dict()))
        Batch(lambda: Chunker(FakeBackend(), SETTINGS), sink, heard, workers=2).run(
            find_documents([str(path) for path in paths])
        )
    whole = sum(len(path.read_bytes()) for path in paths)
    assert heard.n_bytes < whole / 2
