"""Parameters that are tensor-parallel already: what is local is cut over the other axis."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.issue import counts
from support.models import SmallNet as Net
from support.models import net_loss
from support.ranks import on_ranks
from support.selection import each_value
from support.training import adamw, assert_same, in_both_forms, in_form, replicated, train
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import autoshard
from autoshard import fully_shard
from autoshard.runtime.eager.unit_steps import steps_of


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


@each_value(shape=[(2, 2), (1, 4), (4, 1)], form=["compiled", "eager"])
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
    step = steps_of(model.layers[0]._autoshard_unit).last_step
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


# A whole model on one mesh, of which some axes are data-parallel (`dp_mesh_dims`, since 2.13).

HAS_DIMS = hasattr(fsdp, "DataParallelMeshDims")
needs_dims = pytest.mark.skipif(not HAS_DIMS, reason="DataParallelMeshDims came with torch 2.13")

AXES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "shard": ((2, 2), ("data", "tensor"), {"shard": "data"}),
    "last": ((2, 2), ("tensor", "data"), {"shard": "data"}),
    "copies": ((2, 2), ("data", "tensor"), {"replicate": "data"}),
    "hybrid": ((2, 2, 1), ("out", "data", "tensor"), {"shard": "data", "replicate": "out"}),
    "several": ((2, 2, 1), ("data", "more", "tensor"), {"shard": ("data", "more")}),
    "all": ((4,), ("data",), {"shard": "data"}),
}


def on_one_mesh(mesh: DeviceMesh) -> Mlps:
    """All parameters on `mesh`: of each block some cut over "tensor", the rest replicated."""
    torch.manual_seed(0)
    model = Mlps()
    names = mesh.mesh_dim_names or ()

    def place(path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, param in list(module.named_parameters(recurse=False)):
            cut: Any = Replicate()
            if path.endswith("up"):
                cut = Shard(0)
            elif path.endswith("down") and name == "weight":
                cut = Shard(1)
            placements = [cut if axis == "tensor" else Replicate() for axis in names]
            placed = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
            module.register_parameter(name, placed)

    distribute_module(model, mesh, place)
    return model


def loss_on_one_mesh(model: Any, mesh: DeviceMesh, dims: dict[str, Any], step: int) -> Tensor:
    """The sum of all data ranks' losses: its gradients are partial over their axes."""
    names = mesh.mesh_dim_names or ()
    axes = [axis for axis in names if axis != "tensor"]
    data = math.prod(mesh.size(names.index(axis)) for axis in axes)
    batch = [
        torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        for rank in range(data)
    ]
    placements = [Replicate() if axis == "tensor" else Shard(0) for axis in names]
    out = model(distribute_tensor(torch.cat(batch), mesh, placements))
    loss = out.square().sum().full_tensor()
    assert isinstance(loss, Tensor)
    return loss


@needs_dims
@each_value(case=AXES, form=["eager", "compiled"])
@on_ranks(4)
def test_a_model_on_one_mesh(rank: int, case: str, form: str) -> None:
    """Equal to one rank's but for the order in which parts of a sum are added."""
    shape, names, dims = AXES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = on_one_mesh(mesh)
    given = fsdp.DataParallelMeshDims(**dims)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, dp_mesh_dims=given)
    fully_shard(model, mesh=mesh, dp_mesh_dims=given)
    up = model.layers[0].up.weight
    assert isinstance(up, DTensor)
    assert up.shape == (12, 6)
    if case == "shard":
        assert up.device_mesh == mesh
        assert up.placements[1] == Shard(0) != up.placements[0]
    model = in_form(model, form)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for step in range(3):
        loss_on_one_mesh(model, mesh, dims, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    data = 4 // (mesh.size(names.index("tensor")) if "tensor" in names else 1)
    for (name, got), want in zip(
        model.named_parameters(), truth(data, 3).parameters(), strict=True
    ):
        torch.testing.assert_close(got.full_tensor(), want, msg=lambda m, n=name: f"{n}: {m}")


@needs_dims
@on_ranks(4)
def test_axes_by_wrong_names(rank: int) -> None:
    mesh, dims = grid(2, 2), fsdp.DataParallelMeshDims
    model = on_one_mesh(mesh)

    def refused(error: type[Exception], match: str, layer: nn.Module, **given: Any) -> None:
        with pytest.raises(error, match=match):
            fully_shard(layer, **{"mesh": mesh, "dp_mesh_dims": dims(shard="data"), **given})

    refused(ValueError, "'dp', which is no axis", model, dp_mesh_dims=dims(shard="dp"))
    refused(ValueError, "each axis once", model, dp_mesh_dims=dims(shard="data", replicate="data"))
    refused(ValueError, "and no mesh", model, mesh=None)
    refused(ValueError, "without names", model, mesh=init_device_mesh("cpu", (2, 2)))
    refused(NotImplementedError, "can't be had with dp_mesh_dims", model, reshard_after_forward=2)
    refused(ValueError, "parameter weight is no DTensor", nn.Linear(2, 2))
    refused(
        ValueError,
        r"parameter up.weight is placed as S\(0\).* over the data-parallel axis 'tensor'",
        model.layers[0],
        dp_mesh_dims=dims(shard="tensor"),
    )
    refused(ValueError, "on the mesh given", model, mesh=grid(4, 1))
