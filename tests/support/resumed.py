"""Runs that are saved, and go on: a model, its batches, and what is compared of it."""

from __future__ import annotations

import random
from typing import Any

import torch
from support.models import Net, net_loss
from support.training import adamw, in_form
from torch import Tensor
from torch.distributed.tensor import DTensor

import autoshard


class Loader:
    """Batches with a place in them, and noise of the rank's own generators."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rank, self.at = state["rank"], state["at"]


def built(form: str = "eager", *, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = in_form(autoshard.shard(Net()), form)
    return model, adamw(model)


def train(model: Any, optimizer: torch.optim.Optimizer, loader: Loader, steps: int) -> None:
    """Each loss is scaled by numbers of two generators."""
    for _ in range(steps):
        scale = 1 + 0.1 * torch.rand(()).item() + 0.1 * random.random()
        (net_loss(model, loader.rank, loader.at) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        loader.at += 1


def state(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Whole parameters, and the optimizer's whole state."""
    found = list(model.parameters())
    for parameter in model.parameters():
        found += [v for v in optimizer.state[parameter].values() if v.numel() > 1]
    return [(v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for v in found]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
