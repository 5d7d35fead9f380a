"""Limit of how far the host may run ahead of the device with gathers.

A host that only launches is soon many units ahead. That costs no memory where buffers are torch's,
allocated and freed on one stream: the next gather gets the memory of the last, and its kernels come
after it ([Note: lifetimes of buffers]). A user's own all-gather may allocate otherwise, and get
memory back only when the device has come that far. So there the drop of a unit leaves an event, and
before a gather the host waits for the oldest if there are MAX_AHEAD: memory is that of so many
units.

While a CUDA graph is captured the host waits for nothing: it must not, and the graph's order and
memory are fixed.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from autoshard.runtime.comm.streams import is_captured

MAX_AHEAD = 2  # FSDP1's `_MAX_NUM_INFLIGHT_ALL_GATHERS`, "empirically chosen" there


class Limiter:
    """Events of dropped units, oldest first; all units share one limiter."""

    def __init__(self) -> None:
        self._events: deque[Any] = deque()

    def dropped(self, device: torch.device) -> None:
        """Record an event: a unit's unsharded parameters on `device` have just been dropped.

        Does nothing on a CPU, or while a CUDA graph is captured.
        """
        if device.type == "cpu":  # it does what it is told before the host goes on
            return
        if not is_captured():
            event = torch.Event(device)
            event.record()
            self.add(event)

    def add(self, event: Any) -> None:
        self._events.append(event)

    def wait(self) -> None:
        """Have the host wait, before a gather, until the device has passed the oldest drop.

        That drop is then forgotten. Does nothing if fewer than MAX_AHEAD drops are recorded, or
        while a CUDA graph is captured.
        """
        if len(self._events) >= MAX_AHEAD and not is_captured():
            self._events.popleft().synchronize()


limiter = Limiter()
