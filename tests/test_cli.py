"""Behaviour of the command line: results on stdout, everything else on stderr, and a sentence for every mistake."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_cli import CONTEXT_LENGTH, child_environment, fake_backend, refuse_sockets, start, use_fake_model, wait_for

from metachunk_edge import DEFAULT_MODEL, Backend, Chunk, Chunker, ModelFile, Settings, __version__, catalogue, cli
from metachunk_edge.backends.devices import gpu_devices
from metachunk_edge.documents import RECORD_NAME
from metachunk_edge.errors import BackendError, ConversionError, DownloadError

CACHE = os.environ.get("METACHUNK_EDGE_CACHE")
MODEL = "smollm2-135m-instruct"
TEXT = (
    "It was a dark night. Nobody was in the street, and nobody came. The rain had stopped!\n\n"
    "In the morning the sun shone. Birds sang: “é—ü”. All the people came out of their houses, and talked. "
    "今天天气很好。我们去公园吧！Then they went to work.\n"
)
LONG = "".join(f"This is sentence number {number} of a long text. " for number in range(300))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own folder with a text, and a cache without models."""
    monkeypatch.setenv("METACHUNK_EDGE_CACHE", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    Path("a.txt").write_text(TEXT, "utf-8")
    return work


@pytest.fixture
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_model(monkeypatch)


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    result = CliRunner().invoke(cli.main, arguments, input=stdin, prog_name="metachunk-edge")
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def fails(*arguments: str, stdin: bytes | None = None) -> str:
    """The sentence of a run that must end with exit code 1 and write no result."""
    result = run(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def is_misused(*arguments: str) -> str:
    """The sentence of a run that click refuses with exit code 2."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr.splitlines()[-1].removeprefix("Error: ")


def chunks_in(lines: str, source: str = "a.txt") -> list[Chunk]:
    records = [json.loads(line) for line in lines.split("\n") if line]
    assert all(record.pop("model") for record in records)
    return [Chunk(**record) for record in records if record.pop("source") == source]


def chunked(text: str, **settings: Any) -> list[Chunk]:
    """What Python gives for the same text."""
    return Chunker(fake_backend(), Settings(**{"context_length": CONTEXT_LENGTH, **settings})).chunk(text)


# chunk: results


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("", {}),
        ("--max-size 12", {"max_size": 12}),
        ("--max-size 12 --min-size 8", {"max_size": 12, "min_size": 8}),
        ("--unit words --max-size 9", {"unit": "words", "max_size": 9}),
        ("--unit characters --max-size 60", {"unit": "characters", "max_size": 60}),
        ("--method perplexity", {}),
        ("--threshold 1.5 --max-size 20", {"threshold": 1.5, "max_size": 20}),
        ("--threshold auto --max-size 20", {"threshold": "auto", "max_size": 20}),
        ("--merge none", {"merge": "none"}),
        ("--merge greedy --max-size 30", {"merge": "greedy", "max_size": 30}),
        ("--overlap dynamic --max-size 30", {"overlap": "dynamic", "max_size": 30}),
        ("--overlap 1 --max-size 30", {"overlap": 1, "max_size": 30}),
        ("--context-length 300 --window strided", {"context_length": 300, "window": "strided"}),
        ("--language zh --max-size 10", {"language": "zh", "max_size": 10}),
        ("--device cpu --threads 1 -m any", {}),
    ],
)
def test_every_setting_does_what_it_does_in_python(options: str, settings: dict[str, Any]) -> None:
    result = run("chunk", "a.txt", *options.split())
    assert result.exit_code == 0
    assert chunks_in(result.stdout) == chunked(TEXT, **settings)


@pytest.mark.usefixtures("fake_model")
def test_the_defaults_are_those_of_python() -> None:
    help_text = re.sub(r"\s+", " ", run("chunk", "--help").stdout)
    for name, default in Settings().as_dict().items():
        if default is not None:
            assert re.search(rf"--{name.replace('_', '-')} .*?\[default: {default}\]", help_text), name


@pytest.mark.usefixtures("fake_model")
def test_standard_output_has_one_json_object_per_chunk_and_nothing_else() -> None:
    result = run("chunk", "a.txt", "--max-size", "20")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(records) > 3
    assert "".join(record["text"] for record in records) == TEXT
    for number, record in enumerate(records):
        assert list(record) == ["source", "index", "text", "start", "end", "n_tokens", "boundary_strength", "model"]
        assert record["index"] == number
        assert record["text"] == TEXT[record["start"] : record["end"]]
        assert 0 < record["n_tokens"] <= 20
    assert result.stderr == ""


@pytest.mark.usefixtures("fake_model")
def test_json_names_the_model_that_was_used_and_the_settings() -> None:
    record = json.loads(run("chunk", "a.txt", "-f", "json", "--max-size", "20").stdout)
    assert record["model"] == fake_backend().model
    assert record["settings"] == Settings(max_size=20).as_dict()
    assert [Chunk(**chunk) for chunk in record["documents"][0]["chunks"]] == chunked(TEXT, max_size=20)


@pytest.mark.usefixtures("fake_model")
def test_text_is_for_reading() -> None:
    result = run("chunk", "a.txt", "--format", "text", "--max-size", "20")
    assert result.stdout.startswith("── a.txt · chunk 0 · ")
    assert result.stdout.count("── a.txt · chunk ") == len(chunked(TEXT, max_size=20))


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize("option", ["-o", "--output"])
def test_a_file_gets_the_same_bytes_as_standard_output(option: str) -> None:
    for output_format in ("jsonl", "json", "text"):
        expected = run("chunk", "a.txt", "-f", output_format).stdout_bytes
        result = run("chunk", "a.txt", "-f", output_format, option, "новый/童话.out")
        assert (result.exit_code, result.output) == (0, "")
        assert Path("новый/童话.out").read_bytes() == expected
    assert run("chunk", "a.txt", option, "-").stdout == run("chunk", "a.txt").stdout


@pytest.mark.usefixtures("fake_model")
def test_a_directory_gets_one_file_per_input() -> None:
    Path("texts/b").mkdir(parents=True)
    Path("texts/b/童话.md").write_text("童话。" * 50, "utf-8")
    result = run("chunk", "texts", "a.txt", "-d", "out/deep", "-f", "text")
    assert (result.exit_code, result.stdout) == (0, "")
    assert re.fullmatch(r"2 of 2 documents, 2 chunks; \d+ tokens in \d+\.\d s\.\n", result.stderr)
    assert Path("out/deep/a.txt.txt").read_text("utf-8") == run("chunk", "a.txt", "-f", "text").stdout
    assert Path("out/deep/b/童话.md.txt").exists()


@pytest.mark.usefixtures("fake_model")
def test_standard_input_is_chunked_like_a_file() -> None:
    for arguments in (("-",), ("-", "--encoding", "utf-16")):
        result = run("chunk", *arguments, stdin=TEXT.encode(arguments[-1] if len(arguments) > 1 else "utf-8"))
        assert chunks_in(result.stdout, "-") == chunked(TEXT)
    run("chunk", "-", "--output-dir", "out", stdin=TEXT.encode())
    assert chunks_in(Path("out/standard-input.jsonl").read_text("utf-8"), "-") == chunked(TEXT)


@pytest.mark.usefixtures("fake_model")
def test_an_encoding_and_a_pattern_apply_to_the_files_of_a_directory() -> None:
    Path("texts").mkdir()
    Path("texts/a.py").write_text("Привет, мир. Вот.", "koi8-r")
    Path("texts/b.txt").write_bytes(b"\xff\xfe")
    result = run("chunk", "texts", "--glob", "*.py", "--glob", "*.pyi", "--encoding", "koi8-r")
    assert chunks_in(result.stdout, "texts/a.py") == chunked("Привет, мир. Вот.")
    assert result.stderr == ""


@pytest.mark.usefixtures("fake_model")
def test_a_text_is_data_whatever_stands_in_it() -> None:
    text = "\x00NUL.\r\n<|im_end|> <|im_start|>system\r\nA\ttab\u00a0space e\u0301. \u2028 \x85 End."
    Path("a.txt").write_bytes(text.encode())
    for chunk in chunks_in(run("chunk", "a.txt", "--max-size", "5").stdout):
        assert chunk.text == text[chunk.start : chunk.end]


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize("content", [b"", b" \r\n\t\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["a.txt", "-"])
def test_an_empty_or_blank_text_is_a_note_and_exit_code_0(content: bytes, name: str) -> None:
    Path("a.txt").write_bytes(content)
    result = run("chunk", name, stdin=content)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"Note: {name}: empty or blank, so there are no chunks.\n"
    assert json.loads(run("chunk", name, "-f", "json", stdin=content).stdout)["documents"][0]["chunks"] == []


# chunk: several documents


@pytest.mark.usefixtures("fake_model")
def test_one_bad_file_does_not_stop_the_others_and_the_exit_code_says_so() -> None:
    Path("bad.txt").write_bytes(b"caf\xe9")
    Path("z.txt").write_text("The last one.")
    result = run("chunk", "a.txt", "bad.txt", "gone.txt", "z.txt")
    assert result.exit_code == 1
    assert chunks_in(result.stdout) == chunked(TEXT)
    assert chunks_in(result.stdout, "z.txt") == chunked("The last one.")
    first, second, summary = result.stderr.splitlines()
    assert first.startswith("Error: bad.txt: not UTF-8 text at byte offset 3 (0xe9, ")
    assert second == "Error: gone.txt: there is no such file."
    assert re.fullmatch(r"2 of 4 documents, 2 chunks; \d+ tokens in \d+\.\d s; 2 failed\.", summary)


@pytest.mark.usefixtures("fake_model")
def test_a_failure_in_the_middle_of_a_document_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = fake_backend()

    def fail(**_: Any) -> None:
        raise BackendError("the engine failed")

    monkeypatch.setattr(backend, "open_session", fail)
    monkeypatch.setattr("metachunk_edge.chunker.load_backend", lambda *_, **__: backend)
    monkeypatch.setattr(backend, "score_packed", lambda _: fail())
    assert fails("chunk", "a.txt") == "a.txt: the engine failed"
    assert fails("score", "a.txt", "-o", "scores") == "the engine failed"
    assert not Path("scores").exists()


@pytest.mark.usefixtures("fake_model")
def test_resuming_skips_what_is_complete_and_says_so() -> None:
    Path("b.txt").write_text("Another text.")
    arguments = ("chunk", "a.txt", "b.txt", "--output-dir", "out", "--resume")
    assert "skipped" not in run(*arguments).stderr
    assert run(*arguments).stderr == "0 of 2 documents, 0 chunks; 2 skipped (complete).\n"
    assert "1 skipped" not in run(*arguments, "--max-size", "9").stderr
    Path("b.txt").write_text("Another text!")
    assert "1 of 2 documents, 1 chunks; " in run(*arguments, "--max-size", "9").stderr


@pytest.mark.usefixtures("fake_model")
def test_another_model_device_or_number_of_threads_makes_results_new(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("chunk", "a.txt", "gone", "--output-dir", "out", "--resume")
    assert "1 of 2" in run(*arguments).stderr
    assert "1 skipped" in run(*arguments).stderr
    for changed in (("--device", "cpu"), ("--threads", "3")):
        assert "1 of 2" in run(*arguments, *changed).stderr
    monkeypatch.setattr("metachunk_edge.cli.choose_model", lambda *_: ModelFile(Path("x"), "fake", None, "1" * 64))
    assert "1 of 2" in run(*arguments, "--threads", "3").stderr


# chunk: mistakes


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--max-size 0", "max_size must be at least 1, got 0"),
        ("--max-size -5", "max_size must be at least 1, got -5"),
        ("--max-size 10 --min-size 11", "min_size must be in [0, 10], got 11"),
        ("--min-size -1", "min_size must be in [0, 512], got -1"),
        ("--max-size 10 --overlap 10", "overlap must be in [0, 9], got 10"),
        ("--overlap -1", "overlap must be in [0, 511], got -1"),
        ("--threshold -0.5", 'threshold must be a number of nats, at least 0, or "auto", got -0.5'),
        ("--threshold nan", 'threshold must be a number of nats, at least 0, or "auto", got nan'),
        ("--threshold inf", 'threshold must be a number of nats, at least 0, or "auto", got inf'),
        ("--context-length 0", "context_length must be at least 1, got 0"),
        ("--context-length 20", "context_length must be at least 68, got 20"),
        ("--context-length 9999", f"context_length must be at most {CONTEXT_LENGTH}, for which the backend was opened"),
        ("--encoding klingon", "encoding must be one that Python knows, such as utf-8 or gb18030, got 'klingon'"),
        ("--glob=", "glob must be a pattern such as '*.txt', got ''"),
        ("--resume", "--resume needs --output-dir, where complete results can be found"),
        ("-o x -d y", "--output and --output-dir exclude each other: leave one of them out"),
        ("-o a.txt", "--output must not be one of the inputs, got a.txt"),
        ("-o ../work/a.txt", "--output must not be one of the inputs, got ../work/a.txt"),
    ],
)
def test_an_invalid_setting_is_refused_with_its_valid_range(options: str, sentence: str) -> None:
    assert fails("chunk", "a.txt", *options.split()).startswith(sentence)
    assert sorted(path.name for path in Path().iterdir()) == ["a.txt"]
    assert Path("a.txt").read_text("utf-8") == TEXT


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--unit pages", "'pages' is not one of 'tokens', 'words', 'characters'."),
        ("--method magic", "'magic' is not 'perplexity'."),
        ("--merge best", "'best' is not one of 'none', 'greedy', 'optimal'."),
        ("--window none", "'none' is not one of 'rolling', 'strided'."),
        ("--device tpu", "'tpu' is not one of 'auto', 'cpu', 'gpu', 'cuda',"),
        ("--format xml", "'xml' is not one of 'jsonl', 'json', 'text'."),
        ("--max-size many", "'many' is not a valid integer."),
        ("--threads some", "'some' is not a valid integer."),
        ("--threshold low", "must be auto or a number, got 'low'."),
        ("--overlap some", "must be none, dynamic or a whole number, got 'some'."),
        ("--output .", "File '.' is a directory."),
        ("--output-dir a.txt", "Directory 'a.txt' is a file."),
        ("--shape round", "--shape"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_the_valid_ones(options: str, sentence: str) -> None:
    assert sentence in is_misused("chunk", "a.txt", *options.split())


def test_without_an_input_or_with_an_unknown_command_the_usage_is_shown() -> None:
    assert is_misused("chunk") == "Missing argument 'FILES… | DIRECTORIES… | -'."
    assert is_misused("cut", "a.txt").startswith("No such command 'cut'.")


@pytest.mark.usefixtures("fake_model")
def test_what_is_no_text_is_one_sentence() -> None:
    Path("empty").mkdir()
    Path("model.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(100))
    Path("link").symlink_to("nowhere")
    assert fails("chunk", "gone") == "gone: there is no such file."
    assert fails("chunk", "link") == "link: this link leads to a file that is not there."
    assert fails("chunk", "model.gguf") == "model.gguf: not text but a model file; export its text first."
    assert fails("chunk", "empty").startswith("empty: no files in this directory match *.txt, ")
    assert fails("chunk", "a.txt/b") == "a.txt/b: cannot be read (Not a directory)."
    assert fails("chunk", "").startswith("'': an empty name; ")
    assert fails("chunk", "-", stdin=b"\xff").startswith("-: not UTF-8 text at byte offset 0 (0xff, ")
    assert fails("chunk", "-", stdin=b"\x00\x01\x02\x03").startswith("-: not text but binary data")


@pytest.mark.usefixtures("fake_model")
def test_an_output_that_cannot_be_written_is_one_sentence() -> None:
    Path("out").mkdir()
    assert (
        fails("chunk", "a.txt", "-o", "a.txt/x")
        == f"a.txt/x: cannot be written ({Path('a.txt').absolute()} is no directory)."
    )
    assert fails("chunk", "a.txt", "-d", "a.txt/x") == "a.txt/x: cannot be made a directory (Not a directory)."
    assert fails("score", "a.txt", "-o", "x" * 300) == f"{'x' * 300}: cannot be written (File name too long)."


def test_a_model_that_is_not_there_is_one_sentence() -> None:
    pull = f"run `metachunk-edge models pull {DEFAULT_MODEL}`."
    assert fails("chunk", "a.txt") == f"The model {DEFAULT_MODEL} has not been downloaded yet: {pull}"
    assert fails("score", "a.txt") == f"The model {DEFAULT_MODEL} has not been downloaded yet: {pull}"
    assert fails("chunk", "a.txt", "-m", "gone.gguf").startswith("There is no model file at ")
    assert fails("chunk", "a.txt", "-m", "qwen9").startswith("There is no model called 'qwen9'; ")
    Path("broken.gguf").write_text("no model")
    assert "broken.gguf is not a GGUF file" in fails("chunk", "a.txt", "-m", "broken.gguf")
    assert fails("chunk", "a.txt", "-d", "out").startswith(f"The model {DEFAULT_MODEL} has not been downloaded yet")


# score, and chunk --scores


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scores of a.txt; from here on no model can be had."""
    with pytest.MonkeyPatch.context() as patch:
        use_fake_model(patch)
        result = run("score", "a.txt", "-o", "a.scores", "--context-length", "300")
        assert (result.exit_code, result.output) == (0, "")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was asked for")

    for name in ("chunker.choose_model", "chunker.load_backend", "cli.choose_model"):
        monkeypatch.setattr(f"metachunk_edge.{name}", refuse)
    return Path("a.scores")


@pytest.mark.usefixtures("scores")
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("", {}),
        ("--max-size 12 --min-size 3 --merge greedy", {"max_size": 12, "min_size": 3, "merge": "greedy"}),
        ("--threshold auto --overlap 1 --unit words", {"threshold": "auto", "overlap": 1, "unit": "words"}),
    ],
)
def test_scores_are_cut_without_a_model_into_the_same_chunks(options: str, settings: dict[str, Any]) -> None:
    expected = chunked(TEXT, context_length=300, **settings)
    result = run("chunk", "a.txt", "--scores", "a.scores", *options.split())
    assert (result.exit_code, result.stderr) == (0, "")
    assert chunks_in(result.stdout) == expected
    result = run("chunk", "-", "--scores", "a.scores", "-f", "json", *options.split(), stdin=TEXT.encode())
    record = json.loads(result.stdout)
    assert [Chunk(**chunk) for chunk in record["documents"][0]["chunks"]] == expected
    assert record["model"] == fake_backend().model
    assert record["settings"]["context_length"] == 300
    assert run("chunk", "a.txt", "--scores", "a.scores", "-o", "out", *options.split()).output == ""
    assert chunks_in(Path("out").read_text("utf-8")) == expected


