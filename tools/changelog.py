"""Write CHANGELOG.md from changelog.d/, which has a file for each change that users see.

With `--check` it writes nothing, and fails if it would change:

    python -m autoshard.tools.changelog
    python -m autoshard.tools.changelog --check
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import autoshard

ROOT = Path(__file__).resolve().parent.parent
HEAD = """\
# Changelog

Newest first. Written by `python -m autoshard.tools.changelog` from `changelog.d/`, a file a change.
"""


def changelog(folder: Path) -> str:
    """Return the text of the changelog: files of `folder`, the highest number first."""
    entries = [_item(path.read_text()) for path in sorted(folder.glob("*.md"), reverse=True)]
    return "\n".join([HEAD, f"## {autoshard.__version__}, not released\n", *entries, ""])


def _item(text: str) -> str:
    """Make an item of a list of a change; one that has items already stays as it is.

    >>> print(_item("One.\\nTwo."))
    - One.
      Two.
    >>> print(_item("- One.\\n- Two."))
    - One.
    - Two.
    """
    text = text.strip()
    return text if text.startswith("- ") else "- " + "\n  ".join(text.splitlines())


def main(argv: list[str] | None = None) -> int:
    """Write or check CHANGELOG.md; return the exit status, 1 if a check finds it stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args(argv)
    text, target = changelog(ROOT / "changelog.d"), ROOT / "CHANGELOG.md"
    if not arguments.check:
        target.write_text(text)
    elif not target.exists() or target.read_text() != text:
        print("CHANGELOG.md is stale: run python -m autoshard.tools.changelog", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
