"""Command `autoshard explain`: its parser, and what runs it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from autoshard.tools.arguments import add_command

EXAMPLE = """\
examples, with what torch.profiler's export_chrome_trace has written, packed by gzip or not:

  autoshard explain trace.json
  autoshard explain rank0.json.gz rank1.json.gz --json

Any run of FSDP1, FSDP2, DDP or autoshard will do. Sizes of collectives on a CPU are in a trace of
profile(record_shapes=True). With the traces of all ranks, who waits for whom is measured.
"""


def add_parser(commands: Any) -> None:
    """Add the command `autoshard explain`, with its options, to `commands`.

    What is parsed has two attributes more: `run`, which runs the command, and `parser`.
    """
    parser = add_command(
        commands,
        "explain",
        EXAMPLE,
        help="say why communication is exposed in a profiler's trace",
        description="Read a trace of torch.profiler, and say how much communication is exposed in "
        "a step, where, for which reasons, and what removing each would gain.",
    )
    parser.add_argument("traces", nargs="+", metavar="trace", help="a file a rank, of one run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard explain`: print the report, as a table or with `--json` as JSON.

    Returns the exit status, 0. A file that can't be read, or is no such trace, ends the process
    with status 2.
    arguments: the command line; not used.
    """
    from autoshard.tools.trace.explain.reader import read
    from autoshard.tools.trace.explain.report import as_json, lanes_of, report_on, text

    try:
        ranks = [lanes_of(path, read(Path(path))) for path in options.traces]
        report = report_on(ranks)
    except (ValueError, OSError) as error:
        options.parser.error(str(error))
    print(json.dumps(as_json(report)) if options.json else text(report), end="\n" * options.json)
    return 0
