"""Extension of griffe, which reads docstrings for the site: makes lists of their arguments.

In a docstring of ours an argument is a line `name: what it is`, which goes on in lines with an
indent. In Markdown these would run together into one paragraph.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ARGUMENT = re.compile(r"(?P<names>\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*): (?P<text>.*)")


class Arguments(griffe.Extension):
    """Writes each docstring's arguments as a list."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """Rewrite the lines of arguments as items of a list; leave the rest."""
    lines: list[str] = []
    in_item = False
    for line in text.splitlines():
        found = _ARGUMENT.fullmatch(line)
        if found:
            names = ", ".join(f"`{name}`" for name in found["names"].split(", "))
            lines += ([] if in_item else [""]) + [f"- {names}: {found['text']}"]
            in_item = True
        elif in_item and line.startswith("    "):
            lines.append("  " + line.strip())
        else:
            lines += ([""] if in_item and line else []) + [line]
            in_item = False
    return "\n".join(lines)
