"""From a source to a finished folder: the manifest, what is refused, what is left behind, and the `models` commands."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from metachunk_edge import (
    Chunker,
    ConversionError,
    ModelFileError,
    Settings,
    SettingsError,
    find_model,
    remove,
    verify,
)
from metachunk_edge.cache import ModelFile
from metachunk_edge.cli import main
from metachunk_edge.parity import Tolerance

TEXT = "The river rose. Nobody had seen it coming, and the bridge was gone by noon. 孔乙己没有法。"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METACHUNK_EDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def converted(tiny_checkpoint: Path, cache: Path) -> Iterator[ModelFile]:
    """A float32 GGUF file of the tiny model in the cache."""
    from metachunk_edge.convert import convert_model

    assert not cache.exists()
    yield convert_model(tiny_checkpoint, precision="f32", name="tiny-f32", threads=1)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def convert(source: Path, output: Path, precision: str = "f32", **options: Any) -> ModelFile:
    from metachunk_edge.convert import convert_model

    return convert_model(source, output, precision=precision, threads=1, **options)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} if folder.exists() else set()


def test_the_manifest_says_where_the_model_comes_from_and_what_it_is(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = convert(tiny_checkpoint, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["name"] == model.name == f"{tiny_checkpoint.name}-gguf-f32"
    assert (manifest["format"], manifest["precision"], manifest["model_file"]) == ("gguf", "f32", model.path.name)
    assert manifest["source"]["kind"] == "checkpoint"
    assert len(manifest["source"]["sha256"]) == 64
    assert not manifest["is_dequantized"]
    assert manifest["n_parameters"] == 1_050_880  # 2 × 512 × 256 + 2 × 394,240 + 256
    assert {"torch", "transformers", "gguf", "llama-cpp-python", "onnxruntime", "optimum"} <= set(manifest["made_with"])
    assert manifest["parity"]["mean_abs"] < 1e-4
    for name, facts in manifest["files"].items():
        content = (tmp_path / "out" / name).read_bytes()
        assert facts == {"n_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert {*manifest["files"], "manifest.json"} == files_in(tmp_path / "out")
    assert {"tokenizer.json", "config.json", model.path.name} <= set(manifest["files"])


def test_a_gguf_file_is_dequantized_first_and_the_manifest_says_so(
    tiny_model: Callable[[str], ModelFile], tmp_path: Path
) -> None:
    convert(tiny_model("f16").path, tmp_path / "out", name="again")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["is_dequantized"]
    assert manifest["source"] == {"name": "tiny", "kind": "gguf", "sha256": tiny_model("f16").sha256}


def test_the_same_source_gives_the_same_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        convert(tiny_checkpoint, tmp_path / name, name="same")
    for file in files_in(tmp_path / "one"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


@pytest.mark.parametrize("precision", ["f32", "float32"])
def test_a_converted_model_chunks(precision: str, tiny_model: Callable[[str], ModelFile]) -> None:
    path = str(tiny_model(precision).path.parent)
    chunker = Chunker.from_pretrained(path, Settings(max_size=20, context_length=512), device="cpu")
    assert "".join(chunk.text for chunk in chunker.chunk(TEXT)) == TEXT
    assert chunker.backend.model["precision"] == precision
    assert chunker.backend.model["sha256"] == tiny_model(precision).sha256


def test_a_model_in_the_cache_is_known_by_its_name_its_folder_and_its_file(converted: ModelFile) -> None:
    for name in ("tiny-f32", str(converted.path.parent), str(converted.path)):
        assert find_model(name) == converted
        assert verify(name) == converted


def test_the_models_commands_handle_it_like_a_downloaded_one(converted: ModelFile, cache: Path) -> None:
    listed = next(line for line in call("models", "list").output.splitlines() if "tiny-f32" in line)
    assert "converted" in listed
    assert call("models", "path", "tiny-f32").output.strip() == str(converted.path)
    assert converted.sha256 in call("models", "verify", "tiny-f32").output
    assert call("models", "remove", "tiny-f32").exit_code == 0
    assert files_in(cache / "converted") == set()
    assert "There is no model called 'tiny-f32'" in call("models", "path", "tiny-f32").output


def test_an_altered_file_is_found_by_verify_and_one_of_another_size_at_once(converted: ModelFile) -> None:
    content = converted.path.read_bytes()
    status = converted.path.stat()
    converted.path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(converted.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ModelFileError, match="is altered"):
        verify("tiny-f32")
    converted.path.write_bytes(content[:-1])
    with pytest.raises(ModelFileError, match="bytes: remove"):
        find_model("tiny-f32")


def test_removing_leaves_the_files_of_others(converted: ModelFile) -> None:
    (converted.path.parent / "notes.txt").write_text("mine", encoding="utf-8")
    remove("tiny-f32")
    assert files_in(converted.path.parent) == {"notes.txt"}
    with pytest.raises(ModelFileError):
        find_model("tiny-f32")


def test_the_command_converts_shows_progress_and_prints_the_folder(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = call("convert", str(tiny_checkpoint), "-p", "f32", "-o", str(tmp_path / "out"), "--threads", "1")
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "out")
    assert "GB of disk and" in result.stderr
    assert "Verifying against the float32 reference" in result.stderr


def test_an_unknown_precision_says_which_there_are(tiny_checkpoint: Path, tmp_path: Path) -> None:
    sentence = r"precision must be one of f32, .*q4_0, float32, .*int4, int8_fused, got 'q2'"
    with pytest.raises(SettingsError, match=sentence):
        convert(tiny_checkpoint, tmp_path / "out", "q2")


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden"])
def test_a_name_that_no_folder_can_have_is_refused(name: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="name must be"):
        convert(tiny_checkpoint, tmp_path / "out", name=name)


def test_a_folder_that_exists_is_never_written_over(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConversionError, match="exists already: choose another folder"):
        convert(tiny_checkpoint, tmp_path / "out")
    assert files_in(tmp_path / "out") == {"thesis.txt"}


def test_a_disk_without_room_is_said_before_the_work(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1_000})
    monkeypatch.setattr("metachunk_edge.convert.conversion.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ConversionError, match=r"needs up to 0.0 GB in .* make room"):
        convert(tiny_checkpoint, tmp_path / "out")
    assert files_in(tmp_path) == set()


def test_a_result_outside_the_tolerance_is_refused_with_measured_and_allowed_and_nothing_is_left(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = Tolerance(*[0.0] * 7, *[1.0] * 4)
    monkeypatch.setattr("metachunk_edge.convert.verify.tolerance_of", lambda *_: strict)
    with pytest.raises(ConversionError, match=r"mean \|Δ ln p\|: measured .* nats, allowed at most 0 nats"):
        convert(tiny_checkpoint, tmp_path / "out", "f16")
    assert files_in(tmp_path) == set()


def test_a_failure_on_the_way_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("metachunk_edge.convert.conversion.verify_conversion", fail)
    with pytest.raises(KeyboardInterrupt):
        convert(tiny_checkpoint, tmp_path / "out")
    assert files_in(tmp_path) == set()


def test_a_killed_run_leaves_nothing_that_looks_whole_and_the_next_one_cleans_up(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    arguments = [
        sys.executable,
        "-m",
        "metachunk_edge",
        "convert",
        str(tiny_checkpoint),
        "-p",
        "f32",
        "-o",
        str(output),
    ]
    run = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert run.stderr is not None
    for line in run.stderr:
        if "Verifying" in line:
            run.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
            break
    run.wait()
    assert not output.exists()
    assert any(name.endswith(".gguf") for name in files_in(tmp_path / ".out.partial"))
    time.sleep(0.1)
    convert(tiny_checkpoint, output)
    assert (output / "manifest.json").exists()
    assert not (tmp_path / ".out.partial").exists()


def test_two_runs_at_once_do_not_meet(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from metachunk_edge.convert.verify import verify_conversion

    def meanwhile(*arguments: Any, **options: Any) -> dict[str, Any]:
        with pytest.raises(ConversionError, match="out is being converted by another process"):
            convert(tiny_checkpoint, tmp_path / "out")
        parity: dict[str, Any] = verify_conversion(*arguments, **options)
        return parity

    monkeypatch.setattr("metachunk_edge.convert.conversion.verify_conversion", meanwhile)
    convert(tiny_checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.usefixtures("tiny_checkpoint")  # skips where the extra is missing
def test_a_source_that_does_not_exist_gets_a_sentence(tmp_path: Path) -> None:
    result = call("convert", str(tmp_path / "nowhere"), "-p", "f32")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith(f"Error: There is no model at {tmp_path / 'nowhere'}")


def test_without_the_extra_the_command_says_what_to_install(tiny_checkpoint: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['safetensors'] = None\n"
        "from metachunk_edge.cli import main; main()"
    )
    arguments = [
        sys.executable,
        "-c",
        script,
        "convert",
        str(tiny_checkpoint),
        "-p",
        "f32",
        "-o",
        str(tmp_path / "out"),
    ]
    run = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "pip install 'metachunk-edge[convert]'" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_checkpoint_as_a_model_says_that_it_must_be_converted(tiny_checkpoint: Path) -> None:
    with pytest.raises(ModelFileError, match="metachunk-edge convert"):
        find_model(str(tiny_checkpoint))


def test_a_third_run_does_not_disturb_the_first_when_a_second_was_refused(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metachunk_edge.convert.verify import verify_conversion

    def meanwhile(*arguments: Any, **options: Any) -> dict[str, Any]:
        for _ in range(2):
            with pytest.raises(ConversionError, match="being converted by another process"):
                convert(tiny_checkpoint, tmp_path / "out", "f16")
        parity: dict[str, Any] = verify_conversion(*arguments, **options)
        return parity

    monkeypatch.setattr("metachunk_edge.convert.conversion.verify_conversion", meanwhile)
    assert convert(tiny_checkpoint, tmp_path / "out").precision == "f32"
    assert files_in(tmp_path) == {"out", *(f"out/{name}" for name in files_in(tmp_path / "out"))}


def test_an_empty_folder_may_be_the_output(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert convert(tiny_checkpoint, tmp_path / "out").path.exists()


def test_a_path_is_never_taken_for_a_name_of_the_cache(
    converted: ModelFile, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = convert(tiny_checkpoint, tmp_path / "tiny-f32", "f16", name="other")
    for path in ("./tiny-f32", "tiny-f32/", f"tiny-f32/{other.path.name}"):
        assert find_model(path).name == "other"
    assert find_model("tiny-f32") == converted
    remove("./tiny-f32")
    assert not other.path.exists()
    assert find_model("tiny-f32") == converted


def test_a_name_of_the_catalogue_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="not in the catalogue"):
        convert(tiny_checkpoint, tmp_path / "out", name="qwen2.5-coder-0.5b-instruct")


@pytest.mark.parametrize(
    "damage",
    [
        {"files": []},
        {"files": {"../victim.txt": {"n_bytes": 4, "sha256": ""}}},
        {"files": {"a": "b"}},
        {"files": {"a": {"n_bytes": "4", "sha256": ""}}},
        {"files": {"a": {"n_bytes": 4}}},
        {"model_file": "missing.gguf"},
        {"source": None},
        {"name": 1},
    ],
)
def test_a_damaged_manifest_gets_a_sentence_hides_no_other_model_and_can_be_removed(
    damage: dict[str, Any], converted: ModelFile, cache: Path
) -> None:
    (cache / "converted" / "victim.txt").write_text("mine", encoding="utf-8")
    manifest = converted.path.parent / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps({**content, **damage}), encoding="utf-8")
    with pytest.raises(ModelFileError, match="is damaged: run `metachunk-edge models remove tiny-f32`"):
        find_model("tiny-f32")
    assert "qwen2.5-coder-0.5b-instruct" in call("models", "list").output
    assert call("models", "remove", "tiny-f32").exit_code == 0
    assert files_in(cache / "converted") == {"victim.txt"}


def test_what_a_killed_conversion_left_in_the_cache_can_be_removed_by_its_name(cache: Path) -> None:
    partial = cache / "converted" / ".mine.partial"
    partial.mkdir(parents=True)
    (partial / "distributions.f32").write_bytes(b"gigabytes")
    assert remove("mine") == [partial / "distributions.f32"]
    assert files_in(cache / "converted") == set()


@pytest.mark.parametrize("threads", [0, -1])
def test_a_number_of_threads_below_one_is_refused_before_the_work(threads: int, tiny_checkpoint: Path) -> None:
    for command in (["convert", str(tiny_checkpoint), "-p", "f32"], ["parity", "x.gguf", "--reference", "y"]):
        result = call(*command, "--threads", str(threads))
        assert f"threads must be at least 1, got {threads}" in result.output
        assert result.exit_code == 1


def test_the_precision_may_be_written_as_the_catalogue_writes_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert convert(tiny_checkpoint, tmp_path / "out", "F32").precision == "f32"


def test_a_converted_gguf_model_can_be_converted_again_by_its_name(converted: ModelFile, tmp_path: Path) -> None:
    assert convert(Path(converted.name), tmp_path / "out", "f16").name == "tiny-f32-gguf-f16"


def test_a_checkpoint_with_vocabulary_and_merges_in_place_of_a_tokenizer_file_is_converted(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "source"))
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    (source / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]), encoding="utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    (source / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    (source / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    (source / "tokenizer.json").unlink()
    assert convert(source, tmp_path / "out").path.exists()
