"""What is installed is what the repository holds, and what the documents say."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
from pathlib import Path

import pytest
from click import Group
from conftest import REPOSITORY

import metachunk_edge
from metachunk_edge.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = pytest.mark.skipif(
    not (REPOSITORY / "README.md").exists(), reason="these tests run away from the checkout, on a built wheel"
)


@CHECKOUT
def test_every_package_folder_is_listed_for_the_wheel() -> None:
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {
        ".".join(path.parent.relative_to(REPOSITORY).parts)
        for path in (REPOSITORY / "metachunk_edge").rglob("__init__.py")
    }
    beside = {f"metachunk_edge.{name}" for name in ("models", "convert") if (REPOSITORY / name).is_dir()}
    assert set(listed["packages"]) == folders | beside
    assert {f"metachunk_edge.{name}" for name in listed["package-dir"].values()} == beside


def test_the_catalogue_is_installed() -> None:
    assert metachunk_edge.DEFAULT_MODEL in metachunk_edge.catalogue()


def test_the_package_is_typed() -> None:
    assert (Path(metachunk_edge.__file__).parent / "py.typed").exists()


def test_the_version_is_the_distributions() -> None:
    assert metachunk_edge.__version__ == importlib.metadata.version("metachunk-edge")


def test_every_public_name_exists_and_is_documented() -> None:
    assert sorted(set(metachunk_edge.__all__)) == sorted(metachunk_edge.__all__)
    for name in metachunk_edge.__all__:
        value = getattr(metachunk_edge, name)
        if isinstance(value, type) or inspect.isfunction(value):
            assert value.__doc__, name


def commands(group: Group, prefix: str = "") -> set[str]:
    names: set[str] = set()
    for name, command in group.commands.items():
        names |= commands(command, f"{name} ") if isinstance(command, Group) else {prefix + name}
    return names


@CHECKOUT
def test_the_readme_lists_every_command() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("| `")]
    for command in commands(main):
        group, _, name = command.rpartition(" ")
        assert any(f"`{name}`" in row or f"`{command}`" in row for row in rows if group in row), command


@CHECKOUT
def test_every_option_in_the_readme_exists() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    known = {name for command in main.commands.values() for parameter in command.params for name in parameter.opts} | {
        "--help"
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", readme)) <= known
