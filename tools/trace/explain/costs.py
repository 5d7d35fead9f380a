"""Parts of a collective's time: waiting for other ranks, its start-up, and its bytes."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autoshard.tools.trace.explain import intervals
from autoshard.tools.trace.explain.intervals import Interval
from autoshard.tools.trace.explain.lanes import Collective, Lanes

LONG = 1.5
"""Times that a collective takes what others of its size do, before it counts as held up."""

HELD_UP_US = {True: 50.0, False: 1000.0}
"""Microseconds that it takes more, at least; on a device, and on a host."""

AT_ONCE_US = 20.0
"""Time between two collectives of a lane, up to which the second one waited for the first."""

SAME = 4
"""Collectives of one size that are needed to tell what they usually take."""

SMALL_SHARE = 0.25
"""Share of a collective's time that its bytes take, below which its start-up dominates."""

SMALL_BYTES = {True: 2**19, False: 2**16}
"""Bytes of a message whose start-up dominates on any link; between devices, and between hosts."""

MANY = 8
"""Small collectives in a step, from which on buckets count as too small."""


@dataclass
class Costs:
    """Parts of the time of a rank's collectives, in microseconds.

    held_up: what each waited for other ranks after it had begun itself; 0 if it is not there.
    start_up: of those that are too small, what is not due to their bytes.
    """

    lanes: Lanes
    held_up: dict[Collective, float]
    start_up: dict[Collective, float] = field(default_factory=dict)

    @cached_property
    def by_lane(self) -> dict[Hashable, list[Collective]]:
        """Collectives of each lane, one after another."""
        found: dict[Hashable, list[Collective]] = defaultdict(list)
        for each in self.lanes.collectives:
            found[each.lane].append(each)
        return found

    @cached_property
    def strands(self) -> dict[Hashable, list[Interval]]:
        """Times in which each lane goes from one collective, or copy, to the next at once."""
        found: dict[Hashable, list[Interval]] = defaultdict(list)
        for each in self.lanes.collectives:
            found[each.lane].append((each.begin, each.end))
        for copy in self.lanes.copies:
            found[copy.lane].append((copy.begin, copy.end))
        return {lane: intervals.merge(spans, AT_ONCE_US) for lane, spans in found.items()}

    @cached_property
    def launches(self) -> tuple[list[float], list[float]]:
        """Times at which kernels were launched, and when all launched until then have ended."""
        times, ends, latest = [], [], -math.inf
        for kernel in sorted(self.lanes.kernels, key=lambda kernel: kernel.launch):
            latest = max(latest, kernel.end)
            times.append(kernel.launch)
            ends.append(latest)
        return times, ends

    def lead(self, time: float) -> float:
        """Return how long the device still has work at `time`, launched before; below 0: none."""
        times, ends = self.launches
        position = bisect_right(times, time)
        return ends[position - 1] - time if position else -math.inf


def costs_of(ranks: Sequence[Lanes]) -> list[Costs]:
    """Find the parts of the time of all ranks' collectives.

    From several ranks, waiting is seen: from when a rank is at a collective to when the last one
    is. With one, on a device, it is what a collective takes more than most of the same kind, group
    and size; on a host that is not told from what computation takes from it.
    """
    if len(ranks) > 1:
        held_up = _held_up_by_others(ranks)
    else:
        held_up = [_longer_than_usual(ranks[0]) if ranks[0].on_device else {}]
    found = [Costs(lanes, each) for lanes, each in zip(ranks, held_up, strict=True)]
    for costs in found:
        costs.start_up = _start_up(costs)
    return found


