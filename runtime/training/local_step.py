"""Optimizer steps on shards as plain tensors.

An op on a DTensor takes tens of microseconds of Python, and AdamW has a dozen for each parameter:
more than the arithmetic, for most of them. Optimizers that update each element by itself do the
same to the shard alone. So their step is run on a stand-in, a copy of the optimizer:

    param_groups    shards, with their gradients, for sharded parameters
    state           the same dicts, seen with shards for DTensors; what is put there
                    becomes a DTensor in the optimizer's own state at once

The optimizer itself is not touched: an error in the middle of a step leaves nothing to mend.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.unit.param import ShardedParam, find

BY_ELEMENT = frozenset(
    {
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.ASGD,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""Optimizers of torch whose update of an element depends on no other element of the parameter.

Classes derived from them are not among these: they may do anything."""

Group = dict[str, Any]
"""Group of an optimizer's `param_groups`."""

STEP = "step"
"""Key of the state in which torch's optimizers count steps, never cut as a scalar parameter is."""


def stand_in_of(optimizer: optim.Optimizer) -> optim.Optimizer | None:
    """Make a copy of `optimizer` whose step updates shards as plain tensors, the same and faster.

    No step is taken here. In its groups, shards with their gradients stand for sharded parameters,
    where that is possible. Its state is seen with shards for DTensors, and what the step puts there
    gets into the state of `optimizer` at once, which itself stays as it is.

    Returns None, for a step on `optimizer` itself, if its type is not in BY_ELEMENT, if it is
    differentiable, or if the step is compiled.
    """
    if not takes_shards(optimizer) or torch.compiler.is_compiling():
        return None
    return stand_in_for(optimizer, optimizer.param_groups, optimizer.state)


def takes_shards(optimizer: optim.Optimizer) -> bool:
    """Tell whether `optimizer` updates shards as it does DTensors."""
    is_differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    return type(optimizer) in BY_ELEMENT and not is_differentiable


def stand_in_for(
    optimizer: optim.Optimizer, groups: Iterable[Group], own: MutableMapping[Tensor, Any]
) -> optim.Optimizer:
    """Make a copy of `optimizer` that steps `groups` in place of its own; see `stand_in_of`.

    It updates DTensors if `optimizer` does not take shards.
    own: state of their parameters.
    """
    state: MutableMapping[Tensor, Any] = own
    if takes_shards(optimizer):
        state = shards = _States(own)
        groups = [
            {**group, "params": [_plain(param, own, shards) for param in group["params"]]}
            for group in groups
        ]
    made: optim.Optimizer = object.__new__(type(optimizer))
    made.__dict__ = {**optimizer.__dict__, "param_groups": list(groups), "state": state}
    return made


def _plain(param: Tensor, own: MutableMapping[Tensor, Any], state: _States) -> Tensor:
    """Return a plain tensor in the memory of `param`'s shard, with its gradient, or `param` itself.

    It is `param` if that is not sharded, if its gradient is none or no DTensor, if the placements
    of the gradient or of a DTensor in its state are others than its own, or if the gradient's dtype
    or device differs. Else the new tensor gets its own entry in `state`.

    own: the optimizer's own state, by parameter.
    """
    sharded, grad = find(param), param.grad
    if sharded is None or not isinstance(grad, DTensor):
        return param
    known = own.get(param, {})
    alike = (grad, *(value for value in known.values() if isinstance(value, DTensor)))
    if any(each.placements != sharded.layout.placements for each in alike):
        return param
    # Another tensor of that memory: its gradient is let go of with it.
    shard, shard_grad = sharded.shard.detach(), _torch.dtensor.local_tensor(grad)
    if (shard_grad.dtype, shard_grad.device) != (shard.dtype, shard.device):
        return param
    shard.grad = shard_grad
    state.add(shard, param, sharded)
    return shard


class _States(dict[Tensor, Any]):
    """Stand-in for an optimizer's `state`: by shard, or by parameter if that is stepped itself.

    The latter's state is the optimizer's own, and made there if there is none.
    """

    def __init__(self, own: MutableMapping[Tensor, Any]) -> None:
        super().__init__()
        self._own = own

    def add(self, shard: Tensor, param: Tensor, sharded: ShardedParam) -> None:
        """Have `shard` find the state of `param`, with shards for DTensors."""
        self[shard] = _State(self._own, param, sharded)

    def __missing__(self, param: Tensor) -> Any:
        self[param] = found = self._own[param]  # it makes one where there is none
        return found


class _State(dict[str, Any]):
    """Copy of one parameter's state, with shards for DTensors.

    What is set by `state[key] = value` goes to the optimizer's own state at once: a tensor of the
    shard's size as a DTensor, other values, and the count of steps, as they are.
    """

    def __init__(
        self, states: MutableMapping[Tensor, Any], param: Tensor, sharded: ShardedParam
    ) -> None:
        """Copy the state of `param` in `states`, with shards for DTensors; empty if there is none.

        states: the optimizer's own `state`.
        """
        super().__init__(
            (key, _torch.dtensor.local_tensor(value) if isinstance(value, DTensor) else value)
            for key, value in states.get(param, {}).items()
        )
        self._states, self._param, self._sharded = states, param, sharded

    def __setitem__(self, key: str, value: Any) -> None:
        """Set `value` here and in the optimizer's own state, there as a DTensor if shard-sized.

        The count of steps, and what is no tensor, is set there as it is.
        """
        super().__setitem__(key, value)
        is_tensor = isinstance(value, Tensor) and key != STEP
        is_cut = is_tensor and value.shape == self._sharded.shard.shape
        self._states[self._param][key] = self._sharded.grad_from(value) if is_cut else value
