"""What a step costs on one GPU, in a world of one rank with NCCL: kernels, gaps, the host's time.

    python benchmarks/one_gpu.py [--models small medium] [--dtype bf16] [--rounds 20]

Nothing is sent, so that all that a sharded step takes beyond an unsharded one is its own: kernels
that copy, cast and divide, the host's time, and gaps in which the GPU waits for the host. Steps
(forward, backward, gradients emptied) are taken in turn. A line each:

    step    ms from one step's begin to its end, the GPU waited for; median
    host    ms until the host has launched all of a step, without waiting; median
    GPU     ms in which some kernel or copy runs, of one profiled step
    idle    ms between that step's first kernel and last in which none does
    kernels and copies that it launches

On a CPU only the first column is there.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from overlap import WARM_UP, Bench
from torch.profiler import ProfilerActivity, profile

from autoshard.passes.ir.layout import DTYPES
from autoshard.runtime.comm.mesh import ensure_process_group
from autoshard.tools.bench.contestants import CONTESTANTS, Setting
from autoshard.tools.bench.workloads import read_workloads
from autoshard.tools.device import current_device, synchronize

NAMES = (
    "unsharded, compiled",
    "FSDP2",
    "FSDP2, blocks compiled",
    "autoshard, eager",
    "autoshard, compiled",
)


@dataclass(frozen=True)
class OnDevice:
    """What the GPU does in a step.

    busy_ms: while some kernel or copy runs. idle_ms: between the first and the last of them, while
    none does.
    """

    busy_ms: float
    idle_ms: float
    launches: int


@dataclass
class Times:
    """Milliseconds of a contestant's steps: with the GPU waited for, and until all is launched."""

    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    device: OnDevice | None = None


def on_device(spans: Iterable[tuple[float, float]]) -> OnDevice:
    """Sum up spans of kernels and copies, (begin, end) in microseconds, which may overlap."""
    found = sorted(spans)
    if not found:
        return OnDevice(0.0, 0.0, 0)
    busy, (begin, until) = 0.0, found[0]
    first = begin
    for start, end in found[1:]:
        if start > until:
            busy += until - begin
            begin = start
        until = max(until, end)
    busy += until - begin
    return OnDevice(busy / 1e3, (until - first - busy) / 1e3, len(found))


def profiled(step: Callable[[], object]) -> OnDevice:
    """Profile `step` once; the GPU is waited for before and after."""
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        synchronize()
    kind = torch.autograd.DeviceType.CUDA
    events = (each for each in found.events() if each.device_type == kind)
    return on_device((each.time_range.start, each.time_range.end) for each in events)


def measure(bench: Bench) -> Mapping[str, Times]:
    """Build all contestants, and take their steps in turn; return their times by name."""
    models = {name: bench.build(CONTESTANTS[name]) for name in NAMES}
    times = {name: Times() for name in NAMES}
    for number in range(bench.rounds + WARM_UP):
        for name, model in models.items():
            synchronize()
            started = time.perf_counter()
            bench.step(model)
            launched = time.perf_counter()
            synchronize()
            if number >= WARM_UP:
                times[name].host_ms.append(1e3 * (launched - started))
                times[name].step_ms.append(1e3 * (time.perf_counter() - started))
    if bench.setting.device.type == "cuda":
        for name, model in models.items():
            times[name].device = profiled(functools.partial(bench.step, model))
    return times


def table(model: str, times: Mapping[str, Times]) -> str:
    """Format a model's figures, a line a contestant, with the step over that of the first."""
    lines = [f"{model}: ms a step, of the first; host; GPU; idle; kernels and copies"]
    base = statistics.median(next(iter(times.values())).step_ms)
    for name, each in times.items():
        step = statistics.median(each.step_ms)
        line = f"  {name:24} {step:9.2f} {step / base:6.3f}"
        if each.device is not None:
            host, device = statistics.median(each.host_ms), each.device
            line += f" {host:9.2f} {device.busy_ms:9.2f} {device.idle_ms:8.2f} {device.launches:6}"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["small", "medium"])
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16", help="of computation")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    device = current_device()
    ensure_process_group()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    print(f"torch {torch.__version__}, {name}, {vars(options)}")
    for model, work in read_workloads(options.models, device.type).items():
        torch._dynamo.reset()
        setting = Setting(device, work.blocks, DTYPES[options.dtype], {})
        print(table(model, measure(Bench(work, setting, 1, options.rounds))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
