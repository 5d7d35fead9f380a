"""Model, data and loop of the lines that stand beside each other on the pages of docs/migrate/.

`torchrun run.py ddp_before` runs the functions of ddp_before.py, each a few of a page's lines.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, STEPS = 32, 16, 3

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")


class Block(nn.Module):
    """Residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, two blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Checkpointed(Model):
    """Model whose blocks are computed again in backward; made with the values of `build`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.to(device)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def initialize(module: nn.Module) -> None:
    """Fill a module that was on meta."""
    module.to_empty(device=device, recurse=False)
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 0.1)


def scatter(state: None, grad: Tensor, part: Tensor) -> None:
    """Average gradients, as FSDP1's communication hooks do."""
    grad.div_(2)
    dist.reduce_scatter_tensor(part, grad)


class Event:
    """Event that has happened."""

    def wait(self, stream: object = None) -> None:
        return None


class Gather:
    """All-gather of one's own, as FSDP2 takes it."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class Scatter(Gather):
    """Reduce-scatter of one's own, as FSDP2 takes it."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def build() -> Model:
    """Make the model; its values are always the same."""
    torch.manual_seed(0)
    return Model().to(device)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def data(step: int) -> Tensor:
    """Make the ids of a step, other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(WORDS, (4, 8), generator=generator).to(device)


def loss_of(model: Callable[..., Tensor], step: int) -> Tensor:
    ids = data(step)
    return functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def train(model: Any, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Take some steps, and return their losses."""
    optimizer = optimizer or adamw(model)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def numbers(state: dict[str, Any]) -> list[float]:
    """Return the sums of a state dict's plain tensors, in the order of its names."""
    return [float(state[name].double().sum()) for name in sorted(state)]


def run(lines: ModuleType, only: list[str]) -> bool:
    """Call the functions of `lines` in order, or those that `only` names; tell whether all ended.

    Rank 0 prints as JSON, by name, what they return. Each begins with the same random numbers.
    """
    found: dict[str, Any] = {}
    failed = False
    for name, function in list(vars(lines).items()):
        is_ours = inspect.isfunction(function) and function.__module__ == lines.__name__
        if not is_ours or name.startswith("_") or (only and name not in only):
            continue
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            found[name] = function()
        except Exception:
            failed = True
            print(f"{name} on rank {dist.get_rank()}", traceback.format_exc(), file=sys.stderr)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    return not failed
