"""Devices: time on a GPU, and memory of a CPU by the profiler.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

# What a GPU is given next begins that many of its cycles later.
spin_gpu: Callable[[int], None] = torch.cuda._sleep


def cpu_allocations(profile: torch.profiler.profile) -> list[int]:
    """List the bytes of each allocation on the CPU while `profile`, with `profile_memory`, ran.

    They are in the order of time; memory that was freed is an entry less than 0.
    """
    found = []
    assert profile.profiler is not None  # it has run
    results: Any = profile.profiler.kineto_results
    events = list(results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        is_allocation = event.tag == torch._C._profiler._EventType.Allocation
        if is_allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [num_bytes for _, num_bytes in sorted(found, key=lambda each: each[0])]


def versions(device: torch.device) -> dict[str, str]:
    """Versions of what compiles kernels for `device`, and runs them, by name."""
    found = {}
    if importlib.util.find_spec("triton") is not None:
        found["triton"] = importlib.metadata.version("triton")
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = _driver_version()
        found["capability"] = str(torch.cuda.get_device_capability(device))
    return found


def _driver_version() -> str:
    """Version of CUDA that the driver has, 12080 for 12.8; "unknown" where it does not say."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return "unknown"
    return "unknown" if failed else str(number.value)
