"""Decide what forward hands to backward: values, on the device or the host, and whole parameters.

    joint graph --> parts, as the partitioner makes them --> peak under the budget?
        no:   values lie on the host meanwhile, as far as copies are hidden, or are computed again,
              until there is room
        then: parameters stay unsharded, where there is room left for them and time to win

What a decision does is forecast from parts that were made without one, and simulated; of the best,
parts are made.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autoshard.passes.ir.match import is_compute
from autoshard.passes.ir.meta import ParamInfo
from autoshard.passes.ir.plan import SavedBlock
from autoshard.passes.planner.bound import lower_bound
from autoshard.passes.planner.costs import HostLink
from autoshard.passes.planner.keep import unit_by_unit, with_kept, worth_keeping
from autoshard.passes.planner.per_unit import unit_buckets
from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.save import Need, allotted, freed_bytes, least_us
from autoshard.passes.planner.schema import read_as
from autoshard.passes.planner.update import HostStates
from autoshard.passes.plans.auto_buckets import PricedGraph
from autoshard.passes.plans.forecast import Forecast
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.saved import SavedValues, saved_names

log = logging.getLogger(__name__)

KINDS = ("forward", "backward")
WORTH = 0.995  # a choice is worth trying if it takes no more than this share of a known time
MADE = 5  # decisions whose parts are made, at most
PIECES = (1, 2, 4, 8, 16)  # of a block, in turn
ENOUGH = 2  # pieces, beyond which more are tried only as long as they help
FOR_KEPT = (0.25, 0.5, 1.0)  # of what backward gathers: given up for parameters that are kept
MADE_FOR_KEPT = 2  # decisions with parameters kept whose parts are made, at most
TRIES = 20  # forecasts, at most, for blocks in as many pieces


@dataclass(frozen=True)
class Handed:
    """Decision on what forward hands to backward.

    params: names of parameters that stay unsharded, however their units reshard.
    saved: nodes of the joint graph that are saved, by the names that `numbered` gives them; None:
        as the partitioner finds it.
    moved: those of them that lie on the host from forward to backward.
    blocks: what that is by block, for people.
    has_host_states: whether optimizer states of what the frame trains live on the host.
    num_bytes: in memory from forward to backward, shards left out; 0 if nothing was decided.
    """

    params: tuple[str, ...] = ()
    saved: tuple[str, ...] | None = None
    blocks: tuple[SavedBlock, ...] = ()
    moved: tuple[str, ...] = ()
    has_host_states: bool = False
    num_bytes: int = 0

    @classmethod
    def of(cls, values: SavedValues, taken: Sequence[int]) -> Handed:
        """Return the decision to save what a choice for each block says, and to keep no parameter.

        taken: as of `SavedValues.names`.
        """
        return cls(
            saved=tuple(sorted(values.names(taken))),
            blocks=values.saved_blocks(taken),
            moved=tuple(sorted(values.moved(taken))),
        )

    def to_json(self) -> str:
        """Return it as text, the same for equal decisions."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Handed:
        """Read what `to_json` has written."""
        return read_as(cls, json.loads(text), "handed")


class Decider:
    """Decider of what a frame's forward hands to backward, of which a compilation asks once.

    It asks what is known, before anything is traced, and if that is nothing, for a decision, where
    it parts the joint graph; it may never come to that. This one decides by itself, where there are
    no other ranks.

    is_first: whether what it decides counts, and its failures are told.
    """

    is_first = True

    def known(self, key: str | None) -> Handed | None:
        """Return a decision that is known before the frame's joint graph is; None if none is.

        key: of frames that are alike in all that a decision depends on; None: of none.
        """
        return None

    def decide(
        self,
        part: Callable[[Handed], Parts],
        prices: Prices,
        states: HostStates | None = None,
        key: str | None = None,
    ) -> Handed:
        """Decide as the function `decide` does; nothing is decided if that fails.

        key: as of `known`.
        """
        try:
            return decide(part, prices, states)
        except Exception as error:  # the compilation may meet it, too, and will tell all ranks
            log.log(
                logging.WARNING if self.is_first else logging.DEBUG,
                "the memory budget is not kept to, as deciding what to save failed: %s",
                error,
            )
            return Handed()


class Part(NamedTuple):
    """Forward or backward of a joint graph, and the same as its planner sees it."""

    graph: fx.Graph
    priced: PricedGraph