@pytest.mark.usefixtures("fake_model")
def test_scores_go_to_standard_output_and_come_from_standard_input() -> None:
    lines = run("score", "-", stdin=TEXT.encode()).stdout
    assert json.loads(lines.splitlines()[0])["source"] == "-"
    Path("scores").write_text(lines)
    assert chunks_in(run("chunk", "a.txt", "--scores", "scores").stdout) == chunked(TEXT)


@pytest.mark.usefixtures("fake_model")
def test_the_scores_of_a_blank_text_are_a_note_and_exit_code_0() -> None:
    Path("a.txt").write_text("\n")
    result = run("score", "a.txt", "-o", "scores")
    assert (result.exit_code, result.stderr) == (0, "Note: a.txt: empty or blank, so there are no sentences.\n")
    result = run("chunk", "a.txt", "--scores", "scores")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "Note: a.txt: empty or blank, so there are no chunks.\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("-m other", "--model does not go with --scores"),
        ("--device cpu", "--device does not go with --scores"),
        ("--threads 2", "--threads does not go with --scores"),
        ("--context-length 2048", "--context-length does not go with --scores"),
        ("--window rolling", "--window does not go with --scores"),
        ("--language en", "--language does not go with --scores"),
        ("-d out", "--output-dir does not go with --scores"),
        ("--resume", "--resume does not go with --scores"),
        ("b.txt", "--scores takes one text, got 2"),
        ("--max-size 0", "max_size must be at least 1, got 0"),
        ("-o a.scores", "--output must not be one of the inputs, got a.scores"),
        ("-o a.txt", "--output must not be one of the inputs, got a.txt"),
    ],
)
def test_what_does_not_go_with_scores_is_refused(scores: Path, options: str, sentence: str) -> None:
    content = scores.read_text()
    assert fails("chunk", "a.txt", "--scores", str(scores), *options.split()).startswith(sentence)
    assert scores.read_text() == content


