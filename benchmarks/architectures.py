"""Tiny models of known architectures: their graphs and graph breaks, and who equals whom.

    OMP_NUM_THREADS=1 PYTHONPATH=tests torchrun --nproc-per-node 2 benchmarks/architectures.py
    ... benchmarks/architectures.py mixtral dit --lowering inductor
    ... benchmarks/architectures.py --family vision --batch 1/3

Prints a Markdown table. Each model is trained for 4 steps of AdamW, on other data on each rank, in
three ways, each beside one that shards nothing and averages gradients by hand: on the eager
runtime and compiled with the plain lowering, beside the model in eager torch; and, with
`--lowering inductor`, compiled with Inductor, beside the unsharded model in Inductor. A cell says
that all parameters are equal bit for bit, or the largest difference relative to a parameter's
largest element, and the first that differs and by how much, or what was raised. A model whose
parts depend on a rank's data is compiled with `strict_order=False`. Where the plain
lowering differs, the cell says how far it is from the unsharded model compiled with `aot_eager`,
and where it raises, whether that does, too.

Each cell has its time limit, and a rank that fails alone does not keep the other waiting: models
run in processes of their own, which are started anew after a failure. Ends with 1 if a cell says
anything but "bit for bit". The models are in tests/support/architectures.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.architectures import ARCHITECTURES, FAMILIES, architecture, architecture_loss
from support.ranks import free_port
from support.training import adamw, local_rows_of, replicated, sharded, train
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import autoshard
import autoshard.backend
from autoshard.passes.lowering.eager import lower_eagerly

STEPS = 4
SAME = "bit for bit"
EAGER, PLAIN, INDUCTOR = "eager", "plain", "inductor"
HEADINGS = {
    EAGER: "eager runtime, replicated",
    PLAIN: "plain lowering, replicated",
    INDUCTOR: "Inductor, unsharded in Inductor",
}
GRACE = 15.0
"""Seconds that a rank has after another's failure, to tell its own."""


@dataclass(frozen=True)
class Difference:
    """Difference of parameters on a rank, relative to a parameter's largest element.

    position: of the first `parameter` that differs, by `relative`.
    most:     the one that differs most, by `worst`. AdamW divides a gradient by its size: of one
              that is zero but for rounding, as that of an attention's key bias, it makes a whole
              step, so what differs first may say more.
    """

    position: int
    parameter: str
    relative: float
    most: str
    worst: float


@dataclass(frozen=True)
class Outcome:
    """Outcome of one model in one way, on a rank.

    error:      what was raised, in a line; `trace` is its traceback.
    difference: from the unsharded model; None if all parameters are equal bit for bit.
    beside_aot: difference from the unsharded model in `aot_eager`, where that was asked.
    frames:     number of those that Dynamo captured.
    plans:      texts of plans.
    breaks:     reasons for graph breaks.
    fell_back:  a warning that a model fell back, if there was one.
    """

    error: str | None = None
    difference: Difference | None = None
    beside_aot: Difference | None = None
    aot_asked: bool = False
    frames: int = 0
    plans: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    fell_back: str | None = None
    trace: str = ""


# One model in one way, on a rank.


