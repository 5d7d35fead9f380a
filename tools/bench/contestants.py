"""Ways to train a model on several ranks, each as its documentation has it.

Each takes an unsharded model and returns what is to be called. `simple_fsdp` is the scheme of
SimpleFSDP (Zhang and others, "SimpleFSDP: simpler fully sharded data parallel with torch.compile",
2024), in few lines: a parameter is a DTensor, read through a property that redistributes it, which
is recomputed in backward; Inductor buckets the collectives that it traces.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autoshard import _torch
from autoshard.options import CompileOptions
from autoshard.runtime.sharding.shard import shard
from autoshard.runtime.unit.policies import MixedPrecisionPolicy


@dataclass(frozen=True)
class Setting:
    """Conditions that all contestants share.

    blocks: returns the repeated modules of a model, a unit each.
    dtype: of computation and gathers; gradients are reduced in float32.
    options: of autoshard's backend.
    """

    device: torch.device
    blocks: Callable[[Any], Sequence[nn.Module]]
    dtype: torch.dtype
    options: dict[str, Any]

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of all ranks on `device`, which need not be the one that torch takes by default."""
        return init_device_mesh(self.device.type, (dist.get_world_size(),))

    @property
    def is_mixed(self) -> bool:
        return self.dtype != torch.float32


Contestant = Callable[[Any, Setting], Any]

MORE_THAN_THERE_IS = 2**40  # bytes


def unsharded(model: Any, setting: Setting) -> Any:
    """Compile the model on each rank by itself, without communication: replicas drift apart.

    Mixed precision is autocast's, here and in `ddp`: it casts weights and keeps norms in float32.
    """
    return _with_autocast(torch.compile(model), setting)


def ddp(model: Any, setting: Setting) -> Any:
    """Replicate the model with DDP, which reduces gradients in buckets."""
    return _with_autocast(DistributedDataParallel(model), setting)


def fsdp1(model: Any, setting: Setting) -> Any:
    """Shard the model with FullyShardedDataParallel, each module of a block's class a unit.

    With a dtype other than float32, mixed precision reduces in float32. Warnings are ignored
    meanwhile.
    """
    mixed = fsdp.MixedPrecision(param_dtype=setting.dtype, reduce_dtype=torch.float32)
    kinds = {type(block) for block in setting.blocks(model)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and says so
        return fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy(kinds),
            mixed_precision=mixed if setting.is_mixed else None,
            device_id=setting.device,
            use_orig_params=True,
        )


def fsdp2(model: Any, setting: Setting, *, keeps: bool = False) -> Any:
    """Shard the model with torch's `fully_shard`, a unit a block.

    With a dtype other than float32, mixed precision reduces in float32. On a CPU, FSDP2 waits for
    each gather where it launches it, unless prefetch is configured: there, each unit is set to
    prefetch the next one in forward, and gathers to run beside compute.
    keeps: whether blocks stay unsharded from forward to backward.
    """
    policy = fsdp.MixedPrecisionPolicy()
    if setting.is_mixed:
        policy = fsdp.MixedPrecisionPolicy(setting.dtype, torch.float32)
    mesh = setting.mesh
    blocks = [
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps)
        for block in setting.blocks(model)
    ]
    whole = fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    if setting.device.type == "cpu":
        _torch.fsdp.overlap_gathers(whole)
        for unit, following in pairwise([whole, *blocks]):
            unit.set_modules_to_forward_prefetch([following])
    return whole


def fsdp2_compiled_blocks(model: Any, setting: Setting, *, keeps: bool = False) -> Any:
    """Shard the model with torch's `fully_shard`, a unit a block, each block compiled."""
    for block in setting.blocks(model):
        block.compile()
    return fsdp2(model, setting, keeps=keeps)


def fsdp2_kept(model: Any, setting: Setting) -> Any:
    """Shard as `fsdp2_compiled_blocks`, with all parameters unsharded from forward to backward."""
    return fsdp2_compiled_blocks(model, setting, keeps=True)


def autoshard_eager(model: Any, setting: Setting) -> Any:
    """Shard the model with autoshard's eager runtime, by those options that `shard()` takes.

    The mesh is that of all ranks, unless the options have one. A dtype other than float32 sets the
    mixed precision, whatever the options say. Raises ValueError for a wrong option.
    """
    arguments = CompileOptions.read(setting.options).shard_arguments()
    if setting.is_mixed:
        arguments["mp_policy"] = MixedPrecisionPolicy(setting.dtype, torch.float32)
    return shard(model, **{**arguments, "mesh": arguments["mesh"] or setting.mesh})


def autoshard_compiled(model: Any, setting: Setting) -> Any:
    """Shard the model as `autoshard_eager`, and compile it whole with autoshard's backend.

    The first call compiles; what can't be compiled is an error there.
    """
    options = {**setting.options, "strict": True}
    return torch.compile(autoshard_eager(model, setting), backend="autoshard", options=options)


def autoshard_kept(model: Any, setting: Setting) -> Any:
    """Compile as `autoshard_compiled`, with a memory budget for all parameters at once.

    They may then stay unsharded from forward to backward, as in `simple_fsdp`. A `memory_budget` in
    the options goes first.
    """
    options = {"memory_budget": MORE_THAN_THERE_IS, **setting.options}
    return autoshard_compiled(model, replace(setting, options=options))


