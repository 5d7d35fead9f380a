"""What a process holds after thousands of steps: memory, objects, threads, files, store keys.

    torchrun --standalone --nproc-per-node 2 benchmarks/long_run.py [--steps 5000]

A small model trains eagerly, and one compiled, with AdamW, clipped gradients, an evaluation now
and then, and checkpoints that are written while training goes on. What rank 0 holds is printed
after a fifth of the steps, and as often again, for each form; the last line says by how much each
has grown since the first of these, and how many bytes that is a step.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard import _torch

MARKS = 5


def held() -> dict[str, float]:
    """Count what this process holds, after a garbage collection."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return {
        "MiB": int(status.split("VmRSS:")[1].split()[0]) / 1024,
        "objects": len(gc.get_objects()),
        "Python threads": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "store keys": _torch.dist.default_store().num_keys(),
    }


class Block(nn.Module):
    """Two layers around a norm, with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def train(form: str, steps: int, save_every: int, folder: Path) -> list[dict[str, float]]:
    """Train `steps` steps in `form`, "eager" or "compiled"; return what is held at each mark."""
    torch.manual_seed(0)
    model = autoshard.shard(nn.Sequential(*(Block(64) for _ in range(4))))
    if form == "compiled":
        model.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    marks = []
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step % 100 + 100 * dist.get_rank())
        batch = torch.randn(8, 64, generator=generator)
        model(batch).square().mean().backward()
        model.clip_grad_norm_(1.0)  # type: ignore[operator]  # of a sharded module
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            with torch.no_grad():
                model(batch)
        if step % save_every == 0:
            autoshard.save_checkpoint(folder / form, model, optimizer, step=step, wait=False).wait()
        if step % (steps // MARKS) == 0:
            marks.append(held())
    return marks


def main(given: Sequence[str] | None = None) -> None:
    """Train in both forms, and print what rank 0 holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--save-every", type=int, default=500)
    options = parser.parse_args(given)
    dist.init_process_group("gloo")
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    for form in ("eager", "compiled"):
        marks = train(form, options.steps, options.save_every, Path(made[0]))
        if dist.get_rank() == 0:
            report(form, options.steps, marks)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(made[0])
    dist.destroy_process_group()


def report(form: str, steps: int, marks: list[dict[str, float]]) -> None:
    """Print `marks`, and their growth since the first."""
    print(f"{form:10}" + "".join(f"{what:>16}" for what in marks[0]))
    for number, mark in enumerate(marks, 1):
        print(f"{number * steps // MARKS:10}" + "".join(f"{each:16.1f}" for each in mark.values()))
    more = {what: marks[-1][what] - first for what, first in marks[0].items()}
    per_step = more["MiB"] * 2**20 / (steps - steps // MARKS)
    print(f"{'grown':10}" + "".join(f"{each:16.1f}" for each in more.values()))
    print(f"{per_step:.0f} bytes a step\n", flush=True)


if __name__ == "__main__":
    main()
