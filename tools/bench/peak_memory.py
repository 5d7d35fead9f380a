"""Measure the memory that a model keeps, and that a step takes.

On a GPU the allocator counts. On a CPU, where none does, torch's profiler sees each allocation and
its end, those of compiled code included, but only while it runs: other memory that is kept from
step to step (DDP's buckets) isn't seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from autoshard import _torch
from autoshard.tools.device import synchronize


@dataclass(frozen=True)
class Memory:
    """Bytes of memory.

    allocated: what tensors take.
    reserved: what a GPU's allocator holds, for them and in its cache; 0 on a CPU.
    """

    allocated: int = 0
    reserved: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.allocated + other.allocated, self.reserved + other.reserved)

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.allocated - other.allocated, self.reserved - other.reserved)

    def __str__(self) -> str:
        text = f"{self.allocated / 1e6:.1f} MB"
        return f"{text} of {self.reserved / 1e6:.1f}" if self.reserved else text


def memory_now(device: torch.device, tensors: Iterable[Tensor] = ()) -> Memory:
    """Memory in use: on a GPU what its allocator says, once its cache is emptied, as it is here.

    On a CPU it is what `tensors` take on this rank, shared memory counted once; on a GPU they are
    not looked at.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return Memory(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in local}
    return Memory(sum(storage.nbytes() for storage in storages.values()))


def peak_beyond(run: Callable[[], object], device: torch.device) -> Memory:
    """Call `run`; return the memory in use at its peak, beyond what was in use before.

    On a GPU, the allocator's cache is emptied before, and its peaks are reset. On a CPU, `run` is
    profiled, and nothing is reserved.
    """
    if device.type == "cuda":
        before = memory_now(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        synchronize()
        peak = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return Memory(*peak) - before
    # acc_events: there is one cycle alone; 2.11 warns of what would be lost of others.
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as found:
        run()
    changes = _torch.device.cpu_allocations(found)
    return Memory(max(itertools.accumulate(changes), default=0))
