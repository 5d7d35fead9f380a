"""Microseconds and bytes of a graph's nodes, without running them.

A node is a kernel, whose time goes by its shape (`kernels.py`), or a part of one that Inductor
makes (`fusion.py`).

A topology may have measured times of ops, which are used instead, except for pointwise ops that are
fused.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009; the
operations of each op are those of `torch.utils.flop_counter`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from autoshard import _torch
from autoshard.passes.ir.layout import DTYPE_NAMES
from autoshard.passes.ir.match import move_of
from autoshard.passes.ir.meta import EXPOSED_US
from autoshard.passes.planner.kernels import Attention, Kernel, kernel_us
from autoshard.passes.planner.topology import Topology
from autoshard.passes.plans.fusion import Fusion, is_pointwise
from autoshard.passes.plans.values import (
    arguments_of,
    bytes_of,
    hint_of,
    is_view,
    name_of,
    num_bytes_of,
    tensors_of,
)


def node_us(node: fx.Node, topology: Topology, fusion: Fusion | None) -> float:
    """Estimate the microseconds that `node` takes; 0 for views and for nodes that are no calls.

    A wait for the copy of a saved value takes as long as compute waits there.

    fusion: of its graph, if it is lowered with Inductor.
    """
    if move_of(node) in ("offloaded", "reloaded"):
        return topology.call_us + (EXPOSED_US.get(node) or 0.0)
    return kernel_us(kernel_of(node, fusion, has_key=bool(topology.ops)), topology)


def kernel_of(node: fx.Node, fusion: Fusion | None, *, has_key: bool = True) -> Kernel | None:
    """Describe the kernel of `node`; None for views and for nodes that are no calls.

    An op of autoshard's counts as the smallest kernel. Of ops that are fused, only the first
    launches a kernel, and what one hands to the next is neither written nor read.

    fusion: of its graph, if it is lowered with Inductor.
    has_key: whether it may be measured, if it is no pointwise op that is fused.
    """
    if node.op != "call_function" or is_view(node):
        return None
    if move_of(node) in ("offload", "reload"):
        is_to_host = move_of(node) == "offload"
        host_bytes = bytes_of(node.all_input_nodes[0]) if is_to_host else 0
        return Kernel(launches=False, host_bytes=host_bytes)
    if getattr(node.target, "namespace", "") == "autoshard":
        return Kernel()  # not by bytes: shards differ by rank, a plan must not
    if fusion is not None and node in fusion.absent and node not in fusion.parts:
        return Kernel(launches=False)  # computed where it is read
    results = list(tensors_of(node))
    read = [tensor for each in node.all_input_nodes for tensor in tensors_of(each)]
    num_bytes = sum(map(num_bytes_of, [*read, *results]))
    launches = True
    part = None if fusion is None else fusion.parts.get(node)
    if part is not None:
        num_bytes, launches = part.read + part.written, part.first is node
    key = ""
    if has_key and (part is None or not is_pointwise(node)):
        key = op_key(node.target, fx.node.map_arg((node.args, node.kwargs), _value_of))
    attention = _attention_of(node)
    typed = results
    if attention is not None:  # results begin with a generator's state where it is computed again
        typed = [tensor for tensor in read if tensor.is_floating_point()]
    product = _product_of(node)
    return Kernel(
        dtype=DTYPE_NAMES.get(typed[0].dtype, "") if typed else "",
        bytes=num_bytes,
        product=product,
        attention=attention,
        flops=num_flops(node) if product is None and attention is None else 0,
        launches=launches,
        key=key,
    )


_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # where the first factor is


def _product_of(node: fx.Node) -> tuple[int, int, int, int] | None:
    """Return (batch, rows, columns, depth) if `node` is a product of matrices; else None."""
    at = _PRODUCTS.get(name_of(node))
    if at is None:
        return None
    first, second = (_sizes_of(node.args[at + number]) for number in range(2))
    return (first[0] if len(first) == 3 else 1, first[-2], second[-1], first[-1])


def _attention_of(node: fx.Node) -> Attention | None:
    """Describe `node` if it is attention without a matrix of scores, on any device; else None."""
    target, args, kwargs = _torch.ops.call_of(node)
    name = target.overloadpacket.__name__ if isinstance(target, _torch.ops.OpOverload) else ""
    if "scaled_dot_product" not in name:
        return None
    given = arguments_of(target, args, kwargs)
    queries, keys = (_sizes_of(given[each]) for each in ("query", "key"))
    return Attention(
        heads=math.prod(queries[:-2]),
        queries=queries[-2],
        keys=keys[-2],
        width=queries[-1],
        is_causal=bool(given.get("is_causal", False)),
        is_backward=name.endswith("backward"),
    )


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
    """Floating-point operations of `node`, by torch's `flop_registry`; 0 for an op not in it.

    Not for attention: torch 2.11's raises AssertionError where several heads share keys.
    """
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet) if packet is not None else None
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _shape_of)
    return int(count(*args, **kwargs, out_val=_shape_of(node)))


def _shape_of(node: fx.Node) -> Any:
    """Return the results of `node` as meta tensors of f32, with hints in place of symbols."""

    def without_symbols(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty([hint_of(size) for size in value.shape], device="meta")
        return hint_of(value) if isinstance(value, torch.SymInt) else value

    return _torch.tensors.tree_map(without_symbols, node.meta.get("val"))


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("val")
