"""Values of a graph's nodes: which of them own memory, their sizes, and what made them."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoshard import _torch
from autoshard.passes.ir.meta import VALUE


def is_view(node: fx.Node) -> bool:
    """Tell whether `node` allocates nothing: it is a view, or a `getitem` of several results.

    The op's schema tells a view: all of its results alias inputs, and none is written to.
    """
    return is_result(node) or _makes_views(node.target)


@functools.cache  # asked of each node many times
def _makes_views(target: object) -> bool:
    """Tell whether an op, or whatever a node calls, gives views of its inputs alone."""
    if not isinstance(target, _torch.ops.OpOverload):
        return False
    returns = _torch.ops.schema_of(target).returns
    return bool(returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )


def is_result(node: fx.Node) -> bool:
    """Tell whether `node` is one of several results of the node that it reads."""
    return node.target is operator.getitem


def base_of(node: fx.Node) -> fx.Node:
    """Node that makes the memory of `node`: itself, unless it is a view, or a result of an op."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def op_of(node: fx.Node) -> fx.Node:
    """Return the op of whose results `node` is one; else `node`."""
    while is_result(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def owner_of(node: fx.Node) -> fx.Node:
    """Node that owns the memory of `node`: of an op that makes several tensors, each owns its own.

    Of a view it is the owner of what it is a view of.
    """
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        op = op_of(node)
        is_made = op is not node and op.op == "call_function" and not is_view(op)
        if is_made and isinstance(node.meta.get("val"), Tensor):
            break
        node = node.all_input_nodes[0]
    return node


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads the result of `node`, itself or through views, which read nothing."""
    for user in node.users:
        if is_view(user):
            yield from readers_of(user)
        else:
            yield user


def numbered(nodes: Iterable[fx.Node]) -> dict[str, fx.Node]:
    """Name the nodes that compute tensors by their op and its count so far: "mm:0", "mm:1".

    A graph's own names differ where it is traced with sizes that are symbols: these are nodes, too.
    A name stays with its node, and copies of it: the partitioner drops nodes that compute what
    another one does, so that a count would come to others. Nodes that come after are named only if
    none has a name yet.
    """
    nodes = [node for node in nodes if node.op == "call_function"]
    found = {name: node for node in nodes if (name := VALUE.get(node)) is not None}
    if found:
        return found
    counts: Counter[str] = Counter()
    for node in filter(tensors_of, nodes):
        op = getattr(node.target, "overloadpacket", node.target)
        kind = str(getattr(op, "__name__", op))
        name = f"{kind}:{counts[kind]}"
        counts[kind] += 1
        VALUE.set(node, name)
        found[name] = node
    return found


def tensors_of(node: fx.Node) -> Sequence[Tensor]:
    """List the fake tensors that `node` gives, by its meta: one, those of nested lists, or none."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    return [each for each in _torch.tensors.tree_leaves(value) if isinstance(each, Tensor)]


def bytes_of(node: fx.Node) -> int:
    """Bytes of all tensors that `node` gives; a symbolic size counts as its hint."""
    return sum(map(num_bytes_of, tensors_of(node)))


def num_bytes_of(tensor: Tensor) -> int:
    """Bytes of the elements of `tensor`; a symbolic size counts as its hint."""
    return numel_of(tensor) * tensor.dtype.itemsize


def numel_of(tensor: Tensor) -> int:
    """Elements of `tensor`; a symbolic size counts as its hint."""
    numel = tensor.numel()
    return numel if type(numel) is int else math.prod(map(hint_of, tensor.shape))


def arguments_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the arguments of a call of torch's op `target`, by its schema; defaults are left out."""
    names = [each.name for each in _torch.ops.schema_of(target).arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def name_of(node: fx.Node) -> str:
    """Name of torch's op that `node` calls, "mm"; "" if it calls none."""
    return _name_of_op(node.target)


@functools.cache
def _name_of_op(target: object) -> str:
    if not isinstance(target, _torch.ops.OpOverload) or target.namespace != "aten":
        return ""
    return str(target.overloadpacket.__name__)


def hint_of(size: int | torch.SymInt) -> int:
    """Value that a symbolic size had when the graph was traced; 1 if it had none.

    An int is returned as it is.
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if hint is not None else 1
