"""Command `autoshard doctor`: its parser, and what runs it."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterable
from typing import Any

from autoshard.tools.arguments import add_command

EXAMPLE = """\
examples, with two ranks of this machine, and with those of a cluster:

  autoshard doctor
  torchrun --nnodes 4 --nproc-per-node 8 ... -m autoshard.tools.cli doctor

Exit status 1: something is amiss, and the line that begins with FAIL says what to do.
"""


def add_parser(commands: Any) -> None:
    """Add the command `autoshard doctor`, with its options, to `commands`.

    What is parsed has two attributes more: `run`, which runs the command, and `parser`.
    """
    parser = add_command(
        commands,
        "doctor",
        EXAMPLE,
        help="say what is installed, what is amiss, and whether ranks reach each other",
        description="Print versions, devices, topology, compiler, caches and environment, and "
        "test collectives and a compiled step on all ranks.",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--only", choices=["here", "group"], help="one half of it")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard doctor`: print findings on this process, then on tests that all ranks take.

    Unless torchrun has started the ranks, the tests are run by `--ranks` processes forked here.
    Rank 0 prints all findings, the others what fails in the tests. `--only` leaves out one half.
    arguments: the command line; not used.
    Returns the exit status: 1 if a finding is a "FAIL", which a "warn" is not. Sets what
    `self_test` sets for this process, if the tests run in it, and leaves garbage uncollected.
    """
    gc.disable()  # a second of what is to take five goes into looking for garbage that imports lack
    from autoshard.tools.doctor.checks import Finding, checkup, self_test

    rank = int(os.environ.get("RANK", "0"))
    findings: list[Finding] = []

    def show(found: Iterable[Finding]) -> None:
        for finding in found:
            print(finding, flush=True)
            findings.append(finding)

    here = () if options.only == "group" or rank > 0 else checkup()  # looks when it is gone through
    if options.only == "here":
        show(here)
    elif "RANK" in os.environ:
        show(here)
        show(each for each in self_test() if rank == 0 or each.level == "FAIL")
    else:
        from autoshard.tools.doctor.forks import forked

        with forked(options.ranks) as tested:
            show(here)
            show(tested())
    return 1 if any(each.level == "FAIL" for each in findings) else 0
