"""Optimizers of torchao, and torch's Muon, which wants whole matrices, train sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch import nn

import autoshard

optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")

# Not AdamW4bit and AdamWFp8: torchao 0.18 fails with any DTensor there, FSDP2's as well.
OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], float]] = {
    "AdamW8bit": (lambda params: optim.AdamW8bit(params, lr=1e-3), 0.0),
    # Matrices are orthogonalized in bf16, and products of shards are summed in another order.
    "Muon": (lambda params: torch.optim.Muon(params, lr=0.02), 1e-3),
}


def build() -> nn.Module:
    """Make two matrices, large enough for states of 8 bits; they are always of the same values."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512, bias=False), nn.ReLU(), nn.Linear(512, 64, bias=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train on the same values on all ranks; return the losses."""
    losses = []
    for step in range(5):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("form", ["eager", "compiled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_losses(rank: int, name: str, form: str) -> None:
    make, rounding = OPTIMIZERS[name]
    whole, model = build(), autoshard.shard(build())
    if form == "compiled":
        model.compile(backend="autoshard", options={"lowering": "eager"})
    found, want = (train(each, make(each.parameters())) for each in (model, whole))
    assert found == pytest.approx(want, rel=rounding, abs=0.0)
