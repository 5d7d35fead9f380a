"""Gaps of computation in which communication runs, and the collective that ended each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoshard.tools.trace.explain import intervals
from autoshard.tools.trace.explain.intervals import Interval
from autoshard.tools.trace.explain.lanes import Collective, Copy, Kernel, Lanes

Span = TypeVar("Span", Collective, Copy)

LAUNCH_US = 20.0
"""Time that a device needs from the launch of a kernel to its begin, if nothing is in its way."""

WAKE_US = 1000.0
"""Time that a host's thread needs to go on after a collective has ended."""


@dataclass(frozen=True)
class Wait:
    """Gap of computation, from `begin` to `end`, in which collectives or copies run.

    awaited: the collective that computation waited for, if it did wait for one.
    following: the kernel that ends the gap; None at the end of a step.
    exposed: times in the gap at which communication runs; up to the end of `awaited`, if any, and
        without those of `copies`, which are the copies that are in the way.
    unlaunched: times before that, at which a device waited for `awaited` to be launched.
    """

    begin: float
    end: float
    awaited: Collective | None
    following: Kernel | None
    running: Sequence[Collective]
    exposed: Sequence[Interval]
    copies: Sequence[Copy]
    unlaunched: Sequence[Interval]


def waits(lanes: Lanes, step: Interval) -> Iterator[Wait]:
    """Yield the gaps of a step, in order, in which communication runs; in one sweep."""
    found = intervals.gaps(lanes.busy, *step)
    collectives = _overlapping(lanes.collectives, found)
    copies = _overlapping(lanes.copies, found)
    for gap, running, copied in zip(found, collectives, copies, strict=True):
        if running or copied:
            yield _wait(lanes, gap, running, copied)


def _overlapping(spans: Sequence[Span], found: Sequence[Interval]) -> Iterator[list[Span]]:
    """Yield those of `spans`, which are sorted, that overlap each gap of `found`, in turn."""
    active: list[Span] = []
    position = 0
    for begin, end in found:
        while position < len(spans) and spans[position].begin < end:
            active.append(spans[position])
            position += 1
        active = [each for each in active if each.end > begin]
        yield list(active)


def _wait(
    lanes: Lanes, gap: Interval, running: Sequence[Collective], copies: Sequence[Copy]
) -> Wait:
    """Make the wait of one gap."""
    begin, end = gap
    position = bisect_left(lanes.kernels, end - 1.0, key=lambda kernel: kernel.begin)
    after = lanes.kernels[position] if position < len(lanes.kernels) else None
    following = after if after is not None and after.begin <= end + 1.0 else None
    awaited = _awaited(lanes, gap, running, following, copies)
    until = min(end, awaited.end) if awaited else end
    on_links = intervals.merge((each.begin, each.end) for each in running)
    beside = [c for c in copies if not c.is_in_the_way]
    in_the_way = [c for c in copies if c.is_in_the_way]
    alone = intervals.subtract(intervals.merge((c.begin, c.end) for c in beside), on_links)
    taken = intervals.merge((c.begin, c.end) for c in in_the_way)
    late = awaited is not None and lanes.on_device and awaited.launch > begin + LAUNCH_US
    unlaunched = [(begin, awaited.launch)] if awaited and late else []
    return Wait(
        begin,
        end,
        awaited,
        following,
        running,
        intervals.subtract(intervals.clip(on_links, begin, until), taken),
        in_the_way + [c for c in beside if intervals.clip(alone, c.begin, c.end)],
        intervals.subtract(intervals.subtract(unlaunched, on_links), taken),
    )


def _awaited(
    lanes: Lanes,
    gap: Interval,
    running: Sequence[Collective],
    following: Kernel | None,
    copies: Sequence[Copy],
) -> Collective | None:
    """Find the collective that a gap waited for: the last one that ended in it.

    There is none if computation goes on for another reason: on a device, because the host launched
    the next kernel only after that end; on a host, long after it, copies not counted.
    """
    begin, end = gap
    slack = 0.0 if lanes.on_device else WAKE_US
    ended = [each for each in running if begin < each.end <= end + slack]
    last = max(ended, key=lambda each: each.end, default=None)
    if last is None or following is None:
        return last or max(running, key=lambda each: each.end, default=None)
    if lanes.on_device:
        return last if following.launch <= last.end + LAUNCH_US else None
    copied = intervals.merge((max(each.begin, last.end), each.end) for each in copies)
    return last if end - last.end - intervals.total(copied) <= WAKE_US else None
