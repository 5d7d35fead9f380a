"""Operators: their classes, their schemas, and wrappers around them in graphs.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._higher_order_ops.effects import with_effects as with_effects
from torch._higher_order_ops.print import Print as Print
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

# They stand for an op that writes to what it takes, their first argument.
FUNCTIONALIZED: tuple[Any, ...] = (auto_functionalized, auto_functionalized_v2)

FUNCTIONAL_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Namespaces of torch's collectives that return their result."""

COPY: Any = torch.ops.aten._to_copy.default
"""Copy to another dtype, or device."""

VIEW_OF_COPY: Any = torch.ops.aten._unsafe_view.default
"""View of what nobody else has, as reshape makes where it copies."""

functional_collectives: Any = torch.ops._c10d_functional


def is_observed() -> bool:
    """Tell whether a dispatch mode is active, which sees each op that is called."""
    return bool(torch._C._len_torch_dispatch_stack() > 0)


def schema_of(op: object) -> Any:
    """Schema of `op`; None for what has none, as a higher-order operator."""
    return getattr(op, "_schema", None)


def overload_of(op: OpOverload) -> str:
    """Name of the overload that `op` is, "default" for the only one."""
    name: str = op._overloadname
    return name


class Call(NamedTuple):
    """Call of an operator in a graph: what is called, and with what."""

    target: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


_KEEPS_STATE = "run_and_save_rng_state"
_HAS_STATE = "run_with_rng_state"
_HAS_GENERATOR = "graphsafe_run_with_rng_state"
_AROUND_RANDOM = (_KEEPS_STATE, _HAS_STATE, _HAS_GENERATOR)


def is_around_random(node: fx.Node) -> bool:
    """Tell whether `node` calls a random op, attention or other, that backward computes again.

    The partitioner puts such an op, in forward and in backward, inside of another that keeps the
    generator's state, or has it.
    """
    return str(node.target) in _AROUND_RANDOM and isinstance(node.target, HigherOrderOperator)


def call_of(node: fx.Node) -> Call:
    """Return what `node` calls; of a random op that backward computes again, what is inside."""
    if not is_around_random(node):
        return Call(node.target, node.args, node.kwargs)
    target, *args = node.args[1:] if str(node.target) == _HAS_STATE else node.args
    kwargs = dict(node.kwargs)
    if str(node.target) == _HAS_GENERATOR:
        kwargs.pop("rng_state")
    return Call(target, args, kwargs)


def give_value(node: fx.Node) -> None:
    """Give `node`, which is around a random op, the fake value that the partitioner did not."""
    inside = call_of(node)

    def value_of(source: fx.Node) -> Any:
        return source.meta["val"]

    args, kwargs = fx.map_arg((inside.args, dict(inside.kwargs)), value_of)
    with _fake_mode_of(node.graph):  # the op may take no tensor
        value = inside.target(*args, **kwargs)
    if str(node.target) == _KEEPS_STATE:
        states = (user.meta["val"] for user in node.users if user.args[1] == 0)
        value = (next(states), value)
    node.meta["val"] = value


def _fake_mode_of(graph: fx.Graph) -> Any:
    """Return the mode of the fake tensors that `graph` was traced with; there has to be one."""
    leaves = (leaf for node in graph.nodes for leaf in tree_leaves(node.meta.get("val")))
    return next(leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))
