"""`fully_shard`, `replicate` and `shard`: cut a model's parameters and put its modules in units."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from autoshard import _torch
from autoshard.errors import UnsupportedError, UsageError
from autoshard.runtime.comm.mesh import (
    Axes,
    axes_by_name,
    axes_of,
    check_is_mesh,
    default_mesh,
    ensure_process_group,
    hybrid_mesh,
    mesh_device,
    replicate_axes,
    smaller_axes,
    warn_of_restarts,
)
from autoshard.runtime.eager import access, outside
from autoshard.runtime.ranks.watchdog import watch_as_told
from autoshard.runtime.sharding import materialize
from autoshard.runtime.sharding.find_units import (
    find_units,
    log_mixed_units,
    override_mixed_precision,
)
from autoshard.runtime.sharding.materialize import Ignored
from autoshard.runtime.sharding.placements import AUTO, Placing, check_placing, placement_dim
from autoshard.runtime.sharding.saves_itself import methods_for, offer_saving
from autoshard.runtime.sharding.wrap_policies import Overrides, Policy
from autoshard.runtime.training.optimizers import watch_optimizers
from autoshard.runtime.unit.param import IGNORED, ShardedParam, find, is_ignored, shard_parameter
from autoshard.runtime.unit.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from autoshard.runtime.unit.precision import ignore_buffers
from autoshard.runtime.unit.settings import UnitSettings
from autoshard.runtime.unit.unit import ROOT_NAME, Unit

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims
else:
    DataParallelMeshDims = getattr(fsdp, "DataParallelMeshDims", Any)  # since 2.13

log = logging.getLogger(__name__)


@torch.inference_mode(False)
@torch.no_grad()
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Placing = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of `module` that no nested unit has, as one unit, in place.

    Call bottom-up: blocks first, the whole model last. Parameters become DTensors of
    their global size, sharded on dim 0 over `mesh`, scalars replicated; `requires_grad` and ties
    are kept. A nested unit's parameter that modules outside of that unit read, too, moves to this
    unit. Parameters and buffers are moved to this rank's device on `mesh`; those on meta stay
    there. Buffers are not sharded. No values are sent: each rank cuts its own, so all have to be
    alike. All ranks call this together, as it may make process groups. From then on steps of all
    optimizers of this process are checked, and uncaught errors about DTensors get a hint; a
    watchdog starts if the environment asks for one.

    module: one module, or several that are gathered and reduced together.
    mesh: 1-D; or 2-D, named, to replicate over its first axis and shard over its second
        (HSDP); by default all ranks, on the accelerator if there is one. The default
        process group is made from torchrun's environment if there is none.
    reshard_after_forward: True frees unsharded parameters after forward and gathers them
        again in backward; False keeps them until backward is over; None is True, but
        False for the outermost module. An int, a divisor of the number of ranks that shard,
        frees them, too, but keeps shards over groups of so many neighboring ranks, from which
        backward gathers; the number of ranks itself is True, 1 is False.
    shard_placement_fn: called with each parameter; returns the dim along which to cut it, as
        `Shard(dim)`, or None for dim 0; dims other than 0 must divide evenly. `FlatShard()` gives
        each rank a run of its elements, so that any number of ranks share it evenly. "auto"
        chooses that where dim 0 would leave more than a hundredth to padding.
    mp_policy, offload_policy: in which dtypes the unit works, and where its shards live.
    ignored_params: parameters to leave alone.
    dp_mesh_dims: torch's `DataParallelMeshDims`, since 2.13: which axes of `mesh`, on which the
        whole model lies, shard and replicate. Each parameter is a DTensor on `mesh`, replicated
        over these axes. Several axes for one purpose are flattened into one.

    Returns `module`, now of a subclass of its class and of `ShardedModule`.
    Raises TypeError or ValueError, naming the module or parameter, for a container
    without forward, a module sharded before or given to torch's `fully_shard` or `replicate`,
    parameters on several devices or with gradients, an embedding with `max_norm`, or a mesh of
    another form; NotImplementedError for a non-contiguous parameter or an embedding with
    sparse gradients.
    """
    modules = _check_modules(module, "fully_shard")
    axes: Axes | None = None
    if dp_mesh_dims is not None:
        axes = _named_axes(mesh, dp_mesh_dims, reshard_after_forward)
    elif mesh is not None:
        axes = axes_of(mesh, "fully_shard")
    ignored = materialize.find_ignored(modules[0], None, ignored_params)
    _check_reshard(reshard_after_forward, axes)
    check_placing(shard_placement_fn)
    materialize.check_parameters(modules, ignored, moves=False)
    materialize.check_embeddings(modules, ignored)
    ensure_process_group()
    axes = axes or axes_of(default_mesh(), "fully_shard")
    _make_unit(
        modules,
        axes=axes,
        reshard_after_forward=reshard_after_forward if axes.shard is not None else False,
        mp_policy=_read_mp_policy(mp_policy),
        offload_policy=_read_offload_policy(offload_policy),
        placing=shard_placement_fn,
        ignored=ignored,
    )
    return module


