"""Decision on what forward hands to backward, and a joint graph that is parted as one says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autoshard.passes.ir.meta import ParamInfo
from autoshard.passes.ir.plan import SavedBlock
from autoshard.passes.planner.keep import unit_by_unit
from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.schema import read_as
from autoshard.passes.plans.auto_buckets import PricedGraph
from autoshard.passes.plans.saved import SavedValues, saved_names

KINDS = ("forward", "backward")


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
        return beside(forward, self.others), beside(backward, self.others)

    @property
    def saved(self) -> frozenset[str]:
        """Names of the nodes that forward hands to backward."""
        return saved_names(self.joint, self.backward.graph)


def beside(problem: Problem, num_bytes: int) -> Problem:
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
