"""Behaviour of documents: which files are taken, how bytes become text, and what is said where they do not."""

from __future__ import annotations

import codecs
import hashlib
import os
import random
import socket
import sys
from pathlib import Path

import pytest

from metachunk_edge.documents import RECORD_NAME, Document, check_document, find_documents, read_document
from metachunk_edge.errors import DocumentError, SettingsError

BLOCK = 65_536  # what is read at once; the tests put their faults before, on and behind such an edge


def documents(*inputs: str | Path, **options: tuple[str, ...]) -> list[Document]:
    """What is found, where everything must be found."""
    found = list(find_documents([str(name) for name in inputs], **options))
    assert not [item for item in found if isinstance(item, DocumentError)]
    return [item for item in found if isinstance(item, Document)]


def problems(*inputs: str | Path) -> list[str]:
    return [str(item) for item in find_documents([str(name) for name in inputs]) if isinstance(item, DocumentError)]


def text_of(path: Path, encoding: str | None = None) -> str:
    (document,) = documents(path)
    return "".join(read_document(document, encoding=encoding))


def problem_of(path: Path, encoding: str | None = None) -> str:
    """The sentence about a file whose content is at fault; checking and reading must say the same."""
    (document,) = documents(path)
    with pytest.raises(DocumentError) as checked:
        check_document(document, encoding=encoding)
    with pytest.raises(DocumentError) as read:
        list(read_document(document, encoding=encoding))
    assert str(checked.value) == str(read.value)
    return str(checked.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


# From bytes to text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "one\r\ntwo\rthree\n\r\n",
        "with\x00some\x00nulls and \x1b[1mescapes\x1b[0m, \x7f too",
        "“é—ü” e\u0301 👨‍👩‍👧‍👦 สวัสดี هذه यह। これは。\u2028\u2029\x85\ufffe",
        "GGUF is a file format. SQLite format 3 is another one. PK is short.",
        " \n\t\n",
    ],
)
def test_a_text_arrives_as_it_is(file: Path, text: str) -> None:
    file.write_bytes(text.encode())
    assert text_of(file) == text


def test_long_texts_arrive_as_they_are_wherever_a_block_ends(file: Path) -> None:
    for shift in range(5):
        text = "a" * shift + "é€👩🏽‍🚀\r\n" * 20_000
        file.write_bytes(text.encode())
        assert text_of(file) == text


def test_the_facts_of_a_file_are_its_lengths_and_checksum(file: Path) -> None:
    text = "Ж" * 100_000
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    facts = check_document(*documents(file))
    assert (facts.n_characters, facts.n_bytes) == (100_000, 200_003)
    assert facts.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
@pytest.mark.parametrize("stated", [False, True])
def test_a_byte_order_mark_is_taken_off_and_the_text_begins_behind_it(
    file: Path, mark: bytes, encoding: str, stated: bool
) -> None:
    text = "Ein Märchen 童话 👩‍🚀. " * 5_000
    file.write_bytes(mark + text.encode(encoding))
    assert text_of(file, encoding if stated else None) == text


def test_only_the_mark_at_the_very_beginning_is_taken_off(file: Path) -> None:
    file.write_bytes("\ufeff\ufeffone\ufefftwo".encode())
    assert text_of(file) == "\ufeffone\ufefftwo"
    file.write_bytes(b"a" * BLOCK + "\ufeffb".encode())
    assert text_of(file) == "a" * BLOCK + "\ufeffb"


@pytest.mark.parametrize("encoding", ["gb18030", "utf-16", "latin-1", "shift_jis", "koi8-r", "cp1252"])
def test_a_stated_encoding_is_used(file: Path, encoding: str) -> None:
    line = {"gb18030": "今天天气很好。", "utf-16": "“é” 童话 👩", "shift_jis": "これは文です。", "koi8-r": "Сказка. "}
    text = line.get(encoding, "Café, naïve. ") * 9_000
    file.write_bytes(text.encode(encoding))
    assert text_of(file, encoding) == text


