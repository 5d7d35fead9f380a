"""Values of a graph's nodes: which own memory, and how many bytes."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from autoshard import _torch


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


def hint_of(size: int | torch.SymInt) -> int:
    """Value that a symbolic size had when the graph was traced; 1 if it had none.

    An int is returned as it is.
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if hint is not None else 1