def test_scores_that_do_not_fit_are_one_sentence(scores: Path) -> None:
    content = scores.read_text()
    assert fails("chunk", ".", "--scores", str(scores)) == ".: a directory; name one file."
    assert fails("chunk", "gone", "--scores", str(scores)) == "gone: there is no such file."
    assert fails("chunk", "a.txt", "--scores", "gone") == "gone: cannot be read (No such file or directory)."
    assert "not a scores file" in fails("chunk", "a.txt", "--scores", "a.txt")
    scores.write_text(content[:-20])
    assert "cut short" in fails("chunk", "a.txt", "--scores", str(scores))
    scores.write_bytes(b"\xff\xfe\x00")
    assert "not a scores file" in fails("chunk", "a.txt", "--scores", str(scores))
    scores.write_text(content)
    Path("a.txt").write_text("Another text.")
    assert "another text" in fails("chunk", "a.txt", "--scores", str(scores))


@pytest.mark.usefixtures("fake_model")
def test_a_text_that_cannot_be_scored_is_one_sentence() -> None:
    Path("bad.txt").write_bytes(b"ab\xff")
    assert fails("score", "gone") == "gone: there is no such file."
    assert fails("score", ".") == ".: a directory; name one file."
    assert fails("score", "bad.txt").startswith("bad.txt: not UTF-8 text at byte offset 2 ")
    assert fails("score", "-", "-o", "scores", stdin=TEXT.encode() * 500 + b"\xff").startswith("-: not UTF-8 text at ")
    assert fails("score", "a.txt", "-o", "a.txt").startswith("--output must not be one of the inputs")
    assert fails("score", "a.txt", "--context-length", "1").startswith("context_length must be at least 68, got 1")
    assert not Path("scores").exists()


