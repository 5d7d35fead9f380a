"""Ranks that end while a checkpoint is being written."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.runtime.training.checkpoint import writing


def _begun(environment: dict[str, str]) -> nn.Module:
    os.environ.update(environment)
    dist.init_process_group("gloo")
    return autoshard.shard(nn.Linear(64, 32))


def _fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def kill(environment: dict[str, str], folder: str, pipe: Any) -> None:
    """Save step 1, and be killed while step 2 is written: its files are there, and no manifest."""
    model = _begun(environment)
    _fill(model, 1.0)
    autoshard.save_checkpoint(folder, model, step=1, wait=False).wait()
    _fill(model, 2.0)

    def is_written(aside: Path, rank: int) -> Any:
        written.set()
        time.sleep(600)

    written = threading.Event()
    with mock.patch.object(writing, "written_here", is_written):
        autoshard.save_checkpoint(folder, model, step=2, wait=False)
        written.wait()
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def go_on(environment: dict[str, str], folder: str, pipe: Any) -> None:
    """Load, save step 3, and send (the step that was loaded, a parameter's value, names)."""
    model = _begun(environment)
    step = autoshard.load_checkpoint(folder, model)
    value = next(model.parameters()).full_tensor().unique().item()  # type: ignore[attr-defined]
    autoshard.save_checkpoint(folder, model, step=3, wait=False).wait()
    pipe.send((step, value, sorted(path.name for path in Path(folder).glob("step_*"))))
    dist.barrier()
    os._exit(0)


SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
import autoshard
from autoshard.runtime.training.checkpoint.writing import Task

dist.init_process_group("gloo")
model = autoshard.shard(nn.Linear(64, 32))
write = Task.write
def write_later(task):
    import time
    time.sleep(1.0 + task.rank)
    return write(task)
Task.write = write_later
{before}
autoshard.save_checkpoint({folder!r}, model, step=5, wait=False)
{end}
"""
"""Program of a rank that ends with a checkpoint that is not written yet."""

NO_ROOM = """
def no_room(task):
    raise OSError("no room")
if dist.get_rank() == 1:
    Task.write = no_room
"""
"""What may stand `before`."""

FORK = """
import os, signal, sys
from autoshard.runtime.ranks.exchange import client

child = os.fork()
if child == 0:
    signal.alarm(20)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert client().get(f"autoshard/left/{dist.get_rank()}") == ""
"""
"""What may stand at the `end`: another process ends before, which is no rank."""
