"""Lines of docs/migrate/deepspeed.md: autoshard."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from common import STEPS, Block, adamw, build, device, loss_of, numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard


def _train(model, steps: int = STEPS, optimizer=None, **clipping) -> list[float]:
    """Take some steps, with norms of 1 at most, as DeepSpeed has it by default."""
    optimizer = optimizer or adamw(model)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        model.clip_grad_norm_(clipping.get("max_norm", 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _shard(**arguments):
    return autoshard.shard(build(), **arguments)


def started() -> list[float]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = torch.compile(model, backend="autoshard")
    return _train(model, optimizer=optimizer)


def own_optimizer() -> list[float]:
    model = _shard()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return _train(model, optimizer=optimizer)


def stage_0() -> list[float]:
    return _train(_shard(strategy="no_shard"))


def stage_1() -> list[float]:
    return _train(_shard(strategy="shard_grad_op"))


def stage_2() -> list[float]:
    return _train(_shard(strategy="shard_grad_op"))


def stage_3() -> list[float]:
    return _train(_shard(strategy="full_shard"))


def accumulation() -> list[float]:
    model = _shard()
    optimizer = adamw(model)
    losses = []
    for step in range(2 * STEPS):
        is_last = (step + 1) % 2 == 0
        model.set_requires_gradient_sync(is_last)
        loss = loss_of(model, step)
        (loss / 2).backward()
        if is_last:
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def clipping() -> list[float]:
    model = _shard()
    optimizer = adamw(model)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        norm = model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, norm.item()]


def bf16() -> list[float]:
    policy = autoshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = build().bfloat16().float()  # DeepSpeed rounds the first values
    autoshard.shard(model, mp_policy=policy)
    return _train(model)


def fp16() -> list[float]:
    policy = autoshard.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = _shard(mp_policy=policy)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler(device.type, init_scale=2**8)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def autocast() -> list[float]:
    model = _shard()
    optimizer = adamw(model)
    losses = []
    for step in range(STEPS):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def communication() -> list[float]:
    return _train(_shard(mp_policy=autoshard.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)))


def divided_before() -> list[float]:
    model = _shard(strategy="no_shard")
    for unit in model.modules():
        if isinstance(unit, autoshard.ShardedModule):
            unit.set_gradient_divide_factor(2.0)
    return _train(model)


def offload() -> list[float]:
    return _train(_shard(offload_policy=autoshard.CPUOffloadPolicy()))


def buckets() -> list[float]:
    model = build()
    options = {"bucketing": "auto", "memory_budget": 1 << 30}
    model = torch.compile(model, backend="autoshard", options=options)
    return _train(model)


def buckets_of_stage_2() -> list[float]:
    model = build()
    options = {"bucketing": "per_unit", "strategy": "shard_grad_op"}
    model = torch.compile(model, backend="autoshard", options=options)
    return _train(model)


def secondary_shards() -> list[float]:
    model = build()
    for block in model.layers:
        autoshard.fully_shard(block, reshard_after_forward=2)
    autoshard.fully_shard(model, reshard_after_forward=2)
    return _train(model)


def schedule() -> None:
    model = _shard()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def boundaries() -> list[float]:
    found = []
    for step in range(4):
        is_last = (step + 1) % 2 == 0
        found.append(float(is_last))
    return found


def no_sync() -> list[float]:
    model = _shard(strategy="shard_grad_op")
    optimizer = adamw(model)
    with model.no_sync():
        loss_of(model, 0).backward()
    loss_of(model, 1).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    return [loss_of(model, 0).item()]


def evaluation() -> list[float]:
    model = _shard()
    model.eval()
    with torch.no_grad():
        return [loss_of(model, 0).item()]


def the_module() -> list[float]:
    model = _shard()
    return [float(len(model.layers))]


def checkpoints() -> list[float]:
    model = _shard()
    optimizer = adamw(model)
    _train(model, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    states = {"schedule": schedule}
    autoshard.save_checkpoint("checkpoints", model, optimizer, step=3, states=states)
    step = autoshard.load_checkpoint("checkpoints", model, optimizer, states=states)
    return [*_train(model, optimizer=optimizer), float(step)]


def whole_state() -> list[float]:
    model = _shard()
    _train(model)
    return numbers(autoshard.full_state_dict(model, cpu_offload=True))


def saved_model() -> list[float]:
    model = _shard()
    autoshard.save_pretrained(model, "saved")
    return numbers(autoshard.full_state_dict(model))


def on_meta() -> list[float]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    autoshard.shard(model)
    return [float(sum(param.numel() for param in model.parameters()))]


def whole_parameters() -> list[float]:
    model = _shard()
    with model.full_params():
        nn.init.constant_(model.head.bias, 0.5)
        total = model.head.weight.sum().item()
    return [total, loss_of(model, 0).item()]


def one_parameter() -> list[float]:
    model = _shard()
    param = model.head.weight
    loss_of(model, 0).backward()
    whole = param.full_tensor()
    gradient = param.grad.full_tensor()
    with torch.no_grad():
        param.mul_(2)
    return [whole.sum().item(), gradient.abs().sum().item()]


def leaves() -> list[float]:
    model = build()
    autoshard.shard(model, policy=autoshard.ModuleWrapPolicy({Block}), strict_order=False)
    return _train(model)


def activation_checkpoints() -> list[float]:
    model = _shard()
    x = torch.ones(2, 16, device=device, requires_grad=True)
    y = checkpoint(model.layers[0], x, use_reentrant=False)
    return [y.sum().item()]


def compiled() -> list[float]:
    model = _shard()
    model.compile(backend="autoshard")
    return _train(model)


def hybrid() -> None:
    _train(_shard(strategy="hybrid_shard", mesh=autoshard.hybrid_mesh(2)))


def ranks() -> list[float]:
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    assert rank == dist.get_rank()
    return [float(rank + local_rank)]
