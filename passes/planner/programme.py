"""Find the best contiguous buckets of gathers of one class, exactly, where memory is no limit.

Items 0 to n - 1 are in order of first use; the ops between the first uses of item j and of item j +
1 take c_j. Buckets cross the link one after another; crossed(j) is the time at which the bucket of
items i to j - 1 has crossed it. The ops from the first use of item i to that of item j finish at

    finish(j) = max(finish(i), crossed(j)) + call + copies(i..j) + c_i + ... + c_(j-1)

This is a flow shop of two machines with set-up times. A state is (items placed, time crossed,
compute finished): of two with the same items placed, one that is no earlier in either time is
dropped, and so is any that can't beat the best known result. The states that are left are searched
item by item. The result is exact, as a state that is later in both times never leads to an earlier
end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.passes.planner.costs import GROUPED, PACKED
from autoshard.passes.planner.problem import Item, Problem

EFFORT = 200_000  # steps of the search: some 0.2 s


@dataclass(frozen=True)
class Programme:
    """Result of `best_buckets`.

    ends: for each bucket, the number of items in it and in all buckets before.
    time_us: time at which compute ends, in microseconds from the graph's start.
    is_exact: whether it is sure that no other buckets take less.
    """

    ends: tuple[int, ...]
    time_us: float
    is_exact: bool


def best_buckets(problem: Problem, items: Sequence[Item], layout: str) -> Programme:
    """Find the buckets of neighboring `items`, all in `layout`, with which compute ends earliest.

    Memory is no limit, and reduces are left out. Where an exact search takes more than `EFFORT`
    steps, another one follows, and `is_exact` is False: it tries bucket lengths of 1, 2, 3, 4, 6,
    8, 12, ... alone, and goes on from the best few states an item, as many as `EFFORT` steps allow.

    items: gathers of one bucket class, in order of first use; at least one.
    layout: "packed" or "grouped".
    """
    table = _Table(problem, items, layout)
    known = min(table.capped(), key=lambda found: found.time_us)
    every_length = list(range(1, len(items) + 1))
    found = table.search(every_length, known, effort=EFFORT)
    if found is None:
        lengths = _few(len(items))
        width = max(1, EFFORT // (len(items) * len(lengths)))
        found = table.search(lengths, known, width=width)
        assert found is not None
        return Programme(found.ends, found.time_us, is_exact=False)
    return found


class _Table:
    """Prefix sums over items, from which the time of any buckets of neighbors is computed.

    items: gathers of one bucket class, in order of first use; at least one. Their class has one
        link, else ValueError is raised.
    bytes, crossing, sharing, copying: sums over the items before each one, and over all: bytes,
        microseconds on the link, of copies in a packed bucket of several, and of copies in others.
    compute: microseconds of the ops before each item's first use, and of all ops.
    """

    def __init__(self, problem: Problem, items: Sequence[Item], layout: str) -> None:
        """Add up bytes, link times, copies and compute over `items`, at the costs of `problem`.

        items: gathers of one bucket class, in order of first use; at least one.
        layout: "packed" or "grouped", for all buckets.
        Raises ValueError if the class has more than one link.
        """
        costs, bucket_class = problem.costs, items[0].bucket_class
        (link,) = costs.links[bucket_class]
        self.count = len(items)
        self.alpha = link.alpha_us
        self.member = link.member_us if layout == GROUPED else 0.0
        self.is_packed = layout == PACKED
        self.call = costs.call_us
        self.bytes = [0]
        for item in items:
            self.bytes.append(self.bytes[-1] + item.num_bytes)
        self.crossing = [num_bytes * link.us_per_byte for num_bytes in self.bytes]
        moved = itertools.accumulate((item.moved_bytes for item in items), initial=0)
        self.sharing = [
            costs.copy_in_us("gather", bucket_class, moved_bytes) + costs.copy_out_us(num_bytes)
            for moved_bytes, num_bytes in zip(moved, self.bytes, strict=True)
        ]
        self.copying = [0.0]  # what is copied even where no memory is shared
        for item in items:
            copied = costs.copy_in_us("gather", bucket_class, item.moved_bytes * item.is_copied_in)
            copied += costs.copy_out_us(item.num_bytes * item.is_copied_out)
            self.copying.append(self.copying[-1] + copied)
        uses = [item.used for item in items] + [problem.num_ops]
        self.compute = [problem.compute_us[position] for position in uses]

    def step(self, crossed: float, finished: float, i: int, j: int) -> tuple[float, float]:
        """Return (crossed, finished) as they are after a bucket of items i to j - 1 has been added.

        Compute then is done with all ops before item j's first use, or with all ops.

        crossed: when the link is done with all buckets before.
        finished: when compute is done with all ops before item i's first use.
        """
        crossed += self.alpha + self.crossing[j] - self.crossing[i] + (j - i - 1) * self.member
        copies = self.sharing if self.is_packed and j - i > 1 else self.copying
        busy = self.call + copies[j] - copies[i] + self.compute[j] - self.compute[i]
        return crossed, max(finished, crossed) + busy

    def time_us(self, ends: Sequence[int]) -> float:
        """Time at which compute ends, with buckets that end at `ends`."""
        crossed, finished, i = 0.0, self.compute[0], 0
        for j in ends:
            crossed, finished = self.step(crossed, finished, i, j)
            i = j
        return finished

    def capped(self) -> list[Programme]:
        """List buckets filled up to a cap, for caps that double from one byte until one holds all.

        An item that is larger than the cap is a bucket by itself. There is one entry for each cap,
        with `is_exact` False.
        """
        found, cap = [], 1
        while cap < max(2, 2 * self.bytes[-1]):
            ends = []
            start = 0
            for j in range(1, self.count + 1):
                if j == self.count or self.bytes[j + 1] - self.bytes[start] > cap:
                    ends.append(j)
                    start = j
            found.append(Programme(tuple(ends), self.time_us(ends), is_exact=False))
            cap *= 2
        return found

    def search(
        self,
        lengths: list[int],
        known: Programme,
        *,
        effort: int | None = None,
        width: int | None = None,
    ) -> Programme | None:
        """Return the best buckets whose lengths are in `lengths`, or `known` if none is faster.

        `is_exact` of the result is True, whatever `lengths` and `width` leave out. Returns None if
        the search takes more than `effort` steps.

        lengths: numbers of items that a bucket may have, ascending.
        known: buckets to beat.
        width: so many of the states with the same items placed are continued; None for all. They
            are those with the least time that their remaining compute, or link, allows.
        """
        steps = 0
        best = known
        end = self.compute[-1]
        # By items placed: (crossed, finished, where it came from)
        states: list[list[_State]] = [[] for _ in range(self.count + 1)]
        states[0] = [(0.0, self.compute[0], None, 0)]
        for i in range(self.count):
            states[i] = _undominated(states[i])
            if width is not None:
                states[i] = sorted(states[i], key=lambda state: self._least_us(state, i))[:width]
            for state in states[i]:
                crossed, finished = state[:2]
                for length in lengths:
                    j = i + length
                    if j > self.count:
                        break
                    steps += 1
                    after = self.step(crossed, finished, i, j)
                    # With this bucket and nothing in the way of the rest. A longer one is no
                    # faster, but a bucket of one is not copied.
                    if after[1] + end - self.compute[j] >= best.time_us:
                        if length > 1 or not self.is_packed:
                            break
                        continue
                    if j == self.count:
                        best = Programme(_path(state, j), after[1], is_exact=True)
                    else:
                        states[j].append((*after, state, j))
            if effort is not None and steps > effort:
                return None
        return Programme(best.ends, best.time_us, is_exact=True)

    def _least_us(self, state: _State, i: int) -> float:
        """Least time at which `state`, with items before `i` placed, can end."""
        crossed, finished = state[:2]
        rest_us = self.compute[-1] - self.compute[i]
        return max(finished + rest_us, crossed + self.crossing[-1] - self.crossing[i])


_State = tuple[float, float, "_State | None", int]
"""Time crossed, compute finished, the state before, items placed."""


def _undominated(states: list[_State]) -> list[_State]:
    """Return `states` without those for which another one is no later in both times.

    They are sorted by time crossed. Of equal states, one is left.
    """
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept


def _path(state: _State | None, end: int) -> tuple[int, ...]:
    """List the ends of the buckets that have led to `state`, and `end`."""
    ends = [end]
    while state is not None and state[3]:
        ends.append(state[3])
        state = state[2]
    return tuple(reversed(ends))


def _few(count: int) -> list[int]:
    """Lengths 1, 2, 3, 4, 6, 8, 12, ... up to `count`, and `count` itself."""
    lengths, step = [1], 2
    while step <= count:
        lengths += [step, step * 3 // 2]
        step *= 2
    return sorted({length for length in lengths if length <= count} | {count})
