"""Behaviour of the catalogue: finding, verifying and removing model files. Every file lies under tmp_path."""

from __future__ import annotations

import json
import os
import re
import shutil
from importlib import resources
from pathlib import Path

import pytest
from local_sources import CONTENT, HUB_SOURCE, add_entry, files_under, flip_a_byte, sha256

from metachunk_edge.cache import ModelFile, cache_folder
from metachunk_edge.catalogue import (
    DEFAULT_MODEL,
    CatalogueEntry,
    HubSource,
    WheelSource,
    catalogue,
    find_model,
    install,
    is_pulled,
    partial_folder,
    remove,
    verify,
)
from metachunk_edge.errors import ModelFileError, ModelNotFoundError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METACHUNK_EDGE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hub_entry(monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    return add_entry(monkeypatch, HUB_SOURCE)


@pytest.fixture
def pulled(hub_entry: CatalogueEntry) -> Path:
    """The file as `pull` leaves it."""
    part = partial_folder(hub_entry) / f"hub-{'0' * 16}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT)
    return install(hub_entry, part, sha256(CONTENT), len(CONTENT), source=str(HUB_SOURCE), revision=None).path


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

    def test_remove_knows_only_names_of_the_catalogue(self, tmp_path: Path) -> None:
        (tmp_path / "own.gguf").write_bytes(CONTENT)
        with pytest.raises(ModelNotFoundError, match="There is no model called"):
            remove(str(tmp_path / "own.gguf"))
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


class TestRemove:
    def test_a_removed_model_leaves_nothing_behind(self, pulled: Path) -> None:
        assert remove("tiny") == [pulled, pulled.with_name(f"{pulled.name}.verified.json")]
        assert not pulled.parent.exists()
        with pytest.raises(ModelNotFoundError, match="nothing to remove"):
            remove("tiny")

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
