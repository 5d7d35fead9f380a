"""Command `autoshard golden`: graphs and plans of a model, compared with those in files.

A review then shows a change in what is sent.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.tools.arguments import add_command
from autoshard.tools.trace.command import add_traced, traced

if TYPE_CHECKING:
    from autoshard.tools.trace.tracing import Traced

EXAMPLE = """\
examples:

  autoshard golden --model my_model:build --ranks 8 --dir golden/my_model --accept
  autoshard golden --model my_model:build --ranks 8 --dir golden/my_model

The first writes the files, for you to read and keep beside the code; the second, in CI, prints how
the model's graphs and plans differ from them. Exit status 1: they do.
"""


def add_parser(commands: Any) -> None:
    """Add the command `autoshard golden`, with its options, to `commands`.

    What is parsed has two attributes more: `run`, which runs the command, and `parser`.
    """
    parser = add_command(
        commands,
        "golden",
        EXAMPLE,
        help="compare a model's graphs and plans with files",
        description="Trace one step of a model as `autoshard trace` does, and compare its graphs "
        "and plans with those of earlier.",
    )
    add_traced(parser)
    parser.add_argument("--dir", required=True, help="the folder of the files")
    parser.add_argument("--accept", action="store_true", help="write the files")
    parser.set_defaults(run=run, parser=parser, dump=None)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard golden`: print how the files differ, or that they don't.

    With `--accept` they are written first, as `accept` does, so that they don't differ. The step is
    traced as `autoshard trace` does. Returns the exit status: 1 if files differ. What can't be read
    or traced ends the process with status 2.
    arguments: the command line; not used.
    """
    texts, folder = golden_texts(traced(options)), Path(options.dir)
    if options.accept:
        accept(texts, folder)
    lines = list(differences(texts, folder))
    print("\n".join(lines) or f"{folder}: {len(texts)} files, as they were")
    return 1 if lines else 0


def golden_texts(found: Sequence[Traced]) -> dict[str, str]:
    """Return the texts of golden files by name: "forward.txt", say, and "plans.txt" with all plans.

    Plans are without figures, which change with prices.
    """
    texts = {f"{each.graph}.txt": each.text for each in found}
    plans = (dataclasses.replace(each.plan, figures=None).text() for each in found)
    return {**texts, "plans.txt": "\n".join(plans)}


def accept(texts: dict[str, str], folder: Path) -> None:
    """Write `texts` as the golden files in `folder`, which is made if need be.

    Those of graphs that `texts` lacks ("forward.txt", "backward.txt", "inference.txt") are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in _left_over(texts, folder):
        path.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text)


def differences(texts: dict[str, str], folder: Path) -> Iterator[str]:
    """Yield lines of a diff from the golden files to `texts`; none if they are the same.

    A file that is missing counts as empty, as does the text for a file of a graph not in `texts`.
    """
    now = {**texts, **{path.name: "" for path in _left_over(texts, folder)}}
    for name, text in now.items():
        path = folder / name
        want = path.read_text() if path.exists() else ""
        yield from difflib.unified_diff(
            want.splitlines(), text.splitlines(), str(path), f"{name}, now", lineterm=""
        )


def _left_over(texts: dict[str, str], folder: Path) -> list[Path]:
    """List the golden files in `folder` of graphs that are not among `texts`; no other files."""
    known = [f"{kind}.txt" for kind in ("forward", "backward", "inference")]
    return [
        path
        for path in sorted(folder.glob("*.txt"))
        if path.name in known and path.name not in texts
    ]
