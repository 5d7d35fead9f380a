"""Tokens: what autograd sees of a unit.

Unsharded parameters come and go, several times in one step, but a unit must be reduced
once. So autograd gets, per unit and step, *tokens*: tensors with the shape of the unsharded
parameters and the memory of one element.

    parameters -> _Reduce -> anchor -> _Collect -> tokens -> _Attach -> gathered parameters

`_Attach` ties gathered data to a token, and passes gradients through. However often the
unit is gathered or used, autograd sums the gradients at the token, in the order in which
it would for an unsharded parameter, and runs `_Collect.backward` once, when the last is
in. That only takes them: for as long as it runs autograd holds what it was handed, and
to hold unsharded gradients beside the buffers that they are copied into is the peak of a
step. `_Reduce.backward`, which comes next, reduces.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard import _torch
from autoshard.runtime.eager.unit_steps import steps_of
from autoshard.runtime.unit.param import ShardedParam
from autoshard.runtime.unit.unit import Unit
from autoshard.runtime.unit.unsharded import Lent, Unsharded
from autoshard.runtime.unit.uses import Use

if TYPE_CHECKING:
    from autoshard.runtime.eager.step import Step

Grads = dict[ShardedParam, Tensor | None]
"""Unsharded gradients of all trainable parameters of a unit; None where this rank has none."""


class Tokens:
    """Tokens of `unit`, one for each trainable parameter; their gradients end in `step.reduce`.

    Made, they count as a use of the unit (`Unit.uses`) until autograd's graph is gone.
    lent: unsharded parameters that `parameters()` gives between forward and backward, or None.

    Autograd's graph holds this object, by its `_Attach` nodes, and the step has it only weakly: as
    the graph holds the step, too, they would keep each other alive for ever.
    """

    def __init__(self, step: Step, unit: Unit) -> None:
        """Make tokens of the unit's trainable parameters, of which there is one at least.

        They lead to the parameters in autograd's graph, so gradients must be enabled now, and are
        noted as a use in `Unit.uses`.
        """
        trainable = [param for param in unit.params if param.param.requires_grad]
        grads: Grads = {}
        # Where tokens are: autograd runs a node in the thread of its outputs' device.
        device, params = trainable[0].device, (param.param for param in trainable)
        anchor = _torch.autograd.apply(_Reduce, step, unit, grads, device, *params)
        made = _torch.autograd.apply(_Collect, anchor, unit, trainable, grads)
        self._tokens = dict(zip(trainable, made, strict=True))
        self.use = Use(set(trainable), made[0].grad_fn)
        unit.uses.add(self.use)
        self.lent: Lent | None = None

    def free(self) -> None:
        """Stop lending parameters. Raises RuntimeError if one that was lent was written to."""
        lent, self.lent = self.lent, None
        if lent is not None:
            lent.check_unwritten()

    def will_reduce(self) -> bool:
        """Tell whether the running backward will reduce the unit."""
        first = next(iter(self._tokens.values()))
        return _torch.autograd.will_run(first.grad_fn)

    def attach(self, param: ShardedParam, data: Tensor) -> Tensor:
        """Return `data`, gathered, with its gradient going to the token of `param`."""
        attached: Tensor = _torch.autograd.apply(_Attach, self._tokens[param], data, self)
        return attached


class StepTokens:
    """Tokens of the units that one step has read.

    trained: units that have, or had, tokens.
    """

    def __init__(self) -> None:
        self.trained: set[Unit] = set()
        self._made: dict[Unit, weakref.ref[Tokens]] = {}  # the graph holds them
        self._lends = False  # some of them do

    def made(self, unit: Unit) -> Tokens | None:
        """Return the tokens of `unit`; None if it has none, or their graph is gone."""
        known = self._made.get(unit)
        return None if known is None else known()

    def of(self, unit: Unit, step: Step) -> Tokens:
        """Return the tokens of `unit`, made anew if it has none; their gradients go to `step`."""
        made = self.made(unit)
        if made is None:
            made = Tokens(step, unit)
            self._made[unit] = weakref.ref(made)
            self.trained.add(unit)
        return made

    def lend(self, unit: Unit, whole: Unsharded) -> None:
        """Have `parameters()` give unsharded copies of `unit`'s parameters until backward.

        Waits for the gather of `whole`. Nothing is done for a unit without tokens: none of its
        parameters trains, or is used still.
        """
        tokens = self.made(unit)
        if tokens is not None:
            tokens.lent = Lent(whole)
            steps_of(unit).held.add(tokens)
            self._lends = True

    def lent(self, unit: Unit) -> Lent | None:
        """Return the unsharded parameters that `unit` lends until backward, or None."""
        tokens = self.made(unit) if self._lends else None
        return None if tokens is None else tokens.lent

    def take_back(self) -> None:
        """Stop lending parameters of all units.

        Raises RuntimeError if one that was lent was written to.
        """
        if not self._lends:
            return
        self._lends = False
        for unit in self._made:
            tokens = self.made(unit)
            if tokens is not None:
                tokens.free()

    def abandon(self) -> None:
        """Stop lending parameters, after an exception, whatever was done to them."""
        self._lends = False
        for unit in self._made:
            tokens = self.made(unit)
            if tokens is not None:
                tokens.lent = None


class _Collect(torch.autograd.Function):
    """Autograd function whose forward makes a unit's tokens, and whose backward takes gradients.

    Its backward runs when all of the tokens' gradients are in, and puts them into `grads`.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, unit: Unit, trainable: list[ShardedParam], grads: Grads
    ) -> tuple[Tensor, ...]:
        """Return the tokens of `trainable`: of the unsharded size, with the memory of one element.

        grads: to be filled by backward.
        """
        ctx.trainable, ctx.grads, ctx.device = trainable, grads, anchor.device
        ctx.set_materialize_grads(False)
        members = [(param, unit.gathered_member(param)) for param in trainable]
        return tuple(
            torch.empty((1,) * len(m.size), dtype=m.dtype, device=param.device).expand(m.size)
            for param, m in members
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Put the gradients of the tokens, or None, into the `grads` that forward was given."""
        ctx.grads.update(zip(ctx.trainable, grads, strict=True))
        return torch.empty(0, device=ctx.device), None, None, None


class _Reduce(torch.autograd.Function):
    """Autograd function whose backward reduces the gradients that `_Collect` has taken.

    It returns them, reduced, only to `torch.autograd.grad`. Else autograd gets none, and `.grad` is
    filled once the reduce has been waited for.
    """

    @staticmethod
    def forward(
        ctx: Any, step: Step, unit: Unit, grads: Grads, device: torch.device, *params: Tensor
    ) -> Tensor:
        ctx.step, ctx.unit, ctx.grads = step, unit, grads
        return torch.empty(0, device=device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _anchor: Tensor) -> tuple[Any, ...]:
        """Reduce the gradients that `_Collect` has taken, whose dict is emptied.

        For `torch.autograd.grad` it waits, and returns this rank's part as DTensors, None for
        parameters that were not asked for or have a gradient on no rank. Else it launches
        (`Step.reduce`, which may wait, and raises), and returns None for each parameter.
        """
        leaves, trainable = [node for node, _ in ctx.next_functions], list(ctx.grads)
        returned = _select(trainable, map(_torch.autograd.returns_gradient, leaves))
        if returned:  # torch.autograd.grad(): `.grad` is none of its business
            parts = ctx.step.reduce_now(ctx.unit, ctx.grads, returned)
            handed_out = (p.grad_from(parts[p]) if p in parts else None for p in trainable)
            return None, None, None, None, *handed_out
        wanted = _select(trainable, map(_torch.autograd.accumulates_gradient, leaves))
        ctx.step.reduce(ctx.unit, ctx.grads, wanted)
        return (None,) * (4 + len(trainable))


def _select(params: list[ShardedParam], chosen: Iterable[bool]) -> set[ShardedParam]:
    return {param for param, is_chosen in zip(params, chosen, strict=True) if is_chosen}


class _Attach(torch.autograd.Function):
    """Autograd function that gives the gathered data, with its gradient going to the token."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, data: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens = tokens
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None
