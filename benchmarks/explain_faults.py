"""Faults put into training, one a trace, and what `autoshard explain` makes of each.

    OMP_NUM_THREADS=1 python benchmarks/explain_faults.py [--keep FOLDER] [--only recorded]

Ten traces are recorded: on two gloo ranks, or on rank 0 of an emulated link. Twenty are imagined
ones of a GPU (`cuda_traces`), of other sizes each; a fault among them that makes a step less than a
tenth slower is made worse. Faultless ones follow. Right is what names the fault first. Ends with
1 if fewer than 28 of the 30 are right, or a faultless one is blamed.

The rules were written with such traces at hand, and no trace of a GPU was there. On a machine that
is busy, recorded steps have faults of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda_traces
import emulated_link
import torch
import torch.distributed as dist
from cuda_traces import Run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import autoshard
from autoshard.tools.trace.explain.reader import read
from autoshard.tools.trace.explain.reasons import COPY, HOST, LATE, QUEUE, SKEW, SMALL
from autoshard.tools.trace.explain.report import Report, lanes_of, report_on

NEEDED = 28
SLOWER = 1.1
STEPS, WARM_UP, TRIES = 3, 2, 3

IMAGINED = (
    *((LATE, "FSDP2", 0), (LATE, "FSDP2", 1), (LATE, "FSDP1", 0), (LATE, "DDP", 0)),
    *((QUEUE, "FSDP2", 0), (QUEUE, "FSDP2", 1), (QUEUE, "FSDP1", 0), (QUEUE, "FSDP1", 1)),
    *((HOST, "FSDP2", 0), (HOST, "FSDP2", 1), (HOST, "FSDP1", 0)),
    *((COPY, "FSDP2", 0), (COPY, "FSDP2", 1), (COPY, "FSDP2", 0)),
    *((SKEW, "FSDP2", 0), (SKEW, "FSDP1", 1), (SKEW, "DDP", 0)),
    *((SMALL, "FSDP2", 0), (SMALL, "FSDP1", 1), (SMALL, "DDP", 0)),
)
"""Faults of imagined traces: the reason, the library, and the form of the fault."""

FAULTLESS = (("FSDP2", 1.0), ("FSDP2", 3.0), ("FSDP1", 1.0), ("FSDP1", 5.0), ("DDP", 1.0))
"""Libraries of imagined traces without a fault, and how slow the link is; 3.0: it is the bound."""


@dataclass(frozen=True)
class Case:
    """Trace, of a file a rank, and the fault that is in it: a reason, or "".

    slower: times that a step takes of one without the fault; None if that was not measured.
    """

    name: str
    fault: str
    paths: list[Path]
    slower: float | None = None


class Block(nn.Module):
    """Linear layers, and what is done after each, with its output."""

    def __init__(self, dim: int, layers: int, between: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            self.between(x)
        return x


def stack(
    blocks: int, layers: int, dim: int, between: Callable[[Tensor], None] = lambda _: None
) -> Any:
    """Make blocks of linear layers, one after another; each calls `between` after every layer."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dim, layers, between) for _ in range(blocks)))


def sharded(model: Any, shard: Callable[..., object] = autoshard.fully_shard) -> Any:
    """Shard a stack, a unit a block."""
    for block in model:
        shard(block)
    shard(model)
    return model


def sleep(seconds: float, rank: int | None = None) -> Callable[[Tensor], None]:
    """Return a function that sleeps, in forward on that rank; None: on all, in backward, too."""

    def pause(x: Tensor) -> None:
        if rank in (None, dist.get_rank()):
            time.sleep(seconds)
        if rank is None and x.requires_grad:
            x.register_hook(lambda _: time.sleep(seconds))

    return pause


Step = Callable[[], object]


def train(model: Any, rows: int, dim: int) -> Step:
    """Make a step of a model: forward, backward, and the optimizer."""
    x, optimizer = torch.randn(rows, dim), torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def data_parallel(model: Any, bucket_mb: float) -> Any:
    """Make replicas of a model, by DDP."""
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)


def autoshard_sleeps() -> Step:
    """One rank of two sleeps in every block."""
    return train(sharded(stack(4, 2, 384, sleep(0.012, rank=1))), 256, 384)


def ddp_sleeps() -> Step:
    """One rank of two sleeps in forward, where the other one does not."""
    return train(data_parallel(stack(4, 2, 384, sleep(0.012, rank=1)), 1), 256, 384)


def fsdp2_on_a_cpu() -> Step:
    """FSDP2 gathers where it waits, if there are no streams."""
    emulated_link.start(8, latency_us=300, gb_per_s=0.5)
    return train(sharded(stack(6, 2, 512), fully_shard), 256, 512)


