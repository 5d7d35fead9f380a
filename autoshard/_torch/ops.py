"""Operators: their classes, their schemas, and wrappers around them in graphs.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._higher_order_ops.effects import with_effects as with_effects
from torch._higher_order_ops.print import Print as Print
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload

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