@pytest.mark.parametrize("encoding", ["klingon", "hex", "rot13", "undefined", "", "utf-8\0", "é"])
def test_an_unknown_encoding_is_refused_with_its_name(file: Path, encoding: str) -> None:
    file.write_text("text")
    with pytest.raises(SettingsError) as refused:
        check_document(*documents(file), encoding=encoding)
    assert str(refused.value) == f"encoding must be one that Python knows, such as utf-8 or gb18030, got {encoding!r}"


# Bytes that are not text


@pytest.mark.parametrize("offset", [0, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17])
def test_the_message_names_the_byte_that_is_not_utf_8(file: Path, offset: int) -> None:
    file.write_bytes(b"a" * offset + b"\xff" + b" and so on" * BLOCK)
    assert problem_of(file) == (
        f"{file}: not UTF-8 text at byte offset {offset} (0xff, invalid start byte): "
        "name the file's encoding with --encoding, or convert it to UTF-8."
    )


@pytest.mark.parametrize("offset", [BLOCK - 3, BLOCK - 2, BLOCK - 1, BLOCK])
@pytest.mark.parametrize("broken", [b"\xf0\x9f\x91", b"\xe2\x82", b"\xc3"])
def test_a_broken_character_at_the_edge_of_a_block_is_found_at_its_first_byte(
    file: Path, offset: int, broken: bytes
) -> None:
    file.write_bytes(b"a" * offset + broken + b"(behind)" * 100)
    assert f"at byte offset {offset} (0x{broken[0]:02x}, invalid continuation byte)" in problem_of(file)


@pytest.mark.parametrize("offset", [BLOCK - 3, BLOCK - 2, BLOCK - 1])
def test_whole_characters_at_the_edge_of_a_block_do_not_shift_the_position(file: Path, offset: int) -> None:
    file.write_bytes(b"a" * offset + "👩".encode() + b"a" * 10 + b"\xfe")
    assert f"at byte offset {offset + 14} (0xfe, " in problem_of(file)


@pytest.mark.parametrize("offset", [3, BLOCK - 1, BLOCK, 2 * BLOCK - 1])
def test_a_file_that_ends_in_the_middle_of_a_character_is_refused_at_its_first_byte(file: Path, offset: int) -> None:
    file.write_bytes(b"a" * offset + "你".encode()[:2])
    assert f"at byte offset {offset} (0xe4, unexpected end of data)" in problem_of(file)


def test_the_position_counts_the_bytes_of_the_file_with_its_mark(file: Path) -> None:
    file.write_bytes(codecs.BOM_UTF8 + b"abc\xff")
    assert "not UTF-8 text at byte offset 6 (0xff" in problem_of(file)
    file.write_bytes(codecs.BOM_UTF16_LE + "abc".encode("utf-16-le") + b"\x00\xd8a\x00")
    assert "not UTF-16-LE text at byte offset 8 (0x00" in problem_of(file)


