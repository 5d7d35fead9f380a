"""Layouts in memory that Inductor chooses: a bucket of weights changes none."""

from __future__ import annotations

from typing import Any

import torch
from support.ranks import on_ranks
from support.training import assert_same, compiled, replicated
from torch import Tensor, nn


class Patches(nn.Module):
    """An image in patches with the channels last, as a vision transformer begins."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)
        self.norm, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(self.embed(image).permute(0, 2, 3, 1))
        x = x + self.second(x)
        out: Tensor = self.head(x.mean((1, 2)))
        return out


def patches_loss(model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, 3, 32, 32, generator=generator)).square().mean()


@on_ranks(2)
def test_a_convolution_in_a_bucket(rank: int) -> None:
    """What reads another weight of its bucket has the layout that it has without buckets."""
    want, want_losses = replicated(Patches, patches_loss, backend="inductor")
    torch._dynamo.reset()
    got, losses = compiled(Patches, patches_loss, lowering="inductor")
    assert losses == want_losses
    assert_same(got, want)
