"""Streams of a device beside the one that computes, shared by all units.

Gathers and reduce-scatters run on the streams of their process groups. An all-reduce over
replicas has to wait for a reduce-scatter first; waited for where compute runs, that would
stop compute, so it is waited for on a stream of its own:

    compute   backward of k      backward of k-1         | wait for both
    shard        reduce-scatter k -> gather k-2 -> reduce-scatter k-1
    replicate                     all-reduce k

Copies to the device, and to the host, have a stream each: see `copies.py`.

On a CPU there is nothing to choose: what is called is done.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch


@functools.cache
def all_reduce_stream(device: torch.device) -> Any:
    """Stream of `device` that waits for reduce-scatters and then launches their all-reduces."""
    return torch.Stream(device)


@functools.cache
def copy_stream(device: torch.device, direction: str) -> Any:
    """Stream of `device` for copies in one `direction`: "load", to it, or "store", to the host."""
    return torch.Stream(device)


class EventBefore:
    """Event on the device, recorded at the latest of some calls, to be waited for at the next.

    A host that does so is no more than one call ahead of its device.
    """

    def __init__(self) -> None:
        self._latest: Any = None

    def record(self) -> Any:
        """Record an event now; return that of the call before.

        None at the first call, and where there is no device.
        """
        if not torch.accelerator.is_available():
            return None
        before, self._latest = self._latest, torch.Event()
        self._latest.record()
        return before


def is_captured() -> bool:
    """Tell whether what the device is given now becomes part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def on_all_reduce_stream(device: torch.device, *, after_compute: bool) -> Iterator[Any]:
    """Give the work in this context to the all-reduce stream, which it yields.

    On a CPU it makes no difference, and yields None.

    after_compute: whether that stream first waits for all that the current stream was given so far.
        Not needed if the work in this context waits for a reduce-scatter, which was launched after
        the compute that it reads from.
    """
    if device.type == "cpu":
        yield None
        return
    stream = all_reduce_stream(device)
    if after_compute:
        stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        yield stream
