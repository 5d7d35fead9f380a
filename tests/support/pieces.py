"""Models of random ops, which a memory budget may have computed again."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Piece(nn.Module):
    """Layer of random ops: views, in-place writes, several results, random numbers, buffers."""

    def __init__(self, source: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.ops = [source.randrange(8) for _ in range(source.randint(1, 5))]
        if 2 in self.ops:  # a frame that reads not all parameters is no whole step
            self.norm = nn.BatchNorm1d(16)
        self.skips = source.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        first = x
        x = self.linear(x)
        for op in self.ops:
            if op == 0:
                x = torch.sort(x, dim=1)[0]
            elif op == 1:
                x = nn.functional.dropout(x, 0.3, training=self.training)
            elif op == 2:
                x = self.norm(x)
            elif op == 3:
                x = x.clone().mul_(1.5).add_(first)
            elif op == 4:
                halves = x.chunk(2, dim=1)
                x = torch.cat([halves[1].sin(), halves[0].tanh()], 1)
            elif op == 5:
                x = x.view(-1, 4, 4).transpose(1, 2).reshape(-1, 16).exp().log1p()
            elif op == 6:
                x = x.softmax(1) * x.var(dim=1, keepdim=True)
            else:
                x = x + torch.rand_like(x)
        return x + first if self.skips else x


class Pieces(nn.Module):
    """Layers of random ops, some of them with activation checkpointing; all is told by `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        source = random.Random(seed)
        self.layers = nn.ModuleList(Piece(source) for _ in range(source.randint(2, 5)))
        self.checkpointed = {n for n in range(5) if source.random() < 0.2}

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number in self.checkpointed:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x.square().mean()

    def batch(self, rank: int) -> Tensor:
        return torch.linspace(-1, 1 + rank, 64 * 16).view(64, 16)