def _named_axes(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims, reshard: bool | int | None
) -> Axes:
    """Return the axes of `mesh` that `dims` names, for parameters that are DTensors on `mesh`.

    All ranks call this together, as it may make a process group for axes that it flattens.

    reshard: `reshard_after_forward`, only to be checked.
    Raises ValueError without a mesh, if `reshard` is an int, or as `axes_by_name`.
    """
    if mesh is None:
        raise ValueError("fully_shard got dp_mesh_dims, and no mesh: pass the mesh of all axes")
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        raise UnsupportedError(
            f"reshard_after_forward={reshard} can't be had with dp_mesh_dims: pass True or False"
        )
    return axes_by_name(mesh, dims, "fully_shard")


@torch.inference_mode(False)
@torch.no_grad()
def replicate(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    device_id: int | torch.device | None = None,
) -> Any:
    """Make `module` one unit whose parameters stay unsharded on every rank, in place.

    Parameters become DTensors that are replicated over `mesh`. Backward all-reduces their
    gradients: eagerly, the unit's of one dtype together. All else is as in `fully_shard`: no
    values are sent, and steps of all optimizers are checked from then on.

    mesh: 1-D; or 2-D of (replicate, shard), named, whose second axis has size 1; by default all
        ranks.
    device_id: this rank's device, only to be checked.

    Returns `module`, as `fully_shard` does, and raises as it does; also ValueError if `device_id`
    is not this rank's device on the mesh.
    """
    materialize.check_device_id(device_id)
    modules = _check_modules(module, "replicate")
    axes = None if mesh is None else replicate_axes(mesh, "replicate")
    ignored = materialize.find_ignored(modules[0], None, ignored_params)
    materialize.check_parameters(modules, ignored, moves=False)
    materialize.check_embeddings(modules, ignored)
    ensure_process_group()
    axes = axes or replicate_axes(default_mesh(), "replicate")
    materialize.resolve_device(device_id, mesh_device(axes.mesh))
    _make_unit(
        modules,
        axes=axes,
        reshard_after_forward=False,
        mp_policy=_read_mp_policy(mp_policy),
        offload_policy=_read_offload_policy(offload_policy),
        placing=None,
        ignored=ignored,
    )
    return module


