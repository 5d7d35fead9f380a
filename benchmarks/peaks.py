"""Peak memory of a step, of everybody, on one of several ranks of whom no other is there.

    python benchmarks/peaks.py [--ranks 8 64] [--models small medium] [--dtype bf16]

Parameters and optimizer states are one rank's shards, and what a collective would receive is there,
if with no values in it: there is the memory that it would take on a cluster, of a GPU's allocator,
or as torch's profiler sees it on a CPU. It says nothing of time.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.passes.ir.layout import DTYPES
from autoshard.tools.bench.contestants import CONTESTANTS
from autoshard.tools.bench.step import ALONE, StepTimes, bench_step
from autoshard.tools.bench.workloads import read_workloads
from autoshard.tools.device import current_device

BASE = "FSDP2"
ROUNDS = 3
SHARDED = {name: each for name, each in CONTESTANTS.items() if name not in (ALONE, "DDP")}


def table(result: StepTimes, ranks: int) -> str:
    """Format megabytes of each contestant, a line each, below a heading.

    These are: allocated at the peak, the same over that of `BASE`, which must be there, reserved at
    the peak, and allocated between steps.
    ranks: for the heading.
    """
    base = result.entries[BASE].peak.allocated
    lines = [f"{result.name}, {ranks} ranks: MB at the peak, of {BASE}; reserved; between steps"]
    for name, entry in result.entries.items():
        peak, kept = entry.peak, entry.kept.allocated
        lines.append(
            f"  {name:24} {peak.allocated / 1e6:9.1f} {peak.allocated / base:6.3f} "
            f"{peak.reserved / 1e6:9.1f} {kept / 1e6:9.1f}"
        )
    lines += [f"  {name:24} can't be compiled: {why}" for name, why in result.failed.items()]
    return "\n".join(lines)


def main() -> None:
    """Print a table for each number of ranks and model; steps are run on rank 0 of each number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--models", nargs="+", default=["small", "medium"])
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16", help="of computation")
    options = parser.parse_args()
    device = current_device()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    print(f"torch {torch.__version__}, {name}, {vars(options)}")
    for ranks in options.ranks:
        _torch.dist.pretend_ranks(ranks)
        workloads = read_workloads(options.models, device.type)
        results = bench_step(
            workloads, contestants=SHARDED, rounds=ROUNDS, dtype=DTYPES[options.dtype]
        )
        for result in results:
            print(table(result, ranks), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
