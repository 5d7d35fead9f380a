"""Model and batches, as commands on a page name them."""

import torch
from torch import Tensor, nn


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
