"""Device of this process, and times on it, for tools that measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from autoshard import _torch

HEAD_START_CYCLES = 200_000  # some 0.1 ms, in which the host launches what is timed

T = TypeVar("T")


def current_device() -> torch.device:
    """Return the current GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """Call `run` once; return its result and its time in microseconds.

    The GPU, if there is one, is waited for before and after. The time is then what the current
    stream takes for the kernels of `run`: the host has a head start of some 0.1 ms, so that the
    stream waits for launches only if the host falls behind by more. On a CPU it is wall time.
    """
    synchronize()
    if not torch.cuda.is_available():
        started = time.perf_counter()
        return run(), (time.perf_counter() - started) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _torch.device.spin_gpu(HEAD_START_CYCLES)
    begin.record()
    result = run()
    end.record()
    synchronize()
    return result, 1e3 * float(begin.elapsed_time(end))


def synchronize() -> None:
    """Wait until the GPU, if there is one, has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
