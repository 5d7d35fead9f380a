"""A rank that trains until a signal comes, saves, and ends; or goes on from there."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from support.models import SmallNet, net_loss
from support.training import adamw, in_form

import autoshard
from autoshard.runtime.training import preemption

STEPS, AT = 14, 4
PHASES = ("forward", "backward", "optimizer", "between", "save", "writing")


def run(environment: dict[str, str], folder: str, form: str, phase: str, pipe: Any) -> None:
    """Send (the step it came to, its parameters' shards, its averages) through `pipe`.

    phase: in which rank 1 gets SIGTERM in step AT; "" for none.
    """
    os.environ.update(environment)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = in_form(autoshard.shard(SmallNet()), form)
    optimizer = adamw(model)
    first = autoshard.load_checkpoint(folder, model, optimizer) or 0

    def hit(now: str, step: int) -> None:
        if (now, step, rank) == (phase, AT, 1):
            os.kill(os.getpid(), signal.SIGTERM)

    step, pending = first, None
    while step < STEPS:
        noise = 1 + torch.rand(()).item()  # of the rank's generator, which is saved, too
        if step == AT:
            hit("forward", step)
        loss = net_loss(model, rank, step) * noise
        loss.register_hook(lambda grad, step=step: hit("backward", step))
        loss.backward()
        hit("optimizer", step)
        optimizer.step()
        optimizer.zero_grad()
        hit("between", step)
        step += 1
        if step % 5 == 0:
            hit("save", step - 1)
            pending = autoshard.save_checkpoint(folder, model, optimizer, step=step, wait=False)
            hit("writing", step - 1)
        if autoshard.preempted():
            autoshard.save_checkpoint(folder, model, optimizer, step=step)
            break
    assert pending is None or pending.wait().is_dir()
    shards = [param.to_local().tolist() for param in model.parameters()]
    averages = [
        value.to_local().tolist()
        for state in optimizer.state.values()
        for value in state.values()
        if hasattr(value, "to_local")
    ]
    pipe.send((step, shards, averages))
    dist.barrier()
    os._exit(0)


def fork(environment: dict[str, str], pipe: Any) -> None:
    """Send (what a forked child says of signals noted, the signal that ends it, `preempted()`)."""
    os.environ.update(environment)
    autoshard.preempted()
    os.kill(os.getpid(), signal.SIGTERM)
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(there, bytes(preemption._received) + b".")
        time.sleep(60)
        os._exit(0)
    noted = os.read(here, 9)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    pipe.send((noted, os.WIFSIGNALED(status) and os.WTERMSIG(status), autoshard.preempted()))
