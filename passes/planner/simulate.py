"""Simulate one decision: where and when each bucket is launched and waited for, in what memory.

    compute  |copy in|  ops of 1  |wait|copy out|  ops of 2  | ...
    link        |----- gather 2 -----|------ gather 3 ------|

Compute is one stream and keeps its order; copies are on it. Every link is one queue. A collective
starts once compute has come to its launch, and its link is done with all that was launched before.

Launches and waits are placed by what is known at each position:

- a gather is launched at the last position before the gather ahead of it begins on the link, so
  that the link never runs dry, or as soon after as it fits under the budget; at its first use it is
  launched in any case;
- a reduce is launched as soon as its last gradient is there;
- a gather is waited for at its first use. A reduce is waited for once it is over, so that compute
  only has to copy its sums out. It is waited for earlier where a gather needs the memory that it
  holds, where its result is read, and at a barrier.

Memory is counted by position: values that live at an op, gathered parameters from launch to last
use, gradients from when they are made to their wait. A packed bucket is in memory twice while it is
copied, and its sum is allocated after that.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autoshard.passes.planner.problem import Item, Problem

ROUNDING = 1e-9  # times that differ by less are equal
SAMPLES = 1000  # of memory by category, besides those at launches and waits


@dataclass(frozen=True)
class SimulatedBucket:
    """Items of one class that share a collective, and the costs of it.

    ready, used, freed: see `Item`; those of the bucket are the latest, the first, and the latest of
        its items.
    num_bytes: of all items, unsharded. shard_bytes: of one rank's shards of them.
    copy_in_us: of copies before the launch, and of the launch and wait themselves.
    copy_out_us: of copies after the wait.
    """

    kind: str  # "gather" or "reduce"
    bucket_class: str
    items: tuple[Item, ...]
    layout: str
    num_bytes: int
    ready: int
    used: int
    freed: int
    links: tuple[tuple[str, float], ...]  # in turn, each with its time
    copy_in_us: float
    copy_out_us: float
    shard_bytes: int
    twice_bytes: int  # of it, in memory twice while they are copied: in for a reduce, else out

    @cached_property
    def is_summed_twice(self) -> bool:
        """Tell whether the bucket is reduced over replicas, too, by a second collective."""
        return len(self.links) > 1


def make_bucket(problem: Problem, kind: str, items: Sequence[Item], layout: str) -> SimulatedBucket:
    """Make a bucket of `items`, which are of one bucket class, at the costs of `problem`.

    items: one or more.
    kind: "gather" or "reduce".
    layout: "packed" or "grouped".
    """
    costs, bucket_class = problem.costs, items[0].bucket_class
    num_bytes, count = sum(item.num_bytes for item in items), len(items)
    are_shared = costs.are_shared(kind, [item.num_bytes for item in items], layout)
    pairs = list(zip(items, are_shared, strict=True))
    copied_in = [item for item, is_shared in pairs if is_shared or item.is_copied_in]
    copied_out = sum(item.num_bytes for item, shared in pairs if shared or item.is_copied_out)
    return SimulatedBucket(
        kind=kind,
        bucket_class=bucket_class,
        items=tuple(items),
        layout=layout,
        num_bytes=num_bytes,
        ready=max(item.ready for item in items),
        used=min(item.used for item in items),
        freed=max(item.freed for item in items),
        links=tuple(
            (link.name, link.time_us(num_bytes, count, layout))
            for link in costs.links[bucket_class]
        ),
        copy_in_us=costs.call_us
        + costs.copy_in_us(kind, bucket_class, sum(item.moved_bytes for item in copied_in)),
        copy_out_us=(
            costs.copy_out_us(copied_out)
            if kind == "gather"
            else costs.hand_out_us(bucket_class, num_bytes, layout)
        ),
        shard_bytes=-(-num_bytes // costs.shards[bucket_class]),
        twice_bytes=copied_out if kind == "gather" else sum(item.num_bytes for item in copied_in),
    )


@dataclass
class Run:
    """Launch, wait and times of one bucket in a simulation, which fills it in.

    launch, wait: positions. Times are in microseconds from the graph's start.
    """

    bucket: SimulatedBucket
    number: int = -1  # among all buckets, gathers first
    launch: int = -1
    wait: int = -1
    turns: list[tuple[str, float, float]] = field(default_factory=list)  # link, begin, end
    is_summed: bool = False  # over replicas, too: the all-reduce has been begun
    exposed_us: float = 0.0

    @property
    def launch_us(self) -> float:
        """Time at which the collective begins on its first link, which may be after the launch."""
        return self.turns[0][1]

    @property
    def finish_us(self) -> float:
        """Time at which the collective, with the all-reduce if there is one, is over."""
        return self.turns[-1][2]


@dataclass(frozen=True)
class Peak:
    """Bytes in memory at the peak, by category.

    position: of the op that runs then; between two ops, of one of them.
    gathered: unsharded parameters, their copies included.
    unreduced: unsharded gradients that wait to be reduced or are being reduced, copies included.
    reduced: shards of reduced gradients.
    live: other values that live at that op; see `Problem.live_bytes`.
    """

    position: int = 0
    gathered: int = 0
    unreduced: int = 0
    reduced: int = 0
    live: int = 0

    @property
    def num_bytes(self) -> int:
        return self.gathered + self.unreduced + self.reduced + self.live


@dataclass(frozen=True)
class Timeline:
    """Result of a simulation.

    time_us: from the first op to the last wait. exposed_us: for how long compute waits.
    runs: gathers, then reduces, each in the order in which they were given.
    order: (what, run's number, position) of every launch, all-reduce and wait, in program order.
    compute: (begin us, end us, first op, one after the last) of ops between two positions.
    memory: (us, bytes): the most in use from this time to the next entry's.
    """

    time_us: float
    exposed_us: float
    peak: Peak
    runs: tuple[Run, ...]
    order: tuple[tuple[str, int, int], ...]
    compute: tuple[tuple[float, float, int, int], ...]
    memory: tuple[tuple[float, int], ...]

    @property
    def peak_bytes(self) -> int:
        return self.peak.num_bytes

    def needs(self, budget_bytes: float) -> tuple[float, float]:
        """Bytes beyond a budget, and microseconds: less is better."""
        return max(0.0, self.peak_bytes - budget_bytes), self.time_us


Order = tuple[tuple[str, int, int], ...]
"""(what, bucket, position): "launch", "all_reduce" or "wait" of a bucket; gathers have the first
numbers."""


def simulate(
    problem: Problem,
    gathers: Sequence[SimulatedBucket],
    reduces: Sequence[SimulatedBucket],
    *,
    budget_bytes: float,
) -> Timeline:
    """Decide where the given buckets are launched and waited for, and simulate that.

    A gather is launched just early enough to keep its link busy, later if it does not fit under the
    budget, and at the latest at its first use, where it is waited for. A reduce is launched once
    its gradients are there. It is waited for once it is over, or earlier: where a gather needs its
    memory, where its result is read, at a barrier, and at the end.

    gathers: in order of first use; reduces: in order of readiness.
    budget_bytes: for all memory. A parameter that compute needs is gathered even beyond it: the
        timeline's `peak_bytes` then says so.
    """
    return _Placing(problem, gathers, reduces, budget_bytes).run()


def simulate_unless_worse(
    problem: Problem,
    gathers: Sequence[SimulatedBucket],
    reduces: Sequence[SimulatedBucket],
    *,
    budget_bytes: float,
    known: tuple[float, float],
) -> Timeline | None:
    """Simulate as `simulate` does; return None as soon as the timeline is sure to be worse.

    A timeline that is returned may be worse, too.

    known: bytes beyond the budget, and microseconds, of the timeline to compare with. Fewer bytes
        are better, then less time.
    """
    try:
        return _Placing(problem, gathers, reduces, budget_bytes, known).run()
    except _Worse:
        return None


def replay(
    problem: Problem,
    gathers: Sequence[SimulatedBucket],
    reduces: Sequence[SimulatedBucket],
    order: Order,
) -> Timeline:
    """Simulate launches and waits at given positions; no budget is kept to.

    order: of all launches and waits, in program order. An all-reduce that it lacks is begun at the
        wait.
    """
    return _Following(problem, gathers, reduces, order).run()


def usage(problem: Problem, timeline: Timeline) -> tuple[tuple[float, Peak], ...]:
    """Memory by category over the time of `timeline`: (us, the most from then to the next entry's).

    Sums are those of `timeline.memory`, with more entries, and so is the peak. The timeline is
    simulated again, so that a search need not count by category.
    problem: the one that `timeline` was simulated for.
    """
    buckets = [run.bucket for run in timeline.runs]
    gathers = [each for each in buckets if each.kind == "gather"]
    watched = _Watching(problem, gathers, buckets[len(gathers) :], timeline.order)
    watched.run()
    return tuple(watched.samples)


class _Worse(Exception):
    """Signal that the simulated timeline will be worse than the known one, whatever follows."""


class _Simulation(ABC):
    """State of a simulation at one position, and the effects of launches and waits on it.

    gathers, reduces: a `Run` for each bucket, in the order given; numbered, gathers first.
    now: microseconds since the start. exposed: of these, how long compute has waited.
    links: when each link will be done with all that was launched.
    ever_gathered: bytes of all gathers launched so far, even if freed since.
    unreduced: bytes of gradients made and not waited for, and of sums that arrive.
    reduced: bytes of shards of reduced gradients.
    """

    def __init__(
        self,
        problem: Problem,
        gathers: Sequence[SimulatedBucket],
        reduces: Sequence[SimulatedBucket],
    ) -> None:
        """Make an unlaunched `Run` for each bucket, numbered, gathers first; begin at time 0.

        Nothing is simulated before `run`.
        """
        self.problem = problem
        self.gathers = [Run(bucket) for bucket in gathers]
        self.reduces = [Run(bucket) for bucket in reduces]
        for number, run in enumerate([*self.gathers, *self.reduces]):
            run.number = number
        self.now = 0.0
        self.position = 0
        self.links: dict[str, float] = {}
        self.exposed = 0.0
        self.ever_gathered = self.unreduced = self.reduced = 0  # bytes
        self.peak, self.peak_bytes = Peak(), 0
        self.order: list[tuple[str, int, int]] = []
        self.compute: list[tuple[float, float, int, int]] = []
        self.memory: list[tuple[float, int]] = []

    def run(self) -> Timeline:
        """Simulate from the first position to the end, and return the timeline.

        To be called once, as it uses up the state.
        """
        for position, following in itertools.pairwise([*self.positions(), self.problem.num_ops]):
            self._advance(position)
            self.act(position, following)
        self.end()
        runs = (*self.gathers, *self.reduces)
        return Timeline(
            self.now,
            self.exposed,
            self.peak,
            runs,
            tuple(self.order),
            tuple(self.compute),
            tuple(self.memory),
        )

    def positions(self) -> list[int]:
        """Positions at which something may happen, the end included."""
        found = {0, self.problem.num_ops}
        for run in self.gathers:
            found.update(
                (run.bucket.ready, run.bucket.used, min(run.bucket.freed, self.problem.num_ops))
            )
        for run in self.reduces:
            found.update((run.bucket.ready, run.bucket.used))
        return sorted(found)

    @abstractmethod
    def act(self, position: int, following: int) -> None:
        """Launch and wait for what is due at `position`; `act` is next called at `following`."""

    @abstractmethod
    def end(self) -> None:
        """Wait for all that is still in flight at the end."""

    def _advance(self, position: int) -> None:
        """Run compute up to `position`: it takes longer while any link is busy.

        Records the ops' times, and the memory in use; gradients that they make become unreduced.
        Does nothing if compute is there already.
        """
        problem, begin, began_us = self.problem, self.position, self.now
        if begin == position:
            return
        self._note(begin, position)
        self.unreduced += problem.made_bytes[position] - problem.made_bytes[begin]
        self.position = position
        work = problem.compute_us[position] - problem.compute_us[begin]
        factor = problem.costs.contention
        if factor > 1 and work:
            busy_us = max(0.0, max(self.links.values(), default=0.0) - self.now)
            shared_us = min(work * factor, busy_us)
            self.now += shared_us + (work - shared_us / factor)
        else:
            self.now += work
        self.compute.append((began_us, self.now, begin, position))

    def _note(self, begin: int, end: int, *, copied: int = 0) -> None:
        """Record the most memory in use at ops `begin` to `end` - 1, and the peak if it is higher.

        copied: bytes of gathered parameters that are in memory twice.
        """
        problem = self.problem
        held = self.ever_gathered + self.unreduced + self.reduced + copied
        num_bytes = held + problem.peak_bytes(begin, end)
        self._add_note(num_bytes)
        if num_bytes > self.peak_bytes:
            at = problem.peak_op(begin, end)
            live = problem.live_bytes[at] if at < problem.num_ops else 0
            gathered = self.ever_gathered - problem.freed_bytes[at] + copied
            self._set_peak(at, num_bytes, gathered, live)

    def _note_packed(self, copied: int) -> None:
        """Record the memory in use between the ops before and after the position; a new peak, too.

        Of other values, those of the op with fewer bytes count.

        copied: bytes of gradients that are in memory twice.
        """
        problem, at = self.problem, self.position
        lives = problem.live_bytes[max(0, at - 1) : at + 1]
        live = min(lives, default=0)
        gathered = self.ever_gathered - problem.freed_bytes[at]
        num_bytes = gathered + self.unreduced + copied + self.reduced + live
        self._add_note(num_bytes)
        if num_bytes > self.peak_bytes:
            before = len(lives) > 1 and lives[0] <= lives[1]
            self._set_peak(at - before, num_bytes, gathered, live)

    def _add_note(self, num_bytes: int) -> None:
        """Append (now, `num_bytes`) to `memory`; of entries with one time, the largest is kept."""
        if self.memory and self.memory[-1][0] == self.now:
            num_bytes = max(num_bytes, self.memory.pop()[1])
        self.memory.append((self.now, num_bytes))

    def _set_peak(self, position: int, num_bytes: int, gathered: int, live: int) -> None:
        """Make `num_bytes` the peak; what is in no other category counts as unreduced gradients."""
        self.peak_bytes = num_bytes
        unreduced = num_bytes - gathered - self.reduced - live
        self.peak = Peak(position, gathered, unreduced, self.reduced, live)

    def launch(self, run: Run) -> None:
        """Copy in, queue the collective on its links, and account for its memory.

        The collective begins on each link once that is free; compute goes on after the copy.
        """
        bucket = run.bucket
        at = self.position
        if bucket.kind == "gather":
            self.ever_gathered += bucket.num_bytes
            self._note(at, at + 1)
        else:
            self._note_packed(bucket.twice_bytes)
            self.unreduced += bucket.shard_bytes  # where the sum arrives
            self._note_packed(0)
        self.now += bucket.copy_in_us
        run.launch = self.position
        begin = self.now
        for link, time in bucket.links:
            begin = max(begin, self.links.get(link, 0.0))
            end = begin + time
            run.turns.append((link, begin, end))
            self.links[link] = begin = end
        self._record("launch", run)

    def all_reduce(self, run: Run) -> None:
        """Note that the all-reduce begins here; its time was queued at the launch."""
        run.is_summed = True
        self._record("all_reduce", run)

    def wait(self, run: Run) -> None:
        """Have compute wait until the collective is over, then copy out.

        An all-reduce that has not begun is begun. A reduce's gradients are freed; its shards stay.
        """
        bucket = run.bucket
        if bucket.is_summed_twice and not run.is_summed:
            self.all_reduce(run)
        run.wait = self.position
        run.exposed_us = max(0.0, run.finish_us - self.now)
        self.exposed += run.exposed_us
        self.now += run.exposed_us
        self._record("wait", run)
        if bucket.kind == "gather":
            if bucket.twice_bytes:
                self._note(self.position, self.position + 1, copied=bucket.twice_bytes)
        else:
            self.unreduced -= bucket.num_bytes + bucket.shard_bytes
            self.reduced += bucket.shard_bytes
        self.now += bucket.copy_out_us

    def _record(self, what: str, run: Run) -> None:
        self.order.append((what, run.number, self.position))


class _Placing(_Simulation):
    """Simulation that decides itself where to launch and to wait, by the rules of `simulate`.

    known: see `simulate_unless_worse`; by default, nothing is worse. `run` raises _Worse if the
        timeline is sure to be worse.
    """

    def __init__(
        self,
        problem: Problem,
        gathers: Sequence[SimulatedBucket],
        reduces: Sequence[SimulatedBucket],
        budget_bytes: float,
        known: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        """Begin at time 0, with the copies and link times of all buckets still to come.

        Nothing is simulated before `run`, which raises _Worse if the timeline is sure to be worse
        than `known`.

        gathers: in order of first use; reduces: in order of readiness.
        budget_bytes: memory that launches of gathers keep to, except at their first use.
        known: bytes beyond the budget, and microseconds, to beat; times that differ by less than
            `ROUNDING`, relative, are equal. By default, nothing is worse.
        """
        super().__init__(problem, gathers, reduces)
        self.budget = budget_bytes
        sums = (each.shard_bytes for each in reduces)
        copies = (each.twice_bytes for each in gathers)
        self.largest_beside = max((*sums, *copies), default=0)  # of others, beside a gather
        self.known_beyond, self.known_us = known[0], known[1] * (1 + ROUNDING)
        # What is before compute and each link, ops aside; launches and waits take from it.
        self.copies_us = 0.0
        self.queued_us: dict[str, float] = {}
        for bucket in (*gathers, *reduces):
            self.copies_us += bucket.copy_in_us + bucket.copy_out_us
            for link, time in bucket.links:
                self.queued_us[link] = self.queued_us.get(link, 0.0) + time
        self.next_gather = self.next_reduce = self.next_wait = 0
        self.in_flight: deque[Run] = deque()  # reduces
        self.horizon = 0.0  # compute from here to the next position

    def act(self, position: int, following: int) -> None:
        """Launch and wait for what is due at `position`; `following` is the next one.

        In turn: all-reduces begin and reduces are waited for if they are over by now; reduces that
        are ready are launched; those used here are waited for, with those launched before them;
        gathers are launched as `_may_launch` says; gathers used here are waited for.
        Raises _Worse if the timeline is sure to be worse than the known one.
        """
        self._give_up_if_worse()
        compute_us = self.problem.compute_us
        self.horizon = compute_us[following] - compute_us[position]
        for run in self.in_flight:
            if run.turns[0][2] <= self.now and run.bucket.is_summed_twice and not run.is_summed:
                self.all_reduce(run)
        while self.in_flight and self.in_flight[0].finish_us <= self.now:
            self.wait(self.in_flight.popleft())
        reduces, gathers = self.reduces, self.gathers
        while (
            self.next_reduce < len(reduces) and reduces[self.next_reduce].bucket.ready <= position
        ):
            self.launch(reduces[self.next_reduce])
            self.in_flight.append(reduces[self.next_reduce])
            self.next_reduce += 1
        while any(run.bucket.used <= position for run in self.in_flight):
            self.wait(self.in_flight.popleft())
        while self.next_gather < len(gathers) and self._may_launch(self.next_gather):
            self.launch(gathers[self.next_gather])
            self.next_gather += 1
        while self.next_wait < len(gathers) and gathers[self.next_wait].bucket.used <= position:
            self.wait(gathers[self.next_wait])
            self.next_wait += 1

    def end(self) -> None:
        while self.in_flight:
            self.wait(self.in_flight.popleft())

    def launch(self, run: Run) -> None:
        """Launch `run`, and take its copy in, and its time on links, from what is still to come."""
        super().launch(run)
        self.copies_us -= run.bucket.copy_in_us
        for link, time in run.bucket.links:
            self.queued_us[link] -= time

    def wait(self, run: Run) -> None:
        super().wait(run)
        self.copies_us -= run.bucket.copy_out_us

    def _give_up_if_worse(self) -> None:
        """Raise _Worse if this timeline is sure to be worse than the known one.

        It is if more bytes beyond the budget are in use already; or if they are as many, and
        compute or a link, never idle from now on, would end later.
        """
        beyond = max(0.0, self.peak_bytes - self.budget)
        if beyond < self.known_beyond:
            return
        ops_us = self.problem.compute_us
        end_us = self.now + ops_us[-1] - ops_us[self.position] + self.copies_us
        for link, queued_us in self.queued_us.items():
            end_us = max(end_us, max(self.now, self.links.get(link, 0.0)) + queued_us)
        if beyond > self.known_beyond or end_us > self.known_us:
            raise _Worse

    def _may_launch(self, number: int) -> bool:
        """Tell whether gather `number` is to be launched at this position.

        Before its first use it is if its shards are ready, it fits under the budget, and the gather
        ahead of it begins on its link before compute comes to the next position. At its first use
        it always is; reduces in flight are then waited for, here, until there is room.
        """
        bucket = self.gathers[number].bucket
        if bucket.used <= self.position:
            while self.in_flight and not self._fits(bucket):
                self.wait(self.in_flight.popleft())
            return True
        if bucket.ready > self.position:
            return False
        if number:
            begin = self.gathers[number - 1].launch_us - self.horizon
            if begin > self.now and begin > self._arrival_us():
                return False
        return self._fits(bucket)

    def _arrival_us(self) -> float:
        """Time at which all gathers that compute waits for at this position are over.

        The present time, if there are none.
        """
        arrival = self.now
        for number in range(self.next_wait, self.next_gather):
            run = self.gathers[number]
            if run.bucket.used > self.position:
                break
            arrival = max(arrival, run.finish_us)
        return arrival

    def _fits(self, bucket: SimulatedBucket) -> bool:
        """Tell whether `bucket`, if gathered now, stays under the budget until it is freed.

        Until its first use gradients count as if none were reduced meanwhile. From then on they
        count as if all had been reduced to shards, and the bucket's copy out counts, too. What
        others need for a moment until it is freed must also fit: the largest sum of a reduce that
        is launched, and copies out of gathers in flight.
        """
        problem, position, used = self.problem, self.position, bucket.used
        room = self.budget - self.ever_gathered - self.unreduced - self.reduced - bucket.num_bytes
        left = math.inf if position == used else room - problem.peak_bytes(position, used)
        if left < 0:
            return False
        shards = problem.made_shard_bytes
        after = room - bucket.twice_bytes - (shards[used] - shards[position])
        left = min(left, after - problem.peak_bytes(used, bucket.freed))
        return left >= self.largest_beside or (
            left >= 0 and left >= self._arriving_bytes(bucket.freed) and self._copies_fit(room)
        )

    def _copies_fit(self, room: float) -> bool:
        """Tell whether gathers in flight can be copied out in `room`, each at its first use.

        Gradients count as if none were reduced meanwhile.
        """
        problem, made = self.problem, self.problem.made_bytes
        for number in range(self.next_wait, self.next_gather):
            bucket = self.gathers[number].bucket
            made_since = made[bucket.used] - made[self.position]
            others = problem.peak_bytes(bucket.used, bucket.used + 1) + made_since
            if room - others < bucket.twice_bytes:
                return False
        return True

    def _arriving_bytes(self, end: int) -> int:
        """Bytes of the largest shards among reduces still to be launched, ready before `end`."""
        largest = 0
        for number in range(self.next_reduce, len(self.reduces)):
            bucket = self.reduces[number].bucket
            if bucket.ready >= end:
                break
            largest = max(largest, bucket.shard_bytes)
        return largest


class _Following(_Simulation):
    """Simulation that launches and waits where a given order says."""

    def __init__(
        self,
        problem: Problem,
        gathers: Sequence[SimulatedBucket],
        reduces: Sequence[SimulatedBucket],
        order: Order,
    ) -> None:
        """Begin at time 0, with the events of `order` put by position, in their order.

        Nothing is simulated before `run`.
        """
        super().__init__(problem, gathers, reduces)
        self.at: dict[int, list[tuple[str, int]]] = {}
        for what, number, position in order:
            self.at.setdefault(position, []).append((what, number))

    def positions(self) -> list[int]:
        return sorted({*super().positions(), *self.at})

    def act(self, position: int, following: int) -> None:
        runs = [*self.gathers, *self.reduces]
        for what, number in self.at.get(position, []):
            getattr(self, what)(runs[number])

    def end(self) -> None:
        """Do nothing: all waits are in the order that is followed."""


class _Watching(_Following):
    """Simulation that notes memory by category at all times, not only where it is most.

    samples: (us, bytes): the most in use from this time to the next entry's.
    """

    def __init__(
        self,
        problem: Problem,
        gathers: Sequence[SimulatedBucket],
        reduces: Sequence[SimulatedBucket],
        order: Order,
    ) -> None:
        super().__init__(problem, gathers, reduces, order)
        self.samples: list[tuple[float, Peak]] = []

    def positions(self) -> list[int]:
        step = 1 + self.problem.num_ops // SAMPLES
        return sorted({*super().positions(), *range(0, self.problem.num_ops, step)})

    def _add_note(self, num_bytes: int) -> None:
        """Forget the peak, so that what is noted is one, and comes by category."""
        self.peak_bytes = -1

    def _set_peak(self, position: int, num_bytes: int, gathered: int, live: int) -> None:
        """Append the sample; of samples with one time, the largest is kept."""
        super()._set_peak(position, num_bytes, gathered, live)
        if self.samples and self.samples[-1][0] == self.now:
            last = self.samples.pop()[1]
            self.peak = max(last, self.peak, key=lambda peak: peak.num_bytes)
        self.samples.append((self.now, self.peak))
