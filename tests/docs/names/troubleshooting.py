"""Names that fragments of docs/troubleshooting.md take for granted: a model, and a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import autoshard

WORDS, WIDTH = 11, 8


class Block(nn.Module):
    """Block with a square matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.square(x).relu()


class Model(nn.Module):
    """Embedding, two blocks and a head, and a method beside `forward`."""

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

    def score(self, ids: Tensor) -> Tensor:
        """Multiply embeddings by the head's weight, which no submodule does."""
        return self.embed(ids) @ self.head.weight.t()


def names() -> dict[str, Any]:
    """Make a model that is not sharded, and a batch."""
    torch.manual_seed(0)
    ids = torch.arange(8) % WORDS
    return {
        "Model": Model,
        "model": Model(),
        "ids": ids,
        "labels": ids.roll(-1),
        "autoshard": autoshard,
        "functional": functional,
        "nn": nn,
        "torch": torch,
    }