@torch.inference_mode(False)
@torch.no_grad()
def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    policy: Policy | None = None,
    strategy: str = "full_shard",
    shard_placement_fn: Placing = AUTO,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    device_id: int | torch.device | None = None,
    sync_module_states: bool = True,
    forward_prefetch: bool | int = True,
    backward_prefetch: str | int | None = "pre",
    limit_all_gathers: bool = True,
    strict_order: bool = True,
) -> nn.Module:
    """Shard a model in one call, in place: find its units by a policy; the rest is the root's unit.

    mesh: 1-D, or for the hybrid strategies 2-D and named (replicate, shard); by default all ranks,
        for the hybrid ones as `hybrid_mesh()` lays them out: a replica on each node. The default
        process group is made if there is none, as in `fully_shard`.
    policy: which modules are units: one of `autoshard.wrap`, or a function of a module
        that returns a bool. None takes the classes that Hugging Face's `_no_split_modules`
        names, or else the model's repeated blocks. A `CustomPolicy` may return a strategy, or
        arguments of `fully_shard`, for one unit.
    strategy: "full_shard" shards parameters, gradients and optimizer state, and frees unsharded
        parameters after forward, except the root's; "shard_grad_op" keeps them until backward is
        over; "no_shard" replicates. "hybrid_shard" and "hybrid_shard_zero2" do what the first
        two do over the mesh's second axis, and replicate over its first.
    shard_placement_fn: how parameters are cut, as for `fully_shard`; None is by rows.
    mp_policy: dtypes. With a `param_dtype`, BatchNorm layers become units of their own, in full
        precision. `output_dtype` applies to outputs of the model, not of the units inside.
    offload_policy: where shards live.
    ignored_modules, ignored_params: left alone, with all that is in those modules. Ranks
        may ignore different ones as long as the rest agrees.
    param_init_fn: called with each module that has parameters or buffers of its own on meta, to
        fill them; by default its `reset_parameters()` does. See `materialize.materialize`.
    device_id: this rank's device. Given one, parameters may also lie partly on the CPU. The model
        is moved to this rank's device on the mesh in any case.
    sync_module_states: broadcast the first rank's parameters and buffers first, so that
        ranks that built the model from different seeds agree. Ranks wait for each other.
    forward_prefetch: how many units to gather ahead in forward, in the order of the step before:
        True is one, False none.
    backward_prefetch: "pre" gathers one unit ahead when the current one is gathered, "post"
        when the current one's reduce is launched; None gathers nothing ahead; an int is so many
        as "pre".
    limit_all_gathers: have the host wait before it launches a gather by `set_custom_all_gather`
        if the device has yet to come to the drops of two units, before which the comm's
        `allocate` may not have their memory back. Other gathers need no limit: their memory is
        used again in the device's order, however far the host is ahead. In a compiled graph
        the plan decides about this and about prefetch.
    strict_order: False lets each rank run other parts of the model, or leave some out; see
        `ShardedModule.set_strict_order`.

    A unit may have frozen parameters beside trainable ones; which ones do is logged at INFO.
    All ranks call this together. As `fully_shard` does, it has steps of all optimizers checked from
    then on.

    Returns `model`. Raises as `fully_shard`; ValueError also for an unknown strategy, a mesh
    that doesn't fit it, a wrong prefetch, unknown overrides, or if a module of `model` is sharded
    already; RuntimeError if a module on meta can't be initialized, or, naming the first parameter
    that differs, if `sync_module_states` finds another model on another rank.
    """
    given = {name: value for name, value in locals().items() if name != "model"}
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; expected one of {list(STRATEGIES)}")
    _check_modules(model, "shard")
    axes = None if mesh is None else _strategy_axes(strategy, mesh)
    ahead = _prefetch(forward_prefetch, backward_prefetch)
    precision = _read_mp_policy(mp_policy)
    check_placing(shard_placement_fn)
    common = {
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": precision,
        "offload_policy": _read_offload_policy(offload_policy),
    }
    ignored = materialize.find_ignored(model, ignored_modules, ignored_params)
    materialize.check_parameters((model,), ignored, moves=device_id is not None)
    materialize.check_embeddings((model,), ignored)
    ensure_process_group()
    if axes is None:
        axes = _strategy_axes(
            strategy, hybrid_mesh() if strategy.startswith("hybrid") else default_mesh()
        )
    device = materialize.resolve_device(device_id, mesh_device(axes.mesh))
    units = find_units(model, policy, ignored.modules)
    if precision.param_dtype is not None:
        units = override_mixed_precision(model, (_torch.nn.BatchNorm,), units, ignored.modules)
    _check_overrides(model, units)
    materialize.move((model,), device, ignored)
    materialize.materialize(model, device, ignored, param_init_fn)
    if sync_module_states:
        materialize.sync_from_first_rank(model, axes, ignored)
    units = {model: {}, **units}
    for module, overrides in reversed(list(units.items())):  # children before parents
        if module is not model:  # what modules inside hand on is computed with
            own = dataclasses.replace(precision, output_dtype=None)
            overrides = {"mp_policy": own, **overrides}
        arguments = _unit_arguments({"strategy": strategy, **common, **overrides}, axes)
        params = ignored.params | arguments.pop("ignored_params")
        unit = _make_unit((module,), ignored=Ignored(ignored.modules, params), **arguments)
        unit.configure(**ahead, limits_gathers=limit_all_gathers, is_by_fsdp2=False)
    if not strict_order:
        model.set_strict_order(False)  # type: ignore[operator]  # mixed in by now
    ignore_buffers(set(ignored.modules))
    log_mixed_units(model)
    model.__dict__[_GIVEN] = given
    return model


