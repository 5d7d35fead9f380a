"""Measured time of a step at the memory of full checkpointing: a `memory_budget` beside it.

    torchrun --nproc-per-node 2 benchmarks/budget_steps.py [--model small] [--rounds 15]

Llamas of `autoshard bench step`, on gloo ranks, compiled by Inductor: without checkpoints, with one
around each block, and with a budget of what the plan of the latter needs at its peak. Steps of all
run in turns; rank 0 prints medians, and medians of the ratios of one round. Needs transformers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import autoshard
from autoshard.tools.bench.workloads import Workload, read_workloads

WARM_UP = 3


def made(
    workload: Workload, *, is_checkpointed: bool, **options: Any
) -> tuple[Any, Callable[[], None]]:
    """Build, shard and compile a model: it, and a step of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain: Any = workload.build()
    if is_checkpointed:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
        plain.train()
    model: Any = autoshard.shard(plain)
    model.compile(backend="autoshard", options={"strict": True, "topology": "gloo", **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = workload.batch(dist.get_rank())

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    return model, step


def main() -> None:
    """Time steps in turns, and print what they take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    (workload,) = read_workloads([options.model], "cpu").values()
    none, step_of_none = made(workload, is_checkpointed=False)
    full, step_of_full = made(workload, is_checkpointed=True)
    peak, without = (
        max(plan.peak_bytes for plan in autoshard.plans(each)) for each in (full, none)
    )
    beside = 3 * sum(param.to_local().nbytes for param in full.parameters())
    budgeted, step_of_budget = made(workload, is_checkpointed=False, memory_budget=peak + beside)
    needed = max(plan.peak_bytes for plan in autoshard.plans(budgeted))
    steps = {"none": step_of_none, "full": step_of_full, "budget": step_of_budget}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name in steps:
            dist.barrier()
            began = time.perf_counter()
            steps[name]()
            dist.barrier()
            times[name].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        mib = 2**20
        print(
            f"{options.model}: peaks of plans: {without / mib:.1f} MiB without, {peak / mib:.1f} "
            f"with full checkpointing, {needed / mib:.1f} with it as a budget"
        )
        for name, each in times.items():
            ratios = [a / b for a, b in zip(each, times["full"], strict=True)]
            print(
                f"{name}: {1e3 * statistics.median(each):.1f} ms, "
                f"{statistics.median(ratios):.3f} of full checkpointing's"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
