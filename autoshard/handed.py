"""Decide what forward hands to backward: values that it saves, and parameters that stay unsharded.

    joint graph --> parts, as the partitioner makes them --> peak under the budget?
        yes: parameters stay unsharded, where there is room for them and time to win
        no:  values lie on the host meanwhile, as far as copies are hidden, or are computed again,
             until there is room

Parts are made and simulated anew with each decision that is tried.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autoshard.passes.ir.match import is_compute
from autoshard.passes.ir.meta import ParamInfo
from autoshard.passes.ir.plan import SavedBlock
from autoshard.passes.planner.keep import unit_by_unit, worth_keeping
from autoshard.passes.planner.per_unit import unit_buckets
from autoshard.passes.planner.save import Need, allotted, freed_bytes, least_us
from autoshard.passes.planner.schema import read_as
from autoshard.passes.plans.auto_buckets import PricedGraph
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.saved import SavedValues, saved_names

log = logging.getLogger(__name__)

WORTH = 0.995  # of the time of a decision that fits: with more than that, the search ends
TRIES = 7  # of partitioning a graph, for blocks in as many pieces
PIECES = (1, 2, 4, 8, 16)  # of a block
ENOUGH = 2  # pieces, beyond which more are tried only as long as they help


@dataclass(frozen=True)
class Handed:
    """Decision on what forward hands to backward.

    params: names of parameters that stay unsharded, however their units reshard.
    saved: nodes of the joint graph that are saved, by the names that `numbered` gives them; None:
        as the partitioner finds it.
    moved: those of them that lie on the host from forward to backward.
    blocks: what that is by block, for people.
    """

    params: tuple[str, ...] = ()
    saved: tuple[str, ...] | None = None
    blocks: tuple[SavedBlock, ...] = ()
    moved: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return it as text, the same for equal decisions."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Handed:
        """Read what `to_json` has written."""
        return read_as(cls, json.loads(text), "handed")


class Decider:
    """Decider of what a frame's forward hands to backward, of which a compilation asks once.

    This one decides by itself, where there are no other ranks.
    """

    def known(self, key: str | None) -> Handed | None:
        """Return a decision that is known before the frame's joint graph is; None if none is.

        key: of frames that are alike in all that a decision depends on; None: of none.
        """
        return None

    def decide(
        self, part: Callable[[Handed], Parts], prices: Prices, key: str | None = None
    ) -> Handed:
        """Decide as the function `decide` does; nothing is decided if that fails.

        key: as of `known`.
        """
        try:
            return decide(part, prices)
        except Exception as error:  # the compilation may meet it, too, and will tell all ranks
            log.warning(
                "the memory budget is not kept to, as deciding what to save failed: %s", error
            )
            return Handed()


class Part(NamedTuple):
    """Forward or backward of a joint graph, and the same as its planner sees it."""

    graph: fx.Graph
    priced: PricedGraph


class Parts(NamedTuple):
    """Joint graph that was parted, the facts about its parameters, and its parts.

    made: these as they were made, for the compilation to go on with.
    """

    joint: fx.Graph
    table: Sequence[ParamInfo]
    forward: Part
    backward: Part
    made: tuple[fx.GraphModule, fx.GraphModule]

    @property
    def saved(self) -> frozenset[str]:
        """Names of the nodes that forward hands to backward."""
        return saved_names(self.joint, self.backward.graph)


@dataclass(frozen=True)
class _Tried:
    """Decision that was tried: how the parts that it makes run under the budget.

    taken: of each block, the number of its choice.
    over: of the parts that don't fit, position of the peak, and bytes beyond the budget there.
    """

    handed: Handed
    taken: tuple[int, ...]
    parts: Parts
    over: dict[str, tuple[int, float]]
    time_us: float

    @classmethod
    def of(cls, handed: Handed, taken: Sequence[int], parts: Parts, budget_bytes: float) -> _Tried:
        """Simulate `parts`, with one bucket a unit."""
        over, time_us = {}, 0.0
        for kind, part in (("forward", parts.forward), ("backward", parts.backward)):
            timeline = unit_by_unit(part.priced.problem, budget_bytes)
            time_us += timeline.time_us
            if timeline.peak_bytes > budget_bytes:
                over[kind] = timeline.peak.position, timeline.peak_bytes - budget_bytes
        return cls(handed, tuple(taken), parts, over, time_us)

    @property
    def cost(self) -> tuple[float, float]:
        """Most bytes beyond the budget, then microseconds: less is better."""
        return max((num_bytes for _, num_bytes in self.over.values()), default=0.0), self.time_us


def decide(part: Callable[[Handed], Parts], prices: Prices) -> Handed:
    """Decide what forward hands to backward, so that a step is fastest within the budget.

    If a step as the partitioner makes it is within it, parameters are kept unsharded where there is
    room. Else as few values are saved as it takes, at the least time of computing them again; the
    parts are made and looked at anew. A block is computed again as a whole; if that takes too much
    memory at a time, blocks are cut into pieces, and more of them. If nothing fits, the decision
    with the lowest peak is taken.

    part: makes the parts, given a decision; called once, and up to `TRIES` times for each of
        `PIECES`.
    prices: with a budget.
    """
    budget_bytes = prices.budget_bytes
    assert budget_bytes is not None
    parts = part(Handed())
    now = best = _Tried.of(Handed(), (), parts, budget_bytes)
    if not now.over:
        forward, backward = parts.forward.priced, parts.backward.priced
        problems = forward.problem, backward.problem
        return Handed(worth_keeping(*problems, forward.candidates, budget_bytes))
    hosts = list(dict.fromkeys((prices.topology.host_link, None)))
    for pieces in PIECES:
        was = best
        for host in hosts:
            values = SavedValues(parts.joint, parts.saved, prices, parts.table, pieces, host)
            found = _search(part, values, now, budget_bytes)
            best = min(best, found, key=lambda tried: tried.cost)
            if not best.over and WORTH * best.time_us <= now.time_us:
                break
        if not best.over or (pieces > ENOUGH and best is was):
            break
    return best.handed


def _search(
    part: Callable[[Handed], Parts], values: SavedValues, now: _Tried, budget_bytes: float
) -> _Tried:
    """Search for choices of blocks that fit into the budget, and are fastest.

    Bytes that are missing are asked of blocks, as parts that were made show it, until they fit;
    then room for gathers, as long as that saves time. Returns the best that was tried.

    now: what is saved without a decision, which does not fit.
    """
    gathers, _ = unit_buckets(now.parts.backward.priced.problem)
    room = max((bucket.num_bytes for bucket in gathers), default=0)
    wanted: dict[int, float] = {}  # bytes to give up, by the number of the first blocks that do
    best = now = dataclasses.replace(now, taken=(0,) * len(values.blocks))
    for _ in range(TRIES):
        for blocks, num_bytes in _asked(now, values):
            wanted[blocks] = num_bytes + freed_bytes(values.curves, now.taken[:blocks])
        if not now.over:
            freed = {blocks: freed_bytes(values.curves, now.taken[:blocks]) for blocks in wanted}
            wanted = {blocks: num_bytes + room for blocks, num_bytes in freed.items()}
        needs = [Need(*each) for each in wanted.items()]
        taken = allotted(values.curves, needs)
        if taken == now.taken:
            break
        handed = Handed(
            saved=tuple(sorted(values.names(taken))),
            blocks=values.saved_blocks(taken),
            moved=tuple(sorted(values.moved(taken))),
        )
        was, now = now, _Tried.of(handed, taken, part(handed), budget_bytes)
        log.info(
            "%s: given up for %.0f us, at least %.0f; a step of %.0f us, beyond it by %s",
            needs,
            sum(curve[each].time_us for curve, each in zip(values.curves, taken, strict=True)),
            least_us(values.curves, needs),
            now.time_us,
            now.over or "nothing",
        )
        if now.over or best.over or now.time_us < WORTH * best.time_us:
            best = min(best, now, key=lambda tried: tried.cost)
        if not was.over and best is not now:
            break
    return best


def _asked(tried: _Tried, values: SavedValues) -> Iterator[tuple[int, float]]:
    """Yield how many of the first blocks have to give up bytes, and how many bytes together.

    At the peak of forward, those that have run; at backward's, those that are to come. Where these
    are none, all may give up.
    """
    for kind, (position, num_bytes) in tried.over.items():
        part = tried.parts.forward if kind == "forward" else tried.parts.backward
        first = _first_reads(part.graph, values)
        if kind == "forward":
            others = (block for block, at in first.items() if at > position)
        else:
            others = (block for block, at in first.items() if at <= position)
        yield min(others, default=len(values.blocks)) or len(values.blocks), num_bytes


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