_GIVEN = "_autoshard_given"
"""Module attribute: the arguments of `shard()` by which it was sharded. They may refer to it."""


STRATEGIES: dict[str, bool | None] = {
    "full_shard": None,
    "shard_grad_op": False,
    "no_shard": False,
    "hybrid_shard": None,
    "hybrid_shard_zero2": False,
}
"""Strategies, each with the `reshard_after_forward` that it stands for."""


def _strategy_axes(strategy: str, mesh: DeviceMesh) -> Axes:
    """Return the axes of `mesh` as `strategy` uses them.

    The hybrid ones take a 2-D mesh, to replicate over its first axis and shard over its second;
    others a 1-D one, over which "no_shard" replicates, which also takes (replicate, 1), and the
    rest shard.
    Raises ValueError if the number of axes doesn't fit, TypeError for what is no mesh.
    """
    check_is_mesh(mesh, f"strategy {strategy!r}")
    wanted = 2 if strategy.startswith("hybrid") else 1
    if strategy == "no_shard":
        return replicate_axes(mesh, 'strategy "no_shard"')
    if mesh.ndim != wanted:
        hint = "" if wanted == 2 else '; "hybrid_shard" takes a 2D one of (replicate, shard)'
        raise ValueError(
            f"strategy {strategy!r} expects a {wanted}D mesh but got a {mesh.ndim}D mesh "
            f"{mesh}{hint}"
        )
    return axes_of(mesh, f"strategy {strategy!r}")


_OVERRIDES = (
    "strategy",
    "mesh",
    "reshard_after_forward",
    "shard_placement_fn",
    "mp_policy",
    "offload_policy",
    "ignored_params",
)


def _check_overrides(model: nn.Module, units: Mapping[nn.Module, Overrides]) -> None:
    """Check the overrides of `units`, as a policy returned them, before anything is sharded.

    They may be a strategy and arguments of `fully_shard`: see `_OVERRIDES`. Raises ValueError for
    another key or a wrong value, TypeError for a value of a wrong type. Whether a strategy fits
    the model's mesh is only seen when the unit is made.
    """
    for path, module in model.named_modules():
        overrides = units.get(module, {})
        unknown = [key for key in overrides if key not in _OVERRIDES]
        if unknown:
            raise ValueError(
                f"the policy returned {', '.join(map(repr, unknown))} for {path}, which "
                f"fully_shard doesn't take; valid keys: {', '.join(_OVERRIDES)}"
            )
        _unit_arguments({"strategy": "full_shard", **overrides}, None)


