"""The documentation's site: all commands and all public names are in its reference."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest
from support.pages import DOCS

import autoshard
from autoshard.tools import cli

pytest.importorskip("griffe", reason="mkdocstrings is not installed: pip install '.[dev]'")


def load(name: str) -> ModuleType:
    """Import a file of docs/_site, which mkdocs calls by its path."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "_site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arguments_become_a_list() -> None:
    before = """Do it.

mesh: of two axes,
    named.
ignored_modules, ignored_params: left alone.

Returns `model`. Raises ValueError: never."""
    after = """Do it.


- `mesh`: of two axes,
  named.
- `ignored_modules`, `ignored_params`: left alone.

Returns `model`. Raises ValueError: never."""
    assert load("arguments").with_lists(before) == after


def test_the_help_of_a_command_takes_its_place() -> None:
    made = load("commands").on_page_markdown("# One\n<!-- help of: opt -->\nend")
    assert made.startswith("# One\n```text\nusage: autoshard opt")
    assert made.endswith("\n```\nend")


def test_every_command_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    (listed,) = re.findall(r"\{([\w,]+)\}", capsys.readouterr().out.partition("\n\n")[0])
    page = (DOCS / "reference" / "commands.md").read_text()
    told = re.findall(r"<!-- help of: (\w+)", page)
    assert {*told} == {*listed.split(",")}


def test_every_public_name_is_there() -> None:
    pages = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    told = re.findall(r"^::: autoshard\.((?:wrap\.)?\w+)$", pages, re.MULTILINE)
    of_wrap = [name for name in vars(autoshard.wrap) if name[0] != "_"]
    wanted = {*autoshard._PLACES, *(f"wrap.{name}" for name in of_wrap)}
    assert wanted - {*told} == {"ModuleWrapPolicy"}  # it is there as autoshard.wrap's
