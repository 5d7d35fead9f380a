"""Lines of docs/migrate/ddp.md: autoshard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import STEPS, Block, Checkpointed, adamw, build, device, loss_of, numbers, train
from ddp_before import _Branches, _Normed, _WithSpare
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler

import autoshard


def replicas() -> list[float]:
    model = build()
    autoshard.replicate(model)
    return train(model)


def strategies() -> list[float]:
    model = build()
    model = torch.compile(model, backend="autoshard", options={"strategy": "no_shard"})
    return train(model)


def buckets() -> list[float]:
    model = build()
    model = torch.compile(model, backend="autoshard", options={"bucketing": "per_unit"})
    return train(model)


def unused_parameters() -> list[float]:
    model = _WithSpare()
    autoshard.shard(model)
    return train(model)


def branches() -> list[float]:
    model = _Branches()
    autoshard.shard(model, strict_order=False)
    return train(model)


def views() -> list[float]:
    model = build()
    autoshard.shard(model)
    return train(model)


def buffers() -> list[float]:
    model = nn.Sequential(build(), _Normed())
    autoshard.shard(model)
    losses = train(model)
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    return [*losses, *numbers(dict(model.named_buffers()))]


def synchronized_norms() -> list[float]:
    model = nn.Sequential(build(), _Normed())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    autoshard.shard(model)
    model.eval()  # training them needs GPUs
    return [loss_of(model, 0).item()]


def first_values() -> list[float]:
    model = build()
    if dist.get_rank() == 1:
        nn.init.zeros_(model.head.weight)
    autoshard.shard(model, sync_module_states=True)
    return train(model)


def group_of_ranks() -> list[float]:
    group = dist.new_group([0, 1])
    model = build()
    autoshard.shard(model, mesh=DeviceMesh.from_group(group, device.type))
    return train(model)


def accumulation() -> list[float]:
    model = build()
    model = torch.compile(model, backend="autoshard")
    optimizer = adamw(model)
    for step in range(STEPS):
        with model.no_sync():
            loss_of(model, 2 * step).backward()
        loss_of(model, 2 * step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss_of(model, 0).item()]


def accumulation_by_a_setting() -> None:
    model = build()
    autoshard.shard(model)
    optimizer = adamw(model)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        loss_of(model, step).backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def clipping() -> list[float]:
    model = build()
    autoshard.shard(model)
    loss_of(model, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [float(norm.full_tensor())]


def clipping_at_once() -> None:
    model = build()
    autoshard.shard(model)
    loss_of(model, 0).backward()
    norm = model.clip_grad_norm_(1.0)
    assert float(norm) > 0


def clipping_by_value() -> list[float]:
    model = build()
    autoshard.shard(model)
    optimizer = adamw(model)
    loss_of(model, 0).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    return [loss_of(model, 0).item()]


def autocast() -> list[float]:
    model = build()
    autoshard.shard(model)
    optimizer = adamw(model)
    losses = []
    for step in range(STEPS):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def precision() -> None:
    policy = autoshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = build()
    model = torch.compile(model, backend="autoshard", options={"mp_policy": policy})
    train(model)


def scaler() -> list[float]:
    model = build()
    autoshard.shard(model)
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


def reductions_in_fp16() -> list[float]:
    model = build()
    autoshard.shard(model, mp_policy=autoshard.MixedPrecisionPolicy(reduce_dtype=torch.float16))
    return train(model)


def own_hook() -> list[float]:
    model = build()
    autoshard.replicate(model)

    def hook(state, grad):
        dist.all_reduce(grad.div_(2))

    model.register_comm_hook(None, hook)
    return train(model)


def sharded_states() -> list[float]:
    model = build()
    autoshard.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return train(model, optimizer)


def ignored() -> list[float]:
    model = build()
    model.head.requires_grad_(False)
    autoshard.shard(model, ignored_params=[model.head.weight, model.head.bias])
    return train(model)


def frozen() -> list[float]:
    model = build()
    model.embed.requires_grad_(False)
    autoshard.shard(model)
    return train(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))


def hooks() -> list[float]:
    model = build()
    autoshard.shard(model)
    model.head.weight.register_hook(lambda grad: 2 * grad)
    loss_of(model, 0).backward()
    return [float(model.head.weight.grad.full_tensor().sum())]


def saved() -> list[float]:
    model = build()
    autoshard.shard(model)
    train(model)
    state = autoshard.full_state_dict(model, cpu_offload=True, rank0_only=True)
    if dist.get_rank() == 0:
        torch.save(state, "model.pt")
    assert list(model.state_dict()) == list(build().state_dict())
    return numbers(state)


def loaded() -> list[float]:
    dist.barrier()
    model = build()
    model.load_state_dict(torch.load("model.pt", map_location=device))
    autoshard.shard(model)
    return train(model)


def loaded_later() -> list[float]:
    model = build()
    autoshard.shard(model)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, torch.load("model.pt"), options=options)
    return train(model)


def states_of_the_optimizer() -> list[float]:
    model = build()
    autoshard.shard(model)
    optimizer = adamw(model)
    train(model, optimizer)
    autoshard.save_checkpoint("checkpoints", model, optimizer, step=3)
    autoshard.load_checkpoint("checkpoints", model, optimizer)
    return train(model, optimizer)


def activation_checkpoints() -> list[float]:
    model = Checkpointed()
    autoshard.shard(model)
    return train(model)


def compiled() -> list[float]:
    model = build()
    model = torch.compile(model, backend="autoshard")
    return train(model)


def compiled_blocks() -> list[float]:
    model = build()
    for block in model.modules():
        if isinstance(block, Block):
            block.compile()
    autoshard.shard(model)
    return train(model)


def samplers() -> list[float]:
    dataset = torch.arange(8.0)
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset), batch_size=2)
    return [float(each.sum()) for each in loader]


def offload() -> None:
    model = build()
    autoshard.shard(model, offload_policy=autoshard.CPUOffloadPolicy())
    train(model)


def on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    autoshard.shard(model)
    assert not any(param.is_meta for param in model.parameters())


def what_it_does() -> None:
    model = build()
    model = torch.compile(model, backend="autoshard")
    train(model)
    assert autoshard.plans(model)


def replicas_of_shards() -> None:
    model = build()
    autoshard.shard(model, strategy="hybrid_shard", mesh=autoshard.hybrid_mesh(2))
    train(model)
