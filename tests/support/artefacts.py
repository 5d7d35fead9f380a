"""Models that `autoshard compile` makes artefacts of, and a loop that trains what is loaded.

A model's function is `NAME`, its batches' `NAME_batch`.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from support import warm
from support.architectures import ARCHITECTURES, architecture
from torch import Tensor, nn
from torch.nn import functional

import autoshard

FAMILIES = ("llama", "bert", "vit", "t5", "mixtral")


class Normed(nn.Module):
    """A layer with running statistics, a buffer, a constant of its own, and dropout."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.1)
        self.scale = scale
        self.register_buffer("shift", torch.linspace(-1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.linear(x) * self.scale + self.shift)
        return x + self.dropout(functional.gelu(hidden))


class Regression(nn.Module):
    """13 rows a weight: another number on each rank."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed(width, 0.5 + n) for n in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
        found = self.head(x)
        loss = None if y is None else functional.mse_loss(found, y)
        return {"loss": loss, "found": found, "rows": 6}


def small() -> nn.Module:
    torch.manual_seed(0)
    return Regression()


def small_batch(rank: int, step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1000 * rank + step)
    return {"x": torch.randn(6, 13, generator=random), "y": torch.randn(6, 1, generator=random)}


def _family(name: str) -> nn.Module:
    torch.manual_seed(0)
    return architecture(name)


def _family_batch(name: str, rank: int, step: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(1000 * rank + step)
    batch = ARCHITECTURES[name].batch
    assert batch is not None
    return {**batch(random), **({} if name in ("vit", "bert") else {"use_cache": False})}


for _name in FAMILIES:
    globals()[_name] = functools.partial(_family, _name)
    globals()[f"{_name}_batch"] = functools.partial(_family_batch, _name)


def made(name: str, folder: Path, *more: str, ranks: int = 2, options: str = "{}") -> str:
    """Make the artefact of a model in a process of its own; what it prints."""
    here = f"support.artefacts:{name}"
    command = ["-m", "autoshard.tools.cli", "compile", "--model", here, "--batch", f"{here}_batch"]
    command += ["--gpus", str(ranks), "--out", str(folder), "--options", options, *more]
    done = subprocess.run(
        [warm.python(), *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(model: Any, name: str, rank: int, *, accumulate: int = 1, steps: int = 3) -> list[Tensor]:
    """Train by a loop, and evaluate at the end: losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = autoshard.train_step(
        model, optimizer, lambda model, batch: loss_of(model(**batch)), accumulate=accumulate
    )
    batches = globals()[f"{name}_batch"]
    losses = []
    for number in range(steps):
        microbatches = [batches(rank, 10 * number + each) for each in range(accumulate)]
        losses.append(step(microbatches if accumulate > 1 else microbatches[0]))
    return losses


def evaluate(model: Any, name: str, rank: int) -> Tensor:
    model.eval()
    with torch.no_grad():
        loss = loss_of(model(**globals()[f"{name}_batch"](rank, 99)))
    model.train()
    return loss


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss
