"""Time a step of a model with autoshard, and with other libraries: `autoshard bench step`.

All contestants share one process group and one run, and take one step in turn, so that a busy
moment of the machine affects all alike. A step is forward, backward and fused AdamW, the fastest
for all; times are of the slowest rank, medians over the rounds. Beside them stand the parts of the
bound without overlap: forward and backward of the unsharded model, compiled, and autoshard's own
collectives with nothing else, which have a turn of their own.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard import _torch
from autoshard.runtime.comm import transport
from autoshard.runtime.compiled.plans import plans
from autoshard.tools.bench.contestants import CONTESTANTS, RIVALS, Contestant, Setting
from autoshard.tools.bench.peak_memory import Memory, memory_now, peak_beyond
from autoshard.tools.bench.workloads import Workload
from autoshard.tools.device import current_device, synchronize

WARM_UP = 3
OURS = "autoshard, compiled"
ALONE = next(iter(CONTESTANTS))


@dataclass
class Entry:
    """Measurements of one contestant: a list of milliseconds has an entry for each round.

    first_s: seconds of the first forward and backward, which compile.
    backward_ms: of forward and backward.
    kept: memory of its parameters, as they lie between steps, and of its optimizer.
    peak: memory at the peak of a step, `kept` included.
    """

    first_s: float = 0.0
    backward_ms: list[float] = field(default_factory=list)  # forward and backward
    optimizer_ms: list[float] = field(default_factory=list)
    kept: Memory = field(default_factory=Memory)
    peak: Memory = field(default_factory=Memory)

    @property
    def step_ms(self) -> list[float]:
        return [a + b for a, b in zip(self.backward_ms, self.optimizer_ms, strict=True)]


@dataclass(frozen=True)
class StepTimes:
    """Measurements of one model.

    tokens: in the batch of one rank.
    entries: by contestant.
    collectives_ms: by round, of autoshard's own collectives of a step, one after another; empty
        without "autoshard, compiled".
    failed: contestants that this torch can't compile for this model, and its message.
    """

    name: str
    tokens: int
    entries: dict[str, Entry]
    collectives_ms: list[float]
    failed: dict[str, str] = field(default_factory=dict)

    def beyond_ms(self, name: str) -> float:
        """Median milliseconds of a contestant's forward and backward, less those of `ALONE`."""
        ours, alone = (self.entries[each].backward_ms for each in (name, ALONE))
        return _median(ours) - _median(alone)

    def of_bound(self) -> float:
        """Ratio of autoshard's forward and backward to their bound without overlap.

        The bound is forward and backward of the unsharded model, plus autoshard's collectives
        alone.
        """
        bound_ms = _median(self.entries[ALONE].backward_ms) + _median(self.collectives_ms)
        return _median(self.entries[OURS].backward_ms) / bound_ms

    def text(self) -> str:
        """Format the result as a table, a line for each contestant, and the ratios.

        Medians are compared with the fastest of `RIVALS`, or, if none is there, with the first
        contestant.
        """
        medians = {name: statistics.median(each.step_ms) for name, each in self.entries.items()}
        rivals = {name: medians[name] for name in RIVALS if name in medians}
        best = min(rivals, key=lambda name: rivals[name]) if rivals else next(iter(medians))
        has_alone = ALONE in self.entries
        lines = [
            f"{self.name}: ms a step, and from the fastest to the slowest; of {best}; what forward "
            "and backward take longer than unsharded; tokens/s; seconds of the first step; memory "
            "at the peak"
        ]
        for name, entry in self.entries.items():
            steps = entry.step_ms
            exposed = f"{self.beyond_ms(name):8.1f}" if has_alone else ""
            lines.append(
                f"  {name:24} {medians[name]:8.1f} ({min(steps):.1f} to {max(steps):.1f}) "
                f"{medians[name] / medians[best]:6.2f} {exposed} "
                f"{self.tokens / medians[name] * 1e3:9.0f} {entry.first_s:7.1f}  {entry.peak}"
            )
        lines += [f"  {name:24} can't be compiled: {why}" for name, why in self.failed.items()]
        if has_alone and OURS in self.entries:
            lines.append(
                f"  forward and backward of {OURS}: {self.of_bound():.2f} of unsharded, "
                f"compiled, plus its own collectives alone ({_median(self.collectives_ms):.1f} ms)"
            )
        return "\n".join(lines)


def bench_step(
    workloads: Mapping[str, Workload],
    *,
    contestants: Mapping[str, Contestant] = CONTESTANTS,
    rounds: int = 20,
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
    tell: Callable[[StepTimes], None] = lambda result: None,
) -> list[StepTimes]:
    """Train each of `workloads`, models by name, with all contestants, and return measurements.

    A contestant that torch can't compile, on all ranks alike, is left out, but for our own. All
    ranks call this, in a process group. For each model, what torch has compiled is reset, and
    its random generator is reseeded.
    rounds: steps of each contestant that are timed.
    dtype: of computation and gathers.
    options: of autoshard's backend, and of `shard()`.
    tell: is given each model's result, on every rank, as soon as it is there.
    """
    found = []
    for name, work in workloads.items():
        found.append(_bench_model(name, work, contestants, rounds, dtype, options or {}))
        tell(found[-1])
    return found


