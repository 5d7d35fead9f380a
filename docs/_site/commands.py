"""Hook of mkdocs that puts the help of commands into a page, as the program prints it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

_HELP = re.compile("<!-- help of: (?P<command>.*)-->")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Put the help of a command in the place of a comment that names it."""
    return "\n".join(_with_help(line) for line in markdown.splitlines())


def _with_help(line: str) -> str:
    found = _HELP.fullmatch(line)
    if not found:
        return line
    done = subprocess.run(
        [sys.executable, "-m", "autoshard.tools.cli", *found["command"].split(), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    return f"```text\n{done.stdout}```"
