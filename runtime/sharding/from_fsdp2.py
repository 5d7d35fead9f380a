"""Models that torch's `fully_shard` (FSDP2) has sharded, and that are compiled with autoshard.

Each unit becomes one of ours, with the settings that FSDP2 was told and the shards that are there:
both cut rows alike, so that nothing is copied or sent. Optimizers train the same shards.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from autoshard import _torch
from autoshard.errors import UnsupportedError
from autoshard.runtime.eager import access
from autoshard.runtime.sharding.shard import fully_shard, said_otherwise
from autoshard.runtime.training.optimizers import live_optimizers, move_to_shards
from autoshard.runtime.unit.param import ShardedParam, find


@torch.no_grad()
def convert(model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Convert all units of FSDP2 in `model` to ours, in place; tell whether there were any.

    All ranks call this together. Optimizers are moved over, with their state.

    arguments: of `shard()`, which should have its defaults.
    Raises ValueError, before anything is changed, for `arguments`, for a model that is not given to
    FSDP2 as a whole, gradients, parameters that are tensor-parallel, or hooks and collectives of
    the user's.
    """
    units = _torch.fsdp2.units_in(model)
    if not units:
        return False
    _check(model, units, arguments)
    optimizers = live_optimizers()
    for unit in units:
        for module in unit.modules:
            FSDPModule.reshard(module)  # type: ignore[arg-type]  # it is one, and has ours already
    moved: dict[nn.Parameter, ShardedParam] = {}
    stand_ins = {each.param: _on_meta(each.param) for unit in units for each in unit.params}
    for unit in units:
        for each in unit.params:
            for place, name in each.places:
                place._parameters[name] = stand_ins[each.param]
        _torch.fsdp2.take_off(unit)
        for module in unit.modules:
            module.__class__ = _torch.fsdp2.class_before(access.original_class(module))
    for unit in units:
        _shard(unit, stand_ins)
        for each in unit.params:
            sharded = find(stand_ins[each.param])
            assert sharded is not None
            _give(sharded, each.param)
            moved[each.param] = sharded
    for unit in units:
        _tell(unit)
    move_to_shards(optimizers, moved)
    return True


def _check(model: nn.Module, units: list[Any], arguments: dict[str, Any]) -> None:
    """Raise as `convert`."""
    what, rank = type(model).__name__, dist.get_rank()
    remedy = "use autoshard.fully_shard in place of torch's: it takes the same arguments"
    names = said_otherwise(model, arguments)
    if names:
        raise ValueError(
            f"{what} was sharded by torch's fully_shard, whose settings are kept, and options "
            f"{names} say how to shard it: leave these out, or torch's fully_shard"
        )
    if all(model not in unit.modules for unit in units):
        raise ValueError(
            f"modules in {what} were given to torch's fully_shard, and {what} itself was not: give "
            f"it, too, or {remedy}"
        )
    for unit in units:
        for each in unit.params:
            value = each.param.data
            name = f"{each.places[0][1]} of {type(each.places[0][0]).__name__}"
            if each.param.grad is not None:
                raise ValueError(
                    f"parameter {name} has a gradient of FSDP2's on rank {rank}: call zero_grad() "
                    "before the first call of what torch.compile returns"
                )
            if not isinstance(value, DTensor) or value.device_mesh != unit.mesh:
                raise UnsupportedError(
                    f"parameter {name} was tensor-parallel before torch's fully_shard: {remedy}"
                )
        if unit.unusual:
            raise UnsupportedError(
                f"{type(unit.modules[0]).__name__}, sharded by torch's fully_shard, has "
                f"{', '.join(unit.unusual)}, which can't be taken over: {remedy}"
            )


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    made = torch.empty(param.shape, dtype=param.dtype, device="meta")
    return nn.Parameter(made, param.requires_grad)


def _shard(unit: Any, stand_ins: dict[nn.Parameter, nn.Parameter]) -> None:
    """Make a unit of ours of `unit`, whose parameters are on meta."""
    dims = {stand_ins[each.param]: each.dim for each in unit.params}
    plain = {
        param
        for module in unit.modules
        for param in module.parameters()
        if not isinstance(param.data, DTensor) and param not in dims
    }
    fully_shard(
        list(unit.modules),
        mesh=unit.mesh,
        reshard_after_forward=unit.reshard_after_forward,
        shard_placement_fn=lambda param: Shard(dims[param]),
        mp_policy=unit.mp_policy,
        offload_policy=unit.offload_policy,
        ignored_params=plain,
    )


def _tell(unit: Any) -> None:
    """Tell a unit of ours what FSDP2's was told; all units are ours by now."""
    for method, argument in unit.told:
        call = getattr(unit.modules[0], method)
        alone = {"recurse": False} if "recurse" in inspect.signature(call).parameters else {}
        call(argument, **alone)


def _give(sharded: ShardedParam, before: nn.Parameter) -> None:
    """Give `sharded`, which is on meta, the shard of `before`, FSDP2's parameter."""
    local = _torch.dtensor.local_tensor(before)
    assert local.shape == sharded.shard.shape, sharded.name
    made = nn.Parameter(sharded.layout.dtensor(local), requires_grad=before.requires_grad)
    torch.utils.swap_tensors(sharded.param, made)
    sharded.refresh()
