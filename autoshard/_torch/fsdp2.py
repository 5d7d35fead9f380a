"""State that torch's `fully_shard` (FSDP2) keeps of modules: read, and taken off.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    told: what its modules were told beside that: names of FSDP2's methods, and arguments.
    unusual: settings that are not read here, and are set.
    """

    modules: tuple[nn.Module, ...]
    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    mp_policy: Any
    offload_policy: Any
    params: tuple[Managed, ...]
    told: tuple[tuple[str, Any], ...]
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
        return Fsdp2Unit(
            modules, None, None, state._mp_policy, None, (), tuple(_told(state, None)), ()
        )
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
    reshards: bool | int | None = None
    if not reshard:
        reshards = after is not None
        if after is not None and after is not group.mesh_info:
            reshards = int(after.shard_mesh_size)
    return Fsdp2Unit(
        modules=modules,
        mesh=group.mesh_info.mesh,
        reshard_after_forward=reshards,
        mp_policy=policy,
        offload_policy=group.offload_policy,
        params=tuple(map(_managed, group.fsdp_params)),
        told=tuple(_told(state, group)),
        unusual=tuple(unusual),
    )


# By a group's attribute: the method that sets it, and what it is otherwise.
_TOLD_OF_GROUPS: dict[str, tuple[str, Any]] = {
    "gradient_divide_factor": ("set_gradient_divide_factor", None),
    "reduce_grads": ("set_requires_gradient_sync", True),
    "reshard_after_backward": ("set_reshard_after_backward", True),
    "unshard_in_backward": ("set_unshard_in_backward", True),
    "force_sum_reduction_for_comms": ("set_force_sum_reduction_for_comms", False),
    "reduce_scatter_unused_params": ("set_reduce_scatter_unused_params", False),  # since 2.13
}


def _told(state: Any, group: Any) -> Iterator[tuple[str, Any]]:
    """Yield methods, and arguments, that have made `state`, and `group` of it, what they are."""
    for attribute, (method, otherwise) in _TOLD_OF_GROUPS.items():
        value = getattr(group, attribute, otherwise)
        if value != otherwise:
            yield method, value
    if group is not None and group.reduce_grads and not group.all_reduce_grads:
        yield "set_requires_all_reduce", False
    if not state._state_ctx.is_last_backward:
        yield "set_is_last_backward", False
    for method, states in (
        ("set_modules_to_forward_prefetch", state._states_to_forward_prefetch),
        ("set_modules_to_backward_prefetch", state._states_to_backward_prefetch),
    ):
        if states:
            yield method, [each._modules[0] for each in states]


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