def _unit_arguments(overrides: Overrides, axes: Axes | None) -> dict[str, Any]:
    """Translate `overrides`, with a "strategy" among them, to arguments of `_make_unit`.

    The strategy decides on `reshard_after_forward` where that is not overridden.

    axes: of the whole model; a unit of another strategy uses their mesh in its own way, and a
        "mesh" in `overrides` takes their place. None: only check the values.
    Returns also "ignored_params", for the caller to take out. Keys that `fully_shard` doesn't take
    are dropped. Raises ValueError or TypeError for a wrong value.
    """
    given = dict(overrides)
    strategy = given.pop("strategy")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; expected one of {list(STRATEGIES)}")
    mesh = given.pop("mesh", None)
    if mesh is not None:
        axes = axes_of(mesh, "fully_shard")
    elif axes is not None:
        axes = _strategy_axes(strategy, axes.mesh)
    reshard = given.pop("reshard_after_forward", STRATEGIES[strategy])
    _check_reshard(reshard, axes)
    placing = given.pop("shard_placement_fn", AUTO)
    check_placing(placing)
    return {
        "axes": axes,
        "reshard_after_forward": reshard,
        "placing": placing,
        "mp_policy": _read_mp_policy(given.pop("mp_policy", None)),
        "offload_policy": _read_offload_policy(given.pop("offload_policy", None)),
        "ignored_params": frozenset(given.pop("ignored_params", None) or ()),
    }


_FORWARD = "an int, True or False"
_BACKWARD = 'an int, "pre", "post" or None'


def said_otherwise(model: nn.Module, arguments: Mapping[str, Any]) -> list[str]:
    """List the names, sorted, of `arguments` of `shard()` that `model` was not sharded with.

    Those that are defaults say nothing.
    """
    default = {name: each.default for name, each in inspect.signature(shard).parameters.items()}
    before = model.__dict__.get(_GIVEN, {})
    return sorted(
        name
        for name, value in arguments.items()
        if _compared(name, value) != _compared(name, default[name])
        and (not before or _compared(name, value) != _compared(name, before[name]))
    )


def _compared(name: str, value: Any) -> Any:
    """Return for argument `name` of `shard()` what is equal for values that mean the same."""
    if name == "mp_policy":
        return _read_mp_policy(value)
    if name == "offload_policy":
        return _read_offload_policy(value)
    if isinstance(value, (list, tuple, set, frozenset)):  # of modules or parameters
        return sorted(map(id, value))
    return value


def _prefetch(forward: bool | int, backward: str | int | None) -> dict[str, int]:
    """Translate `forward_prefetch` and `backward_prefetch` of `shard()` to `UnitSettings` by name.

    Raises ValueError for other values than `shard()` takes.
    """
    if not isinstance(forward, int) or forward < 0:
        raise ValueError(f"forward_prefetch is {forward!r}; expected {_FORWARD}")
    after_backward = backward == "post"
    if backward in ("pre", "post"):
        backward = 1
    elif backward is None:
        backward = 0
    elif isinstance(backward, bool) or not isinstance(backward, int) or backward < 0:
        raise ValueError(f"backward_prefetch is {backward!r}; expected {_BACKWARD}")
    return {
        "forward_prefetch": int(forward),
        "backward_prefetch": int(backward),
        "prefetches_after_backward": after_backward,
    }


def _read_mp_policy(policy: Any) -> MixedPrecisionPolicy:
    """Return `policy` as a `MixedPrecisionPolicy` of ours; None is the default one.

    Of torch's own policies, which have a `param_dtype`, the fields of the same names are copied.
    Raises TypeError for something else.
    """
    if policy is None:
        return MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    fields = [f.name for f in dataclasses.fields(MixedPrecisionPolicy) if hasattr(policy, f.name)]
    if "param_dtype" not in fields:
        raise TypeError(f"mp_policy should be a MixedPrecisionPolicy, not {type(policy).__name__}")
    return MixedPrecisionPolicy(**{name: getattr(policy, name) for name in fields})


def _read_offload_policy(policy: Any) -> OffloadPolicy:
    """Return `policy`, ours or FSDP2's, as one of ours; None is the default one.

    Raises TypeError for something else.
    """
    if policy is None:
        return OffloadPolicy()
    if isinstance(policy, OffloadPolicy):
        return policy
    if type(policy).__name__ == "CPUOffloadPolicy":
        return CPUOffloadPolicy(pin_memory=bool(policy.pin_memory))
    if type(policy).__name__ == "OffloadPolicy":
        return OffloadPolicy()
    raise TypeError(f"offload_policy should be an OffloadPolicy, not {type(policy).__name__}")


