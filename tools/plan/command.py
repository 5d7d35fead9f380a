"""Command `autoshard plan`: its parser, and what runs it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoshard.tools.arguments import add_command, load

EXAMPLE = """\
examples, with a config.json from Hugging Face, and my_model.py defining build() -> nn.Module:

  autoshard plan --model config.json --gpus 64xH100 --seq 8192
  autoshard plan --model config.json --gpus 64xH100 --seq 8192 --html plan.html
  autoshard plan --model my_model:build --gpus 16xA100 --micro-batch 2 --checkpointing full --json

No GPU is used, and no weights are made. What is left open (mesh, strategy, micro-batch,
checkpointing) is tried, and the three best configurations are shown. Exit status 1: none fits.
Tensor, pipeline and context parallel runs can't be planned.
"""


def add_parser(commands: Any) -> None:
    """Add the command `autoshard plan`, with its options, to `commands`.

    What is parsed has two attributes more: `run`, which runs the command, and `parser`.
    """
    parser = add_command(
        commands,
        "plan",
        EXAMPLE,
        help="predict memory and step time of a model on a cluster",
        description="Trace a model, and predict what a step takes on a cluster: peak memory by "
        "category, time, exposed communication, and what bounds it.",
    )
    add_workload(parser)
    parser.add_argument("--gpus", required=True, help="number and kind, 64xH100, or a number")
    parser.add_argument("--topology", help="a name or a file of `autoshard bench calibrate`")
    parser.add_argument("--network", help="rate between nodes, 800Gb/node or 400Gb/gpu")
    parser.add_argument("--mesh", help="replicas x shards, 8x8, or shards alone")
    parser.add_argument("--strategy", help="full_shard, shard_grad_op, hybrid_shard, zero1, ...")
    parser.add_argument("--micro-batch", type=int, help="sequences of a forward, on a rank")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches a step (1)")
    parser.add_argument("--optimizer", default="adamw", help="adamw (default), adam, sgd, ...")
    parser.add_argument(
        "--checkpointing",
        help="none, full, ops; full of some units: layers:2, first:10; values, the front of memory "
        "and time, value by value, or a share of it: values:35",
    )
    parser.add_argument(
        "--budget",
        help="memory of a device to keep to, 40GiB: as few values as that takes are computed again",
    )
    parser.add_argument(
        "--states",
        choices=["device", "host"],
        help="where the optimizer's states live between steps; by default on the device, with a "
        "budget wherever that is better",
    )
    parser.add_argument("--lowering", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--fp8", action="store_true", help="linear layers compute in float8")
    parser.add_argument(
        "--loss",
        choices=["whole", "chunked"],
        default="whole",
        help="chunked: it runs over an eighth of the tokens at a time, with the layer before it",
    )
    parser.add_argument("--buckets", action="store_true", help="print buckets too, by unit")
    parser.add_argument("--html", metavar="FILE", help="write a page of pictures and tables, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, parser=parser)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe what is trained, for commands that trace without running.

    `read_model` reads them, and `micro_batch`, `optimizer` and `lowering`, which a command adds.
    """
    parser.add_argument(
        "--model", required=True, help="a Hugging Face config.json, or package.module:function"
    )
    parser.add_argument(
        "--batch",
        help="package.module:function of (micro_batch, seq) that returns a dict of keyword "
        "arguments, a tuple of arguments, or one argument; by default token ids",
    )
    parser.add_argument("--seq", type=int, default=4096, help="length of sequences (4096)")
    parser.add_argument("--dtype", default="bf16", help="of computation and gathers (bf16)")
    parser.add_argument("--param-dtype", default="f32", help="of shards and reduces (f32)")
    parser.add_argument("--reduce-dtype", help="of reduces, if it is not --param-dtype")
    parser.add_argument(
        "--amp", action="store_true", help="compute under autocast to --dtype; gather shards as is"
    )


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disable Python's garbage collector in this context; after it, it is as before.

    A trace is a million objects that live, and each collection looks at all of them, a sixth of the
    command's time. The process soon ends, and its garbage with it. A compilation, whose process
    goes on, only makes collections rare (`autoshard/compilation.py`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collections()
def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard plan`: print the best configurations, as tables or with `--json` as JSON.

    With `--html`, a page is written, too. Returns the exit status, 1 if no configuration fits. What
    can't be read, traced or written ends the process with status 2.
    arguments: the command line; not used.
    """
    from autoshard.runtime.weights.save import read_size
    from autoshard.tools.plan.page import write
    from autoshard.tools.plan.planning import Choices, plan
    from autoshard.tools.plan.reading import read_gpus, read_mesh, read_model, read_network
    from autoshard.tools.plan.report import as_json, text

    try:
        gpus, topology = read_gpus(options.gpus, options.topology)
        if options.network:
            topology = read_network(options.network, topology)
        choices = Choices(
            mesh=read_mesh(options.mesh, gpus) if options.mesh else None,
            strategy=options.strategy,
            micro_batches=(options.micro_batch,) if options.micro_batch else None,
            checkpointing=options.checkpointing,
            accumulate=options.accumulate,
            budget_bytes=read_size(options.budget, "--budget") if options.budget else None,
            states_on_host=None if options.states is None else options.states == "host",
        )
        model = dataclasses.replace(
            read_model(options, load),
            is_fp8=options.fp8,
            is_loss_chunked=options.loss == "chunked",
        )
        report = plan(model, topology, gpus, choices)
    except (ValueError, RuntimeError) as error:
        options.parser.error(str(error))
    if options.json:
        print(json.dumps(as_json(report)))
    else:
        print(text(report, with_buckets=options.buckets), end="")
    if options.html:
        try:
            write(report, Path(options.html))
        except OSError as error:
            options.parser.error(f"--html: {error}")
    return 0 if report.overflow is None else 1
