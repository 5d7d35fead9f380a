"""Search for what forward hands to backward, by what choices are forecast to do."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from torch import fx

from autoshard.handed import KINDS, Handed, Parts, Run, beside
from autoshard.passes.ir.match import is_compute
from autoshard.passes.planner.costs import HostLink
from autoshard.passes.planner.keep import with_kept, worth_keeping
from autoshard.passes.planner.per_unit import unit_buckets
from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.save import Need, allotted, freed_bytes
from autoshard.passes.plans.forecast import Forecast
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.saved import SavedValues

WORTH = 0.995  # a choice is worth trying if it takes no more than this share of a known time
PIECES = (1, 2, 4, 8, 16)  # of a block, in turn
ENOUGH = 2  # pieces, beyond which more are tried only as long as they help
TRIES = 20  # forecasts, at most, for blocks in as many pieces


class Chosen(NamedTuple):
    """Choice for each block, of those that `values` has, and how it is forecast to run."""

    values: SavedValues
    taken: tuple[int, ...]
    run: Run

    @property
    def handed(self) -> Handed:
        """Decision to do so."""
        return Handed.of(self.values, self.taken)


class Kept(NamedTuple):
    """Decision that keeps parameters, and how it is forecast to run."""

    handed: Handed
    run: Run


def limits_of(budget_bytes: float) -> dict[str, float]:
    """Return the budget as a limit for both kinds of parts."""
    return dict.fromkeys(KINDS, float(budget_bytes))


class Search:
    """Search for choices of blocks by what they are forecast to do.

    counts: how often a byte that is given up counts, as other frames give up as much.
    candidates: names of parameters that may be kept.
    """

    def __init__(self, parts: Parts, prices: Prices) -> None:
        """Begin with `parts` that were made without a decision."""
        self.parts, self.prices = parts, prices
        host = prices.topology.host_link
        self.hosts = list(dict.fromkeys((host, None)))
        self.forecast = Forecast(
            parts.joint,
            parts.forward.priced,
            parts.backward.priced,
            host,
            parts.num_bytes,
            prices.beside,
        )
        self.counts = 1 + prices.beside
        self.candidates = parts.forward.priced.candidates
        gathers, _ = unit_buckets(parts.backward.priced.problem)
        self.room = max((bucket.num_bytes for bucket in gathers), default=0)
        self._values: dict[tuple[int, bool], SavedValues] = {}
        self._runs: dict[float, Run] = {}
        self._best: dict[tuple[float, ...], list[Chosen]] = {}

    @functools.cached_property
    def _whole(self) -> SavedValues:
        """Blocks as a whole: of no use, and not made, where a step fits and gathers are hidden."""
        return SavedValues(self.parts.joint, self.parts.saved, self.prices, self.parts.table)

    def without(self, budget_bytes: float) -> Run:
        """Simulate the parts that were made without a decision."""
        if budget_bytes not in self._runs:
            self._runs[budget_bytes] = Run.of(self.parts.problems, budget_bytes)
        return self._runs[budget_bytes]

    def keeping(
        self, decided: Handed, problems: tuple[Problem, Problem], budget_bytes: float
    ) -> Kept:
        """Add to a decision, of these problems, the parameters that are best kept.

        Those of a unit are kept together: what is computed again may need more of them than
        backward does itself, which no forecast says.
        """
        forward, _ = problems
        taken = {*worth_keeping(*problems, self.candidates, budget_bytes, self.prices.beside)}
        others = sum(item.num_bytes for item in forward.gathers if item.name in taken)
        others = round(self.prices.beside * others)  # that other frames keep
        after, before = with_kept(*problems, taken)
        run = Run.of((beside(after, others), beside(before, others)), budget_bytes)
        units = {item.unit for item in forward.gathers if item.name in taken}
        of_units = (item.name for item in forward.gathers if item.unit in units)
        kept = tuple(name for name in of_units if name in self.candidates)
        return Kept(dataclasses.replace(decided, params=kept), run)

    def without_gathers(self, problems: tuple[Problem, Problem]) -> tuple[int, float]:
        """Bytes that backward gathers and need not, and the time of a step that keeps them all."""
        again = [item for item in problems[1].gathers if item.name in self.candidates]
        run = Run.of(with_kept(*problems, self.candidates), math.inf)
        return sum(item.num_bytes for item in again), run.time_us

    def cost(self, budget_bytes: float) -> tuple[float, float]:
        """Forecast how far a step is beyond a budget, and its microseconds; see `Run.cost`."""
        limits = limits_of(budget_bytes)
        without = self.without(budget_bytes)
        return (self.best(limits)[0].run if without.over(limits) else without).cost(limits)

    def best(self, limits: Mapping[str, float]) -> list[Chosen]:
        """List choices, the best first, with blocks in as many pieces as it takes for the limits.

        A block is computed again as a whole; if that takes too much memory at a time, blocks are
        cut into pieces, and more of them.
        """
        key = tuple(limits.values())
        if key not in self._best:
            self._best[key] = self._list(limits)
        return self._best[key]

    def _list(self, limits: Mapping[str, float]) -> list[Chosen]:
        found: list[Chosen] = []
        for pieces in PIECES:
            was = found[:1]
            found += [self._search(self._values_of(pieces, host), limits) for host in self.hosts]
            found.sort(key=lambda chosen: chosen.run.cost(limits))
            if not found[0].run.over(limits) or (pieces > ENOUGH and found[:1] == was):
                break
        return found

    def _values_of(self, pieces: int, host: HostLink | None) -> SavedValues:
        key = pieces, host is not None
        if key not in self._values:
            if host is not None:
                found = self._values_of(pieces, None).near(host)
            else:
                found = self._whole.in_pieces(pieces)
            self._values[key] = found
        return self._values[key]

    def _search(self, values: SavedValues, limits: Mapping[str, float]) -> Chosen:
        """Search for choices of blocks that keep to the limits, and are fastest.

        Bytes that are missing are asked of blocks, as forecasts show it, until they fit; then room
        for gathers, as long as that saves time. Returns the best that was tried.
        """
        nothing = (0,) * len(values.blocks)
        first = first_of(self.parts, values)
        wanted: dict[int, float] = {}  # bytes to give up, by the number of the first blocks that do
        best = now = Chosen(values, nothing, self.without(min(limits.values())))
        for _ in range(TRIES):
            for kind, num_bytes in now.run.over(limits).items():
                blocks = asked(kind, now.run.peaks[kind][0], first[kind], values)
                wanted[blocks] = num_bytes / self.counts + freed_bytes(
                    values.curves, now.taken[:blocks]
                )
            if not now.run.over(limits):
                freed = {
                    blocks: freed_bytes(values.curves, now.taken[:blocks]) for blocks in wanted
                }
                room = self.room / self.counts
                wanted = {blocks: num_bytes + room for blocks, num_bytes in freed.items()}
            taken = allotted(values.curves, [Need(*each) for each in wanted.items()])
            if taken == now.taken:
                break
            problems = self.forecast.problems(values, taken)
            was, now = now, Chosen(values, taken, Run.of(problems, min(limits.values())))
            is_faster = now.run.time_us < WORTH * best.run.time_us
            if now.run.over(limits) or best.run.over(limits) or is_faster:
                best = min(best, now, key=lambda tried: tried.run.cost(limits))
            if not was.run.over(limits) and best is not now:
                break
        return best


def asked(kind: str, position: int, first: Mapping[int, int], values: SavedValues) -> int:
    """Return how many of the first blocks have to give up bytes for a peak.

    At the peak of forward, those that have run; at backward's, those that are to come. Where these
    are none, all may give up.

    first: op at which a block is begun on; see `_first_reads`.
    """
    blocks = len(values.blocks)
    if kind == "forward":
        others = (block for block, at in first.items() if at > position)
    else:
        others = (block for block, at in first.items() if at <= position)
    return min(others, default=blocks) or blocks


def first_of(parts: Parts, values: SavedValues) -> dict[str, dict[int, int]]:
    """Map both kinds of parts to where each block is begun on; see `_first_reads`."""
    graphs = zip(KINDS, (parts.forward.graph, parts.backward.graph), strict=True)
    return {kind: _first_reads(graph, values) for kind, graph in graphs}


def _first_reads(graph: fx.Graph, values: SavedValues) -> dict[int, int]:
    """Map each block to the op at which half of what is computed or saved of it has been begun on.

    Some values are read by blocks that are far away.
    """
    position = {node: at for at, node in enumerate(filter(is_compute, graph.nodes))}
    found: dict[int, list[int]] = {}
    for node, block in values.blocks_of(graph).items():
        at = [position[each] for each in (node, *node.users) if each in position]
        if at:
            found.setdefault(block, []).append(min(at))
    return {block: statistics.median_low(at) for block, at in found.items()}
