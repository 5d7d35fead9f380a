"""Plan of what each rank writes of a checkpoint, and copies of that, for asynchronous saves.

torch has ranks plan each save together: each lists what it has, rank 0 settles who writes what
several have, and makes the index. Here the plan is kept: while names, sizes and layouts are those
of the save before, on all ranks, nothing is sent. So is the memory of the copies.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.comm.flat_shard import FlatDTensor
from autoshard.runtime.training.checkpoint.on_ranks import (
    gathered,
    num_ranks,
    on_each_rank,
    on_first_rank,
    scattered,
    this_rank,
)
from autoshard.runtime.training.checkpoint.rank_state import RANKS


@dataclass(frozen=True)
class Plan:
    """Plan of the saves of one model and optimizer, without the ranks' own states.

    part:  what this rank writes.
    index: of what all ranks write, on rank 0; None on others.
    """

    part: SavePlan
    index: Metadata | None


@dataclass
class Kept:
    """Memory of a model's saves, for the next one.

    names:     in checkpoints, by those in the model.
    plan:      of states that have `signature`; None before the first.
    whose:     names in the folder to write to (`folder_aside`), as rank 0 has told.
    copies:    memory of the copies, by name.
    """

    names: dict[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    signature: list[Any] = field(default_factory=list)
    whose: str = ""
    copies: dict[str, Tensor] = field(default_factory=dict)


_kept: weakref.WeakKeyDictionary[nn.Module, Kept] = weakref.WeakKeyDictionary()


def kept_of(model: nn.Module) -> Kept:
    """Return what is kept of the saves of `model`; nothing is before the first."""
    return _kept.setdefault(model, Kept())


def flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is in `state`, of `unchecked_state_of`, by dotted names as torch's planner does.

    torch looks into each value twice, which takes longer than all else.
    """
    found, rest = {}, {key: dict(value) for key, value in state.items()}
    parts = [("model", rest["model"])]
    of_params = rest.get("optimizer", {}).pop("state", {})
    parts += [(f"optimizer.state.{name}", dict(values)) for name, values in of_params.items()]
    for prefix, part in parts:
        for name in [name for name, value in part.items() if isinstance(value, Tensor)]:
            found[f"{prefix}.{name}"] = part.pop(name)
    others = {
        name: values for (_, values), name in zip(parts[1:], of_params, strict=True) if values
    }
    if others:
        rest["optimizer"]["state"] = others
    return found | dict(planner_of(rest).state_dict)


def planner_of(state: Mapping[str, Any]) -> DefaultSavePlanner:
    """Return a planner of `state`, which it has by dotted names as its `state_dict`."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=this_rank() == 0)
    return planner


def signature_of(state: Mapping[str, Any]) -> list[Any]:
    """Describe all in `state` that a plan depends on, which is not its values.

    state: by dotted names. Meshes in it are kept, as they are compared by identity first.
    """
    return [this_rank(), num_ranks(), *((name, *_kind(value)) for name, value in state.items())]


def _kind(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        return ()
    layout = (value.placements, value.device_mesh) if isinstance(value, DTensor) else ()
    return (value.shape, value.dtype, value.requires_grad, *layout)


def plan_together(state: Mapping[str, Any], whose: str, what: str) -> tuple[Plan, str]:
    """Plan a save of `state`; all ranks call this, and wait for each other.

    whose: of `Kept`, on rank 0, which is returned on all. what: what is done, for errors.
    Raises CheckpointError on all ranks if one of them can't plan its part, or rank 0 not all of it.
    """
    planner = planner_of(state)
    parts = gathered(on_each_rank(planner.create_local_plan, what))
    planned: list[tuple[list[SavePlan], Metadata]] = []

    def plan_all() -> str:
        """Plan all parts, as rank 0."""
        assert parts is not None
        all_parts, index = planner.create_global_plan(parts)
        planned.append((FileSystemWriter("").prepare_global_plan(all_parts), index))
        return whose

    whose = on_first_rank(plan_all, what)
    all_parts, index = planned[0] if planned else ([], None)
    return Plan(scattered(all_parts), index), whose


def own_plan(rank: str, own: Tensor) -> SavePlan:
    """Plan the writing of the `own` state of `rank`, whose size differs from save to save."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({RANKS: {rank: own}})
    return planner.create_local_plan()


def whole_index(index: Metadata, own: list[SavePlan]) -> Metadata:
    """Return `index` with each rank's own state in it, of which `own` are the plans."""
    (_, of_own), paths = DefaultSavePlanner().create_global_plan(own), {}
    for each in own:
        paths.update(each.planner_data)
    return dataclasses.replace(
        index,
        state_dict_metadata={**index.state_dict_metadata, **of_own.state_dict_metadata},
        planner_data={**index.planner_data, **paths},
    )


class Copies(DefaultSavePlanner):
    """Copies of what this rank writes, which torch's writer asks for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Take `values`, by name: tensors on the CPU, and objects."""
        super().__init__()
        self.state_dict = dict(values)

    def lookup_object(self, index: Any) -> Any:
        """Return the copy of what `index` names: of a flat tensor, of the box there."""
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, FlatDTensor) else value


def copied(state: Mapping[str, Any], part: SavePlan, into: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy the tensors of `state` that `part` has to the CPU, wait for that, and return them.

    state: by dotted names.
    into:  copies of the save before, which are overwritten where they fit; it has these, then.
    """
    names = (item.index.fqn for item in part.items)
    with torch.no_grad():
        tensors = {name: _local(state[name]) for name in names if isinstance(state[name], Tensor)}
        copies = {name: _copy(tensor, into.get(name)) for name, tensor in tensors.items()}
    for device in {tensor.device for tensor in tensors.values()} - {torch.device("cpu")}:
        torch.accelerator.current_stream(device).synchronize()  # not run on a GPU yet
    into.clear()
    into.update(copies)
    return {name: _like(state[name], copy) for name, copy in copies.items()}


def _like(tensor: Tensor, copy: Tensor) -> Tensor:
    """Return `copy`, of the local part of `tensor`; as a flat tensor if that is one."""
    if not isinstance(tensor, FlatDTensor):
        return copy
    return _torch.dtensor.make(FlatDTensor, copy, _torch.dtensor.spec_of(tensor))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy(tensor: Tensor, before: Tensor | None) -> Tensor:
    """Begin to copy `tensor` to the CPU, into `before` if that is like it; return the copy.

    From a device it is copied to pinned memory, beside what else the host does.
    """
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
    if before is None or (before.shape, before.stride(), before.dtype) != (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    ):
        pinned = tensor.device.type != "cpu"
        before = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    return before.copy_(tensor, non_blocking=True)
