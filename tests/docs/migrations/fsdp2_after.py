"""Lines of docs/migrate/fsdp2.md: autoshard."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp
from common import (
    STEPS,
    Checkpointed,
    Event,
    Gather,
    Scatter,
    adamw,
    build,
    device,
    loss_of,
    numbers,
    on_gpu,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

import autoshard
from autoshard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_forward_method,
    share_comm_ctx,
)


def _sharded(**arguments):
    """Shard each block, and the model."""
    model = build()
    for block in model.layers:
        fully_shard(block, **arguments)
    return fully_shard(model, **arguments)


def bottom_up() -> list[float]:
    model = build()
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    return train(model)


def several_modules() -> list[float]:
    model = build()
    fully_shard([model.layers[0], model.layers[1]])
    fully_shard(model)
    return train(model)


def kept_after_forward() -> list[float]:
    return train(_sharded(reshard_after_forward=False))


def fewer_ranks() -> list[float]:
    return train(_sharded(reshard_after_forward=2))


def mesh() -> list[float]:
    mesh = init_device_mesh(device.type, (2,))
    return train(_sharded(mesh=mesh))


def hybrid() -> list[float]:
    mesh = init_device_mesh(device.type, (1, 2), mesh_dim_names=("replicate", "shard"))
    return train(_sharded(mesh=mesh))


def named_axes() -> list[float]:
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = distribute_module(nn.Linear(4, 4).to(device), mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    ids = distribute_tensor(torch.ones(4, 4, device=device), mesh, [Shard(0)])
    loss = model(ids).square().sum().full_tensor()
    loss.backward()
    return [loss.item(), model.weight.grad.full_tensor().sum().item()]


def placements() -> list[float]:
    def columns(param):
        return Shard(1) if param.ndim == 2 and param.shape[1] % 2 == 0 else None

    return train(_sharded(shard_placement_fn=columns))


def precision() -> list[float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(_sharded(mp_policy=policy))


def precision_of_outputs() -> list[float]:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=True
    )
    model = build()
    fully_shard(model, mp_policy=policy)
    return train(model)


def offload() -> list[float]:
    return train(_sharded(offload_policy=CPUOffloadPolicy(pin_memory=on_gpu)))


def ignored() -> list[float]:
    model = build()
    model.head.requires_grad_(False)
    fully_shard(model, ignored_params=set(model.head.parameters()))
    return train(model)


def on_meta() -> list[float]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    fully_shard(model)
    model.to_empty(device=device)
    for param in model.parameters():
        nn.init.constant_(param, 0.1)
    return [model(torch.ones(2, 8, device=device)).sum().item()]


def frozen() -> list[float]:
    model = build()
    model.embed.requires_grad_(False)
    fully_shard(model)
    return train(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))


def accumulation() -> list[float]:
    model = _sharded()
    optimizer = adamw(model)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        loss_of(model, step).backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return [loss_of(model, 0).item()]


def kept_between_microbatches() -> list[float]:
    model = _sharded()
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    loss_of(model, 0).backward()
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    loss_of(model, 1).backward()
    adamw(model).step()
    return [loss_of(model, 0).item()]


def replicas_reduced_later() -> list[float]:
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    model = _sharded(mesh=mesh)
    model.set_requires_all_reduce(False)
    loss_of(model, 0).backward()
    model.set_requires_all_reduce(True)
    loss_of(model, 1).backward()
    adamw(model).step()
    return [loss_of(model, 0).item()]


def several_backwards() -> list[float]:
    model = _sharded()
    model.set_is_last_backward(False)
    loss_of(model, 0).backward()
    model.set_is_last_backward(True)
    loss_of(model, 1).backward()
    adamw(model).step()
    return [loss_of(model, 0).item()]


def clipping() -> list[float]:
    model = _sharded()
    loss_of(model, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [norm.full_tensor().item()]


def scaler() -> list[float]:
    model = _sharded()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler(device.type)
    for step in range(STEPS):
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [loss_of(model, 0).item()]


def autocast() -> list[float]:
    model = _sharded()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = loss_of(model, 0)
    loss.backward()
    adamw(model).step()
    return [loss.item(), loss_of(model, 0).item()]


def activation_checkpoints() -> list[float]:
    model = Checkpointed()
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    return train(model)


def prefetch() -> list[float]:
    model = _sharded()
    first, second = model.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    return train(model)


def whole_ahead() -> list[float]:
    model = _sharded()
    handle = model.unshard(async_op=True)
    handle.wait()
    model.reshard()
    return train(model)


def settings() -> list[float]:
    model = _sharded()
    model.set_reshard_after_forward(False)
    model.layers[0].set_unshard_in_backward(False)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_reduce_scatter_unused_params(True)
    return train(model)


def divisors() -> list[float]:
    model = _sharded()
    for unit in (*model.layers, model):
        unit.set_gradient_divide_factor(4.0)
        unit.set_force_sum_reduction_for_comms(True)
    return train(model)


def separate_group() -> list[float]:
    model = _sharded()
    model.set_separate_reduce_scatter_group()
    return train(model)


def hooks() -> list[float]:
    model = _sharded()
    model.set_all_reduce_hook(lambda gradients: gradients.mul_(0.5))
    return train(model)


def own_collectives() -> list[float]:
    model = _sharded()
    model.set_custom_all_gather(Gather())
    model.set_custom_reduce_scatter(Scatter())
    return train(model)


def memory_of_the_group() -> list[float]:
    model = _sharded()
    model.set_allocate_memory_from_process_group_for_comm(True)
    return train(model)


def symmetric_memory() -> None:
    model = _sharded()
    if on_gpu:
        model.set_symm_mem_for_comm()


def after_an_optimizer() -> list[float]:
    model = _sharded()
    model.set_post_optim_event(Event())
    return train(model)


def after_an_exception() -> list[float]:
    model = _sharded()
    try:
        model("no ids")
    except TypeError:
        model.reset_iter_state()
    return train(model)


def other_methods() -> list[float]:
    model = build()
    model.generate = lambda: model.head(model.embed.weight[:1]).sum()
    fully_shard(model)
    register_forward_method(model, "generate")
    return [model.generate().item()]


def streams() -> list[float]:
    first, second = _sharded(), _sharded()
    share_comm_ctx([first, second])
    return [*train(first), *train(second)]


def classes() -> list[float]:
    model = _sharded()
    return [float(sum(isinstance(each, FSDPModule) for each in model.modules()))]


def compiled() -> list[float]:
    model = build()
    for block in model.layers:
        block.compile()
        fully_shard(block)
    fully_shard(model)
    return train(model)


def compiled_whole() -> list[float]:
    model = _sharded()
    model.compile(backend="autoshard")
    return train(model)


def optimizer_in_backward() -> list[float]:
    model = _sharded()
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(
            lambda param, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad())
        )
    loss_of(model, 0).backward()
    return [loss_of(model, 0).item()]


def full_state() -> list[float]:
    model = _sharded()
    train(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(state, "model.pt")
    return numbers(state)


def full_state_loaded() -> list[float]:
    dist.barrier()
    model = _sharded()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = torch.load("model.pt") if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=options)
    return train(model)


def full_state_by_hand() -> list[float]:
    model = _sharded()
    state = {name: param.full_tensor() for name, param in model.state_dict().items()}
    for name, param in model.named_parameters():
        whole = distribute_tensor(state[name], param.device_mesh, param.placements)
        state[name] = nn.Parameter(whole)
    model.load_state_dict(state, assign=True)
    return train(model)


def state_of_the_optimizer() -> list[float]:
    model = _sharded()
    optimizer = adamw(model)
    train(model, optimizer)
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    return train(model, optimizer)


def shards() -> list[float]:
    model = _sharded()
    optimizer = adamw(model)
    train(model, optimizer)
    parts, states = get_state_dict(model, optimizer)
    state = {"model": parts, "optimizer": states}
    dcp.save(state, checkpoint_id="shards")
    dcp.load(state, checkpoint_id="shards")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return train(model, optimizer)


def sharded_by_torch() -> None:
    model = build()
    for block in model.layers:
        fsdp.fully_shard(block)
    fsdp.fully_shard(model)
    model.compile(backend="autoshard")
    train(model)
    assert isinstance(model, autoshard.ShardedModule)


def flat() -> None:
    train(_sharded(shard_placement_fn="auto"))


def no_sync() -> None:
    model = _sharded()
    with model.no_sync():
        loss_of(model, 0).backward()
    loss_of(model, 1).backward()


def clipping_at_once() -> None:
    model = _sharded()
    loss_of(model, 0).backward()
    norm = model.clip_grad_norm_(1.0)
    assert norm.item() > 0


def in_one_call() -> None:
    model = build()
    autoshard.shard(model)
    train(model)


def full_state_at_once() -> None:
    model = _sharded()
    state = autoshard.full_state_dict(model, cpu_offload=True, rank0_only=True)
    assert len(state) == (len(model.state_dict()) if dist.get_rank() == 0 else 0)


def whole_parameters() -> None:
    model = _sharded()
    with model.full_params():
        nn.init.constant_(model.head.bias, 0.5)


def checkpoints() -> None:
    model = _sharded()
    optimizer = adamw(model)
    train(model, optimizer)
    autoshard.save_checkpoint("checkpoints", model, optimizer, step=3)
    assert autoshard.load_checkpoint("checkpoints", model, optimizer) == 3


def predicted_memory() -> None:
    model = _sharded()
    model.compile(backend="autoshard")
    train(model)
    assert autoshard.plans(model)[0].peak_bytes > 0
