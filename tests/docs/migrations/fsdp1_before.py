"""Lines of docs/migrate/fsdp1.md: FullyShardedDataParallel."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import (
    STEPS,
    Block,
    Checkpointed,
    adamw,
    build,
    device,
    initialize,
    loss_of,
    numbers,
    on_gpu,
    scatter,
    train,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

policy = ModuleWrapPolicy({Block})


def _fsdp(**arguments):
    """Shard the model, with a unit for each block."""
    arguments = {"auto_wrap_policy": policy, "use_orig_params": True, **arguments}
    return FSDP(build(), device_id=device, **arguments)


def by_classes() -> list[float]:
    model = build()
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)
    return train(model)


def transformers() -> list[float]:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return train(_fsdp(auto_wrap_policy=policy))


def by_size() -> list[float]:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    return train(_fsdp(auto_wrap_policy=policy))


def by_a_function() -> list[float]:
    policy = functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)
    )
    return train(_fsdp(auto_wrap_policy=policy))


def custom() -> list[float]:
    policy = CustomPolicy(
        lambda module: (
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
            if isinstance(module, Block)
            else False
        )
    )
    return train(_fsdp(auto_wrap_policy=policy))


def by_hand() -> list[float]:
    model = build()
    for index, block in enumerate(model.layers):
        model.layers[index] = FSDP(block, device_id=device)
    model = FSDP(model, device_id=device)
    return train(model)


def while_it_is_built() -> list[float]:
    model = build()
    with enable_wrap(wrapper_cls=FSDP, device_id=device):
        model.head = wrap(model.head)
    model = FSDP(model, device_id=device)
    return train(model)


def full_shard() -> list[float]:
    return train(_fsdp(sharding_strategy=ShardingStrategy.FULL_SHARD))


def shard_grad_op() -> list[float]:
    return train(_fsdp(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))


def no_shard() -> list[float]:
    return train(_fsdp(sharding_strategy=ShardingStrategy.NO_SHARD))


def hybrid_shard() -> list[float]:
    mesh = init_device_mesh(device.type, (1, 2), mesh_dim_names=("replicate", "shard"))
    return train(_fsdp(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh))


def hybrid_shard_zero2() -> list[float]:
    mesh = init_device_mesh(device.type, (1, 2), mesh_dim_names=("replicate", "shard"))
    return train(_fsdp(sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2, device_mesh=mesh))


def mesh() -> list[float]:
    mesh = init_device_mesh(device.type, (2,))
    return train(_fsdp(device_mesh=mesh))


def group_of_ranks() -> list[float]:
    group = dist.new_group([0, 1])
    return train(_fsdp(process_group=group))


def precision() -> list[float]:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(_fsdp(mixed_precision=precision))


def precision_of_buffers() -> list[float]:
    precision = MixedPrecision(
        param_dtype=torch.bfloat16,
        buffer_dtype=torch.bfloat16,
        keep_low_precision_grads=False,
        cast_forward_inputs=True,
    )
    return train(_fsdp(mixed_precision=precision))


def precision_by_class() -> list[float]:
    precision = MixedPrecision(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        _module_classes_to_ignore=(nn.LayerNorm,),
    )
    return train(_fsdp(mixed_precision=precision))


def offload() -> list[float] | None:
    model = _fsdp(cpu_offload=CPUOffload(offload_params=True))
    return train(model) if on_gpu else None  # FSDP1 copies between host and GPU only


def prefetch() -> list[float]:
    return train(
        _fsdp(
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=True,
            limit_all_gathers=True,
        )
    )


def prefetch_later() -> list[float]:
    return train(_fsdp(backward_prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=False))


def no_prefetch() -> list[float]:
    return train(_fsdp(backward_prefetch=None))


def ignored() -> list[float]:
    model = build()
    model.head.requires_grad_(False)
    model = FSDP(model, ignored_modules=[model.head], device_id=device)
    return train(model)


def ignored_states() -> list[float]:
    model = build()
    model.head.requires_grad_(False)
    model = FSDP(model, ignored_states=list(model.head.parameters()), device_id=device)
    return train(model)


def first_values() -> list[float] | None:
    model = build()
    if dist.get_rank() == 1:
        nn.init.zeros_(model.head.weight)
    if not on_gpu:  # FSDP1 sends values between GPUs only
        with pytest.raises(RuntimeError, match="needs a non-CPU accelerator device"):
            FSDP(model, sync_module_states=True)
        return None
    return train(FSDP(model, sync_module_states=True))


def on_meta() -> list[float]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = FSDP(model, param_init_fn=initialize, device_id=device)
    return [model(torch.ones(2, 8, device=device)).sum().item()]


def frozen() -> list[float]:
    model = build()
    model.embed.requires_grad_(False)
    model = FSDP(model, use_orig_params=True, device_id=device)
    return train(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))


def accumulation() -> list[float]:
    model = _fsdp()
    optimizer = adamw(model)
    for step in range(STEPS):
        with model.no_sync():
            loss_of(model, 2 * step).backward()
        loss_of(model, 2 * step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss_of(model, 0).item()]


def clipping() -> list[float]:
    model = _fsdp()
    loss_of(model, 0).backward()
    norm = model.clip_grad_norm_(1.0)
    return [float(norm)]


def scaler() -> list[float]:
    model = _fsdp()
    optimizer = adamw(model)
    scaler = ShardedGradScaler(device.type)
    for step in range(STEPS):
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [loss_of(model, 0).item()]


def activation_checkpoints() -> list[float]:
    model = build()
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: isinstance(module, Block),
    )
    model = FSDP(model, auto_wrap_policy=policy, device_id=device)
    return train(model)


def checkpoints_in_forward() -> list[float]:
    model = Checkpointed()
    model = FSDP(model, auto_wrap_policy=policy, device_id=device)
    return train(model)


def compiled() -> list[float]:
    model = _fsdp(use_orig_params=True)
    model = torch.compile(model)
    return train(model)


def whole_parameters() -> list[float]:
    model = _fsdp()
    with FSDP.summon_full_params(model):
        nn.init.constant_(model.head.bias, 0.5)
        total = float(model.head.weight.sum())
    return [total, *train(model)]


def only_read() -> list[float]:
    model = _fsdp()
    with FSDP.summon_full_params(model, writeback=False):
        total = float(model.head.weight.sum())
    return [total]


def applied() -> list[float]:
    model = _fsdp()

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 0.1)

    model.apply(fill)
    return train(model)


def units() -> list[float]:
    model = _fsdp()
    return [float(len(FSDP.fsdp_modules(model)))]


def own_hook() -> list[float]:
    model = _fsdp()
    model.register_comm_hook(None, scatter)
    return train(model)


def full_state() -> list[float]:
    model = _fsdp()
    train(model)
    config = FullStateDictConfig(offload_to_cpu=on_gpu, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, "model.pt")
    return numbers(state)


def full_state_loaded() -> list[float]:
    dist.barrier()
    model = _fsdp()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(torch.load("model.pt"))
    return train(model)


def sharded_state() -> list[float]:
    model = _fsdp()
    train(model)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.save(state, checkpoint_id="shards")
        dcp.load(state, checkpoint_id="shards")
        model.load_state_dict(state["model"])
    return train(model)


def local_state() -> None:
    model = _fsdp()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.state_dict()


def states_of_the_optimizer() -> list[float]:
    model = _fsdp()
    optimizer = adamw(model)
    train(model, optimizer)
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(),
        FullOptimStateDictConfig(offload_to_cpu=on_gpu),
    )
    state = FSDP.optim_state_dict(model, optimizer)
    state = FSDP.optim_state_dict_to_load(model, optimizer, state)
    optimizer.load_state_dict(state)
    return train(model, optimizer)
