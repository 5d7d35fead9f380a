"""Costs by which a graph's planner decides: of a topology, and of how the graph is lowered."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autoshard import _torch
from autoshard.passes.ir import groups
from autoshard.passes.planner.costs import Link
from autoshard.passes.planner.topology import Topology
from autoshard.passes.plans.fusion import Fusion
from autoshard.passes.plans.roofline import node_us


@dataclass(frozen=True)
class Prices:
    """Costs of one compilation, and its memory budget.

    is_fused: whether Inductor lowers the graph, and fuses pointwise ops.
    budget_bytes: for all memory that the graph uses, its inputs included. None: as much as the plan
        with one bucket a unit needs.
    beside: bytes that the model's other frames are taken to save for backward, for each byte that
        this one saves; 0 for a frame that is the whole model, or whose others are known.
    """

    topology: Topology
    is_fused: bool
    budget_bytes: int | None = None
    beside: float = 0.0

    def links(self, kind: str, group: str) -> tuple[Link, ...]:
        """List the costs of a bucket's collectives over `group`, in the order in which they run.

        kind: "gather" or "reduce"; a reduce over replicas has an all-reduce, too.
        """
        shards, copies = groups.shard_part(group), groups.replicate_part(group)
        return self.topology.links(kind, self.ranks(shards), self.ranks(copies))

    def op_us(self, node: fx.Node, fusion: Fusion | None) -> float:
        """Microseconds that `node` takes; see `node_us`."""
        return node_us(node, self.topology, fusion)

    def ranks(self, name: str) -> tuple[int, int]:
        """Count the ranks in the process group `name`, and those on the node of its first rank.

        (1, 1) for "", no group.
        """
        ranks = _torch.dist.group_ranks(name) if name else [0]
        nodes = [rank // self.topology.ranks_per_node for rank in ranks]
        return len(ranks), nodes.count(nodes[0])
