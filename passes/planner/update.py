"""Time of an optimizer's update whose states live on the host between steps.

A bucket of states is copied to the device, updated, and copied back:

    load      0 | 1 | 2
    compute       0 | 1 | 2
    store             0 | 1 | 2

Each direction of the link, and the device, take buckets one after another. A copy to the device is
launched just before the update of the bucket before it, and so begins after earlier updates; it
gets the memory of the third bucket before it, for whose copy to the host the device waits then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoshard.passes.planner.costs import HostLink
from autoshard.passes.planner.topology import Topology

STATES = 2
"""States of an optimizer that budgets count on, each as large as its parameter: Adam's."""

ON_DEVICE = 3
"""Buckets that are on the device at a time, at most."""


class Update(NamedTuple):
    """Update of buckets, with when each is copied to the device, updated, and copied back.

    loads, computes, stores: (begin, end) of each bucket, in microseconds.
    peak_bytes: of states on the device.
    """

    loads: tuple[tuple[float, float], ...]
    computes: tuple[tuple[float, float], ...]
    stores: tuple[tuple[float, float], ...]
    peak_bytes: int

    @property
    def time_us(self) -> float:
        """Microseconds from the first copy to the last."""
        return self.stores[-1][1] if self.stores else 0.0


class HostStates(NamedTuple):
    """Optimizer states that could live on the host between steps, and what that costs.

    num_bytes: of them. more_us: by which a step takes longer.
    """

    num_bytes: int
    more_us: float


def moved_states(
    shard_bytes: Sequence[int], bucket_bytes: int, topology: Topology
) -> HostStates | None:
    """Price states of parameters on the host; None if there are none, or no host memory.

    shard_bytes: of each parameter, which has `STATES` states as large.
    """
    host = topology.host_link
    buckets = buckets_of([STATES * num_bytes for num_bytes in shard_bytes], bucket_bytes)
    if host is None or not any(buckets):
        return None
    # Of each parameter, shards and gradients are read, and shards written; of states, both.
    us_per_byte = (3 / STATES + 2) / topology.memory_bytes_per_us
    near_us = [num_bytes * us_per_byte for num_bytes in buckets]
    update = update_from_host(buckets, near_us, host)
    return HostStates(sum(buckets), update.time_us - sum(near_us))


def buckets_of(state_bytes: Sequence[int], bucket_bytes: int) -> list[int]:
    """Bytes of each bucket: of parameters in order, until there are `bucket_bytes`.

    state_bytes: bytes of the states of each parameter.
    """
    found: list[int] = []
    room = 0
    for num_bytes in state_bytes:
        if room <= 0:
            found.append(0)
            room = bucket_bytes
        found[-1] += num_bytes
        room -= num_bytes
    return found


def update_from_host(buckets: Sequence[int], compute_us: Sequence[float], host: HostLink) -> Update:
    """Simulate an update.

    buckets: bytes of states in each. compute_us: of the update of each, with states on the device.

    >>> link = HostLink(alpha_us=0.0, us_per_byte=1.0, call_us=0.0)
    >>> update_from_host([10, 10, 10], [2.0, 2.0, 2.0], link)  # doctest: +NORMALIZE_WHITESPACE
    Update(loads=((0.0, 10.0), (10.0, 20.0), (20.0, 30.0)),
           computes=((10.0, 12.0), (20.0, 22.0), (30.0, 32.0)),
           stores=((12.0, 22.0), (22.0, 32.0), (32.0, 42.0)), peak_bytes=30)
    """
    loads: list[tuple[float, float]] = []
    computes: list[tuple[float, float]] = []
    stores: list[tuple[float, float]] = []

    def end(turns: Sequence[tuple[float, float]], number: int) -> float:
        return turns[number][1] if number >= 0 else 0.0

    for number, (num_bytes, took) in enumerate(zip(buckets, compute_us, strict=True)):
        copy_us = host.time_us(num_bytes)
        begin = max(end(loads, number - 1), end(computes, number - 2), end(stores, number - 3))
        loads.append((begin, begin + copy_us))
        begin = max(end(loads, number), end(computes, number - 1))
        if number + 1 < len(buckets):  # the next one's memory
            begin = max(begin, end(stores, number - 2))
        computes.append((begin, begin + took))
        begin = max(end(computes, number), end(stores, number - 1))
        stores.append((begin, begin + copy_us))
    return Update(tuple(loads), tuple(computes), tuple(stores), most_on_device(buckets))


def most_on_device(buckets: Sequence[int]) -> int:
    """Bytes of states on the device at the peak of an update from the host."""
    return max((sum(buckets[at : at + ON_DEVICE]) for at in range(len(buckets))), default=0)
