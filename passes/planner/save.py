"""Choose values that forward saves for backward, and those that backward computes again.

A block of the model is computed again from what its forward saves and from what stays in memory
anyway. The choice for one price of memory, in nanoseconds a byte, is a minimum cut, as in
AOTAutograd's partitioner, but with the time of ops in it:

    source --inf--> there(v)    if backward reads v
    there(v) --bytes--> again(v)    cut: v is saved
    again(v) --time--> sink     cut: v is computed again, which needs its sources; values of one op
                                have one node
    again(v) --inf--> there(u)  for each source u of v

Cuts for all prices are the corners of a convex curve of bytes and time, which no choice is below.
Blocks are independent of each other, so a step goes along the curves of all of them, where a byte
costs least, until enough is given up. That is best but for the last corner, and a bound for it.

What is saved may lie on the host meanwhile, as far as copies are hidden behind compute: each corner
has another point beside it, with fewer bytes at next to no time, and the curve goes along both.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx as nx

from autoshard.passes.planner.costs import HostLink

_NS = 1000  # of a microsecond: times are whole numbers, so that cuts are exact


@dataclass(frozen=True)
class Value:
    """Value that forward computes, and that backward may need.

    num_bytes: in memory.
    op_us: microseconds of its op.
    sources: numbers, in its block, of the values that the op reads. What is there in backward
        anyway is left out.
    is_read: whether backward reads it.
    is_fixed: whether it can't be computed again; it is saved if it is needed.
    op: number of the first of the values that its op makes, which alone has the op's time; None
        stands for the value's own number.
    can_move: whether it may lie on the host from forward to backward, if it is saved.
    """

    num_bytes: int
    op_us: float
    sources: tuple[int, ...] = ()
    is_read: bool = False
    is_fixed: bool = False
    op: int | None = None
    can_move: bool = False


Block = tuple[Value, ...]
"""Values of a block of the model, in program order."""


@dataclass(frozen=True)
class Choice:
    """Decision on the values of a block: which are saved, and which are computed again.

    saved, again: numbers of those that forward saves, and of those that backward computes again.
    num_bytes: of what is saved, on the device.
    again_us: microseconds of what is computed again.
    moved: of those saved, the ones that lie on the host meanwhile. host_bytes: of them.
    calls_us: microseconds for which compute stands still for their copies' launches and waits.
    """

    saved: frozenset[int]
    again: frozenset[int]
    num_bytes: int
    again_us: float
    moved: frozenset[int] = frozenset()
    host_bytes: int = 0
    calls_us: float = 0.0

    @property
    def time_us(self) -> float:
        """Microseconds that the choice costs."""
        return self.again_us + self.calls_us


@dataclass(frozen=True)
class Need:
    """Bytes that the first `blocks` blocks have to give up together, at one moment of a step."""

    blocks: int
    num_bytes: float


def choices(block: Block) -> tuple[Choice, ...]:
    """List the best choices for a block: from the least time to the fewest bytes saved.

    From one to the next, a byte less costs more each time.
    """
    times = [round(value.op_us * _NS) for value in block]
    dear = 1 + sum(value.num_bytes for value in block)
    first = _cut(block, times, dear, 1)
    last = _cut(block, times, 1, 1 + sum(times))
    return (first, *_between(block, times, first, last))


def with_host(
    block: Block, curve: Sequence[Choice], link: HostLink, hidden_us: float
) -> tuple[Choice, ...]:
    """Add to a block's curve the choices that have a part of what is saved on the host.

    Of each corner, the largest values move whose copies take up to `hidden_us` together: so long
    they are hidden, and only their calls cost time. Values stay whose copy is mostly start-up.
    Returns the corners of all these choices' curve.

    curve: the block's `choices`.
    """
    more = (_moved(block, choice, link, hidden_us) for choice in curve)
    return _corners([*curve, *more])


def allotted(curves: Sequence[Sequence[Choice]], needs: Sequence[Need]) -> tuple[int, ...]:
    """Choose a corner of each block's curve, so that `needs` are met in the least time.

    The result has the number of a choice for each block. Of blocks whose bytes cost the same, the
    first gives up first: what it saves is in memory for longest. If `needs` can't be met, as much
    is given up as there is.

    curves: of each block, its `choices`.
    """
    taken = [0] * len(curves)
    for need in sorted(needs, key=lambda need: need.blocks):
        left = need.num_bytes - freed_bytes(curves, taken[: need.blocks])
        steps = [
            (_slope(*curves[number][at : at + 2]), number)
            for number, at in enumerate(taken[: need.blocks])
            if at + 1 < len(curves[number])
        ]
        heapq.heapify(steps)
        while steps and left > 0:
            _, number = heapq.heappop(steps)
            now, then, *more = curves[number][taken[number] :]
            taken[number] += 1
            left -= now.num_bytes - then.num_bytes
            if more:
                heapq.heappush(steps, (_slope(then, more[0]), number))
    while (spare := _spare(curves, taken, needs)) is not None:
        taken[spare] -= 1
    return tuple(taken)


def at_price(curves: Sequence[Sequence[Choice]], share: float) -> tuple[int, ...]:
    """Choose corners at one price of memory for all blocks, so that blocks with one curve do alike.

    It is the price at which the bytes given up are nearest to `share` of all that can be.
    """
    slopes = [[_slope(*pair) for pair in itertools.pairwise(curve)] for curve in curves]

    def taken(price: float) -> tuple[int, ...]:
        return tuple(bisect.bisect_right(each, price) for each in slopes)

    prices = [-1.0, *sorted({slope for each in slopes for slope in each})]
    wanted = share * freed_bytes(curves, taken(prices[-1]))
    return min(map(taken, prices), key=lambda each: abs(freed_bytes(curves, each) - wanted))


def freed_bytes(curves: Sequence[Sequence[Choice]], taken: Sequence[int]) -> int:
    """Bytes that the first blocks give up by the choices `taken`, one for each of them."""
    pairs = zip(curves, taken, strict=False)
    return sum(curve[0].num_bytes - curve[number].num_bytes for curve, number in pairs)


def least_us(curves: Sequence[Sequence[Choice]], needs: Sequence[Need]) -> float:
    """Microseconds that no choice beats which meets `needs`; infinite if none does.

    It is that of the need that costs most alone, if blocks could go a part of the way from one
    corner of their curve to the next.
    """
    return max((_alone_us(curves[: need.blocks], need.num_bytes) for need in needs), default=0.0)


def _alone_us(curves: Sequence[Sequence[Choice]], num_bytes: float) -> float:
    """Least microseconds of giving up `num_bytes`, corners being no obstacle."""
    steps = [(curve[at], curve[at + 1]) for curve in curves for at in range(len(curve) - 1)]
    steps.sort(key=lambda step: _slope(*step))
    time_us, left = 0.0, num_bytes
    for now, then in steps:
        if left <= 0:
            break
        freed = now.num_bytes - then.num_bytes
        time_us += (then.time_us - now.time_us) * min(1.0, left / freed)
        left -= freed
    return time_us if left <= 0 else math.inf


def _spare(
    curves: Sequence[Sequence[Choice]], taken: Sequence[int], needs: Sequence[Need]
) -> int | None:
    """Return the block whose last step can be taken back for the most time; None if none can."""
    room = [freed_bytes(curves, taken[: need.blocks]) - need.num_bytes for need in needs]
    found, most = None, 0.0
    for number, at in enumerate(taken):
        if at == 0:
            continue
        before, now = curves[number][at - 1], curves[number][at]
        lost = before.num_bytes - now.num_bytes
        fits = all(
            lost <= left for need, left in zip(needs, room, strict=True) if number < need.blocks
        )
        if fits and now.time_us - before.time_us > most:
            found, most = number, now.time_us - before.time_us
    return found


def _slope(now: Choice, then: Choice) -> float:
    """Nanoseconds that each byte costs from one corner to the next."""
    return (then.time_us - now.time_us) / (now.num_bytes - then.num_bytes) * _NS


def _moved(block: Block, choice: Choice, link: HostLink, hidden_us: float) -> Choice:
    """Return `choice` with as much on the host as copies hide in `hidden_us`: largest first."""
    can = (number for number in choice.saved if block[number].can_move)
    moved, left = [], hidden_us
    for number in sorted(can, key=lambda number: (-block[number].num_bytes, number)):
        time_us = link.time_us(block[number].num_bytes)
        if 2 * link.alpha_us <= time_us <= left:
            moved.append(number)
            left -= time_us
    host_bytes = sum(block[number].num_bytes for number in moved)
    return replace(
        choice,
        num_bytes=choice.num_bytes - host_bytes,
        moved=frozenset(moved),
        host_bytes=host_bytes,
        calls_us=2 * len(moved) * link.call_us,  # there and back
    )


def _corners(every: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return those of `every` that are corners of the convex curve below them all.

    From the least time on, each has fewer bytes than the one before, and a byte costs more.
    """
    found: list[Choice] = []
    for each in sorted(every, key=lambda choice: (choice.time_us, choice.num_bytes)):
        if found and each.num_bytes >= found[-1].num_bytes:
            continue
        while len(found) > 1 and _slope(found[-2], found[-1]) >= _slope(found[-1], each):
            found.pop()
        found.append(each)
    return tuple(found)