def simple_fsdp(model: Any, setting: Setting) -> Any:
    """Make parameters DTensors that are gathered where they are read, and compile the whole model.

    Inductor buckets the collectives. `model` is changed in place: its modules get new parameters,
    which require gradients, and classes with a property for each. Rank 0's values are sent to all
    ranks, which call this together. The first call compiles.
    """
    mesh = setting.mesh
    sharded: dict[int, nn.Parameter] = {}  # by the id of the whole one: ties stay
    for module in model.modules():
        whole = {name: param for name, param in module._parameters.items() if param is not None}
        if not whole:
            continue
        for name, param in whole.items():
            if id(param) not in sharded:
                sharded[id(param)] = nn.Parameter(_shards(param, mesh))
            module._parameters[name] = sharded[id(param)]
        kind = type(module)
        getters = {name: property(_getter(name, setting.dtype)) for name in whole}
        module.__class__ = type(kind.__name__, (kind,), getters)
    whole_mb = sum(param.numel() * param.itemsize for param in sharded.values()) / 1e6
    return torch.compile(model, options=_inductor_options(setting, whole_mb))


def _shards(param: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(param.detach(), mesh, [Shard(0)])


def _getter(name: str, dtype: torch.dtype) -> Callable[[Any], Tensor]:
    """Return a getter of parameter `name`, which gathers it in `dtype`, and again in backward."""

    def get(module: Any) -> Tensor:
        """Gather the parameter of `module`, and return it unsharded; backward gathers it again."""
        whole: Tensor = checkpoint(
            functools.partial(_gather, dtype=dtype),
            module._parameters[name],
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, _recompute_gathers),
        )
        return whole

    return get


def _gather(param: DTensor, *, dtype: torch.dtype) -> Tensor:
    """Return `param`, unsharded, in `dtype`; backward averages its gradient in float32."""
    gathered = param.redistribute(
        placements=[Replicate()], forward_dtype=dtype, backward_dtype=torch.float32
    )
    return gathered.to_local(grad_placements=[Partial("avg")])


def _recompute_gathers(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy of a checkpoint: all-gathers, and waits, are recomputed; all else is saved."""
    c10d = _torch.ops.functional_collectives
    if op in (c10d.all_gather_into_tensor.default, c10d.wait_tensor.default):
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _inductor_options(setting: Setting, whole_mb: float) -> dict[str, Any]:
    """Options of Inductor for `simple_fsdp`: the overlap scheduler on a GPU, two buckets on a CPU.

    The scheduler needs the figures of a GPU. On a CPU, two buckets, of half the parameters each,
    were faster than one, which is Inductor's default, and than one a block: 430 ms for 528 and 494,
    of a Llama's forward and backward (`small` of `autoshard bench step`, two gloo ranks, torch
    2.13). They hold all parameters at once. Inductor counts a bucket's bytes in the dtype that is
    gathered: in bf16 all parameters fit into one. Its reordering for peak memory, which would undo
    the schedule, is off on both.
    whole_mb: megabytes of all parameters, unsharded.
    """
    if setting.device.type == "cuda":
        prefix = "aten_distributed_optimizations"
        scheduler = ("enable_overlap_scheduling", "collective_bucketing", "insert_overlap_deps")
        return {f"{prefix}.{name}": True for name in scheduler} | {"reorder_for_peak_memory": False}

    half_mb = functools.partial(_bucket_mb, whole_mb / 2)  # Inductor's cache pickles it
    return {
        "bucket_all_gathers_fx": "all",
        "bucket_all_gathers_fx_bucket_size_determinator": half_mb,
        "bucket_reduce_scatters_fx": "all",
        "bucket_reduce_scatters_fx_bucket_size_determinator": half_mb,
        "reorder_for_peak_memory": False,
    }


def _bucket_mb(num_mb: float, number: int) -> float:
    return num_mb


def _with_autocast(model: Any, setting: Setting) -> Any:
    """Put `model.forward` under autocast if `setting` is mixed; return `model`."""
    if setting.is_mixed:
        model.forward = torch.autocast(setting.device.type, setting.dtype)(model.forward)
    return model


CONTESTANTS: dict[str, Contestant] = {
    "unsharded, compiled": unsharded,
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "FSDP2, blocks compiled": fsdp2_compiled_blocks,
    "FSDP2, kept": fsdp2_kept,
    "SimpleFSDP scheme": simple_fsdp,
    "autoshard, eager": autoshard_eager,
    "autoshard, compiled": autoshard_compiled,
    "autoshard, kept": autoshard_kept,
}
"""Ways to train, by name. The first only computes: the others are compared with it."""

RIVALS = ("FSDP1", "FSDP2", "FSDP2, blocks compiled", "SimpleFSDP scheme")
"""Contestants of other libraries that shard parameters: ours is compared with the fastest."""


def read_contestants(names: Collection[str]) -> dict[str, Contestant]:
    """Look contestants up by name, in order; return them by name.

    Raises ValueError, with all names, for an unknown one.
    """
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown:
        raise ValueError(f"there is no contestant {unknown}; expected some of {list(CONTESTANTS)}")
    return {name: CONTESTANTS[name] for name in names}
