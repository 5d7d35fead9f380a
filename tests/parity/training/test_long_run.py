"""Many steps: what a process holds does not grow, and the losses stay the same."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import Net, net_loss
from support.ranks import on_ranks
from support.selection import IS_FULL
from support.training import FORMS, assert_same, in_form, sgd

import autoshard

STEPS, WARM_UP = (2000, 400) if IS_FULL else (600, 200)
"""Warmed up are allocators, caches of torch, and of what ranks know of each other."""
MORE_BYTES = (STEPS - WARM_UP) * 5242  # the allocator's; a leaked graph a step would be far more
MORE_OBJECTS = (STEPS - WARM_UP) // 8


def held() -> dict[str, int]:
    """What this process has."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return {
        "resident bytes": 1024 * int(status.split("VmRSS:")[1].split()[0]),
        "objects": len(gc.get_objects()),
        "Python's threads": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def train(
    model: Any, rank: int, *, reduce: Callable[[Any], None] = lambda model: None
) -> tuple[list[float], list[dict[str, int]]]:
    optimizer = sgd(model)
    losses, marks = [], []
    for step in range(STEPS):
        loss = net_loss(model, rank, step % 50)
        loss.backward()
        reduce(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 in (WARM_UP, STEPS):
            marks.append(held())
    return losses, marks


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@on_ranks(2, timeout=240)
def test_many_steps(rank: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    want = Net(layers=1)
    wanted, _ = train(want, rank, reduce=average_at_once)
    for form in FORMS:
        torch.manual_seed(0)
        model = in_form(autoshard.shard(Net(layers=1)), form)
        losses, (before, after) = train(model, rank)
        assert losses == wanted
        assert_same(model, want)
        more = {what: after[what] - number for what, number in before.items()}
        assert more["resident bytes"] < MORE_BYTES, (form, more)
        assert more["objects"] < MORE_OBJECTS, (form, more)
        for what in ("Python's threads", "threads", "files"):
            assert more[what] <= 0, (form, more)


def average_at_once(model: Any) -> None:
    """The sums of two ranks are those of `average_gradients`, in one collective."""
    grads = [param.grad for param in model.parameters()]
    flat = torch.cat([grad.view(-1) for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view(grad.shape))