ARGUMENT_CHECKS: dict[str, Callable[[Any], object]] = {
    "mp_policy": _read_mp_policy,
    "offload_policy": _read_offload_policy,
    "forward_prefetch": lambda value: _prefetch(value, None),
    "backward_prefetch": lambda value: _prefetch(0, value),
    "shard_placement_fn": check_placing,
}
"""Checks of arguments of `shard()`: for a wrong value they raise TypeError or ValueError."""


def _check_reshard(reshard: bool | int | None, axes: Axes | None) -> None:
    """Raise ValueError unless `reshard` is None, a bool, or a positive divisor of `shard_world`.

    axes: None: `shard_world` is not known yet, and any positive int will do.
    """
    if reshard is None or isinstance(reshard, bool):
        return
    if not isinstance(reshard, int) or reshard < 1:
        raise ValueError(
            f"reshard_after_forward should be True, False, None or a positive int, not {reshard!r}"
        )
    world = axes.shard_world if axes is not None else None
    if world is not None and world % reshard:
        raise ValueError(
            f"reshard_after_forward={reshard} should be a factor of the {world} ranks that shard"
        )


def _make_unit(
    modules: tuple[nn.Module, ...],
    *,
    axes: Axes,
    reshard_after_forward: bool | int | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    placing: Placing,
    ignored: Ignored,
) -> Unit:
    """Make one unit of `modules`, headed by each of them, of the parameters no nested unit has.

    Moves parameters and buffers to the mesh's device, shards the parameters, marks ignored ones,
    makes the modules `ShardedModule`s, and names all units and parameters below anew; this unit is
    the root then, and none below. For the whole process it also checks steps of optimizers from
    then on, adds hints to uncaught errors about DTensors, and starts a watchdog if the environment
    asks for one. All ranks call this together if `reshard_after_forward` is an int, which may make
    process groups.
    Raises as `_read_reshard` and `_take_parameters`.
    """
    reshard, smaller = _read_reshard(reshard_after_forward, axes)
    watch_as_told()
    warn_of_restarts()
    outside.explain_uncaught()
    unit = Unit(modules, axes, UnitSettings(reshard, mp_policy, offload_policy, smaller))
    materialize.move(modules, mesh_device(axes.mesh), ignored)
    for param in ignored.params:
        setattr(param, IGNORED, True)
    _take_parameters(unit, placing)
    for each in modules:
        access.head(each, unit, methods_for(each))
        offer_saving(each)
    _name_everything(modules)
    watch_optimizers()
    return unit


def _read_reshard(reshard: bool | int | None, axes: Axes) -> tuple[bool | None, Axes | None]:
    """Split `reshard_after_forward` into a bool or None, and the axes of a smaller mesh or None.

    An int that is the number of ranks that shard is True; 1 is False, with a logged warning;
    another one is True, with the axes of groups of so many ranks: all ranks call this together
    then, as the first such call makes the groups. Raises as `_check_reshard`.
    """
    if reshard is None or isinstance(reshard, bool):
        return reshard, None
    _check_reshard(reshard, axes)
    if reshard == axes.shard_world:
        return True, None
    if reshard == 1:
        log.warning("reshard_after_forward=1 keeps whole parameters, as False does")
        return False, None
    return True, smaller_axes(axes, reshard)


def _check_modules(module: nn.Module | list[nn.Module], what: str) -> tuple[nn.Module, ...]:
    """Return `module`, one or several, as a tuple of modules that may head a new unit.

    what: the public function that was given it, for messages.
    Raises TypeError for what is no module; ValueError for an empty list, a ModuleList or
    ModuleDict without forward, a module that heads a unit, or as `_check_contracts` and
    `_check_around`.
    """
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not modules:
        raise ValueError(f"{what} got an empty list of modules")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"{what} expects nn.Modules but got {type(each).__name__}")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and (
            type(each).forward is nn.Module.forward
        ):
            raise ValueError(
                f"{what} can't take a {type(each).__name__}: a container without forward is "
                f"never called. Shard its modules: {_first_names(each)}"
            )
        _check_contracts(each, what)
        unit = access.unit_of(each)
        if unit is not None:
            how = "sharded" if unit.axes.shard is not None else "replicated"
            raise UsageError(
                f"{type(each).__name__} (unit {unit.name!r}) is {how} already: call fully_shard or "
                "replicate once for each module, children first"
            )
        _check_around(each, what)
    return modules


