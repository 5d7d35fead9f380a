"""Blocks of code in a page of documentation, in order, and what each is.

A block in Python whose first line is a comment with a file's name is that file. Any other block in
Python is a fragment, which takes names for granted. A block for bash is commands, one a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(
    r"^(?P<before>[^\n]*)\n\n?(?P<indent> *)```(?P<language>\w*)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"# (?P<name>\w+\.py)\n")
_GOES_ON = "<!-- goes on -->"
_NOT_CODE = ("text", "json", "yaml", "toml")


@dataclass(frozen=True)
class Block:
    """Block of code of a page."""

    kind: Literal["file", "commands", "fragment"]
    text: str
    line: int  # of the page, where its text begins
    name: str = ""  # of a file
    goes_on: bool = False  # a fragment, in the names of the one before


def blocks(page: Path) -> list[Block]:
    """Find the blocks of a page. Raises ValueError for one of another language."""
    return list(_blocks(page.read_text(), page.name))


def _blocks(text: str, page: str) -> Iterator[Block]:
    for found in _FENCE.finditer("\n" + text):
        language, code = found["language"], _without(found["indent"], found["text"])
        line = text.count("\n", 0, found.start("text") - 1) + 1
        if language in _NOT_CODE:
            continue
        if language == "bash":
            yield Block("commands", code, line)
        elif language == "python":
            file = _FILE.match(code)
            if file:
                yield Block("file", code, line, file["name"])
            else:
                yield Block("fragment", code, line, goes_on=_GOES_ON in found["before"])
        else:
            raise ValueError(
                f"{page}, line {line}: a block of {language!r}; say python, bash or text"
            )


def _without(indent: str, text: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


def commands(block: Block) -> list[str]:
    """Split a block for bash into its commands: lines that end in a backslash go on.

    Programs of an environment in .venv are those of this one.
    """
    lines = block.text.replace("\\\n", " ").replace(".venv/bin/", "").splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.strip() and line[0] != "#"]
