"""State of the model and of the optimizer: what is saved, and room to read it into."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.eager import access
from autoshard.runtime.training.checkpoint import optimizer_state
from autoshard.runtime.training.checkpoint.objects import to_bytes, to_plain
from autoshard.runtime.training.checkpoint.reader import new_tensor

Buffers = dict[str, Tensor]

OBJECTS = "the optimizer's groups, or the model's extra state,"  # in errors
_MODEL, _OPTIMIZER = "model.", "optimizer."  # keys begin so
_GROUPS = f"{_OPTIMIZER}param_groups."


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the state to save: {"model": ...}, and "optimizer" if there is one, by names.

    Sharded tensors are DTensors, and all tensors are those in use, not copies. Nothing is gathered.
    NumPy's numbers in it become Python's. Raises ValueError for objects that could not be loaded as
    weights only, or as `unchecked_state_of`.
    """
    state: dict[str, Any] = to_plain(unchecked_state_of(model, optimizer, {}))
    objects = [leaf for leaf in _torch.tensors.tree_leaves(state) if not isinstance(leaf, Tensor)]
    to_bytes(objects, OBJECTS)
    return state


def unchecked_state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, names: dict[str, str]
) -> dict[str, Any]:
    """Return what `state_of` does, with objects as they are; names that are known are not sought.

    names: those in checkpoints, by those in `model`; new ones are added.
    Raises ValueError for a tensor of the model that nothing can be read into, as elements of it
    share memory, or as `optimizer_state.state_of`.
    """
    with quiet():
        state: dict[str, Any] = {"model": _torch.checkpoint.state_of(model, names)}
        for name, value in state["model"].items():
            if isinstance(value, Tensor) and _shares_elements(value):
                raise ValueError(
                    f"{name!r} could not be loaded: elements of it share memory, as of an expanded "
                    "tensor: register its clone()"
                )
        if optimizer is not None:
            state["optimizer"] = optimizer_state.state_of(model, optimizer, names)
    return state