def _check_around(module: nn.Module, what: str) -> None:
    """Raise UsageError if `module` is in a unit that has taken its parameters already."""
    inside = set(module.modules())
    for unit in {sharded.unit for sharded in _params_below(inside)}:
        around = [head for head in unit.modules if head not in inside and module in head.modules()]
        if around:
            raise UsageError(
                f"{what} got {type(module).__name__}, whose parameters are in the unit of "
                f"{type(around[0]).__name__} around it: call it for modules inside first"
            )


def _check_contracts(top: nn.Module, what: str) -> None:
    """Raise ValueError if `top` or a module in it was given to torch's fully_shard or replicate.

    Modules that head units of ours don't count. what: the public function, for the message.
    """
    for path, module in top.named_modules():
        taken = [] if access.unit_of(module) is not None else _torch.fsdp.contracts(module)
        if taken:
            where = f"{path} ({type(module).__name__})" if path else type(module).__name__
            raise ValueError(
                f"{what} got {type(top).__name__}, of which {where} was given to torch's "
                f"{taken[0]} before: use autoshard's for all of it, or keep that part outside"
            )


def _first_names(container: nn.Module) -> str:
    names = [name for name, _ in container.named_children()]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _take_parameters(unit: Unit, placing: Placing) -> None:
    """Shard the plain parameters below the unit's modules, as its own, except ignored ones.

    Each module with one gets a subclass of its class, whose reads gather. A module whose parameter
    is tied to a sharded one gets that. A parameter of a nested unit moves to `unit` if modules
    outside of the nested unit read it, too. Raises as `placement_dim` and `shard_parameter`.
    """
    names = materialize.unsharded(unit.modules)
    inside = {each for module in unit.modules for each in module.modules()}
    for module in (each for top in unit.modules for each in top.modules()):
        for attribute, param in list(module._parameters.items()):
            if param is None or is_ignored(param):
                continue
            sharded = find(param)
            if sharded is None:
                dim = placement_dim(names[param], param, placing, unit.axes.shard_world)
                sharded = shard_parameter(
                    names[param], param, unit.axes, dim, unit.settings.offload
                )
                unit.take(sharded)
            if (module, attribute) not in sharded.registrations:
                access.bind(module, attribute, sharded)
    # A parameter that modules of two units read belongs to the unit around both, which
    # is this one: gathered once for both, and reduced once.
    for sharded in _params_below(inside):
        if sharded.unit is not unit and not _reads_only_inside(sharded, sharded.unit):
            unit.take(sharded)


def _params_below(modules: Iterable[nn.Module]) -> list[ShardedParam]:
    """List the sharded parameters of `modules`, each once; not of modules inside them."""
    found: dict[ShardedParam, None] = {}
    for module in modules:
        for sharded in module.__dict__.get(access.PARAMS, {}).values():
            found.setdefault(sharded)
    return list(found)


def _reads_only_inside(sharded: ShardedParam, unit: Unit) -> bool:
    inside = {each for module in unit.modules for each in module.modules()}
    return all(module in inside for module, _ in sharded.registrations)


def _name_everything(modules: tuple[nn.Module, ...]) -> None:
    """Name all parameters and units in `modules`, which head one unit, by their paths from there.

    Their unit is the root, and units below are no roots any more, which decides whether they
    reshard by default: markers in compiled code are updated. As enclosing modules are sharded later
    and name all anew, names are in the end paths from the outermost one. If `modules` are several,
    their numbers come first.
    """
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
                if unit.is_root != (module in modules):
                    unit.is_root = not unit.is_root
                    unit.update_markers()
                unit.name = prefix + path if path else (prefix.rstrip(".") or ROOT_NAME)