def reduced_by_hand() -> Step:
    """Gradients are reduced after backward, all at once."""
    emulated_link.start(8, latency_us=300, gb_per_s=0.5)
    model, x = stack(6, 2, 512), torch.randn(256, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(x).sum().backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        for work in works:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()

    return step


def one_a_parameter() -> Step:
    """A collective a parameter, of small ones, over a link that takes long to begin."""
    emulated_link.start(8, latency_us=2000, gb_per_s=4)
    model = nn.Sequential(*stack(8, 3, 96), nn.Linear(96, 8192))
    shard = autoshard.fully_shard
    for block in list(model)[:-1]:
        for layer in block.layers:
            shard(layer)
    return train(sharded(model), 256, 96)


def small_buckets() -> Step:
    """Buckets of DDP of a few KiB."""
    return train(data_parallel(stack(16, 3, 96), 0.01), 128, 96)


def autoshard_host() -> Step:
    """The host sleeps between layers, while the next unit is gathered."""
    emulated_link.start(8, latency_us=300, gb_per_s=0.4)
    return train(sharded(stack(6, 2, 512, sleep(0.008))), 256, 512)


def ddp_host() -> Step:
    """The host sleeps between layers, on both ranks."""
    return train(data_parallel(stack(6, 2, 768, sleep(0.008)), 2), 128, 768)


def large_in_front() -> Step:
    """A large all-reduce, which nothing waits for soon, is in front of gathers."""
    emulated_link.start(8, latency_us=300, gb_per_s=1)
    model = sharded(stack(6, 2, 512))
    large, works = torch.zeros(6_000_000), list[Any]()

    def launch(module: Any, inputs: Any) -> None:
        works.append(dist.all_reduce(large, async_op=True))

    for number in (1, 4):
        model[number].register_forward_pre_hook(launch, prepend=True)
    step = train(model, 512, 512)

    def and_wait() -> None:
        step()
        while works:
            works.pop().wait()

    return and_wait


def few_rows() -> Step:
    """Parameters are large, batches tiny and the link fast: all is copying."""
    emulated_link.start(8, latency_us=20, gb_per_s=200)
    return train(sharded(stack(4, 2, 1024), fully_shard), 2, 1024)


def autoshard_ahead() -> Step:
    """Nothing is wrong: units are gathered ahead, over a link that is fast enough."""
    emulated_link.start(8, latency_us=50, gb_per_s=8)
    return train(sharded(stack(6, 2, 384)), 1024, 384)


def ddp_overlapped() -> Step:
    """Nothing is wrong: buckets are reduced during backward."""
    return train(data_parallel(stack(6, 2, 256), 1), 2048, 256)


RECORDED: dict[Callable[[], Step], tuple[str, int]] = {
    autoshard_sleeps: (SKEW, 2),
    ddp_sleeps: (SKEW, 2),
    fsdp2_on_a_cpu: (LATE, 1),
    reduced_by_hand: (LATE, 1),
    one_a_parameter: (SMALL, 1),
    small_buckets: (SMALL, 2),
    autoshard_host: (HOST, 1),
    ddp_host: (HOST, 2),
    large_in_front: (QUEUE, 1),
    few_rows: (COPY, 1),
    autoshard_ahead: ("", 1),
    ddp_overlapped: ("", 2),
}
"""Steps that are recorded, with the fault of each, and the ranks; one is on an emulated link."""


def record(name: str, stem: str) -> None:
    """Profile steps of RECORDED as one rank, and write its trace to `stem`, rank and ".json"."""
    make, ranks = next((make, of[1]) for make, of in RECORDED.items() if make.__name__ == name)
    if ranks > 1:
        dist.init_process_group("gloo")
    step = make()
    for _ in range(WARM_UP):
        step()
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, schedule=schedule, record_shapes=True
    ) as profile:
        for _ in range(1 + STEPS):
            step()
            profile.step()
    profile.export_chrome_trace(f"{stem}-{dist.get_rank()}.json")
    dist.destroy_process_group()


def recorded(folder: Path) -> Iterator[Case]:
    """Record the traces of RECORDED, in processes of their own, and yield them.

    Those without a fault are recorded TRIES times, and the fastest is taken: what else a machine
    does keeps ranks from their work, which is a fault.
    """
    for make, (fault, ranks) in RECORDED.items():
        name = make.__name__
        tries = [
            record_in_processes(name, ranks, folder / f"{name}-{number}")
            for number in range(1 if fault else TRIES)
        ]
        paths = min(tries, key=lambda each: lanes_time(each[0]))
        yield Case(f"{name}, recorded", fault, paths)


