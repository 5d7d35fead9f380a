"""Parameters that are tensor-parallel already: what is local is cut over the other axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.issue import counts
from support.models import Net, net_loss
from support.ranks import on_ranks
from support.training import adamw, assert_same, in_both_forms, in_form, replicated, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import autoshard
from autoshard import fully_shard


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Mlps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def grid(data: int, tensor: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))


def parallel(mesh: DeviceMesh) -> Mlps:
    torch.manual_seed(0)
    model = Mlps()
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tensor"], plan)
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def loss_of(model: Any, data_rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return model(torch.randn(4, 6, generator=generator)).square().sum()


def truth(data: int, steps: int) -> nn.Module:
    """On one rank: the mean of the losses of all data ranks."""
    torch.manual_seed(0)
    model = Mlps()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for step in range(steps):
        for rank in range(data):
            (loss_of(model, rank, step) / data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@in_both_forms
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
@on_ranks(4)
def test_parity(rank: int, shape: tuple[int, int], form: str) -> None:
    """A48: values as on one rank, but for the order in which parts of a product are added."""
    mesh = grid(*shape)
    model = in_form(parallel(mesh), form)
    assert model.layers[0].up.weight.device_mesh.mesh_dim_names == ("data", "tensor")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for step in range(3):
        loss_of(model, mesh.get_local_rank("data"), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, got), want in zip(
        model.named_parameters(), truth(shape[0], 3).parameters(), strict=True
    ):
        torch.testing.assert_close(got.full_tensor(), want, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(4)
def test_placements_and_counts(rank: int) -> None:
    """A48: cut by tensor parallelism first, strided; gathers go over the data axis alone."""
    model = parallel(grid(2, 2))
    up, down = model.layers[0].up.weight, model.layers[0].down.weight
    assert isinstance(up, DTensor)
    assert up.shape == (12, 6)
    assert up.placements[1] == Shard(0)
    assert up.placements[0] != Shard(0)  # strided: the tensor axis cut dim 0 before
    assert down.placements == (Shard(0), Shard(1))
    torch.manual_seed(0)
    want = Mlps()
    assert torch.equal(up.full_tensor(), want.layers[0].up.weight)
    assert counts(model, lambda: loss_of(model, 0, 0)) == (3, 2, 3, 0)
    step = model.layers[0]._autoshard_unit.last_step
    assert step.num_gathered == 0


@in_both_forms
@on_ranks(4)
def test_beside_a_plain_model(rank: int, form: str) -> None:
    """A48, D-49: what one model needs is its own business, in either order."""
    for first in ("parallel", "plain"):
        models = {}
        for kind in (first, "plain" if first == "parallel" else "parallel"):
            made = parallel(grid(2, 2)) if kind == "parallel" else autoshard.shard(Net())
            models[kind] = in_form(made, form)
        assert all(isinstance(v, DTensor) for v in models["plain"].state_dict().values())
        net_loss(models["plain"], rank, 0).backward()
        loss_of(models["parallel"], 0, 0).backward()
    want, _ = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = autoshard.shard(Net())
    train(model, net_loss, adamw(model))
    assert_same(model, want, rtol=1e-5)  # four ranks, in gloo's order
    assert dist.get_world_size() == 4
