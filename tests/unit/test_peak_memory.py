"""Memory of a CPU, as torch's profiler has it."""

from __future__ import annotations

import torch

from autoshard.tools.bench.peak_memory import Memory, memory_now, peak_beyond

CPU = torch.device("cpu")


def test_a_peak() -> None:
    """What is freed before isn't counted; what was there before isn't either."""
    there = torch.ones(2_000_000)

    def run() -> None:
        for size in (1_000_000, 3_000_000, 500_000):
            torch.ones(size)
        there.add_(1)

    assert peak_beyond(run, CPU) == Memory(12_000_000)


def test_compiled_code_counts() -> None:
    """Its buffers are not made by torch's operators."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu() @ x

    compiled = torch.compile(twice)
    x = torch.ones(500, 500)
    compiled(x)
    assert 2_000_000 <= peak_beyond(lambda: compiled(x), CPU).allocated <= 2_100_000


def test_memory_that_is_shared() -> None:
    whole = torch.ones(1000)
    assert memory_now(CPU, [whole[:500], whole[500:], torch.ones(10)]) == Memory(4040)
    assert str(Memory(4_040_000)) == "4.0 MB"
    assert str(Memory(4_040_000, 5_000_000)) == "4.0 MB of 5.0"
