"""`fully_shard` and `shard`: cut a model's parameters and put its modules in units."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime import access
from autoshard.runtime.mesh import check_mesh, default_mesh, ensure_process_group, mesh_device
from autoshard.runtime.optimizers import watch_optimizers
from autoshard.runtime.param import ShardedParam, find, shard_parameter
from autoshard.runtime.policies import Overrides, Policy
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.unit import ROOT_NAME, Unit
from autoshard.runtime.wrap import find_units, log_mixed_units

SYNC_BUCKET_BYTES = 250 << 20  # of one broadcast; FSDP1's PARAM_BROADCAST_BUCKET_SIZE


@torch.inference_mode(False)
@torch.no_grad()
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
) -> Any:
    """Shard the parameters of `module` that no nested unit has, as one unit, in place.

    Call bottom-up: blocks first, the whole model last. Parameters become DTensors of
    their whole size, sharded on dim 0 over `mesh`; `requires_grad` and ties are kept;
    buffers are left alone.

    module: one module, or several that are gathered and reduced together.
    mesh: 1-D; by default all ranks, on the accelerator if there is one. The default
        process group is made from torchrun's environment if nobody made it.
    reshard_after_forward: True frees whole parameters after forward and gathers them
        again in backward; False keeps them until backward is over; None is True, but
        False for the outermost module.

    Returns `module`, of a class that is also a `ShardedModule`.
    Raises TypeError or ValueError, naming the module or parameter, for a container
    without forward, a module sharded before, a scalar parameter, parameters on several
    devices, or a mesh that isn't 1-D; NotImplementedError for a non-contiguous parameter.
    """
    modules = _check_modules(module)
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward should be True, False or None, not {reshard_after_forward!r}"
        )
    if mesh is not None:
        check_mesh(mesh, "fully_shard")
    _check_parameters(modules)
    ensure_process_group()
    mesh = mesh or default_mesh()
    unit = Unit(modules, mesh, reshard_after_forward)
    _move(modules, mesh_device(mesh))
    _take_parameters(unit)
    for each in modules:
        access.head(each, unit, ShardedModule)
    _name_everything(modules)
    watch_optimizers()
    return module


@torch.inference_mode(False)
@torch.no_grad()
def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    policy: Policy | None = None,
    strategy: str = "full_shard",
    sync_module_states: bool = True,
) -> nn.Module:
    """Shard a whole model in one call, in place: its units are found, the rest is the root.

    policy: which modules are units: one of `autoshard.wrap`, or a function of a module
        that returns a bool. None takes the model's repeated blocks, or what Hugging
        Face's `_no_split_modules` names. A `CustomPolicy` may return arguments of
        `fully_shard` for one unit.
    strategy: "full_shard" (parameters, gradients and optimizer state; whole parameters
        freed after forward) or "shard_grad_op" (whole parameters kept until backward).
    sync_module_states: broadcast rank 0's parameters and buffers first, so that ranks
        that built the model from different seeds agree.

    A unit may have frozen parameters beside trainable ones; which ones do is logged at INFO.

    Returns `model`. Raises as `fully_shard`, and ValueError for an unknown strategy, for
    overrides that `fully_shard` doesn't take, or if a module of `model` is sharded already.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; expected one of {list(STRATEGIES)}")
    _check_modules(model)
    if mesh is not None:
        check_mesh(mesh, "shard")
    _check_parameters((model,))
    ensure_process_group()
    mesh = mesh or default_mesh()
    units = find_units(model, policy)
    _check_overrides(model, units)
    if sync_module_states:
        _move((model,), mesh_device(mesh))
        sync_from_first_rank(model, mesh)
    arguments: Overrides = {"mesh": mesh, "reshard_after_forward": STRATEGIES[strategy]}
    for unit, overrides in reversed(units.items()):  # children before parents
        fully_shard(unit, **{**arguments, **overrides})
    fully_shard(model, **arguments)
    log_mixed_units(model)
    return model


STRATEGIES: dict[str, bool | None] = {"full_shard": None, "shard_grad_op": False}


def sync_from_first_rank(model: nn.Module, mesh: DeviceMesh) -> None:
    """Overwrite every rank's parameters and buffers by those of the mesh's first rank.

    One broadcast a dtype and SYNC_BUCKET_BYTES, each tensor sent once however it is tied.
    """
    if mesh.size() == 1:
        return
    group = mesh.get_group()
    source = dist.get_global_rank(group, 0)
    tensors = [
        _unexpanded(tensor.detach())
        for tensor in (*model.parameters(), *model.buffers())
        if not tensor.is_meta and tensor.numel()
    ]
    for bucket in _sync_buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat, src=source, group=group)
        for tensor, piece in zip(
            bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True
        ):
            tensor.copy_(piece.view(tensor.shape))


