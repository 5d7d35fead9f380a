"""Command line of autoshard: a table of its commands.

A command's module has `add_parser`, which adds its parser, and sets the function that runs it: that
takes the parsed options and the command line, and returns the exit status. The module imports no
torch until the command runs: help answers at once.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from autoshard import __version__
from autoshard.one_piece import MANY, in_one_piece
from autoshard.tools import checkpoint, compile, opt
from autoshard.tools.bench import command as bench
from autoshard.tools.doctor import command as doctor
from autoshard.tools.parity import command as parity
from autoshard.tools.plan import command as plan
from autoshard.tools.ranks import leave
from autoshard.tools.trace import command as trace
from autoshard.tools.trace import golden
from autoshard.tools.trace.explain import command as explain

COMMANDS = (
    parity.add_parser,
    bench.add_parser,  # two: calibrate and step
    plan.add_parser,
    compile.add_parser,
    trace.add_parser,
    golden.add_parser,
    explain.add_parser,
    doctor.add_parser,
    checkpoint.add_parser,
    opt.add_parser,
)
"""Functions that add a command's parser, in the order of help."""


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are a line, and not below a page of usage. Its commands' are of it."""

    def error(self, message: str) -> NoReturn:
        """Print `message`, and what shows the usage; raise SystemExit."""
        self.exit(2, f"{self.prog}: error: {message}\n({self.prog} --help says what there is)\n")


class _Version(argparse.Action):
    """Option that prints versions, and ends the program. torch is not imported for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print the versions of autoshard, torch and Python; raise SystemExit with status 0."""
        found = []
        for name in ("autoshard", "torch"):
            try:
                found.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                found.append(f"{name} {__version__ if name == 'autoshard' else 'is not installed'}")
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"{', '.join(found)}, Python {python}")
        parser.exit()


def script() -> NoReturn:
    """Run the command of `sys.argv`, and end the process: entry point of the console script."""
    leave(main())


@functools.partial(in_one_piece, values=MANY)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name; return its exit status.

    arguments: without the program's name; None: those of `sys.argv`. Wrong ones, and `--help`,
        raise SystemExit.
    """
    parser = _Parser(prog="autoshard", description="Sharded training, compiled.")
    parser.add_argument("--version", action=_Version, nargs=0, help="versions, of torch too")
    commands = parser.add_subparsers(dest="command", required=True)
    for add_parser in COMMANDS:
        add_parser(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options, list(sys.argv[1:] if arguments is None else arguments))
    return status


if __name__ == "__main__":
    script()
