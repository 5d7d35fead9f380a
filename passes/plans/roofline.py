"""Microseconds and bytes of a graph's nodes, without running them.

A node takes the longer of its floating-point operations at the device's rate and its bytes at the
memory's rate, and never less than the smallest kernel. What Inductor fuses is not counted twice: a
value that passes from one pointwise node to the next is neither written nor read; such a chain is
one kernel.

A topology may have measured times of ops, which are used instead, except for pointwise ops that are
fused.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009; the
operations of each op are those of `torch.utils.flop_counter`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from autoshard import _torch
from autoshard.passes.ir.layout import DTYPE_NAMES
from autoshard.passes.planner.topology import Topology


def node_us(node: fx.Node, topology: Topology, *, is_fused: bool) -> float:
    """Estimate the microseconds that `node` takes; 0 for views and for nodes that are no calls.

    An op of autoshard's counts as the smallest kernel. For others, a time in `topology.ops` for
    these dtypes and sizes counts first, unless the op is fused. Else it is the longest of three:
    floating-point operations at the device's rate (0 unless in torch's `flop_registry`), bytes read
    and written at the memory's rate, and the smallest kernel. Of pointwise ops that are fused, only
    the first counts as a kernel, and what one hands to the next is neither written nor read.

    is_fused: whether the graph is lowered with Inductor, which fuses pointwise ops.
    """
    if node.op != "call_function" or is_view(node):
        return 0.0
    if getattr(node.target, "namespace", "") == "autoshard":
        return topology.op_us  # not by bytes: shards differ by rank, a plan must not
    if topology.ops and not (is_fused and is_fusible(node)):
        values = fx.node.map_arg((node.args, node.kwargs), _value_of)
        known_us = topology.ops.get(op_key(node.target, values))
        if known_us is not None:
            return known_us
    written = list(tensors_of(node))
    flops = num_flops(node)
    if flops:
        read = [tensor for each in node.all_input_nodes for tensor in tensors_of(each)]
        num_bytes = sum(map(num_bytes_of, [*read, *written]))
        rate = topology.flops_per_us(DTYPE_NAMES.get(written[0].dtype, "") if written else "")
        return max(flops / rate, num_bytes / topology.memory_bytes_per_us, topology.op_us)
    inputs = [each for each in node.all_input_nodes if tensors_of(each)]
    if is_fused and is_fusible(node):
        fused = [each for each in inputs if is_fusible(base_of(each))]
        read = [t for each in inputs if each not in fused for t in tensors_of(each)]
        if not is_written(node):
            written = []
        least = 0.0 if fused else topology.op_us
    else:
        read = [tensor for each in inputs for tensor in tensors_of(each)]
        least = topology.op_us
    num_bytes = sum(map(num_bytes_of, [*read, *written]))
    return max(num_bytes / topology.memory_bytes_per_us, least)


def op_key(target: object, arguments: object) -> str:
    """Key of an op among a topology's measured times: its name, and its tensors' dtypes and sizes.

    For instance `aten.mm.default(f32[64, 32], f32[32, 8])`. A symbolic size counts as its hint.

    arguments: any nesting of values; those that are no tensors are left out.
    """
    tensors = [each for each in _torch.tensors.tree_leaves(arguments) if isinstance(each, Tensor)]
    texts = (
        f"{DTYPE_NAMES.get(each.dtype, each.dtype)}{[hint_of(size) for size in each.shape]}"
        for each in tensors
    )
    return f"{target}({', '.join(texts)})"


def num_flops(node: fx.Node) -> int:
    """Floating-point operations of `node`, by torch's `flop_registry`; 0 for an op not in it."""
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet) if packet is not None else None
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _shape_of)
    return int(count(*args, **kwargs, out_val=_shape_of(node)))


def is_view(node: fx.Node) -> bool:
    """Tell whether `node` allocates nothing: it is a view, or a `getitem` of several results.

    The op's schema tells a view: all of its results alias inputs, and none is written to.
    """
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, _torch.ops.OpOverload):
        return False
    returns = _torch.ops.schema_of(node.target).returns
    return bool(returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )


def is_fusible(node: fx.Node) -> bool:
    """Tell whether Inductor may fuse `node` with its neighbors: a pointwise or `prims` op.

    So is a view of a node that is one.
    """
    if is_view(node):
        return bool(node.all_input_nodes) and is_fusible(base_of(node))
    target = node.target
    return isinstance(target, _torch.ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target.namespace == "prims"
    )


def is_written(node: fx.Node) -> bool:
    """Tell whether a node that can't be fused reads the result of `node`, or a view of it.

    The graph's output is such a node. Then the fused kernel has to write that result to memory.
    """
    return any(is_written(user) if is_view(user) else not is_fusible(user) for user in node.users)


def base_of(node: fx.Node) -> fx.Node:
    """Node that owns the memory of `node`: itself, unless it is a view."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def tensors_of(node: fx.Node) -> Sequence[Tensor]:
    """List the fake tensors that `node` gives, by its meta: one, those of a list, or none."""
    value = node.meta.get("val")
    values: Iterable[object] = value if isinstance(value, (list, tuple)) else (value,)
    return [each for each in values if isinstance(each, Tensor)]


def num_bytes_of(tensor: Tensor) -> int:
    """Bytes of the elements of `tensor`; a symbolic size counts as its hint."""
    numel = 1
    for size in tensor.shape:
        numel *= hint_of(size)
    return numel * tensor.dtype.itemsize


def _shape_of(node: fx.Node) -> Any:
    """Return the results of `node` as meta tensors of f32, with hints in place of symbols."""

    def without_symbols(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty([hint_of(size) for size in value.shape], device="meta")
        return hint_of(value) if isinstance(value, torch.SymInt) else value

    return _torch.tensors.tree_map(without_symbols, node.meta.get("val"))


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("val")


def hint_of(size: int | torch.SymInt) -> int:
    """Value that a symbolic size had when the graph was traced; 1 if it had none.

    An int is returned as it is.
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if hint is not None else 1
