"""Optimizer states in checkpoints.

torch makes room for an optimizer's state by a step with gradients of 0. AdamW counts that step, and
momentum gets its share of weight decay: an optimizer that is saved before its first step, or loaded
in vain, would train otherwise than one that is not. Here a stand-in takes that step, for parameters
of 0, and what is missing stays missing: parameters that were never used have no state.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from autoshard import _torch
from autoshard.runtime.eager import access
from autoshard.runtime.training import loaded_states
from autoshard.runtime.training.checkpoint.reader import new_tensor

Group = Mapping[str, Any]
"""Group of an optimizer's `param_groups`, with names for its "params"."""

_OTHER_TYPE = "give an optimizer of the type that was saved, or load the model alone"


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, known: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return "state" and "param_groups" as torch's `get_optimizer_state_dict`, by parameter names.

    A parameter without state, as before the first step, has no entry in "state". Tensors are the
    optimizer's own, not copies. Raises ValueError if `optimizer` trains what is no parameter of
    `model`.

    known: names in checkpoints, by those in `model`, which are not looked up again; new ones are
        added.
    """
    names, own = _names(model, optimizer, {} if known is None else known), optimizer.state_dict()
    flat = [name for each in names for name in each]
    groups = zip(own["param_groups"], names, strict=True)
    return {
        "state": {flat[number]: values for number, values in own["state"].items()},
        "param_groups": [{**group, "params": each} for group, each in groups],
    }


def room_for(
    model: nn.Module, optimizer: torch.optim.Optimizer, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Make room to read a saved state into: like `state_of`, with state where some was saved.

    A parameter's own state is taken, to be overwritten, or else `_new_state`; for LBFGS, whose
    states have lists that grow, `_state_as_saved`.

    known: metadata of what a checkpoint has below "optimizer", by key.
    Raises ValueError if a saved state lacks a key that this optimizer has, as that of another type.
    """
    loaded_states.watch(optimizer)  # what is loaded may be for the host
    room, there = state_of(model, optimizer), _beginnings(known)
    saved: dict[str, dict[str, Any]] = {}
    for group, its in zip(optimizer.param_groups, room["param_groups"], strict=True):
        for param, name in zip(group["params"], its["params"], strict=True):
            if f"state.{name}" in there:
                if isinstance(optimizer, torch.optim.LBFGS):
                    values: Mapping[str, Any] = _state_as_saved(known, f"state.{name}.", param)
                else:
                    values = room["state"].get(name)
                    values = values or loaded_states.where_it_lives(
                        param, _new_state(optimizer, group, param)
                    )
                saved[name] = dict(values)
    for name, values in saved.items():
        for key in values:
            if f"state.{name}.{key}" not in there:
                raise ValueError(
                    f"there is no {key!r} in the optimizer's state of {name!r}: {_OTHER_TYPE}"
                )
    return {**room, "state": saved}


def match_groups(groups: Sequence[Group], saved: Sequence[Group]) -> list[dict[str, Any]]:
    """Return `groups`, each with the values of the group in `saved` that has its parameters.

    "params" stay, and a group of which no parameter was saved keeps its own values. The dicts are
    new; tensors are moved to the device of the group's own.
    Raises ValueError if the parameters of a group are from several of `saved`, or those of one of
    `saved` are in several groups, or if a value is missing.
    """
    of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    found = [{of[name] for name in group["params"] if name in of} for group in groups]
    numbers = [number for each in found for number in each]
    if any(len(each) > 1 for each in found) or len(set(numbers)) < len(numbers):
        raise ValueError(
            "the optimizer's parameters are grouped otherwise: groups of "
            f"{[len(group['params']) for group in saved]} there, and of "
            f"{[len(group['params']) for group in groups]} here: group them as they were, or load "
            "the model alone"
        )
    matched = []
    for group, number in zip(groups, found, strict=True):
        values = saved[number.pop()] if number else group
        missing = sorted(group.keys() - values.keys())
        if missing:
            raise ValueError(f"there is no {missing[0]!r} in the optimizer's groups: {_OTHER_TYPE}")
        moved = {key: _where(value, group.get(key)) for key, value in values.items()}
        matched.append({**moved, "params": group["params"]})
    return matched