def record_in_processes(name: str, ranks: int, stem: Path) -> list[Path]:
    """Record a trace of RECORDED, a file a rank; return the paths."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = [__file__, "--record", name, "--stem", str(stem)]
    command = [sys.executable, *(launcher if ranks > 1 else []), *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return [Path(f"{stem}-{rank}.json") for rank in range(ranks)]


def lanes_time(path: Path) -> float:
    """Return the time of all steps of a trace."""
    return sum(end - begin for begin, end in lanes_of(path.name, read(path)).steps)


def imagined(folder: Path, seed: int) -> Iterator[Case]:
    """Write imagined traces to a folder, of sizes drawn at random, and yield them."""
    rng = random.Random(seed)
    wanted = [(*each, 1.0) for each in IMAGINED]
    wanted += [("", library, 0, times) for library, times in FAULTLESS]
    for number, (fault, library, form, times) in enumerate(wanted):
        run = draw(rng, fault, library, form)
        run = dataclasses.replace(run, us_per_mb=times * run.us_per_mb)
        own = rng.randrange(1000)
        while True:
            both = fault == SKEW and form == 1
            ranks = cuda_traces.record_ranks(run, own) if both else [cuda_traces.record(run, own)]
            slower = length(ranks[0]) / length(cuda_traces.record(without_fault(run), own))
            if not fault or slower >= SLOWER:
                break
            run = dataclasses.replace(run, strength=1.5 * run.strength)
        paths = [folder / f"imagined-{number}-{rank}.json" for rank in range(len(ranks))]
        for path, events in zip(paths, ranks, strict=True):
            path.write_text(cuda_traces.as_json(events))
        yield Case(f"{library}, {run.layers} layers of {run.layer_us} us", fault, paths, slower)


def draw(rng: random.Random, fault: str, library: str, form: int) -> Run:
    """Draw the sizes of a run: the link is busy for a quarter to three quarters of forward."""
    layer_us = rng.choice((400, 1600, 6000))
    layer_mb = rng.choice((30, 100, 400))
    busy = rng.uniform(0.4, 0.75) * (0.6 if library == "FSDP1" else 1.0)
    return Run(
        library=library,
        layers=rng.choice((8, 12, 24)),
        kernels=rng.choice((12, 20, 40)),
        layer_mb=layer_mb,
        layer_us=layer_us,
        us_per_mb=busy * layer_us / layer_mb,
        start_us=rng.choice((20, 35)),
        fault=fault,
        form=form,
        strength=rng.uniform(0.8, 1.3) * (1.6 if fault == HOST else 1.0),
        is_annotated=rng.random() < 0.5,
    )


def without_fault(run: Run) -> Run:
    """Return the same run with nothing wrong."""
    return dataclasses.replace(run, fault="")


def length(events: Sequence[dict[str, Any]]) -> float:
    """Return the time from the first to the last kernel of a trace."""
    kernels = [event for event in events if event["cat"] == "kernel"]
    first = min(event["ts"] for event in kernels)
    return max(event["ts"] + event["dur"] for event in kernels) - first


def explain(case: Case) -> Report:
    """Explain a case, from nothing but its files."""
    return report_on([lanes_of(path.name, read(path)) for path in case.paths])


def judge(case: Case) -> bool:
    """Print a line about a case; tell whether the fault in it was named first, or none for none."""
    report = explain(case)
    named = next(iter(report.causes), "none")
    is_right = named == (case.fault or "none")
    shares = ", ".join(f"{each.reason} {each.share:.0%}" for each in report.findings[:3])
    slower = f"{case.slower:5.2f}" if case.slower else "     "
    verdict = "right" if is_right else "WRONG"
    print(f"{case.fault or 'none':32}{named:32}{verdict:6}{slower}  {case.name}: {shares}")
    return is_right


def main() -> int:
    """Run the benchmark, or one rank of it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="a folder for the traces")
    parser.add_argument("--only", choices=["recorded", "imagined"])
    parser.add_argument("--seed", type=int, default=0, help="of the imagined traces' sizes")
    parser.add_argument("--record", help=argparse.SUPPRESS)
    parser.add_argument("--stem", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(options.record, options.stem)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{'injected':32}{'named first':32}{'':6}slower  trace: share of a step")
    right = {True: [], False: []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        makers = {"recorded": recorded(folder), "imagined": imagined(folder, options.seed)}
        for name, cases in makers.items():
            if options.only in (None, name):
                for case in cases:
                    right[bool(case.fault)].append(judge(case))
    faulty, faultless = right[True], right[False]
    print(f"{sum(faulty)} of {len(faulty)} faults named first; ", end="")
    print(f"{sum(faultless)} of {len(faultless)} faultless traces not blamed")
    allowed = 30 - NEEDED
    return 0 if faulty.count(False) <= allowed and all(faultless) else 1


if __name__ == "__main__":
    sys.exit(main())