# models, info


def test_the_list_of_models_has_every_entry_of_the_catalogue() -> None:
    lines = run("models", "list").stdout.splitlines()
    assert [line[2:].split()[0] for line in lines] == list(catalogue())
    assert [line[2:].split()[0] for line in lines if line.startswith("*")] == [DEFAULT_MODEL]
    assert not [line for line in lines if "downloaded" in line]


def test_a_model_that_was_not_pulled_has_no_path_and_cannot_be_verified_or_removed() -> None:
    for command in ("path", "verify", "remove"):
        assert f"The model {MODEL} has not been downloaded" in fails("models", command, MODEL)
        assert fails("models", command, "smollm2-135m-instrukt").startswith(
            "There is no model called 'smollm2-135m-instrukt'; did you mean "
        )
    assert fails("models", "pull", "smollm2-135m-instrukt").startswith(
        "There is no model called 'smollm2-135m-instrukt'; did you mean "
    )
    assert is_misused("models", "remove") == "Missing argument 'NAME'."


def test_a_model_file_has_a_path_and_a_checksum() -> None:
    Path("tiny.gguf").write_bytes(b"GGUF\x03\0\0\0")
    path = str(Path("tiny.gguf").absolute())
    assert run("models", "path", "tiny.gguf").stdout == f"{path}\n"
    result = run("models", "verify", "tiny.gguf")
    assert re.fullmatch(rf"tiny: [0-9a-f]{{64}}  {path}\n", result.stdout)


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A download that succeeds, and what it says on stderr."""

    def pull(name: str, *, on_progress: Any) -> ModelFile:
        for done in range(3):
            on_progress("downloading", done * 10**6, 2 * 10**6)
        on_progress("checking the sha256", 2 * 10**6, 2 * 10**6)
        return ModelFile(Path("/cache") / name, name, "Q4", "0" * 64)

    monkeypatch.setattr("metachunk_edge.cli.pull", pull)
    monkeypatch.setattr("metachunk_edge.cli.open_converted", lambda _: None)
    return ["downloading (2 MB)", "checking the sha256 (2 MB)", f"{MODEL}: SHA-256 is right ({'0' * 64})."]


def test_pulling_prints_the_path_alone_on_standard_output(pulled: list[str]) -> None:
    result = run("models", "pull", MODEL, "--no-fast")
    assert result.stdout == f"/cache/{MODEL}\n"
    assert result.stderr.splitlines() == pulled


def test_pulling_makes_the_fast_mode_once(pulled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def convert(source: str, *, precision: str, name: str, on_progress: Any) -> None:
        on_progress("Building", 0, 1)
        made.append((source, precision, name))

    monkeypatch.setattr("metachunk_edge.cli.convert_model", convert)
    assert run("models", "pull", MODEL).stderr.splitlines() == [*pulled, "fast mode: Building …"]
    monkeypatch.setattr("metachunk_edge.cli.open_converted", lambda _: "there it is")
    assert run("models", "pull", MODEL).stderr.splitlines() == pulled
    assert made == [(MODEL, "int8_fused", f"{MODEL}-int8_fused")]


def test_a_model_without_a_fast_mode_is_pulled_with_a_note(pulled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*_: Any, **__: Any) -> None:
        raise ConversionError("only Qwen2 models are converted.")

    monkeypatch.setattr("metachunk_edge.cli.convert_model", convert)
    result = run("models", "pull", MODEL)
    note = f"Note: no fast mode of {MODEL}: only Qwen2 models are converted."
    assert (result.exit_code, result.stderr.splitlines()) == (0, [*pulled, note])


def test_a_download_that_fails_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(*_: Any, **__: Any) -> ModelFile:
        raise DownloadError("every source failed")

    monkeypatch.setattr("metachunk_edge.cli.pull", pull)
    assert fails("models", "pull") == "every source failed"


def test_info_names_versions_devices_features_and_the_cache(tmp_path: Path) -> None:
    result = run("info")
    rows = dict(re.split(r"  +|(?<=features) ", line, maxsplit=1) for line in result.stdout.splitlines())
    assert rows["metachunk-edge"] == __version__
    assert re.match(r"llama-cpp-python 0\.[\d.]+, with cpu", rows["GGUF models"])
    assert re.match(r"onnxruntime (\d[\d.]+, with cpu|is not installed: pip install)", rows["ONNX models"])
    assert rows["cache folder"] == str(tmp_path / "cache")
    assert rows["default model"] == f"{DEFAULT_MODEL} (not downloaded)"
    assert {"Python", "threads", "CPU features", "other versions"} <= set(rows)
    assert result.stderr == ""


def test_help_and_version_need_nothing() -> None:
    assert run("--version").stdout == f"metachunk-edge, version {__version__}\n"
    for command in ((), ("chunk",), ("score",), ("models",), ("models", "pull"), ("info",), ("convert",), ("parity",)):
        assert run(*command, "-h").stdout.startswith(f"Usage: {' '.join(['metachunk-edge', *command])} ")


# No network


def test_nothing_but_pull_opens_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_model(monkeypatch)
    refuse_sockets(monkeypatch)
    with pytest.raises(AssertionError, match="a socket was opened"):
        socket.socket()
    for arguments in (
        ("chunk", "a.txt"),
        ("chunk", ".", "-d", "out"),
        ("score", "a.txt", "-o", "scores"),
        ("chunk", "a.txt", "--scores", "scores"),
        ("models", "list"),
        ("info",),
    ):
        assert run(*arguments).exit_code == 0
    monkeypatch.undo()


# A process of its own


def spawn(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The real command in a process of its own."""
    command = [sys.executable, "-m", "metachunk_edge", *arguments]
    return subprocess.run(command, env=child_environment(), capture_output=True, check=False, timeout=100, **options)