def _where(value: Any, own: Any) -> Any:
    """Move `value` to the device of `own` if both are tensors, as a learning rate may be."""
    both = isinstance(value, Tensor) and isinstance(own, Tensor)
    return value.to(own.device) if both else value


def load_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load `state`, which `room_for` made, with groups of `match_groups`, into `optimizer`.

    Names become the optimizer's numbers, for its `load_state_dict()`, which may copy and cast.
    """
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: at for at, name in enumerate(names)}
    optimizer.load_state_dict(
        {
            "state": {number[name]: values for name, values in state["state"].items()},
            "param_groups": [
                {**group, "params": [number[name] for name in group["params"]]}
                for group in state["param_groups"]
            ],
        }
    )


def _names(
    model: nn.Module, optimizer: torch.optim.Optimizer, known: dict[str, str]
) -> list[list[str]]:
    """List, for each of the optimizer's groups, the names of its parameters in checkpoints.

    known: as of `state_of`. Raises ValueError for a parameter that is none of the model's.
    """
    own: dict[Tensor, str] = {param: name for name, param in access.named_sharded(model)}

    def name_of(param: Tensor) -> str:
        """Return the name of `param` in checkpoints; raise ValueError if the model lacks it."""
        if param not in own:
            raise ValueError(
                f"the optimizer trains a parameter of shape {tuple(param.shape)} that is none of "
                "the model's: give the model that has all of them, outside of full_params()"
            )
        return _torch.checkpoint.name_of(model, own[param], known)

    return [[name_of(param) for param in group["params"]] for group in optimizer.param_groups]


def _new_state(optimizer: torch.optim.Optimizer, group: Group, param: Tensor) -> Mapping[str, Any]:
    """Return the state that a step of `optimizer` makes for a parameter of zeros like `param`.

    Its gradient is of zeros, too. A stand-in takes the step: `optimizer` and `param` stay as they
    are, and the optimizer's own hooks on steps do not run.

    group: of `param_groups`, that `param` is in.
    """
    like = nn.Parameter(torch.zeros_like(param), requires_grad=param.requires_grad)
    like.grad = torch.zeros_like(like)
    stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__ = {
        **optimizer.__dict__,
        **{hooks: OrderedDict() for hooks in _torch.nn.STEP_HOOKS},
        "param_groups": [{**group, "params": [like]}],
        "state": defaultdict(dict),
    }
    type(optimizer).step(stand_in)  # a schedule may have put another `step` on the optimizer itself
    found: Mapping[str, Any] = stand_in.state[like]
    return found


def _state_as_saved(known: Mapping[str, Any], prefix: str, param: Tensor) -> dict[str, Any]:
    """Make room for what a checkpoint has of an LBFGS: counts, tensors, and lists of them.

    Each rank has its tensors whole, as it computes with all parameters in a row.

    known: as of `room_for`. prefix: of the keys of `param`, with which the others are, too.
    """
    room: dict[str, Any] = {"func_evals": None, "n_iter": None}  # others have none of these
    lists: dict[str, dict[int, Any]] = defaultdict(dict)
    for key, kind in known.items():
        if not key.startswith(prefix):
            continue
        value = _whole(kind, param) if isinstance(kind, TensorStorageMetadata) else None
        name, _, number = key.removeprefix(prefix).partition(".")
        if number:
            lists[name][int(number)] = value
        else:
            room[name] = value
    return room | {name: [each[at] for at in sorted(each)] for name, each in lists.items()}


def _whole(saved: TensorStorageMetadata, like: Tensor) -> Tensor:
    """Make a tensor to read a saved one into, where `like` is, and on its mesh if it has one."""
    made = new_tensor(saved).to(like.device)
    if not isinstance(like, DTensor):
        return made
    mesh = like.device_mesh
    return DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _beginnings(keys: Iterable[str]) -> set[str]:
    """Find all prefixes of dotted `keys`: of "state.w.step" it, "state.w" and "state"."""
    parts = [key.split(".") for key in keys]
    return {".".join(each[:end]) for each in parts for end in range(1, len(each) + 1)}
