"""State that torch's `fully_shard` (FSDP2) keeps of modules: read, and taken off.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state


@dataclass(frozen=True)
class Managed:
    """Parameter of FSDP2's: the DTensor, the dim that it is cut along, and where it stands."""

    param: nn.Parameter
    dim: int
    places: tuple[tuple[nn.Module, str], ...]


@dataclass(frozen=True)
class Fsdp2Unit:
    """Settings of `modules` that FSDP2's `fully_shard` was given, and their parameters.

    mesh: None if it has no parameters of its own.
    unusual: settings that are not read here, and are set.
    """

    modules: tuple[nn.Module, ...]
    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    mp_policy: Any
    offload_policy: Any
    divide_factor: float | None
    params: tuple[Managed, ...]
    unusual: tuple[str, ...]


def units_in(model: nn.Module) -> list[Fsdp2Unit]:
    """List what FSDP2 has sharded in `model`, children before parents."""
    states: dict[FSDPState, None] = {}
    for module in model.modules():
        state = _get_module_fsdp_state(module)
        if isinstance(state, FSDPState):
            states[state] = None
    return [_read(state) for state in reversed(states)]


def _read(state: Any) -> Fsdp2Unit:
    groups = getattr(state, "_fsdp_param_groups", None)  # since 2.13
    if groups is None:
        groups = [each for each in (state._fsdp_param_group,) if each is not None]
    modules, reshard = tuple(state._modules), getattr(state, "_auto_reshard_after_forward", False)
    if not groups:
        return Fsdp2Unit(modules, None, None, state._mp_policy, None, None, (), ())
    group = groups[0]
    unusual = ["parameters on several meshes"] if len(groups) > 1 else []
    if group._all_reduce_hook is not None:
        unusual.append("set_all_reduce_hook()")
    if type(group._all_gather_comm) is not collectives.DefaultAllGather:
        unusual.append("set_custom_all_gather()")
    if type(group._reduce_scatter_comm) is not collectives.DefaultReduceScatter:
        unusual.append("set_custom_reduce_scatter()")
    policies = {getattr(each, "mp_policy", None) for each in group.fsdp_params}  # since 2.14
    policy = getattr(group, "mp_policy", None) or next(iter(policies))
    if len(policies) > 1:
        unusual.append("an mp_policy that differs by parameter")
    after = group.post_forward_mesh_info
    told: bool | int | None = None
    if not reshard:
        told = after is not None
        if after is not None and after is not group.mesh_info:
            told = int(after.shard_mesh_size)
    return Fsdp2Unit(
        modules=modules,
        mesh=group.mesh_info.mesh,
        reshard_after_forward=told,
        mp_policy=policy,
        offload_policy=group.offload_policy,
        divide_factor=group.gradient_divide_factor,
        params=tuple(map(_managed, group.fsdp_params)),
        unusual=tuple(unusual),
    )


def _managed(its: Any) -> Managed:
    info = its._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    places = ((info.module, info.param_name), *shared)
    return Managed(its.sharded_param, its.fsdp_placement.dim, tuple(places))


def take_off(unit: Fsdp2Unit) -> None:
    """Have FSDP2 forget `unit`: its hooks, classes and state. Parameters stay where they are."""
    for module in unit.modules:
        state: Any = _get_module_fsdp_state(module)
        if state is None:
            continue
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            if group is not None:
                for handles in (
                    group._module_to_pre_save_state_dict_hook_handle,
                    group._module_to_pre_load_state_dict_hook_handle,
                ):
                    for handle in handles.values():
                        handle.remove()
        for each in unit.modules:
            each.__dict__.get(REGISTRY_KEY, {}).pop("fully_shard", None)
            # A decorator of torch's has put it there, which its types don't say.
            each.__dict__.get(STATE_KEY, {}).pop(fully_shard.__wrapped__, None)  # type: ignore[attr-defined]
            _module_state_mapping.pop(each, None)
    for top in unit.modules:
        for module in top.modules():
            for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
                module.__dict__.pop(name, None)


def class_before(cls: type) -> type:
    """Return the class of which FSDP2 has made `cls`."""
    before: type = cls.__bases__[1]
    return before