def _longer_than_usual(lanes: Lanes) -> dict[Collective, float]:
    """Find what collectives take more than the quarter that is fastest of the same size."""
    alike: dict[Hashable, list[Collective]] = defaultdict(list)
    for each in lanes.collectives:
        if each.num_bytes:
            alike[each.kind, each.group, each.lane, each.num_bytes].append(each)
    found = {}
    for group in alike.values():
        if len(group) >= SAME:
            usual = sorted(_length(each) for each in group)[len(group) // 4]
            for each in group:
                more = _length(each) - usual
                if more > max((LONG - 1) * usual, HELD_UP_US[lanes.on_device]):
                    found[each] = more
    return found


def _held_up_by_others(ranks: Sequence[Lanes]) -> list[dict[Collective, float]]:
    """Find what each rank's collectives wait for the rank that comes last.

    Clocks of ranks are set by the ends of collectives, which are the same moment on all.
    """
    found: list[dict[Collective, float]] = [{} for _ in ranks]
    for row in _matching(ranks):
        offsets = [
            statistics.median(b.end - a.end for a, b in zip(row[0], other, strict=True))
            for other in row
        ]
        for same in zip(*row, strict=True):
            begins = [each.begin - offset for each, offset in zip(same, offsets, strict=True)]
            for rank, (each, begin) in enumerate(zip(same, begins, strict=True)):
                waited = min(max(begins) - begin, _length(each))
                if waited > HELD_UP_US[ranks[rank].on_device]:
                    found[rank][each] = waited
    return found


def _matching(ranks: Sequence[Lanes]) -> Iterator[list[list[Collective]]]:
    """Yield lists of the collectives of each rank, of which those at one place are the same.

    They are all of a trace, if ranks have as many of each kind and size, or those of each step in
    which they have.
    """
    whole = [lanes.collectives for lanes in ranks]
    if rows := _in_order(whole):
        yield rows
        return
    for number in range(min(len(lanes.steps) for lanes in ranks)):
        parts = []
        for lanes in ranks:
            begin, end = lanes.steps[number]
            parts.append([each for each in lanes.collectives if begin <= each.begin < end])
        if rows := _in_order(parts):
            yield rows


def _in_order(parts: Sequence[Sequence[Collective]]) -> list[list[Collective]]:
    """Sort each rank's collectives by kind and size; return no lists if ranks differ in these."""
    rows = [sorted(part, key=_likeness) for part in parts]  # stable: those alike as they began
    is_same = all([*map(_likeness, row)] == [*map(_likeness, rows[0])] for row in rows)
    return rows if rows[0] and is_same else []


def _likeness(each: Collective) -> tuple[str, str, int]:
    """Return what a collective has in common with itself on other ranks."""
    return each.kind, each.group, each.num_bytes


def _start_up(costs: Costs) -> dict[Collective, float]:
    """Find the start-up of collectives that are too small, if a step has MANY.

    A link's rate is that of the larger half of the collectives of a kind, of the fastest kind.
    """
    of_kinds: dict[str, list[Collective]] = defaultdict(list)
    for each in costs.lanes.collectives:
        if each.num_bytes and each.kind != "message":
            of_kinds[each.kind].append(each)
    rate = max((_rate(group, costs) for group in of_kinds.values()), default=0.0)
    found = {}
    for each in (each for group in of_kinds.values() for each in group):
        own = _length(each) - costs.held_up.get(each, 0.0)
        by_bytes = each.num_bytes / rate if rate else own
        if each.num_bytes < SMALL_BYTES[costs.lanes.on_device]:
            found[each] = own
        elif by_bytes < SMALL_SHARE * own:
            found[each] = own - by_bytes
    return found if len(found) >= MANY * len(costs.lanes.steps) else {}


def _rate(group: Sequence[Collective], costs: Costs) -> float:
    """Return the usual bytes a microsecond of those that have half the bytes of the largest."""
    half = max(each.num_bytes for each in group) / 2
    times = [
        each.num_bytes / max(_length(each) - costs.held_up.get(each, 0.0), 1e-3)
        for each in group
        if each.num_bytes >= half
    ]
    return statistics.median(times)


def _length(each: Collective) -> float:
    """Return the microseconds that a collective takes."""
    return each.end - each.begin
