"""Command `autoshard doctor`: its parser, and what runs it."""

from __future__ import annotations

import argparse
import os
from typing import Any

from autoshard.tools.arguments import add_command
from autoshard.tools.ranks import launch

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

    Unless torchrun has started the ranks, the tests are run by `--ranks` processes started here.
    Rank 0 prints all findings, the others what fails in the tests. `--only` leaves out one half.
    arguments: the command line; not used.
    Returns the exit status: 1 if a finding is a "FAIL", which a "warn" is not, or if the processes
    started here fail. Sets what `self_test` sets for this process, if the tests run in it.
    """
    from autoshard.tools.doctor.checks import checkup, self_test

    rank = int(os.environ.get("RANK", "0"))
    findings = []
    if options.only != "group" and rank == 0:
        for finding in checkup():
            print(finding, flush=True)
            findings.append(finding)
    if options.only != "here":
        if "RANK" not in os.environ:
            launched = launch(["doctor", "--only", "group"], options.ranks)
            return 1 if launched or any(each.level == "FAIL" for each in findings) else 0
        tested = self_test()
        findings += tested
        shown = [each for each in tested if rank == 0 or each.level == "FAIL"]
        for finding in shown:
            print(finding, flush=True)
    return 1 if any(each.level == "FAIL" for each in findings) else 0
