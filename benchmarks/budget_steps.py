"""Measured time and memory of a step under a `memory_budget`, beside checkpoints by hand.

    torchrun --nproc-per-node 2 benchmarks/budget_steps.py [--model small] [--rounds 15]
    ... benchmarks/budget_steps.py --batch 1 --length 1024

A Llama of `autoshard bench step`, on gloo ranks, compiled by Inductor. Ours without checkpoints,
with one around each block, and with two budgets: what the plan of the latter needs at its peak, and
60 % of what that of the former does. Beside them FSDP2, whose blocks are compiled one by one,
without checkpoints; with one around each block, and around each second; and with products and
attention saved ("ops"). Steps of all run in turns; rank 0 prints medians, medians of the ratios of
one round to the second line's, and the memory of a step at its peak, as torch's profiler sees it,
beyond parameters and optimizer states. "Memory of full's" has the budget with which as much is
measured as with full checkpointing: its plan does not know of buffers that Inductor keeps on a CPU
without a budget. Needs transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import autoshard
from autoshard.tools.bench.contestants import Setting, fsdp2_compiled_blocks
from autoshard.tools.bench.peak_memory import peak_beyond
from autoshard.tools.bench.workloads import SIZES, Workload, llama

WARM_UP = 3
SHARE = 0.6  # of the peak without a budget
CPU = torch.device("cpu")
aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Ops whose results the policy "ops" saves."""

Step = Callable[[], None]


def ours(workload: Workload, *, is_checkpointed: bool = False, **options: Any) -> tuple[Any, Step]:
    """Build, shard and compile a model: it, and a step of it."""
    plain = built(workload)
    if is_checkpointed:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
        plain.train()
    model: Any = autoshard.shard(plain)
    model.compile(backend="autoshard", options={"strict": True, "topology": "gloo", **options})
    return model, step_of(model, workload)


def fsdp2(workload: Workload, way: str) -> Step:
    """Make a step of FSDP2's, with checkpoints around blocks."""
    model = built(workload)
    for number, block in enumerate(workload.blocks(model)):
        if way in ("full", "ops") or (way == "every second" and number % 2):
            with_checkpoint(block, saves_ops=way == "ops")
    setting = Setting(CPU, workload.blocks, torch.float32, {})
    return step_of(fsdp2_compiled_blocks(model, setting), workload)


def built(workload: Workload) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return workload.build()


def with_checkpoint(block: nn.Module, *, saves_ops: bool) -> None:
    """Have a module's forward run in a checkpoint."""
    keywords: dict[str, Any] = {"use_reentrant": False}
    if saves_ops:
        keywords["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    run = functools.partial(checkpoint, block.forward, **keywords)
    block.forward = run  # type: ignore[method-assign]  # the instance's, not the class's


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save results of products and attention."""
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def step_of(model: Any, workload: Workload) -> Step:
    """Return a step of `model`, which has run a few times."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = workload.batch(dist.get_rank())

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    return step


def main() -> None:
    """Time steps in turns, and print what they take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("small", "medium", "large"), default="small")
    parser.add_argument("--batch", type=int, help="samples of a rank, in place of the model's own")
    parser.add_argument("--length", type=int, help="tokens of a sample, likewise")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    given = {"batch": options.batch, "length": options.length}
    sizes = dataclasses.replace(
        SIZES["cpu"][options.model], **{name: value for name, value in given.items() if value}
    )
    workload = llama(sizes)
    none, step_of_none = ours(workload)
    full, step_of_full = ours(workload, is_checkpointed=True)
    without, peak = (
        max(plan.peak_bytes for plan in autoshard.plans(each)) for each in (none, full)
    )
    beside = 3 * sum(param.to_local().nbytes for param in full.parameters())
    steps = {"none": step_of_none, "full": step_of_full}
    for name, budget in (("budget of full's", peak), ("budget of 60 %", int(SHARE * without))):
        _, steps[name] = ours(workload, memory_budget=budget + beside)
    for way in ("none", "full", "every second", "ops"):
        steps[f"FSDP2, {way}"] = fsdp2(workload, way)
    peaks = {name: peak_beyond(step, CPU).allocated for name, step in steps.items()}
    more = torch.tensor(peaks["budget of full's"] - peaks["full"])
    dist.all_reduce(more, dist.ReduceOp.MAX)
    _, steps["memory of full's"] = ours(workload, memory_budget=peak + beside - int(more))
    peaks["memory of full's"] = peak_beyond(steps["memory of full's"], CPU).allocated
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
            "with full checkpointing"
        )
        for name, each in times.items():
            ratios = [a / b for a, b in zip(each, times["full"], strict=True)]
            print(
                f"{name:18} {1e3 * statistics.median(each):6.1f} ms, "
                f"{statistics.median(ratios):.3f} of full checkpointing's; "
                f"{peaks[name] / mib:.1f} MiB"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
