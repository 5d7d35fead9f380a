"""Small models, their batches and losses: what the tests train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A pre-norm block with sizes that two ranks can't share evenly."""

    def __init__(self, dim: int = 6, hidden: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, and a head tied to the embedding.

    checkpointing: None, "non-reentrant" or "reentrant".
    """

    def __init__(
        self, layers: int = 3, *, tied: bool = True, checkpointing: str | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)


class SmallNet(Net):
    """Net of two blocks unless told otherwise: enough for parity, and quicker to compile."""

    def __init__(self, layers: int = 2, **arguments: Any) -> None:
        super().__init__(layers, **arguments)


def tokens(rank: int, step: int, *, length: int = 5, vocab: int = 11) -> Tensor:
    """One sequence of token ids, its own for each rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocab, (length,), generator=generator)


def net_loss(model: Any, rank: int, step: int) -> Tensor:
    ids = tokens(rank, step)
    return functional.cross_entropy(model(ids), ids.roll(-1))
