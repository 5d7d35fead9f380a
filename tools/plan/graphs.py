"""Graphs of a training step in numbers: what a planner knows of them, with kernels for their ops.

An op's time is its kernel's on a device of some topology, so that a graph is traced once for all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import fx

from autoshard.passes.planner.kernels import Kernel, in_float8, kernel_us
from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.topology import Topology
from autoshard.passes.plans.auto_buckets import PricedGraph
from autoshard.passes.plans.fusion import Fusion
from autoshard.passes.plans.liveness import Live
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.roofline import kernel_of


@dataclass(frozen=True)
class Graph:
    """Graph of a training step, in numbers.

    problem: its costs are of no configuration, its live_bytes are without parameters, and its
        op_us are numbers of `kernels`.
    activations: bytes at each op, part of live_bytes, that forward makes for backward or the user.
    kernels: those that differ; None for views.
    """

    problem: Problem
    activations: tuple[int, ...]
    kernels: tuple[Kernel | None, ...]

    def op_us(self, topology: Topology) -> tuple[float, ...]:
        """Microseconds of each op on a device of `topology`."""
        times = [kernel_us(each, topology) for each in self.kernels]
        return tuple(times[int(number)] for number in self.problem.op_us)

    @property
    def host_bytes(self) -> int:
        """Bytes that a forward copies to the host, for its backward."""
        sizes = [0 if each is None else each.host_bytes for each in self.kernels]
        return sum(sizes[int(number)] for number in self.problem.op_us)

    def in_float8(self, vocabulary: int) -> Graph:
        """Return this graph with products in float8, but for those as wide as `vocabulary`."""
        kernels = tuple(in_float8(each, vocabulary) for each in self.kernels)
        return dataclasses.replace(self, kernels=kernels)


@dataclass(frozen=True)
class TracedGraph:
    """Graph of a few blocks: its op_us are numbers of `kernels`, as of `Graph`."""

    problem: Problem
    live: Live
    kernels: tuple[Kernel | None, ...]


@dataclass(frozen=True)
class _Numbering(Prices):
    """Prices that number kernels, each as it is first seen, in place of timing them."""

    kernels: dict[Kernel | None, int] = dataclasses.field(default_factory=dict)

    def op_us(self, node: fx.Node, fusion: Fusion | None) -> float:
        """Return the number of the kernel of `node`."""
        kernel = kernel_of(node, fusion)
        return self.kernels.setdefault(kernel, len(self.kernels))


def in_numbers(gm: fx.GraphModule, kind: str, *, is_fused: bool) -> TracedGraph:
    """Describe a graph that `passes.preparation` has run over; it is only read.

    kind: "forward" or "backward". is_fused: whether Inductor lowers the graph.
    """
    prices = _Numbering(Topology.load("h100"), is_fused)
    priced = PricedGraph(gm.graph, kind, prices)
    return TracedGraph(priced.problem, priced.live, tuple(prices.kernels))
