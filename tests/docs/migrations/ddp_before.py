"""Lines of docs/migrate/ddp.md: DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import STEPS, Block, Checkpointed, adamw, build, device, loss_of, numbers, train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def replicas() -> list[float]:
    model = build()
    model = DDP(model)
    return train(model)


def buckets() -> list[float]:
    model = build()
    model = DDP(model, bucket_cap_mb=1)
    return train(model)


def unused_parameters() -> list[float]:
    model = _WithSpare()
    model = DDP(model, find_unused_parameters=True)
    return train(model)


class _WithSpare(nn.Module):
    """Model with a layer that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()
        self.spare = nn.Linear(2, 2, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


def branches() -> list[float]:
    model = _Branches()
    model = DDP(model, find_unused_parameters=True)
    return train(model)


class _Branches(nn.Module):
    """Model whose ranks call different blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.layers[dist.get_rank()](self.model.embed(ids))
        return self.model.head(x)


def views() -> list[float]:
    model = build()
    model = DDP(model, static_graph=True, gradient_as_bucket_view=True)
    return train(model)


def buffers() -> list[float]:
    model = nn.Sequential(build(), _Normed())
    model = DDP(model, broadcast_buffers=True)
    losses = train(model)
    return [*losses, *numbers(dict(model.module.named_buffers()))]


class _Normed(nn.Module):
    """Batch norm over words."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


def synchronized_norms() -> list[float]:
    model = nn.Sequential(build(), _Normed())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.eval()  # training, and DDP, need GPUs for them
    return [loss_of(model, 0).item()]


def first_values() -> list[float]:
    model = build()
    if dist.get_rank() == 1:
        nn.init.zeros_(model.head.weight)
    model = DDP(model)
    return train(model)


def group_of_ranks() -> list[float]:
    group = dist.new_group([0, 1])
    model = build()
    model = DDP(model, process_group=group)
    return train(model)


def accumulation() -> list[float]:
    model = build()
    model = DDP(model)
    optimizer = adamw(model)
    for step in range(STEPS):
        with model.no_sync():
            loss_of(model, 2 * step).backward()
        loss_of(model, 2 * step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss_of(model, 0).item()]


def clipping() -> list[float]:
    model = build()
    model = DDP(model)
    loss_of(model, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [float(norm)]


def clipping_by_value() -> list[float]:
    model = build()
    model = DDP(model)
    optimizer = adamw(model)
    loss_of(model, 0).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    return [loss_of(model, 0).item()]


def autocast() -> list[float]:
    model = build()
    model = DDP(model)
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


def scaler() -> list[float]:
    model = build()
    model = DDP(model)
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
    model = DDP(model)
    model.register_comm_hook(None, fp16_compress_hook)
    return train(model)


def own_hook() -> list[float]:
    model = build()
    model = DDP(model)
    group = dist.group.WORLD

    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    return train(model)


def sharded_states() -> list[float]:
    model = build()
    model = DDP(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return train(model, optimizer)


def ignored() -> list[float]:
    model = build()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["head.weight", "head.bias"])
    model.head.requires_grad_(False)
    model = DDP(model)
    return train(model)


def frozen() -> list[float]:
    model = build()
    model.embed.requires_grad_(False)
    model = DDP(model)
    return train(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))


def hooks() -> list[float]:
    model = build()
    model.head.weight.register_hook(lambda grad: 2 * grad)
    model = DDP(model)
    loss_of(model, 0).backward()
    return [float(model.module.head.weight.grad.sum())]


def saved() -> list[float]:
    model = build()
    model = DDP(model)
    train(model)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
    return numbers(model.module.state_dict())


def loaded() -> list[float]:
    dist.barrier()
    model = build()
    model.load_state_dict(torch.load("model.pt", map_location=device))
    model = DDP(model)
    return train(model)


def loaded_later() -> list[float]:
    model = build()
    model = DDP(model)
    model.module.load_state_dict(torch.load("model.pt", map_location=device))
    return train(model)


def states_of_the_optimizer() -> list[float]:
    model = build()
    model = DDP(model)
    optimizer = adamw(model)
    train(model, optimizer)
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    if dist.get_rank() == 0:
        torch.save(state, "checkpoint.pt")
    dist.barrier()
    state = torch.load("checkpoint.pt", map_location=device)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return train(model, optimizer)


def activation_checkpoints() -> list[float]:
    model = Checkpointed()
    model = DDP(model)
    return train(model)


def compiled() -> list[float]:
    model = build()
    model = DDP(model)
    model = torch.compile(model)
    return train(model)


def compiled_blocks() -> list[float]:
    model = build()
    for block in model.modules():
        if isinstance(block, Block):
            block.compile()
    model = DDP(model)
    return train(model)


def samplers() -> list[float]:
    dataset = torch.arange(8.0)
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset), batch_size=2)
    return [float(each.sum()) for each in loader]


def uneven_inputs() -> None:
    model = build()
    model = DDP(model)
    optimizer = adamw(model)
    with Join([model]):
        for step in range(1 + dist.get_rank()):
            loss_of(model, step).backward()
            optimizer.step()


def what_it_did() -> None:
    model = build()
    model = DDP(model)
    train(model)
    model._get_ddp_logging_data()