def _between(block: Block, times: Sequence[int], first: Choice, last: Choice) -> list[Choice]:
    """List the corners after `first`, up to `last`, in order."""
    fewer = first.num_bytes - last.num_bytes
    if fewer <= 0:
        return []
    more = _ns(times, last) - _ns(times, first)
    middle = _cut(block, times, fewer, more)

    def cost(choice: Choice) -> int:
        return fewer * _ns(times, choice) + more * choice.num_bytes

    if cost(middle) >= cost(first) or not last.num_bytes < middle.num_bytes < first.num_bytes:
        return [last]
    before = _between(block, times, first, middle)
    return [*before, *_between(block, times, middle, last)]


def _ns(times: Sequence[int], choice: Choice) -> int:
    return sum(times[number] for number in choice.again)


def _cut(block: Block, times: Sequence[int], of_time: int, of_bytes: int) -> Choice:
    """Find the choice of the least `of_time` * nanoseconds + `of_bytes` * bytes."""
    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    ops = [
        ("again", number if value.op is None else value.op) for number, value in enumerate(block)
    ]
    cannot = {op for value, op in zip(block, ops, strict=True) if value.is_fixed}
    for number, (value, again) in enumerate(zip(block, ops, strict=True)):
        there = ("there", number)
        if value.is_read:
            graph.add_edge("source", there)  # without a capacity: never cut
        graph.add_edge(there, again, capacity=of_bytes * value.num_bytes)
        for source in value.sources:
            graph.add_edge(again, ("there", source))
        if again in cannot:
            graph.add_edge(again, "sink")
        elif again == ("again", number):
            graph.add_edge(again, "sink", capacity=of_time * times[number])
    _, (needed, _) = nx.minimum_cut(graph, "source", "sink")
    computed = {number for number, op in enumerate(ops) if op in needed}
    saved = {number for number in range(len(block)) if ("there", number) in needed} - computed
    return Choice(
        frozenset(saved),
        frozenset(computed),
        sum(block[number].num_bytes for number in saved),
        sum(block[number].op_us for number in computed),
    )
