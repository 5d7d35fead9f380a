"""Lines of docs/migrate/fsdp1.md: autoshard."""

from __future__ import annotations

import functools

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
    scatter,
    train,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoshard
from autoshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

policy = ModuleWrapPolicy({Block})


def _shard(**arguments):
    """Shard the model, with a unit for each block."""
    return autoshard.shard(build(), **{"policy": policy, **arguments})


def by_classes() -> list[float]:
    model = build()
    model = autoshard.shard(model, policy=ModuleWrapPolicy({Block}))
    return train(model)


def transformers() -> list[float]:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return train(_shard(policy=policy))


def by_size() -> list[float]:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    return train(_shard(policy=policy))


def by_a_function() -> list[float]:
    policy = functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)
    )
    return train(_shard(policy=policy))


def custom() -> list[float]:
    policy = CustomPolicy(
        lambda module: {"strategy": "shard_grad_op"} if isinstance(module, Block) else False
    )
    return train(_shard(policy=policy))


def by_hand() -> list[float]:
    model = build()
    for block in model.layers:
        autoshard.fully_shard(block)
    autoshard.fully_shard(model)
    return train(model)


def while_it_is_built() -> list[float]:
    model = build()
    with enable_wrap(wrapper_cls=autoshard.fully_shard):
        model.head = wrap(model.head)
    autoshard.fully_shard(model)
    return train(model)


def full_shard() -> list[float]:
    return train(_shard(strategy="full_shard"))


def shard_grad_op() -> list[float]:
    return train(_shard(strategy="shard_grad_op"))


def no_shard() -> list[float]:
    return train(_shard(strategy="no_shard"))


def hybrid_shard() -> list[float]:
    mesh = init_device_mesh(device.type, (1, 2), mesh_dim_names=("replicate", "shard"))
    return train(_shard(strategy="hybrid_shard", mesh=mesh))


def hybrid_shard_zero2() -> list[float]:
    return train(_shard(strategy="hybrid_shard_zero2", mesh=autoshard.hybrid_mesh(2)))


def mesh() -> list[float]:
    mesh = init_device_mesh(device.type, (2,))
    return train(_shard(mesh=mesh))


def group_of_ranks() -> list[float]:
    group = dist.new_group([0, 1])
    return train(_shard(mesh=DeviceMesh.from_group(group, device.type)))


def precision() -> list[float]:
    precision = autoshard.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    return train(_shard(mp_policy=precision))


def precision_of_buffers() -> list[float]:
    precision = autoshard.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        buffer_dtype=torch.bfloat16,
        keep_low_precision_grads=False,
        cast_forward_inputs=True,
    )
    return train(_shard(mp_policy=precision))


def precision_by_class() -> list[float]:
    precision = autoshard.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    whole = autoshard.MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    policy = CustomPolicy(
        lambda module: (
            {"mp_policy": whole} if isinstance(module, nn.LayerNorm) else isinstance(module, Block)
        )
    )
    return train(_shard(policy=policy, mp_policy=precision))


def offload() -> list[float]:
    return train(_shard(offload_policy=autoshard.CPUOffloadPolicy()))


def prefetch() -> list[float]:
    return train(_shard(backward_prefetch="pre", forward_prefetch=True, limit_all_gathers=True))


def prefetch_later() -> list[float]:
    return train(_shard(backward_prefetch="post", forward_prefetch=False))


def no_prefetch() -> list[float]:
    return train(_shard(backward_prefetch=None))


def ignored() -> list[float]:
    model = build()
    model.head.requires_grad_(False)
    autoshard.shard(model, ignored_modules=[model.head])
    return train(model)


def ignored_states() -> list[float]:
    model = build()
    model.head.requires_grad_(False)
    autoshard.shard(model, ignored_params=list(model.head.parameters()))
    return train(model)


def first_values() -> list[float]:
    model = build()
    if dist.get_rank() == 1:
        nn.init.zeros_(model.head.weight)
    autoshard.shard(model, sync_module_states=True)
    return train(model)


def on_meta() -> list[float]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    autoshard.shard(model, param_init_fn=initialize)
    return [model(torch.ones(2, 8, device=device)).sum().item()]


def frozen() -> list[float]:
    model = build()
    model.embed.requires_grad_(False)
    autoshard.shard(model)
    return train(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))


def accumulation() -> list[float]:
    model = _shard()
    optimizer = adamw(model)
    for step in range(STEPS):
        with model.no_sync():
            loss_of(model, 2 * step).backward()
        loss_of(model, 2 * step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss_of(model, 0).item()]


def clipping() -> list[float]:
    model = _shard()
    loss_of(model, 0).backward()
    norm = model.clip_grad_norm_(1.0)
    return [float(norm)]


def scaler() -> list[float]:
    model = _shard()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler(device.type)
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
    autoshard.shard(model, policy=policy)
    return train(model)


def checkpoints_in_forward() -> list[float]:
    model = Checkpointed()
    autoshard.shard(model, policy=policy)
    return train(model)


def compiled() -> list[float]:
    model = _shard()
    model.compile(backend="autoshard")
    return train(model)


def in_one_line() -> list[float]:
    model = build()
    model = torch.compile(model, backend="autoshard", options={"strategy": "shard_grad_op"})
    return train(model)


def whole_parameters() -> list[float]:
    model = _shard()
    with model.full_params():
        nn.init.constant_(model.head.bias, 0.5)
        total = float(model.head.weight.sum())
    return [total, *train(model)]


def only_read() -> list[float]:
    model = _shard()
    with model.full_params(writeback=False):
        total = float(model.head.weight.sum())
    return [total]


def applied() -> list[float]:
    model = _shard()

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 0.1)

    with model.full_params():
        model.apply(fill)
    return train(model)


def units() -> list[float]:
    model = _shard()
    found = [each for each in model.modules() if isinstance(each, autoshard.ShardedModule)]
    return [float(len(found))]


def own_hook() -> list[float]:
    model = _shard()
    model.register_comm_hook(None, scatter)
    return train(model)


def full_state() -> list[float]:
    model = _shard()
    train(model)
    state = autoshard.full_state_dict(model, cpu_offload=True, rank0_only=True)
    if dist.get_rank() == 0:
        torch.save(state, "model.pt")
    return numbers(state)


def full_state_loaded() -> list[float]:
    dist.barrier()
    model = _shard()
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, torch.load("model.pt"), options=options)
    return train(model)


def sharded_state() -> list[float]:
    model = _shard()
    train(model)
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id="shards")
    dcp.load(state, checkpoint_id="shards")
    model.load_state_dict(state["model"])
    return train(model)


def states_of_the_optimizer() -> list[float]:
    model = _shard()
    optimizer = adamw(model)
    train(model, optimizer)
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    return train(model, optimizer)


def checkpoints() -> list[float]:
    model = _shard()
    optimizer = adamw(model)
    train(model, optimizer)
    autoshard.save_checkpoint("checkpoints", model, optimizer, step=3)
    autoshard.load_checkpoint("checkpoints", model, optimizer)
    return train(model, optimizer)
