"""`autoshard checkpoint verify FOLDER`: whether checkpoints can be loaded, by their digests."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.tools.arguments import add_command

if TYPE_CHECKING:
    from autoshard.runtime.training.checkpoint.manifest import Manifest

EXAMPLE = """\
example:

  autoshard checkpoint verify checkpoints/

Exit status 1: one of them can't be loaded, and its line says why.
"""


def add_parser(commands: Any) -> None:
    """Add the command `autoshard checkpoint`, with its options, to `commands`.

    What is parsed has two attributes more: `run`, which runs the command, and `parser`.
    """
    parser = add_command(
        commands,
        "checkpoint",
        EXAMPLE,
        help="say whether checkpoints can be loaded",
        description="Read all files of checkpoints, and compare them with their digests.",
    )
    parser.add_argument("what", choices=["verify"], help="compare files with their digests")
    parser.add_argument("folder", type=Path, help="as given to save_checkpoint, or one in it")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print a line for each checkpoint; return 1 if one can't be loaded, or none is there."""
    from autoshard.runtime.training.checkpoint.folder import verify

    found = verify(options.folder)
    for name, each in found.items():
        print(f"{name}: {each if isinstance(each, str) else describe(each)}")
    return int(any(isinstance(each, str) for each in found.values()))


def describe(manifest: Manifest) -> str:
    """Describe a checkpoint that can be loaded, as "complete, 3 files of 1,234 bytes, ..."."""
    size = sum(file.size for file in manifest.files.values())
    digests = [file.sha256 for file in manifest.files.values()]
    by = "by their digests" if None not in digests else "by their sizes alone: it has no digests"
    return (
        f"complete, {len(digests)} files of {size:,} bytes, {by}; saved by {manifest.world} ranks"
    )