def _unexpanded(tensor: Tensor) -> Tensor:
    """The elements that `tensor` really has: of an expanded dim, the first."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _sync_buckets(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.nbytes > SYNC_BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        if bucket:
            yield bucket


def _check_modules(module: nn.Module | list[nn.Module]) -> tuple[nn.Module, ...]:
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard expects nn.Modules but got {type(each).__name__}")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and (
            type(each).forward is nn.Module.forward
        ):
            raise ValueError(
                f"fully_shard can't take a {type(each).__name__}: a container without forward is "
                f"never called. Shard its modules: {_first_names(each)}"
            )
        if access.unit_of(each) is not None:
            raise ValueError(
                f"{type(each).__name__} (unit {access.unit_of(each).name!r}) is sharded already: "  # type: ignore[union-attr]
                "call fully_shard once for each module, children first"
            )
    return modules


def _first_names(container: nn.Module) -> str:
    names = [name for name, _ in container.named_children()]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _unsharded(modules: Iterable[nn.Module]) -> dict[nn.Parameter, str]:
    """Parameters below `modules` that no unit has, with their first names."""
    several: dict[nn.Parameter, str] = {}
    for number, module in enumerate(modules):
        for name, param in module.named_parameters():
            if find(param) is None:
                several.setdefault(param, name if number == 0 else f"{number}.{name}")
    return several


def _check_overrides(model: nn.Module, units: Mapping[nn.Module, Overrides]) -> None:
    """Before anything is sharded: overrides are arguments that `fully_shard` takes by name."""
    parameters = inspect.signature(fully_shard).parameters.values()
    valid = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    for path, module in model.named_modules():
        unknown = [key for key in units.get(module, ()) if key not in valid]
        if unknown:
            raise ValueError(
                f"the policy returned {', '.join(map(repr, unknown))} for {path}, which "
                f"fully_shard doesn't take; valid keys: {', '.join(valid)}"
            )


def _check_parameters(modules: tuple[nn.Module, ...]) -> None:
    devices: dict[torch.device, str] = {}
    for param, name in _unsharded(modules).items():
        devices.setdefault(param.device, name)
        if param.grad is not None:
            raise ValueError(
                f"parameter {name} of {type(modules[0]).__name__} has a gradient from before "
                "sharding, which is this rank's own: call zero_grad() first"
            )
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"the parameters of {type(modules[0]).__name__} are on several devices ({where}): "
            "move them to one, for example with module.to(device), before sharding"
        )


def _move(modules: tuple[nn.Module, ...], device: torch.device) -> None:
    for module in modules:
        for tensor in (*_unsharded((module,)), *module.buffers()):
            if not tensor.is_meta and tensor.device != device:
                tensor.data = tensor.data.to(device)


def _take_parameters(unit: Unit) -> None:
    """Shard what is whole below the unit's modules; tie places to parameters sharded before."""
    names = _unsharded(unit.modules)
    inside = {each for module in unit.modules for each in module.modules()}
    for module in (each for top in unit.modules for each in top.modules()):
        for attribute, param in list(module._parameters.items()):
            if param is None:
                continue
            sharded = find(param)
            if sharded is None:
                sharded = shard_parameter(names[param], param, unit.mesh)
                unit.take(sharded)
            if (module, attribute) not in sharded.places:
                access.bind(module, attribute, sharded)
    # A parameter that modules of two units read belongs to the unit around both, which
    # is this one: gathered once for both, and reduced once.
    for sharded in _params_below(inside):
        if sharded.unit is not unit and not _reads_only_inside(sharded, sharded.unit):
            unit.take(sharded)


def _params_below(modules: Iterable[nn.Module]) -> list[ShardedParam]:
    found: dict[ShardedParam, None] = {}
    for module in modules:
        for sharded in module.__dict__.get(access.PARAMS, {}).values():
            found.setdefault(sharded)
    return list(found)


def _reads_only_inside(sharded: ShardedParam, unit: Unit) -> bool:
    inside = {each for module in unit.modules for each in module.modules()}
    return all(module in inside for module, _ in sharded.places)


def _name_everything(modules: tuple[nn.Module, ...]) -> None:
    """Name parameters and units from the outermost sharded module, which is the last to come."""
    for number, top in enumerate(modules):
        prefix = f"{number}." if len(modules) > 1 else ""
        named: set[ShardedParam] = set()
        for path, module in top.named_modules():
            dot = f"{prefix}{path}." if path else prefix
            for attribute, sharded in module.__dict__.get(access.PARAMS, {}).items():
                if sharded not in named:
                    named.add(sharded)
                    sharded.name = dot + attribute
            unit = access.unit_of(module)
            if unit is not None and module is unit.modules[0]:
                unit.is_root = module in modules
                unit.name = prefix + path if path else (prefix.rstrip(".") or ROOT_NAME)