@pytest.mark.parametrize(
    ("encoding", "good", "bad"),
    [
        ("gb18030", "童话", b"\xff"),
        ("utf-16", "童话", b"\x00\xdc"),
        ("utf-8-sig", "童话", b"\xff"),
        ("shift_jis", "文", b"\xff"),
        ("ascii", "ab", b"\xe9"),
    ],
)
@pytest.mark.parametrize("n_before", [0, 2, BLOCK // 2 + 1])
def test_the_position_is_right_in_other_encodings_too(
    file: Path, encoding: str, good: str, bad: bytes, n_before: int
) -> None:
    before = (good * n_before).encode(encoding) or codecs.lookup(encoding).encode("")[0]
    file.write_bytes(before + bad + ("a" * 9).encode(encoding.replace("utf-16", "utf-16-le")))
    assert f"not {encoding.upper()} text at byte offset {len(before)} (0x{bad[0]:02x}, " in problem_of(file, encoding)


@pytest.mark.parametrize(
    ("beginning", "kind"),
    [
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a PDF file"),
        (b"PK\x03\x04\x14\0\x06\0", "a ZIP archive (such as a Word or OpenDocument file)"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Microsoft Office file"),
        (b"\x1f\x8b\x08\0", "a gzip archive"),
        (b"\x89PNG\r\n\x1a\n", "a PNG picture"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG picture"),
        (b"GGUF\x03\0\0\0", "a model file"),
        (b"SQLite format 3\0", "a database"),
    ],
)
@pytest.mark.parametrize("encoding", [None, "latin-1"])
def test_well_known_binary_files_are_refused_by_name(
    file: Path, beginning: bytes, kind: str, encoding: str | None
) -> None:
    file.write_bytes(beginning + bytes(range(256)))
    assert problem_of(file, encoding) == f"{file}: not text but {kind}; export its text first."


def test_mostly_control_characters_are_refused_as_binary_unless_an_encoding_is_stated(file: Path) -> None:
    file.write_bytes("ASCII text in UTF-16 without a mark".encode("utf-16-le"))
    assert problem_of(file) == (
        f"{file}: not text but binary data (35 of its first 70 bytes are control characters); "
        "if it is text, name its encoding with --encoding."
    )
    assert text_of(file, "utf-16-le") == "ASCII text in UTF-16 without a mark"


def test_random_bytes_are_refused(file: Path) -> None:
    for seed in range(20):
        file.write_bytes(random.Random(seed).randbytes(50_000))
        assert f"{file}: not " in problem_of(file)


# Which files are taken


def test_the_inputs_come_in_their_order_with_the_names_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.anything"):
        Path(name).write_text("text")
    Path("folder").mkdir()
    Path("folder/c.md").write_text("text")
    found = documents("b.txt", "-", "./a.anything", "folder")
    assert [item.source for item in found] == ["b.txt", "-", "./a.anything", str(Path("folder/c.md"))]
    assert [str(item.relative) for item in found] == ["b.txt", "standard-input", "a.anything", "c.md"]


def test_a_directory_stands_for_its_texts_sorted_by_path(tmp_path: Path) -> None:
    names = ["Z.txt", "a/b.md", "a/a/z.rst", "a.txt", "b c/ü.txt", "Сказки/童话.txt", "NOTES.TXT", "a-b/c.txt"]
    for name in [*names, "picture.png", "a/results.jsonl"]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("text")
    assert [str(item.relative) for item in documents(tmp_path)] == sorted(names, key=lambda name: name.split("/"))
    assert [item.path for item in documents(tmp_path)] == [tmp_path / item.relative for item in documents(tmp_path)]


def test_hidden_files_and_hidden_directories_are_left_out(tmp_path: Path) -> None:
    for name in ["seen.txt", ".hidden.txt", ".git/description.txt", "a/.b/c.txt", "a/.d.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("text")
    assert [str(item.relative) for item in documents(tmp_path)] == ["seen.txt"]


def test_a_hidden_file_or_directory_that_is_named_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".notes").mkdir()
    (tmp_path / ".notes/.a.txt").write_text("text")
    (tmp_path / ".notes/b.txt").write_text("text")
    assert [str(item.relative) for item in documents(tmp_path / ".notes")] == ["b.txt"]
    assert [str(item.relative) for item in documents(tmp_path / ".notes/.a.txt")] == [".a.txt"]


def test_results_of_earlier_runs_below_the_directory_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks/deep").mkdir()
    (tmp_path / "chunks" / RECORD_NAME).write_text("")
    (tmp_path / "chunks/deep/b.txt.txt").write_text("a chunk")
    (tmp_path / "chunks/a.txt.txt").write_text("a chunk")
    (tmp_path / "a.txt").write_text("text")
    assert [str(item.relative) for item in documents(tmp_path)] == ["a.txt"]
    assert len(documents(tmp_path / "chunks")) == 2  # named as an input, it is one


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("*.py",), ["code/a.py", "code/deep/b.py", "top.py"]),
        (("*.PY", "*.txt"), ["a.txt", "code/a.py", "code/deep/b.py", "top.py"]),
        (("code/*.py",), ["code/a.py", "code/deep/b.py"]),
        (("**/a.*",), ["a.txt", "code/a.py"]),
        (("[at]*",), ["a.txt", "code/a.py", "top.py"]),
    ],
)
def test_a_pattern_decides_which_files_of_a_directory_are_taken(
    tmp_path: Path, patterns: tuple[str, ...], expected: list[str]
) -> None:
    for name in ["a.txt", "top.py", "code/a.py", "code/deep/b.py"]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("text")
    assert [str(item.relative) for item in documents(tmp_path, patterns=patterns)] == expected


def test_an_empty_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"glob must be a pattern such as '\*\.txt', got ''"):
        list(find_documents([str(tmp_path)], patterns=[""]))


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/up").symlink_to("..", target_is_directory=True)
    (tmp_path / "self.txt").symlink_to("self.txt")
    found = list(find_documents([str(tmp_path)]))
    assert [item.source for item in found if isinstance(item, Document)] == [str(tmp_path / "a.txt")]
    assert [str(item) for item in found if isinstance(item, DocumentError)] == [
        f"{tmp_path / 'self.txt'}: cannot be read (Too many levels of symbolic links)."
    ]


