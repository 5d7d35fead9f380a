"""How long a save holds up training: asynchronous, blocking, and copying alone.

    OMP_NUM_THREADS=1 python benchmarks/save_stalls.py [--rounds 15] [--blocks 12] [--dim 512]

Two gloo ranks with a model and AdamW. In each round, in turns, after a barrier: copies of all
tensors of this rank, to new memory, and to memory that was used before; a blocking save; and an
asynchronous one. Then steps are timed while the files are written, and after that. A time is that
of the slower rank; medians are printed, with minima and maxima, and for copies and saves the CPU
time of the calling thread, which others on the machine do not lengthen as much.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.tools.ranks import launch, leave

RANKS = 2
Times = dict[str, list[tuple[float, float]]]
"""By what was timed: ms of wall time and of CPU time in each round, of the slower rank."""


class Net(nn.Module):
    """Residual blocks of two linear layers each."""

    def __init__(self, blocks: int, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def own_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List this rank's tensors: parameters, and the optimizer's state."""
    found = [*model.parameters()]
    for state in optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, Tensor)]
    return [(each.to_local() if isinstance(each, DTensor) else each).detach() for each in found]


def timed(times: Times, what: str, work: Callable[[], Any]) -> Any:
    """Call `work` on all ranks after a barrier, note its time under `what`, return its result."""
    dist.barrier()
    began, cpu_began = time.perf_counter(), time.thread_time()
    found = work()
    took = torch.tensor([time.perf_counter() - began, time.thread_time() - cpu_began])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    times[what].append((1e3 * took[0].item(), 1e3 * took[1].item()))
    return found


def rounds(folder: Path, count: int, blocks: int, dim: int) -> tuple[Times, float]:
    """Measure `count` rounds, after one that is not counted; return times, and MB of a rank."""
    torch.manual_seed(0)
    model: Any = autoshard.shard(Net(blocks, dim))
    optimizer = torch.optim.AdamW(model.parameters())
    times: Times = defaultdict(list)

    def step() -> None:
        """Train a step."""
        model(torch.randn(16, dim)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(number: int, *, wait: bool) -> Any:
        """Save the step `number`."""
        return autoshard.save_checkpoint(folder, model, optimizer, step=number, wait=wait)

    step()
    tensors = own_tensors(model, optimizer)
    used = [tensor.clone() for tensor in tensors]
    for number in range(count + 1):
        works: dict[str, Callable[[], Any]] = {
            "copy to new memory": lambda: [tensor.clone() for tensor in tensors],
            "copy to used memory": lambda: [a.copy_(b) for a, b in zip(used, tensors, strict=True)],
            "blocking save": functools.partial(save, 2 * number, wait=True),
            "asynchronous save": functools.partial(save, 2 * number + 1, wait=False),
        }
        pending = None
        for what in list(works)[number % 4 :] + list(works)[: number % 4]:
            found = timed(times, what, works[what])
            if what == "asynchronous save":
                pending = found
                timed(times, "step while files are written", step)
                pending.wait()
        timed(times, "step", step)
        if number == 0:
            times.clear()
    return times, sum(tensor.nbytes for tensor in tensors) / 1e6


def report(times: Times, megabytes: float) -> None:
    """Print the times as a table."""
    (count,) = {len(each) for each in times.values()}
    print(f"{megabytes:.0f} MB a rank, {count} rounds, ms of the slower of {RANKS} ranks\n")
    print("| | median | min to max | CPU of the caller, median | min |\n|---|---|---|---|---|")
    for what, each in times.items():
        wall, cpu = zip(*each, strict=True)
        print(
            f"| {what} | {statistics.median(wall):.1f} | {min(wall):.1f} to {max(wall):.1f} | "
            f"{statistics.median(cpu):.1f} | {min(cpu):.1f} |"
        )


def main() -> int:
    """Start the ranks, or, on a rank, measure; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return launch(sys.argv[1:], RANKS, program=(str(Path(__file__).resolve()),))
    dist.init_process_group("gloo")
    place: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    times, megabytes = rounds(Path(place[0]), options.rounds, options.blocks, options.dim)
    if dist.get_rank() == 0:
        report(times, megabytes)
    dist.barrier()
    return leave(0)


if __name__ == "__main__":
    sys.exit(main())
