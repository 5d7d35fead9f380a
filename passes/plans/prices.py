"""Costs by which a graph's planner decides: of a topology, and of how the graph is lowered."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autoshard import _torch
from autoshard.passes.ir import groups
from autoshard.passes.planner.costs import Link
from autoshard.passes.planner.topology import Topology
from autoshard.passes.plans.roofline import node_us


@dataclass(frozen=True)
class Prices:
    """Costs of one compilation, and its memory budget.

    is_fused: whether Inductor lowers the graph.
    budget_bytes: of all memory that the graph uses, its inputs included; None for what one bucket a
        unit needs.
    """

    topology: Topology
    is_fused: bool
    budget_bytes: int | None = None

    def links(self, kind: str, group: str) -> tuple[Link, ...]:
        """Collectives of a bucket over `group`, in the order in which they run."""
        shards, copies = groups.shard_part(group), groups.replicate_part(group)
        return self.topology.links(kind, self.ranks(shards), self.ranks(copies))

    def op_us(self, node: fx.Node) -> float:
        return node_us(node, self.topology, is_fused=self.is_fused)

    def ranks(self, name: str) -> tuple[int, int]:
        """Number of ranks in the group `name`, and of those of them on its first rank's node."""
        ranks = _torch.dist.group_ranks(name) if name else [0]
        nodes = [rank // self.topology.ranks_per_node for rank in ranks]
        return len(ranks), nodes.count(nodes[0])
