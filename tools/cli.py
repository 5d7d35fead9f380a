"""Command line of autoshard: `parity`, `bench`, `plan`, `trace`, `golden`, `doctor` and `opt`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autoshard.tools import opt
from autoshard.tools.ranks import launch, leave

PARITY_EXAMPLE = """\
example, with my_model.py defining build() -> nn.Module and batch(rank, step) -> dict:

  autoshard parity my_model:build --batch my_model:batch --ranks 2 --steps 3

autoshard's own models, in random combinations of its options:

  autoshard parity --matrix --samples 25 --seed 0
"""


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


PLAN_EXAMPLE = """\
examples, with a config.json from Hugging Face, and my_model.py defining build() -> nn.Module:

  autoshard plan --model config.json --gpus 64xH100 --seq 8192
  autoshard plan --model my_model:build --gpus 16xA100 --micro-batch 2 --checkpointing full --json

No GPU is used, and no weights are made. What is left open (mesh, strategy, micro-batch,
checkpointing) is tried, and the three best configurations are shown. Exit status 1: none fits.
"""


TRACE_EXAMPLE = """\
examples, with a config.json from Hugging Face, and my_model.py defining build() -> nn.Module:

  autoshard trace --model config.json --ranks 8 --seq 128 --dump graphs
  autoshard trace --model my_model:build --ranks 64 --options '{"topology": "h100"}' --out plans

No GPU is used, no weights are made, and nothing is run. Options: lowering, bucketing, topology
(without one, a bucket a unit), strategy (full_shard or shard_grad_op).
"""


GOLDEN_EXAMPLE = """\
examples:

  autoshard golden --model my_model:build --ranks 8 --dir golden/my_model --accept
  autoshard golden --model my_model:build --ranks 8 --dir golden/my_model

The first writes the files, for you to read and keep beside the code; the second, in CI, prints how
the model's graphs and plans differ from them. Exit status 1: they do.
"""


DOCTOR_EXAMPLE = """\
examples, with two ranks of this machine, and with those of a cluster:

  autoshard doctor
  torchrun --nnodes 4 --nproc-per-node 8 ... -m autoshard.tools.cli doctor

Exit status 1: something is amiss, and the line that begins with FAIL says what to do.
"""


BATCH = (
    "package.module:function of (rank, step) that returns a batch: a dict of keyword arguments, a "
    "tuple of arguments, or one argument"
)


def script() -> NoReturn:
    """Entry point of the console script."""
    leave(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name; return its exit status."""
    parser = argparse.ArgumentParser(prog="autoshard", description="Sharded training, compiled.")
    commands = parser.add_subparsers(dest="command", required=True)
    add_parity(commands)
    add_bench(commands)
    add_plan(commands)
    add_trace(commands)
    add_golden(commands)
    add_doctor(commands)
    opt.add_parser(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options, list(sys.argv[1:] if arguments is None else arguments))
    return status


def _with_example(commands: Any, name: str, example: str, **texts: str) -> Any:
    """Add a command whose help ends with `example`, as it is written."""
    formatter = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, epilog=example, formatter_class=formatter, **texts)


def add_parity(commands: Any) -> None:
    """Add the command `autoshard parity`."""
    parser = _with_example(
        commands,
        "parity",
        PARITY_EXAMPLE,
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
    parser.set_defaults(run=run_parity, parser=parser)


def add_bench(commands: Any) -> None:
    """Add the commands `autoshard bench calibrate` and `autoshard bench step`."""
    parser = commands.add_parser("bench", help="measure the cluster at hand")
    what = parser.add_subparsers(dest="what", required=True)
    calibrate = _with_example(
        what,
        "calibrate",
        CALIBRATE_EXAMPLE,
        help="write a topology file for the option topology=",
        description="Time collectives of several sizes, matrix products and copies, and write "
        "what plans reckon with.",
    )
    calibrate.add_argument("--model", help="package.module:function that returns a model to time")
    calibrate.add_argument("--batch", help=f"{BATCH}; of that model")
    calibrate.add_argument("--loss", help="package.module:function of (model, batch)")
    calibrate.add_argument("--out", required=True, help="the JSON file to write")
    calibrate.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    calibrate.set_defaults(run=run_calibrate, parser=calibrate)

    step = _with_example(
        what,
        "step",
        STEP_EXAMPLE,
        help="time a step beside FSDP1, FSDP2, DDP and others",
        description="Train models with autoshard and with what else there is, a step of each in "
        "turn, and print medians, what communication adds, and how long the first step takes.",
    )
    step.add_argument("--models", nargs="+", default=["small", "medium", "large"])
    step.add_argument("--contestants", nargs="+", help="some of them (all)")
    step.add_argument("--rounds", type=int, default=20, help="steps of each (default 20)")
    step.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="of computation")
    step.add_argument("--options", default="{}", help="of autoshard's backend, as JSON")
    step.add_argument("--out", help="a JSON file to write, with every step's times")
    step.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    step.set_defaults(run=run_step, parser=step)