class Parts(NamedTuple):
    """Joint graph that was parted, the facts about its parameters, and its parts.

    made: these as they were made, for the compilation to go on with.
    num_bytes: that forward hands to backward, shards left out.
    others: bytes that the model's other frames have saved meanwhile, if they save like this one.
    """

    joint: fx.Graph
    table: Sequence[ParamInfo]
    forward: Part
    backward: Part
    made: tuple[fx.GraphModule, fx.GraphModule]
    num_bytes: int
    others: int

    @property
    def problems(self) -> tuple[Problem, Problem]:
        """Forward and backward as numbers, with what other frames have saved."""
        forward, backward = self.forward.priced.problem, self.backward.priced.problem
        if not self.others:
            return forward, backward
        return _beside(forward, self.others), _beside(backward, self.others)

    @property
    def saved(self) -> frozenset[str]:
        """Names of the nodes that forward hands to backward."""
        return saved_names(self.joint, self.backward.graph)


def _beside(problem: Problem, num_bytes: int) -> Problem:
    """Return `problem` with `num_bytes` more in use at all ops."""
    live = tuple(each + num_bytes for each in problem.live_bytes)
    return dataclasses.replace(problem, live_bytes=live)


class Run(NamedTuple):
    """Simulation of forward and backward under a budget, with one bucket a unit.

    peaks: of each, position, and bytes in use there.
    """

    peaks: dict[str, tuple[int, float]]
    time_us: float

    @classmethod
    def of(cls, problems: tuple[Problem, Problem], budget_bytes: float) -> Run:
        """Simulate forward and backward."""
        peaks: dict[str, tuple[int, float]] = {}
        time_us = 0.0
        for kind, problem in zip(KINDS, problems, strict=True):
            timeline = unit_by_unit(problem, budget_bytes)
            peaks[kind] = timeline.peak.position, timeline.peak_bytes
            time_us += timeline.time_us
        return cls(peaks, time_us)

    @property
    def peak_bytes(self) -> float:
        """Bytes at the higher of both peaks."""
        return max(num_bytes for _, num_bytes in self.peaks.values())

    def over(self, limits: Mapping[str, float]) -> dict[str, float]:
        """Bytes beyond the limits, of the parts that are beyond theirs."""
        over = {kind: num_bytes - limits[kind] for kind, (_, num_bytes) in self.peaks.items()}
        return {kind: num_bytes for kind, num_bytes in over.items() if num_bytes > 0}

    def cost(self, limits: Mapping[str, float]) -> tuple[float, float]:
        """Most bytes beyond the limits, then microseconds: less is better."""
        return max(self.over(limits).values(), default=0.0), self.time_us


class _Chosen(NamedTuple):
    """Choice for each block, of those that `values` has, and how it is forecast to run."""

    values: SavedValues
    taken: tuple[int, ...]
    run: Run

    @property
    def handed(self) -> Handed:
        """Decision to do so."""
        return Handed.of(self.values, self.taken)


def decide(
    part: Callable[[Handed], Parts], prices: Prices, states: HostStates | None = None
) -> Handed:
    """Decide what forward hands to backward, so that a step is fastest within the budget.

    If a step as the partitioner makes it is not within it, as few bytes of what is saved are given
    up as it takes, in the least time: they go to the host, or values are computed again. What that
    does is forecast, then parts are made; by how much they need more or less than forecast is left
    out of the budget of the next choice. If nothing fits, the decision with the lowest peak is
    taken. At last parameters are kept unsharded where there is room left.

    part: makes the parts, given a decision; called up to 1 + `MADE` + `MADE_FOR_KEPT` times.
    prices: with a budget. If other frames save beside this one (`beside`), each byte given up
        counts for theirs, too.
    states: that go to the host if a step is faster so, by forecast: what they leave is for values.
    """
    budget_bytes = prices.budget_bytes
    assert budget_bytes is not None
    parts = part(Handed())
    search = _Search(parts, prices)
    near, far = search.cost(budget_bytes), (math.inf, math.inf)
    if states is not None and search.without(budget_bytes).over(_limits(budget_bytes)):
        over, time_us = search.cost(budget_bytes + states.num_bytes)
        far = over, time_us + states.more_us
    if states is None or near <= far:
        return _within(budget_bytes, part, search)
    log.info("optimizer states live on the host: a step of %.0f us, for %.0f", far[1], near[1])
    handed = _within(budget_bytes + states.num_bytes, part, search)
    return dataclasses.replace(handed, has_host_states=True)


