"""Reads outside of a forward that give unsharded parameters: after `unshard()`, before backward."""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.runtime.eager.step import Step, open_step
from autoshard.runtime.eager.unit_steps import steps_of
from autoshard.runtime.unit.param import ShardedParam, lend
from autoshard.runtime.unit.unsharded import is_kept, keep


def read_unsharded(param: ShardedParam) -> Tensor:
    """Return the unsharded parameter, outside of forward, between `unshard()` and `reshard()`.

    Waits for its unit's gather, which is launched here if the unit keeps nothing, or shards were
    written to since. Gradients, if enabled now, go to the unit's reduce. Reads share a step, which
    is made anew when grad mode has changed.
    """
    unit = param.unit
    kept = keep(unit)
    step = steps_of(unit).reading
    if step is None or step.has_grad != torch.is_grad_enabled():
        step = steps_of(unit).reading = Step(unit)
    return step.attach(param, kept.tensors()[param])


def registered(param: ShardedParam) -> Tensor:
    """Return what `parameters()` gives for `param`: itself, or its unsharded copy if there is one.

    There is one from `unshard()` to `reshard()`, the next backward or a write to shards, and, if
    its unit lends (`Unit.lends`), from a forward to its backward. Gradients of a copy go to the
    unit's reduce; the step of an optimizer that holds one raises (`lend`). Inside a forward or a
    backward the parameter itself is given; likewise one that has a gradient, as code that clips
    gradients, or looks at them, is to find it. Waits for a gather that `unshard(async_op=True)`
    has launched. From `unshard()` to `reshard()` a unit does not lend.
    """
    unit = param.unit
    if open_step() is not None or _torch.autograd.in_backward() or param.param.grad is not None:
        return param.param
    if unit.is_unsharded_by_user:
        is_there = unit.shows_unsharded and is_kept(unit)
        return lend(param, read_unsharded(param)) if is_there else param.param
    step = steps_of(unit).last_step
    lent = None if step is None else step.tokens.lent(unit)
    if step is None or lent is None:
        return param.param
    return lend(param, step.attach(param, lent.tensors[param]))
