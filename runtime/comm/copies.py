"""Copies between host and device, beside compute, for what lives on the host between its uses.

    compute   ... launch | backward of k            | wait: gather k-1
    load                   copy shards of k-1 to device

A copy begins when compute gets to where it is launched, so that what it reads is there, and
what its memory held before is not needed any more. On a CPU it is made at once.

Copies in one direction follow one another on one stream. A host that waits for one waits for the
newest, and then has no need to wait for those before it: the waits at the end of a step are one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.comm.streams import copy_stream


@dataclass(frozen=True)
class Copies:
    """Copies that were begun; it holds their `sources`, which must live until they are over."""

    results: list[Tensor]
    sources: list[Tensor]
    done: Any = None  # an event; None: they are there
    lane: _Lane | None = None
    number: int = 0  # of those that were launched on the lane, from 1 on

    def wait_on_device(self) -> list[Tensor]:
        """Have the device's current stream wait for the copies, not the host; return `results`."""
        if self.done is not None:
            self.done.wait()
        return self.results

    def wait_on_host(self) -> list[Tensor]:
        """Have the host wait until the copies are there; return `results`.

        Waits for all launched since in the same direction, too, and so not at all if an earlier
        wait covered these, or if they were made at once.
        """
        if self.lane is not None and self.number > self.lane.passed:
            passed = self.lane.launched
            self.lane.newest.synchronize()
            self.lane.passed = passed
        return self.results

    def release(self) -> Copies:
        """Return a copy without the `sources`, which may be freed then; itself if it has none.

        The device's current stream waits for the copies first.
        """
        if not self.sources:
            return self
        self.wait_on_device()
        return replace(self, sources=[])


@dataclass
class _Lane:
    """Copies in one direction of one device, in the order in which they are launched.

    newest: event of the last one. passed: number of those that the host knows to be there.
    """

    launched: int = 0
    newest: Any = None
    passed: int = 0


_lanes: defaultdict[Any, _Lane] = defaultdict(_Lane)  # by stream


def launch_load(shards: list[Tensor], device: torch.device) -> Copies:
    """Begin to copy `shards` from the host to `device`, on a stream beside compute.

    That stream first waits for what the current one was given so far. The host waits while memory
    that is not pinned is read. Where `device` is a CPU, the copies are made at once.
    shards: one at least.
    """
    results = [torch.empty_like(shard, device=device) for shard in shards]
    return _copy(results, shards, results[0].device, "load")


def launch_store(shards: list[Tensor], into: list[Tensor] | None = None) -> Copies:
    """Begin to copy `shards`, all of one device, to the host, on a stream beside compute.

    That stream first waits for what the current one was given so far. From a CPU the copies are
    made at once.
    shards: one at least.
    into: host memory to copy them to; None: new memory, pinned if it is not a CPU's.
    """
    return _copy(into or [on_host(each) for each in shards], shards, shards[0].device, "store")


def on_host(shard: Tensor, *, pin_memory: bool = True) -> Tensor:
    """Return new host memory for a copy of `shard`, pinned if asked to and it is not a CPU's."""
    pins = pin_memory and shard.device.type != "cpu"
    return torch.empty_like(shard, device="cpu", pin_memory=pins)


def _copy(
    results: list[Tensor], sources: list[Tensor], device: torch.device, direction: str
) -> Copies:
    """Begin to copy `sources` to `results`: at once on a CPU, else on the stream of `direction`.

    That stream first waits for what the current stream of `device` was given so far; the copies
    become the newest of its `_Lane`. The host waits for memory that is not pinned. What is returned
    has no event if the copies were made at once.
    """
    with torch.no_grad():
        if device.type == "cpu":
            for result, source in zip(results, sources, strict=True):
                result.copy_(source)
            return Copies(results, sources)
        stream = copy_stream(device, direction)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            for result, source in zip(results, sources, strict=True):
                result.copy_(source, non_blocking=True)
            done = stream.record_event()
    lane = _lanes[stream]
    lane.launched, lane.newest = lane.launched + 1, done
    return Copies(results, sources, done, lane, lane.launched)