def _within(budget_bytes: int, part: Callable[[Handed], Parts], search: _Search) -> Handed:
    """Decide as `decide` does, wherever states live."""
    budgets, best_parts = _limits(budget_bytes), search.parts
    best, found = Handed(), search.without(budget_bytes)
    limits, seen = dict(budgets), {best}
    for number in range(MADE if found.over(budgets) else 0):
        new = (each for each in search.best(limits) if each.handed not in seen)
        chosen = next(new, None)
        if chosen is None:
            break
        is_faster = chosen.run.time_us < WORTH * found.time_us
        if not (found.over(budgets) or is_faster):
            break
        seen.add(chosen.handed)
        made = part(chosen.handed)
        run = Run.of(made.problems, budget_bytes)
        log.info(
            "parts %d: given up for %.0f us; a step of %.0f us, forecast %.0f; beyond it by %s",
            number,
            sum(choice.time_us for choice, _, _ in chosen.values.chosen(chosen.taken)),
            run.time_us,
            chosen.run.time_us,
            run.over(budgets) or "nothing",
        )
        if run.cost(budgets) < found.cost(budgets):
            best, found, best_parts = chosen.handed, run, made
        for kind in KINDS:  # what parts need beyond their forecast is not there
            limits[kind] = budget_bytes - (run.peaks[kind][1] - chosen.run.peaks[kind][1])
    decided, run = _with_kept(best, best_parts, found, part, search, limits, budget_bytes)
    if log.isEnabledFor(logging.INFO) and decided.saved is not None:
        prices = dataclasses.replace(search.prices, budget_bytes=budget_bytes)
        log.info("a step of %.0f us, at least %.0f", run.time_us, bound_us(search.parts, prices))
    return decided


def _with_kept(
    decided: Handed,
    parts: Parts,
    found: Run,
    part: Callable[[Handed], Parts],
    search: _Search,
    limits: Mapping[str, float],
    budget_bytes: float,
) -> tuple[Handed, Run]:
    """Add to a decision on values the parameters that are kept, or give up more for them.

    Returns it, and how it runs. parts, found: as the decision has them made, and simulated.
    part: as of `decide`. limits: of forecasts, so that parts keep to the budget.
    """
    tries = [search.keeping(decided, parts.problems, budget_bytes)]
    gathers, least_us = search.without_gathers(parts.problems)
    if least_us < WORTH * tries[0].run.time_us:
        for share in FOR_KEPT:
            more = share * gathers * search.counts
            chosen = search.best({kind: limit - more for kind, limit in limits.items()})[0]
            if chosen.run.over(limits):
                break
            problems = search.forecast.problems(chosen.values, chosen.taken)
            tries.append(search.keeping(chosen.handed, problems, budget_bytes))
    budgets = _limits(budget_bytes)
    for handed, forecast in sorted(tries, key=lambda each: each.run.cost(budgets))[:MADE_FOR_KEPT]:
        is_worth_it = decided == Handed() or forecast.time_us < WORTH * found.time_us
        if not (handed.params and is_worth_it):
            break
        made = part(handed)
        run = Run.of(made.problems, budget_bytes)
        log.info(
            "%d parameters kept: a step of %.0f us, forecast %.0f, without %.0f; beyond it by %s",
            len(handed.params),
            run.time_us,
            forecast.time_us,
            found.time_us,
            run.over(budgets) or "nothing",
        )
        if run.cost(budgets) < found.cost(budgets):
            return dataclasses.replace(handed, num_bytes=made.num_bytes), run
    return dataclasses.replace(decided, num_bytes=parts.num_bytes), found


class _Kept(NamedTuple):
    """Decision that keeps parameters, and how it is forecast to run."""

    handed: Handed
    run: Run


def _limits(budget_bytes: float) -> dict[str, float]:
    """Return the budget as a limit for both kinds of parts."""
    return dict.fromkeys(KINDS, float(budget_bytes))


def bound_us(parts: Parts, prices: Prices) -> float:
    """Microseconds of a step that no choice for its blocks beats within the budget.

    They are the bounds of forward and backward, of compute and links, though parameters be kept,
    and that of what blocks have to give up: as much as the step is beyond the budget with one
    bucket a unit. Choices are those of `SavedValues`: no block computes another one's values again,
    and copies are hidden.

    parts: that were made without a decision. prices: with a budget.
    """
    budget_bytes = prices.budget_bytes
    assert budget_bytes is not None
    problems = parts.problems
    run = Run.of(problems, budget_bytes)
    host = prices.topology.host_link
    values = SavedValues(parts.joint, parts.saved, prices, parts.table, host=host)
    first = _first_of(parts, values)
    counts = 1 + prices.beside
    needs = [
        Need(_asked(kind, run.peaks[kind][0], first[kind], values), num_bytes / counts)
        for kind, num_bytes in run.over(dict.fromkeys(KINDS, budget_bytes)).items()
    ]
    kept = with_kept(*problems, parts.forward.priced.candidates)
    made_us = sum(lower_bound(problem).time_us for problem in kept)
    return made_us + least_us(values.curves, needs)


