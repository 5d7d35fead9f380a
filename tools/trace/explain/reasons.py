"""Why communication is exposed: rules, in the order in which they are asked.

Time in a gap is copying first, then waiting of the host, then what the collective itself or its
place on the link explains. What no rule explains is due to the link ("link-bound").
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from autoshard.tools.trace.explain import intervals
from autoshard.tools.trace.explain.costs import MANY, Costs
from autoshard.tools.trace.explain.exposure import Wait, waits
from autoshard.tools.trace.explain.intervals import Interval
from autoshard.tools.trace.explain.lanes import Collective

COPY, HOST, SKEW = "copy", "host-bound", "skewed rank"
SMALL, QUEUE, LATE = "bucket too small", "queue behind another collective", "late launch"
LINK, OTHER = "link-bound", "unexplained"
CAUSES = (LATE, QUEUE, HOST, COPY, SKEW, SMALL)
"""Reasons that can be removed. LINK takes a faster link or less to send; OTHER is no reason."""

AHEAD_US = 30.0
"""Time of work left on a device, below which the host is not ahead of it."""

AHEAD_SHARE = 0.1
"""The same, as a share of the collective that is launched then."""

TOGETHER = 3
"""Reduces that begin in one wait, from which on they could have begun before."""


class Piece(NamedTuple):
    """Exposed time with one reason, in microseconds, at one place: a collective, or a copy."""

    reason: str
    time: float
    place: str
    begin: float
    lane: Hashable = None


def explain_step(costs: Costs, step: Interval) -> list[Piece]:
    """Find the pieces of exposed communication of one step, with their reasons.

    What a queue costs is no more than the link is idle later in the step: what is in front would
    have to be sent then. The rest is due to the link.
    """
    explained = _Step(costs, step)
    pieces = [piece for wait in waits(costs.lanes, step) for piece in explained.pieces(wait)]
    return list(explained.within_idle(pieces))


def gains(pieces: Sequence[Piece]) -> dict[str, float]:
    """Estimate the time that removing each of CAUSES alone would gain, no more than it exposes.

    "late launch", "host-bound": the exposed time, as far as the link was idle before the launch, or
    the host had nothing on the device. "queue ...": as far as the link is idle later in the step.
    "copy", "skewed rank": all of it. "bucket too small": all start-ups but one in MANY.
    """
    times: defaultdict[str, float] = defaultdict(float)
    for piece in pieces:
        times[piece.reason] += piece.time
    return {cause: times[cause] * (1 - 1 / MANY if cause == SMALL else 1) for cause in CAUSES}


class _Step:
    """Rules for the waits of one step of a rank."""

    def __init__(self, costs: Costs, step: Interval) -> None:
        self.costs, self.step = costs, step
        self.numbers: Counter[str] = Counter()
        self.labels: dict[Collective, str] = {}
        self.lanes: dict[Hashable, list[Collective]] = {}
        self.positions: dict[Collective, int] = {}
        begin, end = step
        for lane, found in costs.by_lane.items():
            first = bisect_left(found, begin, key=lambda each: each.end)
            last = bisect_left(found, end, key=lambda each: each.begin)
            self.lanes[lane] = found[first:last]
            self.positions.update((each, i) for i, each in enumerate(self.lanes[lane]))
        for each in sorted((e for own in self.lanes.values() for e in own), key=lambda e: e.begin):
            self.numbers[each.kind] += 1
            self.labels[each] = self._label(each)
        self.end = max((each.end for each in self.labels), default=end)
        self.last_reduce = max(
            (e.launch for e in self.labels if e.kind in ("reduce", "all_reduce")), default=begin
        )

    def _label(self, each: Collective) -> str:
        """Name a collective for people: by its annotation, or by its number in the step."""
        size = f", {each.num_bytes / 2**20:.3g} MiB" if each.num_bytes else ""
        number = f"{each.kind} {self.numbers[each.kind]} of the step{size}"
        return f"{each.place}: {number}" if each.place else number

    def pieces(self, wait: Wait) -> Iterator[Piece]:
        """Yield the pieces of a wait."""
        taken: list[Interval] = []
        for copy in sorted(wait.copies):
            span = [(max(copy.begin, wait.begin), min(copy.end, wait.end))]
            own = intervals.subtract(intervals.merge(span), intervals.merge(taken))
            yield Piece(COPY, intervals.total(own), copy.name, copy.begin)
            taken += own
        exposed = intervals.subtract(wait.exposed, intervals.merge(taken))
        if wait.awaited is None:
            yield self._not_awaited(wait, intervals.total(exposed))
        else:
            unlaunched = intervals.total(
                intervals.subtract(wait.unlaunched, intervals.merge(taken))
            )
            yield Piece(HOST, unlaunched, self.labels[wait.awaited], wait.begin)
            yield from self._awaited(wait, wait.awaited, exposed)

    def _not_awaited(self, wait: Wait, time: float) -> Piece:
        """Explain a gap that no collective ended: the host launched the next kernel late."""
        following = wait.following
        name = f"before {following.name.split('(')[0][:60]}" if following else "in compiled code"
        is_late = not self.costs.lanes.on_device or (following and following.launch > wait.begin)
        return Piece(HOST if is_late else OTHER, time, name, wait.begin)

    def _awaited(
        self, wait: Wait, awaited: Collective, exposed: Sequence[Interval]
    ) -> Iterator[Piece]:
        """Explain the wait for a collective, with those in front of it that it waited for, too."""
        chain = [e for e in wait.running if e.lane == awaited.lane and e.end <= awaited.end]
        left, first, queued = intervals.total(exposed), awaited, False
        for each, after in itertools.zip_longest(chain, chain[1:]):
            time = intervals.total(intervals.clip(exposed, each.begin, each.end))
            is_blocking = after is not None and self._blocks(each, after, awaited)
            for piece in self._own(each, time):
                yield piece
                time -= piece.time
                left -= piece.time
            if is_blocking:
                yield Piece(QUEUE, time, self.labels[awaited], each.begin, each.lane)
                left, queued = left - time, True
            else:
                first = min(first, each, key=lambda other: other.begin)
        rest = max(0.0, left)
        for reason, most in self._before(wait, first, chain, queued):
            time = min(rest, most)
            yield Piece(reason, time, self.labels[first], first.begin, first.lane)
            rest -= time
        yield Piece(LINK, rest, self.labels[awaited], awaited.begin)

    def _blocks(self, before: Collective, after: Collective, awaited: Collective) -> bool:
        """Tell whether `before` kept `awaited`, of another kind or group, from the link.

        after: what began when `before` had ended; `awaited`, or something in front of it.
        """
        is_other = (before.kind, before.group) != (awaited.kind, awaited.group)
        if not is_other or awaited.launch >= before.end:
            return False
        between = intervals.clip(self.costs.strands[before.lane], before.end, after.begin)
        return not intervals.gaps(between, before.end, after.begin)

    def _own(self, each: Collective, time: float) -> Iterator[Piece]:
        """Yield what a collective itself explains of its exposed time: others, and its start-up."""
        waited = min(time, self.costs.held_up.get(each, 0.0))
        yield Piece(SKEW, waited, self.labels[each], each.begin)
        start_up = min(time - waited, self.costs.start_up.get(each, 0.0))
        yield Piece(SMALL, start_up, self.labels[each], each.begin)

    def _before(
        self, wait: Wait, first: Collective, chain: Sequence[Collective], queued: bool
    ) -> Iterator[tuple[str, float]]:
        """Yield reasons for which `first`, and those behind it, began no sooner, and by how much.

        chain: what ran in the gap on its lane. queued: whether something in it blocked others.
        """
        lane, position = self.lanes[first.lane], self.positions[first]
        before = lane[position - 1] if position else None
        free_since = max(before.end if before else self.step[0], self.step[0])
        is_here = before and before.begin >= self.step[0] and not queued
        if before and is_here and self._blocks(before, first, first):
            yield QUEUE, first.begin - max(first.launch, before.begin)
        yield self._why_late(first), self._idle_before(wait, first, chain, free_since)

    def _why_late(self, first: Collective) -> str:
        """Tell whether the host was late, as the device had nothing left to do, or the program."""
        if not self.costs.lanes.on_device:
            return LATE
        ahead = max(AHEAD_US, AHEAD_SHARE * (first.end - first.begin))
        return HOST if self.costs.lead(first.launch) <= ahead else LATE

    def _idle_before(
        self, wait: Wait, first: Collective, chain: Sequence[Collective], free_since: float
    ) -> float:
        """Return for how long the link was idle while `first` could have been on it.

        A gather's inputs are there from the begin of the step. Those of a reduce are there when it
        begins, unless several wait for the end of backward; but if more gradients come later, it is
        waited for too soon, and could be on the link until the next one begins.
        """
        idle = max(0.0, first.begin - free_since)
        if first.kind not in ("reduce", "all_reduce"):
            return idle
        together = sum(each.kind == first.kind and each.begin >= wait.begin for each in chain)
        if wait.following is not None and self.last_reduce > wait.end:
            lane = self.lanes[first.lane]
            later = bisect_left(lane, wait.end, key=lambda each: each.begin)
            return (lane[later].begin if later < len(lane) else self.step[1]) - wait.end
        return idle if together >= TOGETHER else 0.0

    def within_idle(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """Yield the pieces, with those of queues cut to what their lane is idle later in the step.

        Idle time counts once, from the end of the step backwards.
        """
        used: Counter[Hashable] = Counter()
        spans = {
            lane: intervals.merge((each.begin, each.end) for each in found)
            for lane, found in self.lanes.items()
        }
        for piece in sorted(pieces, key=lambda each: -each.begin):
            if piece.reason == QUEUE:
                idle = intervals.total(intervals.gaps(spans[piece.lane], piece.begin, self.end))
                taken = min(piece.time, max(0, round(idle) - used[piece.lane]))
                used[piece.lane] += round(taken)
                yield piece._replace(reason=LINK, time=piece.time - taken)
                piece = piece._replace(time=taken)
            yield piece
