"""Peak memory of a step beside FSDP2's, on 8 ranks of whom one is there."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from support.link import bench_of, on_each_device
from support.memory import PeakMemory, PeakOfGraphs

from autoshard.tools.bench.contestants import Contestant, autoshard_compiled, fsdp2

LIMITS = {"cuda": 0.95, "cpu": 1.0}
"""Of FSDP2's. On a CPU with the plain lowering, which fuses nothing."""


@on_each_device
@pytest.mark.parametrize("fake_world", [8], indirect=True)
def test_peak(fake_world: None, device: str) -> None:
    _peak_bytes(fsdp2, device)  # after it, there are the workspaces that libraries keep
    ours = _peak_bytes(autoshard_compiled, device)
    theirs = _peak_bytes(fsdp2, device)
    assert ours <= LIMITS[device] * theirs


def _peak_bytes(contestant: Contestant, device: str) -> int:
    """Of the second step, its parameters included: by the allocator, or by storages on a CPU."""
    torch._dynamo.reset()
    gc.collect()
    dim = 1024 if device == "cuda" else 64
    bench = bench_of(device, layers=8, dim=dim, hidden=4 * dim, rows=dim)
    if device == "cuda":
        before = torch.cuda.memory_allocated()  # by the one before
        model = bench.build(contestant)
        torch.cuda.reset_peak_memory_stats()
        bench.step(model)
        return torch.cuda.max_memory_allocated() - before
    peak = PeakOfGraphs() if contestant is autoshard_compiled else PeakMemory()
    compiling = peak.compiling() if isinstance(peak, PeakOfGraphs) else contextlib.nullcontext()
    with compiling:
        model = bench.build(contestant, lowering="eager")
    with peak:
        bench.step(model)
    return peak.peak