class _Search:
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
        self._best: dict[tuple[float, ...], list[_Chosen]] = {}

    def without(self, budget_bytes: float) -> Run:
        """Simulate the parts that were made without a decision."""
        if budget_bytes not in self._runs:
            self._runs[budget_bytes] = Run.of(self.parts.problems, budget_bytes)
        return self._runs[budget_bytes]

    def keeping(
        self, decided: Handed, problems: tuple[Problem, Problem], budget_bytes: float
    ) -> _Kept:
        """Add to a decision, of these problems, the parameters that are best kept.

        Those of a unit are kept together: what is computed again may need more of them than
        backward does itself, which no forecast says.
        """
        forward, _ = problems
        taken = {*worth_keeping(*problems, self.candidates, budget_bytes, self.prices.beside)}
        run = Run.of(with_kept(*problems, taken), budget_bytes)
        units = {item.unit for item in forward.gathers if item.name in taken}
        of_units = (item.name for item in forward.gathers if item.unit in units)
        kept = tuple(name for name in of_units if name in self.candidates)
        return _Kept(dataclasses.replace(decided, params=kept), run)

    def without_gathers(self, problems: tuple[Problem, Problem]) -> tuple[int, float]:
        """Bytes that backward gathers and need not, and the time of a step that keeps them all."""
        again = [item for item in problems[1].gathers if item.name in self.candidates]
        run = Run.of(with_kept(*problems, self.candidates), math.inf)
        return sum(item.num_bytes for item in again), run.time_us

    def cost(self, budget_bytes: float) -> tuple[float, float]:
        """Forecast how far a step is beyond a budget, and its microseconds; see `Run.cost`."""
        limits = _limits(budget_bytes)
        without = self.without(budget_bytes)
        return (self.best(limits)[0].run if without.over(limits) else without).cost(limits)

    def best(self, limits: Mapping[str, float]) -> list[_Chosen]:
        """List choices, the best first, with blocks in as many pieces as it takes for the limits.

        A block is computed again as a whole; if that takes too much memory at a time, blocks are
        cut into pieces, and more of them.
        """
        key = tuple(limits.values())
        if key not in self._best:
            self._best[key] = self._list(limits)
        return self._best[key]

    def _list(self, limits: Mapping[str, float]) -> list[_Chosen]:
        found: list[_Chosen] = []
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
            elif pieces > 1:
                found = self._values_of(1, None).in_pieces(pieces)
            else:
                parts = self.parts
                found = SavedValues(parts.joint, parts.saved, self.prices, parts.table)
            self._values[key] = found
        return self._values[key]

    def _search(self, values: SavedValues, limits: Mapping[str, float]) -> _Chosen:
        """Search for choices of blocks that keep to the limits, and are fastest.

        Bytes that are missing are asked of blocks, as forecasts show it, until they fit; then room
        for gathers, as long as that saves time. Returns the best that was tried.
        """
        nothing = (0,) * len(values.blocks)
        first = _first_of(self.parts, values)
        wanted: dict[int, float] = {}  # bytes to give up, by the number of the first blocks that do
        best = now = _Chosen(values, nothing, self.without(min(limits.values())))
        for _ in range(TRIES):
            for kind, num_bytes in now.run.over(limits).items():
                blocks = _asked(kind, now.run.peaks[kind][0], first[kind], values)
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
            was, now = now, _Chosen(values, taken, Run.of(problems, min(limits.values())))
            is_faster = now.run.time_us < WORTH * best.run.time_us
            if now.run.over(limits) or best.run.over(limits) or is_faster:
                best = min(best, now, key=lambda tried: tried.run.cost(limits))
            if not was.run.over(limits) and best is not now:
                break
        return best


def _asked(kind: str, position: int, first: Mapping[int, int], values: SavedValues) -> int:
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


def _first_of(parts: Parts, values: SavedValues) -> dict[str, dict[int, int]]:
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