def _bench_model(
    name: str,
    work: Workload,
    contestants: Mapping[str, Contestant],
    rounds: int,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> StepTimes:
    """Measure one model: build it for each contestant, then have them take steps in turn.

    All models are in memory at once, each built after torch's generator is seeded with 0, with a
    fused AdamW of its own; what torch has compiled before is reset. A rank's batch is always the
    same. First steps, without an optimizer's, are measured with an empty cache of Inductor's.
    `WARM_UP` rounds, which are not timed, come before the `rounds`; the very first measures memory.
    Each also times the collectives of `OURS` by themselves, if that is a contestant. All ranks call
    this.
    """
    device = current_device()
    setting = Setting(device, work.blocks, dtype, options)
    batch = {key: value.to(device) for key, value in work.batch(dist.get_rank()).items()}
    entries = {name: Entry() for name in contestants}
    failed: dict[str, str] = {}
    models, optimizers = {}, {}
    torch.compiler.reset()
    # The models' classes are the same, so all that compile have their graphs in one cache.
    with _torch.dynamo.recompiling(64):
        for contestant, entry in entries.items():
            before = memory_now(device)
            torch.manual_seed(0)
            model = contestants[contestant](work.build().to(device), setting)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            try:
                with _torch.inductor.fresh_cache():  # each compiles all of its kernels
                    entry.first_s = _timed(partial(_backward, model, batch)) / 1e3
            except _torch.dynamo.BackendCompilerFailed as error:
                if contestant == OURS:
                    raise
                failed[contestant] = reason(error)
                continue
            _step(optimizer)
            states = [state for each in optimizer.state.values() for state in each.values()]
            lasting = [each for each in states if isinstance(each, Tensor)]
            lasting += model.parameters()
            entry.kept = memory_now(device, lasting) - before
            models[contestant], optimizers[contestant] = model, optimizer
        entries = {name: entry for name, entry in entries.items() if name in models}
        ours = models.get(OURS)
        send = _collectives_of(ours, dtype) if ours is not None else None
        collectives_ms: list[float] = []
        for number in range(rounds + WARM_UP):
            if send is not None:
                collectives_ms.append(_timed(send))
            for contestant, entry in entries.items():
                model, optimizer = models[contestant], optimizers[contestant]
                if number == 0:
                    entry.peak = entry.kept + peak_beyond(
                        partial(_steps, model, optimizer, batch), device
                    )
                    continue
                backward_ms = _timed(partial(_backward, model, batch))
                optimizer_ms = _timed(partial(_step, optimizer))
                if number >= WARM_UP:
                    entry.backward_ms.append(backward_ms)
                    entry.optimizer_ms.append(optimizer_ms)
    models.clear()
    gc.collect()
    return StepTimes(name, work.tokens, entries, collectives_ms[WARM_UP:], failed)


def reason(error: _torch.dynamo.BackendCompilerFailed) -> str:
    """Return what a compiler failed with, in one line, without advice on how to debug it."""
    inner = error.inner_exception
    return f"{type(inner).__name__}: {inner}".partition("\n")[0]


def _backward(model: Any, batch: dict[str, Tensor]) -> None:
    model(**batch).loss.backward()


def _steps(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    """Take two steps: the peak of the second counts what the first has left in memory."""
    for _ in range(2):
        _backward(model, batch)
        _step(optimizer)


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _timed(run: Callable[[], None]) -> float:
    """Milliseconds of `run` on the slowest rank, from a common start; all ranks call this.

    It begins with a barrier, waits for the GPU before and after, and ends with an all-reduce.
    """
    dist.barrier()
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    took = torch.tensor((time.perf_counter() - started) * 1e3, device=current_device())
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def _collectives_of(model: Any, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that runs the collectives of a compiled model's plans, one by one.

    Each is waited for before the next. They run over all ranks, gathers and reduce-scatters alone:
    what replicas sum is left out. The plans are those of graphs compiled so far; buffers for all of
    them are allocated here.
    dtype: of the buffers.
    """
    group, world, device = _torch.dist.default_group(), dist.get_world_size(), current_device()
    buckets = [bucket for plan in plans(model) for bucket in plan.buckets]

    def once() -> None:
        """Run the collectives in the order of the plans, each to its end."""
        for bucket, whole, part in buffers:
            if bucket.kind == "gather":
                for work in transport.gather([whole], [part], group):
                    work.wait()
            else:
                transport.bare_reduce(part, whole, group).wait()

    buffers = []
    for bucket in buckets:
        numel = -(-bucket.num_bytes // dtype.itemsize // world)
        part = torch.ones(numel, device=device, dtype=dtype)
        buffers.append((bucket, part.new_ones(world * numel), part))
    return once


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))
