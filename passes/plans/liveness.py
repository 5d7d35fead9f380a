"""Lifetimes of a graph's values, and the memory that they take at each compute node."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autoshard.passes.ir import groups, ops
from autoshard.passes.ir.layout import read_members
from autoshard.passes.ir.match import (
    TABLE,
    begun_by,
    group_of,
    is_compute,
    is_hold_grad,
    is_marker,
    is_planned,
    is_reduce_grad,
    is_unshard,
    members_of,
    move_of,
)
from autoshard.passes.ir.meta import CHUNKS, PARAM
from autoshard.passes.plans.fusion import Fusion
from autoshard.passes.plans.values import (
    bytes_of,
    is_result,
    op_of,
    owner_of,
    tensors_of,
)


def last_uses(
    graph: fx.Graph, position: Mapping[fx.Node, int], end: int, fusion: Fusion | None
) -> dict[fx.Node, int]:
    """Map each node that owns memory to the last position at which it, or a view of it, is read.

    Readers are compute nodes and the output, but not what a plan moves: markers, and what prepares
    a gather or copies a gradient to the host. Nodes without a reader are missing.

    position: of the compute nodes.
    end: position of the output.
    fusion: of the graph, if Inductor lowers it: what is computed where it is read reads there.
    """
    last: dict[fx.Node, int] = {}
    for at, read in reads(graph, position, fusion):
        last.update(dict.fromkeys(read, at))
    last.update(dict.fromkeys(map(owner_of, graph.output_node().all_input_nodes), end))
    return last


def reads(
    graph: fx.Graph, position: Mapping[fx.Node, int], fusion: Fusion | None
) -> Iterator[tuple[int, Iterable[fx.Node]]]:
    """Yield the position of each compute node, and the nodes whose memory it reads, in order.

    position, fusion: see `last_uses`.
    """
    for node in graph.nodes:
        at = position.get(node)
        if at is None:
            continue
        if fusion is not None and node in fusion.parts:
            yield at, fusion.sources[node]
        else:
            yield at, map(owner_of, node.all_input_nodes)


@dataclass(frozen=True)
class Live:
    """Bytes in use at each compute node, without gathered parameters and unreduced gradients.

    parameters:  shards: inputs of the graph that markers read, and in backward those of parameters
        that stay unsharded until then, which are no inputs.
    inputs:      other inputs that live longer than the graph: the user's inputs, buffers, and
        parameters that the runtime keeps unsharded.
    activations: in forward or inference, its outputs, for backward or for the user; in backward,
        inputs that are saved activations, kept parameters or gradients of outputs.
    temporaries: all other values.
    """

    parameters: int
    inputs: int
    activations: tuple[int, ...]
    temporaries: tuple[int, ...]

    @property
    def total(self) -> tuple[int, ...]:
        """Bytes of all four categories together, at each compute node."""
        given = self.parameters + self.inputs
        return tuple(given + a + t for a, t in zip(self.activations, self.temporaries, strict=True))


def live_bytes(graph: fx.Graph, kind: str, fusion: Fusion | None = None) -> Live:
    """Add up the bytes in use at each compute node of `graph`.

    All inputs live all the time, except those of a backward that are neither shards nor inputs of
    its forward: they are freed after their last use. Results of markers are not counted, nor
    gradients that only a `reduce_grad` reads. A shard counts as the largest of all ranks.

    kind: "forward", "backward" or "inference".
    fusion: of the graph, if Inductor lowers it: what it says to be absent takes no memory.
    """
    num_ops = sum(map(is_compute, graph.nodes))
    given = {"parameters": 0, "inputs": 0}
    activations, temporaries = [0] * (num_ops + 2), [0] * (num_ops + 2)
    for node, begin, end in _lives(graph, fusion):
        num_bytes = _num_bytes(node)
        if node.op == "placeholder" and (kind != "backward" or _is_kept(node)):
            given["parameters" if _is_parameter(node) else "inputs"] += num_bytes
            continue
        is_handed_on = node.op == "placeholder" or (kind != "backward" and end == num_ops)
        change = activations if is_handed_on else temporaries
        change[begin] += num_bytes
        change[end + 1] -= num_bytes
    if kind == "backward":
        given["parameters"] += _unread_shards(graph)
    return Live(
        **given,
        activations=tuple(itertools.accumulate(activations))[:num_ops],
        temporaries=tuple(itertools.accumulate(temporaries))[:num_ops],
    )


def handed_bytes(forward: fx.Graph, backward: fx.Graph, shards: Collection[str]) -> int:
    """Add up what a forward has in memory for its backward, on the device.

    Inputs of the user's that backward reads are part of it, but not `shards`, by their names. The
    graphs are those of one step.
    """
    given = {node.name for node in backward.find_nodes(op="placeholder")}
    nodes = [node for node in forward.nodes if node.name in given and node.name != TABLE]
    owners = dict.fromkeys(map(owner_of, nodes))
    return sum(_num_bytes(node) for node in owners if node.name not in shards)


def _unread_shards(graph: fx.Graph) -> int:
    """Bytes of shards whose gradients a backward reduces, though it does not gather them."""
    markers = [(node, PARAM.get(node)) for node in graph.nodes if is_marker(node)]
    gathered = {info.name for node, info in markers if info is not None and is_unshard(node)}
    found = 0
    for node, info in markers:
        if is_reduce_grad(node) and info is not None and info.name not in gathered:
            (member,) = read_members(members_of(node))
            dtype = member.shard_dtype or member.dtype
            numel = 0 if member.on_host else member.chunk_numel(groups.shards(group_of(node)))
            found += numel * dtype.itemsize
    return found


def count_between(graph: fx.Graph) -> tuple[int, ...]:
    """Count the values of a backward graph that live on after each compute node, one count a node.

    Shards and inputs of forward are not counted, as they are never freed; nor are results of
    markers, and gradients that only a `reduce_grad` reads. Counts, unlike bytes, are the same on
    all ranks, whose batches may differ in size.
    """
    num_ops = sum(map(is_compute, graph.nodes))
    change = [0] * (num_ops + 1)
    for node, begin, end in _lives(graph, None):
        if node.op != "placeholder" or not _is_kept(node):
            change[begin] += 1
            change[end] -= 1
    return tuple(itertools.accumulate(change))[:num_ops]


def _lives(graph: fx.Graph, fusion: Fusion | None) -> Iterator[tuple[fx.Node, int, int]]:
    """Yield each node that owns memory, with the positions that make it and that read it last.

    Positions are those of compute nodes. An input, or what prepares a gather, is made at 0, the
    output stands behind the last compute node, and what nothing reads ends where it is made. Left
    out are markers, and gradients that nothing but a `reduce_grad` reads.
    """
    computed = [node for node in graph.nodes if is_compute(node)]
    position = {node: number for number, node in enumerate(computed)}
    last = last_uses(graph, position, len(computed), fusion)
    absent = frozenset() if fusion is None else fusion.absent
    reduced = {owner_of(node.all_input_nodes[0]) for node in graph.nodes if is_reduce_grad(node)}
    for node in graph.nodes:
        if is_marker(node) or node.op == "output" or owner_of(node) is not node or node in absent:
            continue
        begin = position.get(_allocated_by(node), 0)
        end = last.get(node, begin)
        is_given = node.op == "placeholder" and _is_kept(node)
        if node in reduced and end <= begin and not is_given:
            continue  # from its birth on it is what waits to be reduced, and nobody else reads it
        yield node, begin, end


def _num_bytes(node: fx.Node) -> int:
    """Bytes of the tensors that `node` gives, on the device; 0 for a `hold_grad`.

    Of what is computed in chunks, one is in memory at a time. A shard, whose rows differ by rank,
    counts as the largest one, as plans must be the same on all ranks.
    """
    if is_hold_grad(node):
        return 0  # it stands for nothing
    if _is_on_host(node):
        return 0
    for marker in (node, *node.users):
        if marker.target is ops.cut or (marker is not node and is_unshard(marker)):
            (member,) = read_members(members_of(marker))
            numel = member.chunk_numel(groups.shards(group_of(marker)))
            return max(numel * tensor.dtype.itemsize for tensor in tensors_of(node))
    num_bytes = bytes_of(node) - sum(map(_num_bytes, _results(node)))
    return num_bytes // (CHUNKS.get(node) or 1)


def _allocated_by(node: fx.Node) -> fx.Node:
    """Return the op that allocates the memory of `node`: of a copy's result, the copy's launch."""
    launch = begun_by(node) if move_of(node) == "reloaded" else None
    return op_of(node) if launch is None else launch


def _is_on_host(node: fx.Node) -> bool:
    """Tell whether `node` gives a saved value on the host, or a ticket of its copy."""
    if node.op == "placeholder":
        return bool(node.users) and all(move_of(user) is not None for user in node.users)
    return move_of(node) in ("offload", "offloaded", "reload")


def _results(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the results of `node` that own their memory."""
    for user in node.users:
        if is_result(user) and node.op == "call_function":
            if owner_of(user) is user:
                yield user
            else:
                yield from _results(user)


def _is_kept(node: fx.Node) -> bool:
    """Tell whether an input of a backward graph outlives it: a shard, table or forward's input."""
    return _is_parameter(node) or node.name.startswith("primals") or node.name == TABLE


def _is_parameter(node: fx.Node) -> bool:
    """Tell whether an input counts as a shard: a marker, or a preparation, reads it directly."""
    return any(map(is_planned, node.users))
