"""What a planner decides about: compute in order, what it reads whole, what it makes to be reduced.

    op            0    1    2    3    4    5
    gathers       a--------|    b---------|       item a is read at 0 for the first time,
                        c----|                    and is free from 2 on
    reduces                 d|            e|      item d is made by op 3: ready at 4

Positions are those of plans: an event at position p stands before op p.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from autoshard.passes.planner.costs import Costs


@dataclass(frozen=True)
class Item:
    """One parameter to gather, or one gradient to reduce.

    carrier:   items of one bucket have the same: kind, group, dtype, place.
    num_bytes: of the whole, on the wire.
    ready:     the first position at which it may be launched.
    used:      the first position at which what comes of it is read, or which it must not pass;
        `num_ops` if there is none.
    freed:     the first position at which the whole is needed no more.
    stretch:   between which two barriers it must be under way, counted; one bucket is in one.
    is_copied_in:  whether a gather copies its shard even if that is sent alone: to another dtype,
        or because it is made in the graph.
    is_copied_out: whether its whole is copied even if it arrives alone: shards along other dims
        than the first do not lie as they are read.
    """

    name: str
    unit: str
    carrier: str
    num_bytes: int
    ready: int
    used: int
    freed: int
    stretch: int = 0
    is_copied_in: bool = False
    is_copied_out: bool = False


@dataclass(frozen=True)
class Problem:
    """One graph, as its planner sees it.

    op_us:      time of each compute op, in program order.
    live_bytes: memory in use at each op, whatever is gathered or waits to be reduced apart.
    gathers:    in order of first use.
    reduces:    in order of readiness.
    """

    graph: str
    op_us: tuple[float, ...]
    live_bytes: tuple[int, ...]
    gathers: tuple[Item, ...]
    reduces: tuple[Item, ...]
    costs: Costs

    @cached_property
    def num_ops(self) -> int:
        return len(self.op_us)

    @cached_property
    def compute_us(self) -> tuple[float, ...]:
        """Of all ops before each position, the end included."""
        return tuple(itertools.accumulate(self.op_us, initial=0.0))

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """Of all gradients that are there at each position, or have been."""
        made = [0] * (self.num_ops + 1)
        for item in self.reduces:
            made[item.ready] += item.num_bytes
        return tuple(itertools.accumulate(made))

    @cached_property
    def made_shard_bytes(self) -> tuple[int, ...]:
        """The same once they are reduced."""
        made = [0] * (self.num_ops + 1)
        for item in self.reduces:
            made[item.ready] += -(-item.num_bytes // self.costs.shards[item.carrier])
        return tuple(itertools.accumulate(made))

    @cached_property
    def freed_bytes(self) -> tuple[int, ...]:
        """Of all wholes that are needed no more at each position."""
        freed = [0] * (self.num_ops + 1)
        for item in self.gathers:
            if item.freed <= self.num_ops:
                freed[item.freed] += item.num_bytes
        return tuple(itertools.accumulate(freed))

    @cached_property
    def _peaks(self) -> list[list[int]]:
        """Row k: the most that there is over 2 ** k ops from each on, with all gradients made until
        then, and without wholes; those that are freed taken away."""
        live = (*self.live_bytes, 0)
        made = (*self.made_bytes[1:], self.made_bytes[-1])
        rows = [[a + b - c for a, b, c in zip(live, made, self.freed_bytes, strict=True)]]
        while 2 * (step := 1 << (len(rows) - 1)) <= len(rows[0]):
            last = rows[-1]
            rows.append([max(a, b) for a, b in zip(last, last[step:], strict=False)])
        return rows

    def peak_bytes(self, begin: int, end: int) -> int:
        """The most that lives at ops `begin` to `end`, the latter not included and behind the
        former, with gradients made since `begin`, less wholes that are freed by then: what is to be
        added to all that was ever gathered."""
        row = (end - begin).bit_length() - 1
        peaks = self._peaks[row]
        return max(peaks[begin], peaks[end - (1 << row)]) - self.made_bytes[begin]

    def peak_op(self, begin: int, end: int) -> int:
        """The first of these ops at which that is."""
        return max(range(begin, end), key=self._peaks[0].__getitem__)
