"""Graphs of a model of whose blocks some are checkpointed, from those with all and with none.

    none     head | 0  | 1  | 2  | 3  tail
    full     head | 0' | 1' | 2' | 3' tail
    layers:2 head | 0' | 1  | 2' | 3  tail

Where a block without checkpoints follows one that has them, its input is kept, as in an eager run;
torch.compile computes the last product of that block again.

A block is from the first use of a parameter of its own to that of the next one's. What blocks keep
from forward to backward is summed up from block to block, each as it is in its own graph.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.repeat import begin_of
from autoshard.tools.plan.graphs import Graph
from autoshard.tools.plan.ways import VALUES


def checkpointed(way: str, graph: Graph) -> frozenset[str]:
    """Names of the blocks of `graph` that have checkpoints by `way`, "layers:2" or "first:10".

    Blocks are units that are numbered under one name. Of each such list, every second one has them,
    from the first on, or the first ten.
    Raises ValueError for another way, or if there are no such units.
    """
    kind, number = read_way(way)
    blocks = _blocks(graph.problem)
    if not blocks:
        raise ValueError(f"{way}: the model has no list of units")
    at = {name: int(name.rpartition(".")[2]) for name in blocks}
    if kind == "first":
        return frozenset(name for name in blocks if at[name] < number)
    return frozenset(name for name in blocks if at[name] % number == 0)


def first_blocks(share: float, graph: Graph) -> frozenset[str]:
    """Names of the first blocks of `graph`: `share` of them all."""
    blocks = _blocks(graph.problem)
    return frozenset(blocks[: round(share * len(blocks))])


def read_way(way: str) -> tuple[str, int]:
    """Read ("layers", 2) from "layers:2", ("first", 10) or ("values", 35).

    Raises ValueError for anything else.
    """
    kind, _, text = way.partition(":")
    number = int(text) if text.isdecimal() else 0
    if kind not in ("layers", "first", VALUES) or number < 1 or (kind == VALUES and number > 100):
        raise ValueError(
            f"{way!r} is no way of checkpointing; expected one such as layers:2, or values:35"
        )
    return kind, number


def spliced(none: Graph, full: Graph, chosen: frozenset[str]) -> Graph:
    """Return the graph whose blocks called `chosen` are those of `full`, and the others of `none`.

    Raises ValueError if the two have not the same blocks.
    """
    blocks = _blocks(none.problem)
    if blocks != _blocks(full.problem):
        raise ValueError("blocks with and without checkpoints come in another order")
    inner = [name in chosen for name in blocks]
    picks = [*inner[:1], *inner]  # the head is as the first block, as the tail is as the last
    cuts = (_cut(none, blocks), _cut(full, blocks))
    begins = [0, *itertools.accumulate(cuts[pick].length(n) for n, pick in enumerate(picks))]
    numbers = (none.problem.op_us, [us + len(none.kernels) for us in full.problem.op_us])
    op_us = [us for n, pick in enumerate(picks) for us in numbers[pick][cuts[pick].span(n)]]
    items = _Items(cuts, picks, begins, blocks, chosen)
    problem = dataclasses.replace(
        none.problem,
        op_us=tuple(op_us),
        live_bytes=_memory(cuts, picks, (none.problem.live_bytes, full.problem.live_bytes)),
        gathers=items.moved(none.problem.gathers, full.problem.gathers, "used"),
        reduces=items.moved(none.problem.reduces, full.problem.reduces, "ready"),
    )
    activations = _memory(cuts, picks, (none.activations, full.activations))
    return Graph(problem, activations, (*none.kernels, *full.kernels))


def _blocks(problem: Problem) -> list[str]:
    """List the names of numbered units, in program order; those in another one are left out."""
    units = {item.unit for item in (*problem.gathers, *problem.reduces)}
    found = {name for name in units if re.search(r"\.\d+$", name)}
    outer = {name for name in found if not any(name.startswith(f"{each}.") for each in found)}
    return sorted(outer, key=lambda name: begin_of(problem, name))


@dataclass(frozen=True)
class _Cut:
    """Places of a graph: where its head begins, each block, and where it ends."""

    places: tuple[int, ...]

    def length(self, number: int) -> int:
        return self.places[number + 1] - self.places[number]

    def span(self, number: int) -> slice:
        return slice(self.places[number], self.places[number + 1])


def _cut(graph: Graph, blocks: Sequence[str]) -> _Cut:
    begins = (begin_of(graph.problem, name) for name in blocks)
    return _Cut((0, *begins, graph.problem.num_ops))


def _memory(
    cuts: Sequence[_Cut], picks: Sequence[bool], lives: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Join bytes in memory: each block's grow or shrink from where those before it ended.

    What backward frees was kept by forward, so that it begins with the less, the less it will free.
    """

    def change(pick: bool, number: int) -> int:
        live, places = lives[pick], cuts[pick].places
        return live[min(places[number + 1], len(live) - 1)] - live[places[number]]

    is_freed = lives[0][0] > lives[0][-1]
    now = lives[0][0]
    if is_freed:
        now += sum(change(False, n) - change(True, n) for n, pick in enumerate(picks) if pick)
    found: list[int] = []
    for number, pick in enumerate(picks):
        span = lives[pick][cuts[pick].span(number)]
        found += [each - span[0] + now for each in span]
        now += change(pick, number)
    return tuple(found)


@dataclass(frozen=True)
class _Items:
    """Items of both graphs, to be moved to where their ops are in the joined one.

    picks: of the head and of each block, whether it is checkpointed. begins: in the joined graph.
    Items of no block are in the head or the tail, as far as this goes.
    """

    cuts: Sequence[_Cut]
    picks: Sequence[bool]
    begins: Sequence[int]
    blocks: Sequence[str]
    chosen: frozenset[str]

    def moved(self, none: Iterable[Item], full: Iterable[Item], order: str) -> tuple[Item, ...]:
        """Take each item from the graph that its block is from; sorted by its field `order`."""
        found = [
            dataclasses.replace(
                item,
                ready=self._place(item.ready, pick),
                used=self._place(item.used, pick),
                freed=self._place(item.freed, pick),
            )
            for pick, items in ((False, none), (True, full))
            for item in items
            if self._is_from(item, pick, order) == pick
        ]
        return tuple(sorted(found, key=lambda item: int(getattr(item, order))))

    def _is_from(self, item: Item, pick: bool, order: str) -> bool:
        """Tell from which graph an item is taken: that of its block, or of where it is."""
        for name in self.blocks:
            if item.unit == name or item.unit.startswith(f"{name}."):
                return name in self.chosen
        place = min(getattr(item, order), self.cuts[pick].places[-1] - 1)
        is_behind = place >= self.cuts[pick].places[-2]
        return self.picks[-1 if is_behind else 0]

    def _place(self, place: int, pick: bool) -> int:
        """Return where `place` of one graph is in the joined one."""
        places = self.cuts[pick].places
        if place >= places[-1]:
            return self.begins[-1] + place - places[-1]
        number = bisect.bisect_right(places, place) - 1
        offset = place - places[number]
        if self.picks[number] != pick:
            offset = min(offset, self.begins[number + 1] - self.begins[number])
        return self.begins[number] + offset
