"""Microseconds and bytes of a graph's nodes, without running them.

A node is a kernel, whose time goes by its shape (`kernels.py`). What Inductor fuses is not counted
twice: a value that passes from one pointwise node to the next is neither written nor read; such a
chain is one kernel.

A topology may have measured times of ops, which are used instead, except for pointwise ops that are
fused.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009; the
operations of each op are those of `torch.utils.flop_counter`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from autoshard import _torch
from autoshard.passes.ir.layout import DTYPE_NAMES
from autoshard.passes.planner.kernels import Attention, Kernel, kernel_us
from autoshard.passes.planner.topology import Topology


def node_us(node: fx.Node, topology: Topology, *, is_fused: bool) -> float:
    """Estimate the microseconds that `node` takes; 0 for views and for nodes that are no calls.

    is_fused: whether the graph is lowered with Inductor, which fuses pointwise ops.
    """
    return kernel_us(kernel_of(node, is_fused=is_fused, has_key=bool(topology.ops)), topology)


def kernel_of(node: fx.Node, *, is_fused: bool, has_key: bool = True) -> Kernel | None:
    """Describe the kernel of `node`; None for views and for nodes that are no calls.

    An op of autoshard's counts as the smallest kernel. Of pointwise ops that are fused, only the
    first launches a kernel, and what one hands to the next is neither written nor read.

    has_key: whether it may be measured, if it is not fused.
    """
    if node.op != "call_function" or is_view(node):
        return None
    if getattr(node.target, "namespace", "") == "autoshard":
        return Kernel()  # not by bytes: shards differ by rank, a plan must not
    results = list(tensors_of(node))
    written = results
    inputs = [each for each in node.all_input_nodes if tensors_of(each)]
    launches, key = True, ""
    if is_fused and is_fusible(node):
        fused = [each for each in inputs if is_fusible(base_of(each))]
        inputs = [each for each in inputs if each not in fused]
        launches = not fused
        if not is_written(node):
            written = []
    elif has_key:
        key = op_key(node.target, fx.node.map_arg((node.args, node.kwargs), _value_of))
    read = [tensor for each in inputs for tensor in tensors_of(each)]
    attention = _attention_of(node)
    typed = results
    if attention is not None:  # results begin with a generator's state where it is computed again
        typed = [tensor for tensor in read if tensor.is_floating_point()]
    return Kernel(
        dtype=DTYPE_NAMES.get(typed[0].dtype, "") if typed else "",
        bytes=sum(map(num_bytes_of, [*read, *written])),
        product=_product_of(node),
        attention=attention,
        flops=num_flops(node),
        launches=launches,
        key=key,
    )


_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # where the first factor is


def _product_of(node: fx.Node) -> tuple[int, int, int, int] | None:
    """Return (batch, rows, columns, depth) if `node` is a product of matrices; else None."""
    at = _PRODUCTS.get(_name_of(node))
    if at is None:
        return None
    first, second = (_sizes_of(node.args[at + number]) for number in range(2))
    return (first[0] if len(first) == 3 else 1, first[-2], second[-1], first[-1])


def _attention_of(node: fx.Node) -> Attention | None:
    """Describe `node` if it is attention without a matrix of scores, on any device; else None."""
    target, args = _call_of(node)
    name = target.overloadpacket.__name__ if isinstance(target, _torch.ops.OpOverload) else ""
    if "scaled_dot_product" not in name:
        return None
    names = [each.name for each in _torch.ops.schema_of(target).arguments]
    given = {**dict(zip(names, args, strict=False)), **node.kwargs}
    queries, keys = (_sizes_of(given[each]) for each in ("query", "key"))
    return Attention(
        heads=math.prod(queries[:-2]),
        queries=queries[-2],
        keys=keys[-2],
        width=queries[-1],
        is_causal=bool(given.get("is_causal", False)),
        is_backward=name.endswith("backward"),
    )


def _call_of(node: fx.Node) -> tuple[Any, Sequence[Any]]:
    """Return what `node` calls, and with what: where backward computes random ops again, theirs.

    Attention is such an op, with or without dropout: the generator's state is kept for it.
    """
    name = str(node.target)
    if name == "run_and_save_rng_state":
        return node.args[0], node.args[1:]
    if name == "run_with_rng_state":
        return node.args[1], node.args[2:]
    return node.target, node.args


def _name_of(node: fx.Node) -> str:
    target = node.target
    if not isinstance(target, _torch.ops.OpOverload) or target.namespace != "aten":
        return ""
    return str(target.overloadpacket.__name__)


def _sizes_of(node: Any) -> list[int]:
    return [hint_of(size) for size in node.meta["val"].shape]


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
    """List the fake tensors that `node` gives, by its meta: one, those of nested lists, or none."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    return [each for each in _torch.tensors.tree_leaves(value) if isinstance(each, Tensor)]


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
