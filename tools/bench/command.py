"""Commands `autoshard bench calibrate` and `autoshard bench step`: parsers, and what runs them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard.tools.arguments import BATCH, add_command, load, read_options
from autoshard.tools.ranks import launch

CALIBRATE_EXAMPLE = """\
example, on two CPU ranks of this machine, and on the GPUs of a cluster:

  autoshard bench calibrate --out gloo2.json --ranks 2
  torchrun --nnodes 4 --nproc-per-node 8 ... -m autoshard.tools.cli bench calibrate --out h100.json

with the ops of a model timed one by one, whole on each rank (some of its layers are enough):

  autoshard bench calibrate --out gloo2.json --model my_model:build --batch my_model:batch

then: torch.compile(model, backend="autoshard", options={"topology": "gloo2.json"})
"""


STEP_EXAMPLE = """\
examples, on two CPU ranks of this machine, and on the GPUs of a node:

  autoshard bench step --models small vit --rounds 10
  torchrun --nproc-per-node 8 -m autoshard.tools.cli bench step --dtype bf16

Needs `pip install transformers`. Models: small, medium, large (Llamas), gpt2, vit.
"""


def add_parser(commands: Any) -> None:
    """Add the commands `autoshard bench calibrate` and `autoshard bench step`."""
    parser = commands.add_parser("bench", help="measure the cluster at hand")
    what = parser.add_subparsers(dest="what", required=True)
    _add_calibrate(what)
    _add_step(what)


def _add_calibrate(commands: Any) -> None:
    """Add the command `autoshard bench calibrate`, with its options, to `commands`.

    What is parsed has two attributes more: `run`, which runs the command, and `parser`.
    """
    parser = add_command(
        commands,
        "calibrate",
        CALIBRATE_EXAMPLE,
        help="write a topology file for the option topology=",
        description="Time collectives of several sizes, matrix products and copies, and write "
        "what plans reckon with.",
    )
    parser.add_argument("--model", help="package.module:function that returns a model to time")
    parser.add_argument("--batch", help=f"{BATCH}; of that model")
    parser.add_argument("--loss", help="package.module:function of (model, batch)")
    parser.add_argument("--out", required=True, help="the JSON file to write")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.set_defaults(run=run_calibrate, parser=parser)


def _add_step(commands: Any) -> None:
    """Add the command `autoshard bench step`, with its options, to `commands`.

    What is parsed has two attributes more: `run`, which runs the command, and `parser`.
    """
    parser = add_command(
        commands,
        "step",
        STEP_EXAMPLE,
        help="time a step beside FSDP1, FSDP2, DDP and others",
        description="Train models with autoshard and with what else there is, a step of each in "
        "turn, and print medians, what communication adds, and how long the first step takes.",
    )
    parser.add_argument("--models", nargs="+", default=["small", "medium", "large"])
    parser.add_argument("--contestants", nargs="+", help="some of them (all)")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each (default 20)")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="of computation")
    parser.add_argument("--options", default="{}", help="of autoshard's backend, as JSON")
    parser.add_argument("--out", help="a JSON file to write, with every step's times")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.set_defaults(run=run_step, parser=parser)


def run_calibrate(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard bench calibrate`; start the ranks, and wait for them, unless torchrun did.

    torchrun did if RANK is set. A rank makes the process group if there is none; rank 0 writes the
    topology to `--out`, and prints it. Raises as `make_step` and `calibrate` do.
    arguments: the command line, with which ranks are started.
    Returns the exit status: that of torchrun, or, on a rank, 0. `--model` without `--batch`, or the
    other way round, or `--loss` without them, ends the process with status 2.
    """
    if bool(options.model) != bool(options.batch):
        options.parser.error("--model needs --batch, and --batch needs --model")
    if options.loss and not options.model:
        options.parser.error("--loss needs --model and --batch")
    if "RANK" not in os.environ:
        return launch(arguments, options.ranks)
    from autoshard.runtime.comm.mesh import ensure_process_group
    from autoshard.tools.bench.calibrate import calibrate

    ensure_process_group()
    steps = [make_step(options)] if options.model else []
    topology = calibrate(options.out, steps=steps)
    if int(os.environ["RANK"]) == 0:
        print(topology.to_json(), end="")
    return 0


def make_step(options: argparse.Namespace) -> Callable[[], object]:
    """Return a function that runs forward and backward of the unsharded model of `options`.

    It has one batch, this rank's for step 0, which is made here and not moved, and takes no
    optimizer step: gradients add up. The model is built here, and moved to this rank's device; no
    seed is set. Raises ValueError for a function that can't be loaded.
    """
    from autoshard.runtime.comm.mesh import device_type
    from autoshard.tools.parity.compare import default_loss

    model = load(options.model)().to(device_type())
    batch = load(options.batch)(int(os.environ["RANK"]), 0)
    loss = load(options.loss) if options.loss else default_loss
    return lambda: loss(model, batch).backward()


def run_step(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard bench step`; start the ranks, and wait for them, unless torchrun did.

    A rank makes the process group if there is none. Rank 0 prints versions, then each model's table
    when it is measured, and writes `--out`, if given, anew each time.
    arguments: the command line, with which ranks are started.
    Returns the exit status: that of torchrun, or, on a rank, 0. Unknown names, options that can't
    be read, or no folder for `--out` end the process with status 2.
    """
    if options.out and not os.access(Path(options.out).parent, os.W_OK):
        options.parser.error(f"--out {options.out}: there is no such folder to write to")
    if "RANK" not in os.environ:
        return launch(arguments, options.ranks)
    import torch

    from autoshard.passes.ir.layout import DTYPES
    from autoshard.runtime.comm.mesh import device_type, ensure_process_group
    from autoshard.tools.bench.contestants import CONTESTANTS, read_contestants
    from autoshard.tools.bench.step import StepTimes, bench_step
    from autoshard.tools.bench.workloads import read_workloads

    is_first = int(os.environ["RANK"]) == 0
    try:
        given = read_options(options.options)
        contestants = read_contestants(options.contestants or CONTESTANTS)
        workloads = read_workloads(options.models, device_type())
    except ValueError as error:
        options.parser.error(str(error))
    ensure_process_group()
    if is_first:
        print(f"torch {torch.__version__}, {os.environ['WORLD_SIZE']} ranks, {' '.join(arguments)}")
    results: list[dict[str, Any]] = []

    def tell(result: StepTimes) -> None:
        """Print `result`, and write all results so far to `--out`; on rank 0 only."""
        if not is_first:
            return
        print(result.text(), flush=True)
        results.append(dataclasses.asdict(result))
        if options.out:
            Path(options.out).write_text(json.dumps(results, indent=1))

    bench_step(
        workloads,
        contestants=contestants,
        rounds=options.rounds,
        dtype=DTYPES[options.dtype],
        options=given,
        tell=tell,
    )
    return 0
