"""Command `autoshard trace`: its parser, and what runs it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.tools.arguments import add_command, load, read_options
from autoshard.tools.plan.command import add_workload

if TYPE_CHECKING:
    from autoshard.tools.trace.tracing import Traced

EXAMPLE = """\
examples, with a config.json from Hugging Face, and my_model.py defining build() -> nn.Module:

  autoshard trace --model config.json --ranks 8 --seq 128 --dump graphs
  autoshard trace --model my_model:build --ranks 64 --options '{"topology": "h100"}' --out plans

No GPU is used, no weights are made, and nothing is run. Options: lowering, bucketing, topology
(without one, a bucket a unit), strategy (full_shard or shard_grad_op).
"""


def add_parser(commands: Any) -> None:
    """Add the command `autoshard trace`, with its options, to `commands`.

    What is parsed has two attributes more: `run`, which runs the command, and `parser`.
    """
    parser = add_command(
        commands,
        "trace",
        EXAMPLE,
        help="print the plans of a model, and write its graphs",
        description="Trace one step of a model, sharded over ranks that are not there, and print "
        "its plans.",
    )
    add_traced(parser)
    parser.add_argument("--out", help="a folder for the plans as JSON, and their timelines")
    parser.add_argument("--dump", help="a folder for the graphs, a file a pass")
    parser.set_defaults(run=run, parser=parser)


def add_traced(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which step is traced, and how, to `parser`.

    Of what `read_model` asks for, `optimizer` and `lowering` get values here, and are no options.
    """
    add_workload(parser)
    parser.add_argument("--ranks", type=int, default=8, help="that are not there (default 8)")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences a rank (default 1)")
    parser.add_argument("--options", default="{}", help="of the backend, as JSON")
    parser.set_defaults(optimizer="adamw", lowering="inductor")


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard trace`: print the plans, and write them to the folder of `--out`, if given.

    Timelines are written with them, where plans have figures, and the paths are printed. With
    `--dump` graphs are written after each pass. This process becomes a rank of ranks that are not
    there. Returns the exit status, 0. What can't be read or traced ends the process with status 2.
    arguments: the command line; not used.
    """
    from autoshard.tools.trace.tracing import write

    found = traced(options)
    for each in found:
        print(each.plan.text())
    if options.out:
        print("\n".join(map(str, write(found, Path(options.out)))))
    return 0


def traced(options: argparse.Namespace) -> list[Traced]:
    """Trace the step that `options` describe, as `trace_model` does; run none of it.

    This process becomes rank 0 of ranks that are not there, and what torch has compiled is reset.
    What can't be read or traced is an error of the command line: it ends the process with status 2.
    options: what is parsed, with `parser`; graphs after each pass go to the folder of `dump`, if
        any.
    """
    from autoshard.tools.plan.reading import read_model
    from autoshard.tools.trace.tracing import trace_model

    parser: argparse.ArgumentParser = options.parser
    try:
        given = {"dump": options.dump, **read_options(options.options)}
        planned = read_model(options, load)
        return trace_model(planned, options.ranks, options.micro_batch, given)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
