"""What the fragments of docs/guides take for granted: a model, and batches of a rank's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import autoshard


class Block(nn.Module):
    """Residual block of two linear layers."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, three blocks in `layers`, and a head."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(3))
        self.head = nn.Linear(dim, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return how badly `model` says which id follows each of `ids`."""
    return functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.roll(-1, 1).flatten())


def names() -> dict[str, Any]:
    """Make a model, the same on all ranks, batches of a rank's own, and a loss; with imports."""
    torch._dynamo.reset()  # fragments share the code of `Net.forward`, and its limit of graphs
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(100, (4, 16), generator=generator) for _ in range(4)]
    return {
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "autoshard": autoshard,
        "Block": Block,
        "Net": Net,
        "model": Net(),
        "batches": batches,
        "ids": batches[0],
        "loss_of": loss_of,
    }
