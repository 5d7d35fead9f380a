"""Command `autoshard parity`: its parser, and what runs it, on every rank."""

from __future__ import annotations

import argparse
import os
from typing import Any

from autoshard.tools.arguments import BATCH, add_command, load, read_options
from autoshard.tools.ranks import launch

EXAMPLE = """\
example, with my_model.py defining build() -> nn.Module and batch(rank, step) -> dict:

  autoshard parity my_model:build --batch my_model:batch --ranks 2 --steps 3

autoshard's own models, in random combinations of its options:

  autoshard parity --matrix --samples 25 --seed 0
"""


def add_parser(commands: Any) -> None:
    """Add the command `autoshard parity`, with its options, to `commands`.

    What is parsed has two attributes more: `run`, which runs the command, and `parser`.
    """
    parser = add_command(
        commands,
        "parity",
        EXAMPLE,
        help="compare replicated, eager and compiled training of a model",
        description="Train a model replicated, on the eager runtime and compiled, on the same "
        "batches, and name the first parameter that differs, on which rank, by how much.",
    )
    parser.add_argument("model", nargs="?", help="package.module:function that returns the model")
    parser.add_argument("--batch", help=BATCH)
    parser.add_argument("--loss", help="package.module:function of (model, batch)")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument("--lowering", default="eager", help="eager (default) or inductor")
    parser.add_argument("--options", default="{}", help="more backend options, as JSON")
    parser.add_argument("--strategy", default="full_shard", help="full_shard or shard_grad_op")
    parser.add_argument("--rtol", type=float, default=1e-5, help="what passes where not bitwise")
    parser.add_argument(
        "--bisect", action="store_true", help="where runs differ, find the first op that does"
    )
    parser.add_argument(
        "--matrix", action="store_true", help="small models in random combinations of options"
    )
    parser.add_argument("--fuzz", action="store_true", help="random models, with random options")
    parser.add_argument("--samples", type=int, default=25, help="of either (default 25)")
    parser.add_argument("--seed", type=int, default=0, help="of the first sample (default 0)")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard parity`; start the ranks, and wait for them, unless torchrun did.

    On a rank, the process group is made if there is none, and rank 0 prints the report. With
    `--matrix` or `--fuzz` samples are tried, and a model is not looked at.
    arguments: the command line, with which ranks are started.
    Returns the exit status: 1 if a run differs by more than `--rtol`, or a sample fails; that of
    torchrun where ranks are started. A command line that asks for nothing to compare ends the
    process with status 2.
    Raises ValueError, on a rank, for a function or options that can't be read.
    """
    draws = options.matrix or options.fuzz
    if not draws and not (options.model and options.batch):
        options.parser.error("a model and --batch are required, or --matrix, or --fuzz")
    if "RANK" not in os.environ:
        return launch(arguments, options.ranks)
    if draws:
        return _run_samples(options)
    from autoshard.tools.parity.compare import parity

    rank = int(os.environ["RANK"])
    make_batch = load(options.batch)
    report = parity(
        load(options.model),
        [make_batch(rank, step) for step in range(options.steps)],
        loss=load(options.loss) if options.loss else None,
        options={"lowering": options.lowering, **read_options(options.options)},
        rtol=options.rtol,
        bisect=options.bisect,
        strategy=options.strategy,
    )
    if rank == 0:
        print(report.text())
    return 0 if report.ok else 1


def _run_samples(options: argparse.Namespace) -> int:
    """Try random samples on all ranks; rank 0 prints a line for each that fails, and one for all.

    Returns the exit status: 1 if one fails.
    options: `seed`, of the first sample, `samples`, and `fuzz`, for random models.
    """
    from autoshard.tools.parity.matrix import try_case
    from autoshard.tools.parity.random_models import try_model

    failed = 0
    for seed in range(options.seed, options.seed + options.samples):
        outcome = try_model(seed) if options.fuzz else try_case(seed)
        failed += outcome.problem is not None
        if outcome.problem is not None and int(os.environ["RANK"]) == 0:
            print(f"seed {seed}: {outcome.problem}\n    {outcome.text}", flush=True)
    if int(os.environ["RANK"]) == 0:
        passed = options.samples - failed
        print(f"parity: {passed} of {options.samples} samples pass, from seed {options.seed}")
    return 1 if failed else 0