def test_links_to_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("the text")
    (tmp_path / "link.txt").symlink_to("real")
    assert "".join(read_document(*documents(tmp_path))) == "the text"


# What cannot be read


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to("gone")
    (tmp_path / "a.txt").write_text("text")
    assert problems(tmp_path / "gone", tmp_path / "link.txt", tmp_path / "a.txt/b") == [
        f"{tmp_path / 'gone'}: there is no such file.",
        f"{tmp_path / 'link.txt'}: this link leads to a file that is not there.",
        f"{tmp_path / 'a.txt/b'}: cannot be read (Not a directory).",
    ]
    assert problems("x" * 5_000) == [f"{'x' * 5_000}: cannot be read (File name too long)."]
    assert problems("") == ["'': an empty name; name a file or a directory ('.' is the current one)."]


def test_a_link_that_leads_nowhere_does_not_hide_the_other_files_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to("gone")
    (tmp_path / "c.txt").write_text("text")
    found = list(find_documents([str(tmp_path)]))
    assert [isinstance(item, Document) for item in found] == [True, False, True]


def test_a_directory_without_texts_is_named_with_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_text("")
    (problem,) = problems(tmp_path)
    assert problem.startswith(f"{tmp_path}: no files in this directory match *.txt, *.text, *.md,")
    assert problem.endswith(" (see --glob).")


def test_a_file_that_vanishes_after_it_was_found_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    (document,) = documents(tmp_path)
    path.unlink()
    with pytest.raises(DocumentError) as refused:
        check_document(document)
    assert str(refused.value) == f"{path}: cannot be read (No such file or directory)."


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reading fails, as Linux has")
def test_a_file_whose_reading_fails_is_one_sentence() -> None:
    assert problem_of(Path("/proc/self/mem")) == "/proc/self/mem: cannot be read (Input/output error)."


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="everything is readable for root")
def test_files_and_directories_without_permission_are_one_sentence_each(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.txt").chmod(0)
    (tmp_path / "locked").mkdir(mode=0)
    (tmp_path / "unsearchable").mkdir()
    (tmp_path / "unsearchable/b.txt").write_text("text")
    (tmp_path / "unsearchable").chmod(0o444)
    found = list(find_documents([str(tmp_path)]))
    assert [str(item) for item in found if isinstance(item, DocumentError)] == [
        f"{tmp_path / name}: cannot be read (Permission denied)." for name in ("locked", "unsearchable/b.txt")
    ]
    assert problem_of(tmp_path / "a.txt") == f"{tmp_path / 'a.txt'}: cannot be read (Permission denied)."
    for name in ("locked", "unsearchable"):
        (tmp_path / name).chmod(0o700)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such files on Windows")
def test_pipes_sockets_and_devices_are_refused_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.txt")
        assert problems("pipe.txt", "/dev/zero", ".") == [
            f"{name}: a pipe, socket or device and no file; send its text to standard input (-)."
            for name in ("pipe.txt", "/dev/zero", "pipe.txt", "socket.txt")
        ]


def test_standard_input_can_be_named_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    found = list(find_documents(["-", str(tmp_path), "-"]))
    assert [isinstance(item, Document) for item in found] == [True, True, False]
    assert str(found[2]) == "-: standard input was named before and can be read only once."


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_name_that_is_not_utf_8_is_read_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    path = Path(os.fsdecode(os.fsencode(tmp_path / "d") + b"/caf\xe9.txt"))
    path.write_text("text")
    (document,) = documents(tmp_path / "d")
    assert "".join(read_document(document)) == "text"