def add_plan(commands: Any) -> None:
    """Add the command `autoshard plan`."""
    parser = _with_example(
        commands,
        "plan",
        PLAN_EXAMPLE,
        help="predict memory and step time of a model on a cluster",
        description="Trace a model, and predict what a step takes on a cluster: peak memory by "
        "category, time, exposed communication, and what bounds it.",
    )
    _add_workload(parser)
    parser.add_argument("--gpus", required=True, help="number and kind, 64xH100, or a number")
    parser.add_argument("--topology", help="a name or a file of `autoshard bench calibrate`")
    parser.add_argument("--mesh", help="replicas x shards, 8x8, or shards alone")
    parser.add_argument("--strategy", help="full_shard, shard_grad_op, hybrid_shard, ...")
    parser.add_argument("--micro-batch", type=int, help="sequences a step and rank")
    parser.add_argument("--optimizer", default="adamw", help="adamw (default), adam, sgd, ...")
    parser.add_argument("--checkpointing", choices=["none", "full"], help="of every unit")
    parser.add_argument("--lowering", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--buckets", action="store_true", help="print buckets too, by unit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_plan, parser=parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe what is trained, for commands that trace without running."""
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


def add_trace(commands: Any) -> None:
    """Add the command `autoshard trace`."""
    parser = _with_example(
        commands,
        "trace",
        TRACE_EXAMPLE,
        help="print the plans of a model, and write its graphs",
        description="Trace one step of a model, sharded over ranks that are not there, and print "
        "its plans.",
    )
    _add_traced(parser)
    parser.add_argument("--out", help="a folder for the plans as JSON, and their timelines")
    parser.add_argument("--dump", help="a folder for the graphs, a file a pass")
    parser.set_defaults(run=run_trace, parser=parser)


def add_golden(commands: Any) -> None:
    """Add the command `autoshard golden`."""
    parser = _with_example(
        commands,
        "golden",
        GOLDEN_EXAMPLE,
        help="compare a model's graphs and plans with files",
        description="Trace one step of a model as `autoshard trace` does, and compare its graphs "
        "and plans with those of earlier.",
    )
    _add_traced(parser)
    parser.add_argument("--dir", required=True, help="the folder of the files")
    parser.add_argument("--accept", action="store_true", help="write the files")
    parser.set_defaults(run=run_golden, parser=parser, dump=None)


def add_doctor(commands: Any) -> None:
    """Add the command `autoshard doctor`."""
    parser = _with_example(
        commands,
        "doctor",
        DOCTOR_EXAMPLE,
        help="say what is installed, what is amiss, and whether ranks reach each other",
        description="Print versions, devices, topology, compiler, caches and environment, and "
        "test collectives and a compiled step on all ranks.",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--only", choices=["here", "group"], help="one half of it")
    parser.set_defaults(run=run_doctor, parser=parser)


def _add_traced(parser: argparse.ArgumentParser) -> None:
    _add_workload(parser)
    parser.add_argument("--ranks", type=int, default=8, help="that are not there (default 8)")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences a rank (default 1)")
    parser.add_argument("--options", default="{}", help="of the backend, as JSON")
    parser.set_defaults(optimizer="adamw", lowering="inductor")


def run_trace(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard trace`; exit status 2 for what can't be read or traced."""
    from autoshard.tools.trace.tracing import write

    found = _traced(options)
    for each in found:
        print(each.plan.text())
    if options.out:
        print("\n".join(map(str, write(found, Path(options.out)))))
    return 0


def run_golden(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard golden`.

    Exit status 1 where the files differ, 2 for what can't be read or traced.
    """
    from autoshard.tools.trace.tracing import accept, differences, golden_texts

    texts, folder = golden_texts(_traced(options)), Path(options.dir)
    if options.accept:
        accept(texts, folder)
    lines = list(differences(texts, folder))
    print("\n".join(lines) or f"{folder}: {len(texts)} files, as they were")
    return 1 if lines else 0


def _traced(options: argparse.Namespace) -> Any:
    from autoshard.tools.plan.planning import read_workload
    from autoshard.tools.trace.tracing import trace_workload

    try:
        given = {"dump": options.dump, **read_options(options.options)}
        workload = read_workload(options, load)
        return trace_workload(workload, options.ranks, options.micro_batch, given)
    except (ValueError, RuntimeError) as error:
        options.parser.error(str(error))


def run_plan(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard plan`; exit status 1 if no configuration fits, 2 for what can't be read."""
    from autoshard.tools.plan.planning import Choices, plan, read_gpus, read_mesh, read_workload
    from autoshard.tools.plan.report import as_json, text

    try:
        gpus, topology = read_gpus(options.gpus, options.topology)
        choices = Choices(
            mesh=read_mesh(options.mesh, gpus) if options.mesh else None,
            strategy=options.strategy,
            micro_batches=(options.micro_batch,) if options.micro_batch else None,
            checkpointing=None
            if options.checkpointing is None
            else options.checkpointing == "full",
        )
        report = plan(read_workload(options, load), topology, gpus, choices)
    except (ValueError, RuntimeError) as error:
        options.parser.error(str(error))
    if options.json:
        print(json.dumps(as_json(report)))
    else:
        print(text(report, with_buckets=options.buckets), end="")
    return 0 if report.overflow is None else 1


def run_calibrate(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard bench calibrate`; start the ranks unless torchrun did."""
    if bool(options.model) != bool(options.batch):
        options.parser.error("--model needs --batch, and --batch needs --model")
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


def run_step(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard bench step`; start the ranks unless torchrun did.

    Exit status 2 for a name that isn't there.
    """
    if options.out and not os.access(Path(options.out).parent, os.W_OK):
        options.parser.error(f"--out {options.out}: there is no such folder to write to")
    if "RANK" not in os.environ:
        return launch(arguments, options.ranks)
    import torch

    from autoshard.passes.ir.layout import DTYPES
    from autoshard.runtime.comm.mesh import device_type, ensure_process_group
    from autoshard.tools.bench.contestants import CONTESTANTS, read_contestants
    from autoshard.tools.bench.step import Result, bench_step
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

    def tell(result: Result) -> None:
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


def run_doctor(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard doctor`; start the ranks unless torchrun did.

    Exit status 1 if something is amiss.
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


def make_step(options: argparse.Namespace) -> Callable[[], object]:
    """Return forward and backward, as a function, of the unsharded model that `options` names."""
    from autoshard.runtime.comm.mesh import device_type
    from autoshard.tools.parity.compare import default_loss

    model = load(options.model)().to(device_type())
    batch = load(options.batch)(int(os.environ["RANK"]), 0)
    loss = load(options.loss) if options.loss else default_loss
    return lambda: loss(model, batch).backward()


def run_parity(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard parity`; start the ranks unless torchrun did.

    Exit status 1 if a run differs.
    """
    draws = options.matrix or options.fuzz
    if not draws and not (options.model and options.batch):
        options.parser.error("a model and --batch are required, or --matrix, or --fuzz")
    if "RANK" not in os.environ:
        return launch(arguments, options.ranks)
    if draws:
        return run_samples(options)
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


def run_samples(options: argparse.Namespace) -> int:
    """Try random samples; print a line for each that fails, and one for all.

    Exit status 1 if one fails.
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


def read_options(text: str) -> dict[str, Any]:
    """Read the backend's options from `--options`. Raises ValueError for what is no JSON object."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--options {text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--options {text!r}: expected an object, such as '{{\"strict\": true}}'")
    return found


def load(place: str) -> Callable[..., Any]:
    """Load the function at `package.module:name`. Raises ValueError if there is none."""
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"can't load {place!r} ({error}); expected package.module:function"
        ) from error
    if not callable(found):
        raise ValueError(f"{place!r} is a {type(found).__name__}; expected a function")
    return found  # type: ignore[no-any-return]


if __name__ == "__main__":
    script()
