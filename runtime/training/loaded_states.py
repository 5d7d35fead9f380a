"""State dicts of optimizers whose states live on the host: what is loaded stays there.

`load_state_dict()` moves states to where parameters are, and a state dict has the optimizer's own
dicts. Hooks of torch's optimizers change both: tensors for the host are held back from loading, and
put in their places after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.training.host_states import (
    BY_PARAMETER,
    HostState,
    move_to_host,
    params_from_host,
    room_for,
    shards_in,
)
from autoshard.runtime.unit.param import find


def move_loaded(optimizer: optim.Optimizer) -> None:
    """Move states that are to live on the host, and don't, as they were loaded before a first step.

    Those of an optimizer that is not known to update parameters one by one stay.
    """
    if type(optimizer) not in BY_PARAMETER:
        return
    near = [
        sharded
        for param, sharded in params_from_host(optimizer).items()
        if optimizer.state.get(param) and not isinstance(optimizer.state[param], HostState)
    ]
    if near:
        watch(optimizer)
        move_to_host(optimizer, near)


def where_it_lives(param: Tensor, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a new state of `param` to load into: on the host, not copied, if it lives there."""
    sharded = find(param)
    if sharded is None or sharded.states_offload is None:
        return state
    moved = dict(state)
    for key, local in shards_in(moved, sharded):
        moved[key] = sharded.grad_from(room_for(local, sharded))
    return moved


@dataclass(frozen=True)
class _Held:
    """Tensor of a state that is loaded, which `load_state_dict()` would move to the device."""

    value: DTensor


_watched: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()


def watch(optimizer: optim.Optimizer) -> None:
    """Have state dicts of `optimizer` made of plain dicts, and what is loaded stay on the host.

    Hooks of the user's see neither, but for those before loading that are registered later.
    """
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_state_dict_post_hook(_with_plain_dicts, prepend=True)
        optimizer.register_load_state_dict_pre_hook(_hold)
        optimizer.register_load_state_dict_post_hook(_take_held, prepend=True)


def _with_plain_dicts(optimizer: optim.Optimizer, made: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with a dict for each state that lies on the host."""
    states = {
        key: dict(state) if isinstance(state, HostState) else state
        for key, state in made["state"].items()
    }
    return {**made, "state": states}


def _hold(optimizer: optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict in which tensors that stay on the host are `_Held`."""
    numbers = (number for group in given["param_groups"] for number in group["params"])
    params = (param for group in optimizer.param_groups for param in group["params"])
    states, mine = dict(given["state"]), params_from_host(optimizer)
    for number, param in zip(numbers, params, strict=False):
        if param in mine and number in states:
            values = dict(states[number])
            for key, _ in shards_in(values, mine[param]):
                values[key] = _Held(values[key])
            states[number] = values
    return {**given, "state": states}


def _take_held(optimizer: optim.Optimizer) -> None:
    """Put what was held back into states of `optimizer`, in the dtypes of parameters."""
    for param, sharded in params_from_host(optimizer).items():
        values = optimizer.state.get(param)
        if values and any(isinstance(each, _Held) for each in values.values()):
            state = optimizer.state[param] = HostState()
            for key, value in values.items():
                if isinstance(value, _Held):
                    local = _torch.dtensor.local_tensor(value.value)
                    value = sharded.grad_from(local.to("cpu", param.dtype))
                state[key] = value
