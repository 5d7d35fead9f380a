"""Planner's input for one graph: compute in order, parameters that it reads, gradients it makes.

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

import numpy as np

from autoshard.passes.planner.costs import Costs


@dataclass(frozen=True)
class Item:
    """Parameter to gather, or gradient to reduce.

    bucket_class: kind, group, dtype and place, the same for all items of a bucket.
    num_bytes: of the unsharded tensor, on the wire.
    ready:     the first position at which it may be launched.
    used:      the last position at which it may be waited for: its result is first read there, or a
        barrier stands there; `num_ops` if neither comes.
    freed:     the first position at which the unsharded parameter is needed no more; `num_ops + 1`
        if it outlives the graph. For a gradient, the same as `used`.
    segment:   number of barriers before those positions; a bucket is in one segment.
    is_copied_in:  whether a shard, or a gradient, is copied before it is sent however members lie:
        to another dtype, or because the graph has made the shard.
    is_copied_out: whether a gather copies its unsharded parameter even if it is the only member:
        shards along another dim than the first do not lie as they are read.
    source_bytes:  of the unsharded tensor in the dtype that it is copied from before it is sent;
        None if that is the one on the wire.
    """

    name: str
    unit: str
    bucket_class: str
    num_bytes: int
    ready: int
    used: int
    freed: int
    segment: int = 0
    is_copied_in: bool = False
    is_copied_out: bool = False
    source_bytes: int | None = None

    @property
    def moved_bytes(self) -> int:
        """Bytes that are read and written where the whole tensor is copied before it is sent."""
        return self.num_bytes + (self.num_bytes if self.source_bytes is None else self.source_bytes)


@dataclass(frozen=True)
class Problem:
    """Graph as its planner sees it.

    graph:      "forward", "backward" or "inference".
    op_us:      time of each compute op, in program order.
    live_bytes: memory in use at each op, without gathered parameters and unreduced gradients.
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
        """Microseconds of all ops before each position, 0 to `num_ops`."""
        return tuple(itertools.accumulate(self.op_us, initial=0.0))

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """Bytes of all unsharded gradients made before each position, 0 to `num_ops`.

        Those that have been reduced since then count, too.
        """
        made = [0] * (self.num_ops + 1)
        for item in self.reduces:
            made[item.ready] += item.num_bytes
        return tuple(itertools.accumulate(made))

    @cached_property
    def made_shard_bytes(self) -> tuple[int, ...]:
        """Bytes of one rank's shards of all gradients made before each position, 0 to `num_ops`.

        Each shard is rounded up.
        """
        made = [0] * (self.num_ops + 1)
        for item in self.reduces:
            made[item.ready] += -(-item.num_bytes // self.costs.shards[item.bucket_class])
        return tuple(itertools.accumulate(made))

    @cached_property
    def freed_bytes(self) -> tuple[int, ...]:
        """Bytes of all unsharded parameters no longer needed, at positions 0 to `num_ops`."""
        freed = [0] * (self.num_ops + 1)
        for item in self.gathers:
            if item.freed <= self.num_ops:
                freed[item.freed] += item.num_bytes
        return tuple(itertools.accumulate(freed))

    @cached_property
    def _peaks(self) -> list[list[int]]:
        """Table whose row k has the most bytes in use at the 2 ** k ops from each op on.

        Counted are values in `live_bytes`, and all gradients made so far. Gathered parameters are
        not, and those that were freed by then are subtracted. The end of the graph counts as an op
        more, and rows get shorter, as no entry reaches past it.
        """
        live = np.array((*self.live_bytes, 0))
        made = np.array((*self.made_bytes[1:], self.made_bytes[-1]))
        rows = [live + made - np.array(self.freed_bytes)]
        while 2 * (step := 1 << (len(rows) - 1)) <= len(rows[0]):
            rows.append(np.maximum(rows[-1][:-step], rows[-1][step:]))
        return [row.tolist() for row in rows]  # whose numbers Python reads faster than an array's

    def peak_bytes(self, begin: int, end: int) -> int:
        """Most bytes in use at ops `begin` to `end` - 1, without gathered parameters.

        Counted at each op are values that live there, and all gradients made since `begin`, reduced
        or not; unsharded parameters that are not needed any more, even since before `begin`, are
        subtracted, so the result may be negative. The caller adds the bytes of all parameters that
        were ever gathered, and of gradients from before `begin`.

        begin, end: `begin` < `end`, at most `num_ops + 1`: the end of the graph counts as an op.
        """
        row = (end - begin).bit_length() - 1
        peaks = self._peaks[row]
        return max(peaks[begin], peaks[end - (1 << row)]) - self.made_bytes[begin]

    def peak_op(self, begin: int, end: int) -> int:
        """First of the ops `begin` to `end` - 1 at which `peak_bytes` is reached."""
        return max(range(begin, end), key=self._peaks[0].__getitem__)
