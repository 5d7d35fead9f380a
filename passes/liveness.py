"""How long values of a graph live, and how much memory that is at each op of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import fx

from autoshard.passes import groups, ops
from autoshard.passes.give_table import TABLE
from autoshard.passes.layout import read_members
from autoshard.passes.match import (
    group_of,
    is_compute,
    is_hold_grad,
    is_marker,
    is_planned,
    is_reduce_grad,
    is_unshard,
    members_of,
)
from autoshard.passes.roofline import base_of, num_bytes_of, tensors_of


def last_uses(graph: fx.Graph, position: Mapping[fx.Node, int], end: int) -> dict[fx.Node, int]:
    """By node with memory of its own: the last position at which that is read, by any name.

    position: of the compute nodes.
    end: position of the output. Markers, which a plan moves, don't count as readers.
    """
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        at = end if node.op == "output" else position.get(node)
        if at is None:
            continue
        for each in node.all_input_nodes:
            last[base_of(each)] = at
    return last


def live_bytes(graph: fx.Graph, kind: str) -> tuple[int, ...]:
    """Memory in use at each compute node, what markers give and what they reduce apart.

    kind: "forward", "backward" or "inference". What backward was given to read it once is freed
        after that; parameters and the user's inputs live all the time.
    """
    computed = [node for node in graph.nodes if is_compute(node)]
    position = {node: number for number, node in enumerate(computed)}
    last = last_uses(graph, position, end=len(computed))
    reduced = {base_of(node.all_input_nodes[0]) for node in graph.nodes if is_reduce_grad(node)}
    change = [0] * (len(computed) + 2)
    for node in graph.nodes:
        if is_marker(node) or node.op == "output" or base_of(node) is not node:
            continue
        num_bytes = _num_bytes(node)
        begin = position.get(node, 0)
        is_lasting = node.op == "placeholder" and (kind != "backward" or _is_kept(node))
        end = len(computed) if is_lasting else last.get(node, begin)
        if node in reduced and end <= begin and not is_lasting:
            continue  # from its birth on it is what waits to be reduced, and nobody else reads it
        change[begin] += num_bytes
        change[end + 1] -= num_bytes
    return tuple(itertools.accumulate(change))[: len(computed)]


def _num_bytes(node: fx.Node) -> int:
    """What `node` takes. Of shards, whose rows differ by rank, what the largest one takes: a plan
    must not."""
    if is_hold_grad(node):
        return 0  # it stands for nothing
    for marker in (node, *node.users):
        if marker.target is ops.cut or (marker is not node and is_unshard(marker)):
            (member,) = read_members(members_of(marker))
            numel = member.chunk_numel(groups.shards(group_of(marker)))
            return max(numel * tensor.dtype.itemsize for tensor in tensors_of(node))
    return sum(map(num_bytes_of, tensors_of(node)))


def _is_kept(node: fx.Node) -> bool:
    """Whether an input of a backward graph outlives it: the user's, a shard, a table."""
    is_shard = any(map(is_planned, node.users))
    return is_shard or node.name.startswith("primals") or node.name == TABLE
