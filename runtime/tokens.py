"""What autograd sees of a unit.

Whole parameters come and go, several times in one step, but a unit must be reduced
once. So autograd gets, per unit and step, one `_ReduceUnit` node whose outputs are
*tokens*: tensors with the shape of the whole parameters and the memory of one
element. Each gathered parameter is tied to its token by `_Attach`, which passes
gradients through. However often the unit is gathered or used, autograd sums the
gradients at the token, in the order in which it would for an unsharded parameter,
and runs `_ReduceUnit.backward` once, when the last is in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard import _torch
from autoshard.runtime.param import ShardedParam
from autoshard.runtime.unit import Unit

if TYPE_CHECKING:
    from autoshard.runtime.step import Step


class Tokens:
    """One token for each trainable parameter of `unit`; their gradients end in `step.reduce`.

    The graph holds them, by the nodes that attach to them, and the step only weakly: it is
    held by the graph itself, and the two would keep each other alive for ever.
    """

    def __init__(self, step: Step, unit: Unit) -> None:
        trainable = [param for param in unit.params if param.param.requires_grad]
        made = _torch.apply(_ReduceUnit, step, unit, trainable, *(p.param for p in trainable))
        self._tokens = dict(zip(trainable, made, strict=True))

    def attach(self, param: ShardedParam, data: Tensor) -> Tensor:
        """`data`, gathered, whose gradient goes to the token of `param`."""
        attached: Tensor = _torch.apply(_Attach, self._tokens[param], data, self)
        return attached


class _ReduceUnit(torch.autograd.Function):
    """Forward makes a unit's tokens; backward, run when all their gradients are in, reduces."""

    @staticmethod
    def forward(
        ctx: Any, step: Step, unit: Unit, trainable: list[ShardedParam], *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.unit, ctx.trainable = step, unit, trainable
        ctx.set_materialize_grads(False)
        members = [(param, unit.gathered_member(param)) for param in trainable]
        return tuple(
            torch.empty((1,) * len(m.size), dtype=m.dtype, device=param.device).expand(m.size)
            for param, m in members
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        whole = dict(zip(ctx.trainable, grads, strict=True))
        leaves = [node for node, _ in ctx.next_functions]
        returned = _select(ctx.trainable, map(_torch.returns_gradient, leaves))
        if returned:  # torch.autograd.grad(): `.grad` is none of its business
            parts = ctx.step.reduce_now(ctx.unit, whole, returned)
            handed_out = (p.grad_from(parts[p]) if p in parts else None for p in ctx.trainable)
            return None, None, None, *handed_out
        wanted = _select(ctx.trainable, map(_torch.accumulates_gradient, leaves))
        ctx.step.reduce(ctx.unit, whole, wanted)
        return (None,) * (3 + len(grads))


def _select(params: list[ShardedParam], chosen: Iterable[bool]) -> set[ShardedParam]:
    return {param for param, is_chosen in zip(params, chosen, strict=True) if is_chosen}


class _Attach(torch.autograd.Function):
    """The gathered data, with its gradient going to the token."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, data: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens = tokens
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None
