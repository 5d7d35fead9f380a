"""Place copies of saved values, between a device and its host, by the times of a graph's ops.

    forward    | ops of 1 | launch(1)  ops of 2 | wait(1) launch(2)  ops of 3 | wait(2)
    to host                 |---- 1 ----|         |---- 2 ----|
    to device    |---- 2 ----|                    |---- 1 ----|
    backward     launch(2) ops of 3 | wait(2)  ops of 2  launch(1) .. | wait(1)  ops of 1

Copies in one direction follow one another; collectives have other links. Positions are those of
plans: an event at position p stands before op p.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placed:
    """Copy that was placed.

    launch, wait: positions. exposed_us: for which compute is predicted to wait for it.
    """

    launch: int
    wait: int
    exposed_us: float


def place_offloads(
    op_us: Sequence[float], ready: Sequence[int], copy_us: Sequence[float]
) -> list[Placed]:
    """Place copies to the host: each is launched once it may, and waited for once it is over.

    op_us: microseconds of each op.
    ready: first position at which each copy may be launched, in ascending order.
    copy_us: microseconds that each takes.
    """
    begun = list(itertools.accumulate(op_us, initial=0.0))
    over = late = 0.0
    found = []
    for launch, time_us in zip(ready, copy_us, strict=True):
        over = max(over, begun[launch]) + time_us
        wait = min(bisect.bisect_left(begun, over, lo=launch), len(op_us))
        exposed_us = max(0.0, over - begun[wait] - late)
        late += exposed_us  # at the end of the graph, as nothing waits before it
        found.append(Placed(launch, wait, exposed_us))
    return found


def place_reloads(
    op_us: Sequence[float], used: Sequence[int], copy_us: Sequence[float]
) -> list[Placed]:
    """Place copies to the device: each is launched as late as it can be, and waited for at its use.

    It can be so late that it, and those used after it, are over in time.

    used: position at which each copy is read, in ascending order; `op_us`, `copy_us`: see
        `place_offloads`.
    """
    begun = list(itertools.accumulate(op_us, initial=0.0))
    launches = []
    start = float("inf")
    for wait, time_us in zip(reversed(used), reversed(copy_us), strict=True):
        start = min(start, begun[wait]) - time_us
        launches.append(max(0, bisect.bisect_right(begun, start, hi=wait + 1) - 1))
    launches.reverse()
    over = late = 0.0
    found: list[Placed] = []
    for launch, wait, time_us in zip(launches, used, copy_us, strict=True):
        before = sum(each.exposed_us for each in found if each.wait <= launch)
        over = max(over, begun[launch] + before) + time_us
        exposed_us = max(0.0, over - begun[wait] - late)
        late += exposed_us
        found.append(Placed(launch, wait, exposed_us))
    return found