def test_the_module_is_the_command() -> None:
    done = spawn("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"metachunk-edge, version {__version__}\n".encode(), b"")
    done = spawn("chunk", "gone.txt")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"Error: gone.txt: there is no such file.\n"


def test_a_standard_encoding_that_is_not_utf_8_changes_nothing() -> None:
    Path("童话.txt").write_text(TEXT, "utf-8")
    process = start("chunk", "童话.txt", "gone-童话.txt", environment={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    out, err = process.communicate(timeout=300)
    assert chunks_in(out.decode("utf-8"), "童话.txt") == chunked(TEXT)
    assert "Error: gone-童话.txt: there is no such file." in err.decode("utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_name_that_is_not_utf_8_goes_through() -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    Path(name).write_text(TEXT, "utf-8")
    process = start("chunk", name, "gone")
    out, _ = process.communicate(timeout=300)
    assert chunks_in(out.decode("utf-8"), name) == chunked(TEXT)


def test_a_reader_that_has_enough_ends_the_command_quietly() -> None:
    Path("long.txt").write_text(LONG * 20)
    for arguments in (("chunk", "long.txt", "--max-size", "20"), ("score", "long.txt")):
        process = start(*arguments)
        assert process.stdout and process.stderr
        assert json.loads(process.stdout.readline())
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full, as Linux has")
def test_a_standard_output_that_takes_nothing_is_one_sentence() -> None:
    for arguments in (("chunk", "a.txt"), ("chunk", "a.txt", "-f", "json"), ("models", "list")):
        with Path("/dev/full").open("w") as full:
            process = start(*arguments, stdout=full)
            _, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (1, b"Error: standard output: No space left on device.\n")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such redirection on Windows")
@pytest.mark.parametrize(
    ("redirection", "sentence"),
    [
        (">&-", b"Error: Standard output is closed: name a file with --output.\n"),
        ("<&-", b"Error: -: standard input is closed.\n"),
        ("2>&-", b""),
    ],
)
def test_a_closed_stream_is_no_traceback(redirection: str, sentence: bytes) -> None:
    script = str(Path(__file__).with_name("fake_cli.py"))
    name = "-" if "<" in redirection else "gone.txt" if "2" in redirection else "a.txt"
    command = f'"{sys.executable}" "{script}" chunk {name} {redirection}'
    done = subprocess.run(command, shell=True, env=child_environment(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, sentence)


def test_what_was_appended_to_stays_when_a_document_fails() -> None:
    Path("results.jsonl").write_text("what was there\n")
    appended = os.open("results.jsonl", os.O_WRONLY | os.O_APPEND)  # as the shell's >> does: the position is 0
    process = start("chunk", "-", stdout=appended)
    process.communicate(b"ab\xff")
    os.close(appended)
    assert process.returncode == 1
    assert Path("results.jsonl").read_text() == "what was there\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are something else on Windows")
@pytest.mark.parametrize("output", [(), ("-o", "out.jsonl"), ("-d", "out")])
def test_ctrl_c_ends_with_130_and_leaves_no_half_result(output: tuple[str, ...], tmp_path: Path) -> None:
    Path("long.txt").write_text(LONG)
    flag = tmp_path / "stopped"
    process = start(
        "chunk", "a.txt", "long.txt", *output, environment={"FAKE_STOP_AFTER": "40", "FAKE_STOPPED": str(flag)}
    )
    wait_for(flag, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, b"Interrupted.\n")
    made = {path.name for path in Path().rglob("*") if path.is_file()} - {"a.txt", "long.txt"}
    assert made == ({"a.txt.jsonl", RECORD_NAME} if "-d" in output else set())


@contextlib.contextmanager
def pseudo_terminal() -> Iterator[tuple[int, list[bytes]]]:
    """A terminal to give to a child, and what the child will have written to it at the end of the block."""
    pty = pytest.importorskip("pty", reason="there are no pseudo-terminals on this system")
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(ours, 4_096):
                seen.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield theirs, seen
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


@pytest.mark.parametrize("name", ["long.txt", "-"])
def test_a_terminal_shows_progress_and_standard_output_stays_clean(name: str) -> None:
    text = "童话。今天天气很好。" * 400
    Path("long.txt").write_text(text, "utf-8")
    with pseudo_terminal() as (terminal, seen):
        process = start("chunk", name, "gone.txt", "--max-size", "50", stderr=terminal)
        out, _ = process.communicate(text.encode())
    assert chunks_in(out.decode(), name) == chunked(text, max_size=50)
    shown = b"".join(seen).decode()
    assert re.search(r"[1-9][\d,]* tokens/s", shown)
    assert "\r\x1b[KError: gone.txt: there is no such file.\r\n" in shown
    if name == "long.txt":
        percents = [int(percent) for percent in re.findall(r"(\d+)%", shown)]
        assert percents == sorted(percents)
        assert len(set(percents)) > 20
        assert max(percents) >= 99


def test_without_a_terminal_there_is_no_progress() -> None:
    process = start("chunk", "a.txt")
    assert process.communicate()[1] == b""


# With a real model


@pytest.fixture
def real_model(small_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A model that is in the cache of the one who runs the tests."""
    if CACHE is None:
        monkeypatch.delenv("METACHUNK_EDGE_CACHE")
    else:
        monkeypatch.setenv("METACHUNK_EDGE_CACHE", CACHE)
    return small_backend


@pytest.mark.model
def test_the_command_gives_the_chunks_of_a_real_model_and_cuts_from_its_scores(real_model: Backend) -> None:
    done = spawn("chunk", "a.txt", "-m", MODEL, "--max-size", "40")
    assert (done.returncode, done.stderr) == (0, b"")
    chunks = chunks_in(done.stdout.decode())
    assert chunks == Chunker(real_model, Settings(max_size=40)).chunk(TEXT)
    assert "".join(chunk.text for chunk in chunks) == TEXT
    done = spawn("score", "a.txt", "-m", MODEL, "-o", "scores")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert chunks_in(run("chunk", "a.txt", "--scores", "scores", "--max-size", "40").stdout) == chunks


@pytest.mark.model
def test_a_real_model_opens_no_socket_and_is_named_in_the_result(
    real_model: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_sockets(monkeypatch)
    result = run("chunk", "a.txt", "-m", MODEL, "-f", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["model"] == real_model.model


@pytest.mark.model
@pytest.mark.usefixtures("real_model")
def test_a_device_or_a_number_of_threads_that_is_not_there_is_one_sentence() -> None:
    assert fails("chunk", "a.txt", "-m", MODEL, "--threads", "0") == "threads must be at least 1, got 0"
    sentence = fails("chunk", "a.txt", "-m", MODEL, "--context-length", "100000")
    assert re.fullmatch(rf"context_length must be at most \d+ for {MODEL}, got 100000", sentence)
    if not gpu_devices():
        assert fails("chunk", "a.txt", "-m", MODEL, "--device", "gpu").startswith("There is no GPU to use: ")


@pytest.mark.usefixtures("fake_model")
def test_a_result_from_another_encoding_is_not_kept(tmp_path: Path) -> None:
    Path("ru.txt").write_bytes("Привет, мир.".encode("cp1251"))
    for encoding, text in (("latin-1", "Ïðèâåò, ìèð."), ("cp1251", "Привет, мир.")):
        run("chunk", "ru.txt", "-d", str(tmp_path / "out"), "--encoding", encoding, "--resume")
        assert text in (tmp_path / "out" / "ru.txt.jsonl").read_text("utf-8")


@pytest.mark.usefixtures("fake_model")
def test_workers_change_nothing_but_the_time(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"w{number}.txt").write_text(f"Text {number}. " * 30, encoding="utf-8")
    names = [f"w{number}.txt" for number in range(6)]
    assert run("chunk", *names, "--workers", "3").stdout == run("chunk", *names).stdout
    assert fails("chunk", *names, "--workers", "0") == "workers must be at least 1, got 0"
