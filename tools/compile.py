"""Command `autoshard compile`: its parser, and what runs it."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from autoshard.tools.arguments import BATCH, add_command, as_call, load, read_options

EXAMPLE = """\
example, with my_model.py defining build() -> nn.Module and batch(rank, step) -> dict:

  autoshard compile --model my_model:build --batch my_model:batch --gpus 8 --out compiled

One process, without the cluster, traces and plans what each of 8 ranks then loads:

  model = autoshard.load_compiled(my_model.build(), "compiled")

It is for the kind of device at hand. A model built on the meta device gets memory for its shards.
"""


def add_parser(commands: Any) -> None:
    """Add the command `autoshard compile`, with its options, to `commands`.

    What is parsed has two attributes more: `run`, which runs the command, and `parser`.
    """
    parser = add_command(
        commands,
        "compile",
        EXAMPLE,
        help="make once, in one process, what all ranks load instead of tracing",
        description="Trace and plan the steps of a model for a number of ranks, and write graphs, "
        "plans and all that they depend on to a folder.",
    )
    parser.add_argument("--model", required=True, help="package.module:function, returns the model")
    parser.add_argument("--batch", required=True, help=BATCH)
    parser.add_argument(
        "--gpus", required=True, help="number of ranks, 64, or with a kind: 64xH100"
    )
    parser.add_argument("--mesh", help="replicas x shards, 8x8, for hybrid_shard")
    parser.add_argument("--options", default="{}", help="backend options, as JSON")
    parser.add_argument("--amp", help="a dtype, bf16: calls are under autocast to it")
    parser.add_argument(
        "--accumulate",
        action="store_true",
        help="also of microbatches whose gradients wait, and of the last one after them",
    )
    parser.add_argument("--evaluate", action="store_true", help="also without gradients, in eval")
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard compile`: write the folder, and print what is in it; return the exit status.

    What can't be read ends the process with status 2, what can't be compiled returns 1.
    arguments: the command line; not used.
    """
    import torch

    from autoshard import _torch
    from autoshard.artefacts.folder import ArtefactError
    from autoshard.artefacts.make import make
    from autoshard.passes.ir.layout import DTYPES
    from autoshard.tools.plan.reading import read_gpus, read_mesh

    try:
        given = read_options(options.options)
        ranks, _, kind = options.gpus.partition("x")
        if kind:
            read_gpus(options.gpus, None)
            if kind.lower() not in _kind_at_hand().lower():
                raise ValueError(
                    f"--gpus {options.gpus}: the device at hand is {_kind_at_hand()}, and code is "
                    f"made for that: run this where there is a {kind}"
                )
        elif not ranks.isdigit() or not int(ranks):
            raise ValueError(f"--gpus {options.gpus!r}: expected a number of ranks, such as 8")
        mesh = read_mesh(options.mesh, int(ranks)) if options.mesh else None
        if mesh is not None and mesh[0] * mesh[1] != int(ranks):
            raise ValueError(f"--mesh {options.mesh}: that is not {ranks} ranks")
        if options.amp is not None and options.amp not in DTYPES:
            raise ValueError(f"--amp {options.amp!r}: expected a dtype, such as bf16")
        build, batch = load(options.model), load(options.batch)
    except ValueError as error:
        options.parser.error(str(error))
    _torch.dist.pretend_ranks(int(ranks))
    calls = ["train", *(["accumulate", "last"] if options.accumulate else [])]
    calls += ["evaluate"] if options.evaluate else []
    args, kwargs = as_call(batch(0, 0))
    try:
        model = build()
        with contextlib.ExitStack() as stack:
            if options.amp is not None:
                kind = "cuda" if torch.cuda.is_available() else "cpu"
                stack.enter_context(torch.autocast(kind, DTYPES[options.amp]))
            digest = make(
                Path(options.out), model, args, kwargs, options=given, mesh=mesh, calls=calls
            )
    except (ArtefactError, ValueError, OSError) as error:
        print(f"autoshard compile: error: {error}")
        return 1
    print(f"{options.out}: {', '.join(calls)} for {ranks} ranks, digest {digest[:16]}")
    return 0


def _kind_at_hand() -> str:
    """Name of the device at hand."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "a CPU"