def room_for(
    known: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Make room to read a checkpoint into: {"model": ..., "optimizer": {"state": ...}}.

    Tensors of the model, and those that the optimizer has, are the ones in use: reading overwrites
    them. "optimizer" also has the optimizer's own "param_groups", which are not read into; without
    an `optimizer` it has no "param_groups" and no state.

    known: metadata of what is saved, by key.
    Raises ValueError where names or sizes of the model differ, if there is an `optimizer` and none
    was saved, or as `optimizer_state.room_for`.
    """
    with quiet():
        state = get_model_state_dict(model)
        _check_fits(known, state)
        room: dict[str, Any] = {"model": state, "optimizer": {"state": {}}}
        if optimizer is not None:
            below = {
                key.removeprefix(_OPTIMIZER): kind
                for key, kind in known.items()
                if key.startswith(_OPTIMIZER)
            }
            if not below:
                raise ValueError("there is no optimizer's state: load the model alone")
            room["optimizer"] = optimizer_state.room_for(model, optimizer, below)
    return room


def rounded(known: Mapping[str, Any], room: Mapping[str, Any]) -> str:
    """Describe which tensors of the model can't have all that was saved of them; "" if none.

    known: metadata of what is saved, by key. room: as `room_for` made it.
    """
    found = []
    for name, value in room["model"].items():
        saved = known.get(_MODEL + name)
        if isinstance(value, Tensor) and isinstance(saved, TensorStorageMetadata):
            there, here = saved.properties.dtype, value.dtype
            if torch.promote_types(there, here) != here:
                found.append(f"{name!r} in {there}, and the model has it in {here}")
    more = f" ({len(found)} such tensors)" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else ""


def saved_buffers(state: Mapping[str, Any], model: nn.Module) -> Buffers:
    """Return those tensors of the model in `state` that are its buffers, on the CPU, by name."""
    places = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    return {
        name: value.detach().cpu()
        for name, value in state["model"].items()
        if isinstance(value, Tensor)
        and not isinstance(value, DTensor)
        and value.untyped_storage().data_ptr() in places
    }


def digests(buffers: Buffers) -> tuple[int, int]:
    """Return numbers whose lowest of all ranks tell, in `own_buffers`, if all have these values."""
    said = hashlib.sha256()
    for value in buffers.values():
        said.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    number = int.from_bytes(said.digest()[:7])
    return number, -number


def own_buffers(buffers: Buffers, lowest: Sequence[int]) -> Buffers:
    """Return `buffers` if ranks have different ones, and none if all have the same.

    Running statistics are each rank's own, where nothing synchronises them.

    lowest: of all ranks' `digests`.
    """
    return buffers if lowest[0] < -lowest[1] else {}


def load_own_buffers(own: Mapping[str, Tensor], room: Mapping[str, Any]) -> None:
    """Put this rank's own buffers into `room`, which the others' were read into."""
    for name, value in own.items():
        room["model"][name].copy_(value)


def room_for_groups(known: Mapping[str, Any]) -> dict[str, Any]:
    """Make room to read the saved optimizer's groups into: a tensor or None by key.

    known: metadata of all that is saved, by key.
    """
    return {
        key: new_tensor(kind) if isinstance(kind, TensorStorageMetadata) else None
        for key, kind in known.items()
        if key.startswith(_GROUPS)
    }


def match_groups(room: dict[str, Any], rest: Mapping[str, Any]) -> None:
    """Replace the optimizer's groups in `room` by the saved ones in `rest` with their parameters.

    Does nothing if `room` was made without an optimizer. Raises ValueError if groups don't match.

    room: as `room_for` made it.
    rest: what was read, by key, the groups among it.
    """
    if "param_groups" not in room["optimizer"]:
        return
    groups: dict[int, dict[str, Any]] = defaultdict(dict)
    for key, value in rest.items():
        if key.startswith(_GROUPS):
            number, name = key.removeprefix(_GROUPS).split(".", 1)
            groups[int(number)][name] = value
    room["optimizer"]["param_groups"] = optimizer_state.match_groups(
        room["optimizer"]["param_groups"], [groups[number] for number in sorted(groups)]
    )


def load_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, room: Mapping[str, Any]
) -> None:
    """Load what was read into `room` into the model, and into the optimizer unless it is None.

    room: as `room_for` made it, with groups by `match_groups`.
    """
    with quiet():
        set_model_state_dict(model, room["model"])
    if optimizer is not None:
        optimizer_state.load_state(optimizer, room["optimizer"])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context that ignores warnings, and in which `named_parameters()` gives no unsharded copies.

    FutureWarnings and UserWarnings are ignored, in the whole process: torch warns of its own
    deprecated calls. It would find copies after `unshard()`, and between forward and backward.
    """
    with warnings.catch_warnings(), access.as_sharded():
        warnings.simplefilter("ignore", category=FutureWarning)
        warnings.simplefilter("ignore", category=UserWarning)
        yield


def _shares_elements(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided:
        return False
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sides)


def _check_fits(known: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise ValueError unless the saved model has the names and sizes of `state`, and no others.

    Dtypes are not compared.

    known: metadata of what is saved, by key. Objects in `state`, as extra state, may differ.
    """
    tensors = {
        key.removeprefix(_MODEL): kind
        for key, kind in known.items()
        if key.startswith(_MODEL) and isinstance(kind, TensorStorageMetadata)
    }
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        found = tensors.get(name)
        if found is None:
            raise ValueError(
                f"there is no parameter or buffer {name!r}, but {list(tensors)[:8]}: it is of "
                "another model"
            )
        if found.size != value.size():
            raise ValueError(
                f"{name!r} has size {list(found.size)} there, and {list(value.size())} in the "
                "model: it is of another model"
            )
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    for name in sorted(tensors.keys() - state.keys()):
        if not any(name.startswith(f"{other}.") for other in others):
            raise ValueError(f"there is {name!r}, which the model has not: it is of another model")