def run(name: str, way: str) -> Outcome:
    """Train the model `name` in one way and unsharded, and compare: the outcome on this rank.

    All ranks call this. Where the plain lowering differs on any of them, the unsharded model is
    also trained in `aot_eager`, and compared. Dynamo and its counters are reset. Exceptions are
    passed on.
    way: EAGER, PLAIN or INDUCTOR, which is compared with the unsharded model in Inductor.
    """

    def loss(model: Any, rank: int, step: int) -> Tensor:
        return architecture_loss(model, name, rank, step)

    build = functools.partial(architecture, name)
    want, _ = replicated(build, loss, backend=INDUCTOR if way == INDUCTOR else None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = sharded(build, loss)[0] if way == EAGER else in_one_line(name, loss, way)
    counters = torch._dynamo.utils.counters
    frames, breaks = counters["stats"]["unique_graphs"], tuple(map(str, counters["graph_break"]))
    ours = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    difference = compare(got, want)
    beside_aot = None
    if aot_asked := any_rank(difference is not None) and way == PLAIN:
        beside_aot = compare(got, replicated(build, loss, backend=unsharded_graphs())[0])
    return Outcome(
        difference=difference,
        beside_aot=beside_aot,
        aot_asked=aot_asked,
        frames=frames,
        plans=tuple(plan.text() for plan in autoshard.plans(got)),
        breaks=breaks,
        fell_back=next((text for text in ours if "shard" in text), None),
    )


def in_one_line(name: str, loss: Any, way: str) -> nn.Module:
    """Train the model `name` compiled by `torch.compile` alone, without `strict`; return it.

    So users do: what falls back is to give a warning, and to be right.
    """
    torch.manual_seed(0)
    model = architecture(name)
    optimizer = adamw(model)
    options: dict[str, Any] = {"lowering": "inductor" if way == INDUCTOR else "eager"}
    if not ARCHITECTURES[name].ordered:
        options["strict_order"] = False
    call = torch.compile(model, backend="autoshard", options=options)
    train(call, loss, optimizer, steps=STEPS)
    return model


def unsharded_graphs() -> Any:
    """Return a backend as `aot_eager`, but that a view may copy, as in the plain lowering.

    See `lower_eagerly`.
    """
    return aot_autograd(
        fw_compiler=lambda gm, _: lower_eagerly(gm),
        partition_fn=min_cut_rematerialization_partition,
    )


def any_rank(fact: bool) -> bool:
    """Tell whether `fact` is true on any rank; all ranks call this."""
    number = torch.tensor(float(fact))
    dist.all_reduce(number)
    return number.item() > 0


def compare(got: nn.Module, want: nn.Module) -> Difference | None:
    """Compare this rank's part of each parameter of `got` with the matching rows of `want`.

    Returns the first and the largest difference; None if all are equal bit for bit.
    """
    theirs = dict(want.named_parameters())
    found: list[tuple[float, int, str]] = []
    for position, (name, param) in enumerate(got.named_parameters()):
        have, expected = local_rows_of(param, param), local_rows_of(theirs[name], param)
        if not torch.equal(have, expected):
            found.append((relative_difference(have, expected), position, name))
    if not found:
        return None
    (relative, position, name), (worst, _, most) = found[0], max(found)
    return Difference(position, name, relative, most, worst)


def relative_difference(have: Tensor, expected: Tensor) -> float:
    """Largest difference of two tensors, relative to the largest of what is expected.

    It is infinite where one has a NaN, or where all that is expected is 0.
    """
    absolute = (have.double() - expected.double()).abs().max().item()
    largest = expected.double().abs().max().item()
    relative = absolute / largest if largest else math.inf
    return relative if relative == relative else math.inf


# The processes that models run in.


def serve(rank: int, world: int, port: int, pipe: Any) -> None:
    """Run models in this process, and answer each (name, way) in `pipe` with its outcome.

    An exception is an outcome, too. It returns when the other end is closed. The process becomes
    `rank` of a gloo group of `world` ranks, which meet at `port` of this machine.
    """
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # or it would ask torchrun's
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    gc.freeze()
    gc.set_threshold(50_000)  # as in the tests: a compilation makes and drops many more than 700
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        try:
            name, way = pipe.recv()
        except EOFError:
            return
        autoshard.backend._warned.clear()  # each model's are to be told
        try:
            outcome = run(name, way)
        except Exception as error:
            also = "; so does aot_eager" if way == PLAIN and fails_unsharded(name, rank) else ""
            outcome = Outcome(error=in_a_line(error) + also, trace=traceback.format_exc())
        pipe.send(outcome)


def fails_unsharded(name: str, rank: int) -> bool:
    """Tell whether torch can't compile the model, either: a forward, in `aot_eager`, raises."""
    torch._dynamo.reset()
    try:
        architecture_loss(torch.compile(architecture(name), backend="aot_eager"), name, rank, 0)
    except Exception:
        return True
    return False


def in_a_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class Helper:
    """Process in which this rank's models run. All ranks call `ask` and `answers` together."""

    def __init__(self) -> None:
        self.process: Any = None
        self.pipe: Any = None

    def ask(self, name: str, way: str, limit: float) -> list[Outcome]:
        """Have all ranks' processes run a model in one way; return each rank's outcome, in order.

        A process is started if there is none, and stopped after a failure on any rank.
        limit: in seconds, after which an outcome is an error.
        """
        if self.process is None:
            self.start()
        outcomes = self.answers(name, way, limit)
        if any(outcome.error for outcome in outcomes):
            self.stop()  # nobody knows what its collectives wait for
        return outcomes

    def answers(self, name: str, way: str, limit: float) -> list[Outcome]:
        """Send the processes a model, and wait for all answers; return them by rank.

        After `limit` seconds, or `GRACE` seconds after a first failure, an error stands for those
        that are missing.
        """
        begun, mine = time.monotonic(), None
        failed_after: float | None = None
        self.pipe.send((name, way))
        while True:
            mine = mine or self.poll()
            elapsed = time.monotonic() - begun
            found = exchange((mine, elapsed))
            outcomes, now = [each for each, _ in found], max(after for _, after in found)
            if all(outcomes):
                return outcomes
            if failed_after is None and any(each and each.error for each in outcomes):
                failed_after = now
            if now > (limit if failed_after is None else failed_after + GRACE):
                late = Outcome(error=f"no answer within {now:.0f} s")
                return [each or late for each in outcomes]

    def poll(self) -> Outcome | None:
        """Return the process's answer if it comes within 0.2 s, or None; if it ended, an error."""
        try:
            return self.pipe.recv() if self.pipe.poll(0.2) else None
        except EOFError:
            return Outcome(error="the process ended")

    def start(self) -> None:
        """Start this rank's process, which meets the others' at a port that rank 0 has found."""
        context = multiprocessing.get_context("spawn")
        port = exchange(free_port())[0]
        self.pipe, there = context.Pipe()
        self.process = context.Process(
            target=serve, args=(dist.get_rank(), dist.get_world_size(), port, there), daemon=True
        )
        self.process.start()
        there.close()

    def stop(self) -> None:
        """Kill the process, if there is one, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = None


def exchange(value: Any) -> list[Any]:
    """Return what each rank gives, in the order of ranks; all ranks call this."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# The table.


def cell(outcomes: Sequence[Outcome]) -> str:
    """Format all ranks' outcomes of one model in one way: `SAME`, the difference, or an error.

    Of errors, one that is no missing answer goes first. A fallback is added, with the difference
    from `aot_eager` where that was asked. Texts are cut off.
    """
    errors = [(rank, each.error) for rank, each in enumerate(outcomes) if each.error]
    if errors:
        # One that waited in vain for another says less than that other.
        rank, error = min(errors, key=lambda found: found[1].startswith("no answer"))
        alone = "" if len(errors) == len(outcomes) else f"rank {rank}: "
        return f"raises: {alone}{error}".replace("|", "/")[:300]
    text = difference_text([each.difference for each in outcomes])
    if any(each.aot_asked for each in outcomes):
        text += f"; beside aot_eager: {difference_text([each.beside_aot for each in outcomes])}"
    fell_back = next((each.fell_back for each in outcomes if each.fell_back), None)
    if fell_back:
        text += f"; falls back: {fell_back.splitlines()[0]}".replace("|", "/")[:300]
    return text


def difference_text(differences: Sequence[Difference | None]) -> str:
    """Format the largest of all ranks' differences, and the first; `SAME` if all are None."""
    found = [each for each in differences if each is not None]
    if not found:
        return SAME
    first = min(found, key=lambda each: each.position)
    most = max(found, key=lambda each: each.worst)
    return f"{most.worst:.2g} in {most.most}; first in {first.parameter}, {first.relative:.2g}"


def graphs(outcomes: Sequence[Outcome]) -> str:
    """Format the numbers of frames, plans and graph breaks of rank 0."""
    here = outcomes[0]
    breaks = f", {count(len(here.breaks), 'break')}" if here.breaks else ""
    return f"{count(here.frames, 'frame')}, {count(len(here.plans), 'plan')}{breaks}"


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def row(helper: Helper, name: str, ways: Sequence[str], options: Any) -> tuple[str, bool]:
    """Return the table's row of `name`, and whether all cells say `SAME`.

    All ranks call this: the model is run in each way. With `details` in `options`, rank 0 prints
    breaks, plans and tracebacks. Inductor has four times the limit.
    """
    cells, captured = [], "-"
    for way in ways:
        limit = options.limit * (4 if way == INDUCTOR else 1)
        outcomes = helper.ask(name, way, limit)
        cells.append(cell(outcomes))
        if way != EAGER and not outcomes[0].error:
            captured = graphs(outcomes)
        if options.details:
            say("\n".join(details(outcomes)))
    line = " | ".join([name, ARCHITECTURES[name].family, captured, *cells])
    return f"| {line} |", all(each == SAME for each in cells)


def details(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield breaks and plans of rank 0, and the tracebacks of all."""
    yield from outcomes[0].breaks
    yield from outcomes[0].plans
    for each in outcomes:
        yield each.trace


def chosen(options: Any) -> list[str]:
    """List the models to run: those named, or of a family, or all; of these every n-th."""
    names = options.names or [
        name
        for name, line in ARCHITECTURES.items()
        if options.family is None or line.family == options.family
    ]
    number, batches = map(int, options.batch.split("/"))
    return names[number - 1 :: batches]


def main() -> None:
    """Print the table, and end the process: rank 0 with 1 if a cell says anything but `SAME`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *ARCHITECTURES], metavar="name")
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument(
        "--lowering", default="eager", choices=["eager", "inductor", "both"], help="which columns"
    )
    parser.add_argument("--batch", default="1/1", help="k/n: every n-th, from the k-th on")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds a cell; Inductor's 4")
    parser.add_argument("--details", action="store_true", help="print breaks, plans and tracebacks")
    options = parser.parse_args()
    ways = {"eager": [EAGER, PLAIN], "inductor": [INDUCTOR], "both": [EAGER, PLAIN, INDUCTOR]}
    columns = ways[options.lowering]
    os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # what `serve` inherits
    dist.init_process_group("gloo")
    headings = ["model", "family", "graphs", *(HEADINGS[way] for way in columns)]
    say(f"torch {torch.__version__}, {dist.get_world_size()} ranks, {STEPS} steps\n")
    say(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    wrong = []
    helper = Helper()
    with contextlib.ExitStack() as stack:
        stack.callback(helper.stop)
        for name in chosen(options):
            line, same = row(helper, name, columns, options)
            say(line)
            if not same:
                wrong.append(name)
    dist.destroy_process_group()
    sys.exit(f"not equal: {', '.join(wrong)}" if wrong and int(os.environ["RANK"]) == 0 else 0)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
