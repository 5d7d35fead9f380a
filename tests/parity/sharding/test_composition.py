"""Sharded modules among torch's own parts: composable functions, meshes, Dynamo, copies."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import SmallNet, net_loss
from support.ranks import on_ranks
from support.training import (
    adamw,
    assert_same,
    average_gradients,
    in_both_forms,
    in_form,
    replicated,
    sgd,
    train,
)
from torch import Tensor, nn
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import autoshard

OPTIONS = {"lowering": "eager", "strict": True}


class Pair(nn.Module):
    """A layer that a test shards, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def pair_loss(model: Any, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().sum()


@in_both_forms
@on_ranks(2)
def test_ddp_around_a_unit(rank: int, form: str) -> None:
    """torch's composable `replicate` passes by what is sharded, and averages the rest itself."""
    want, want_losses = replicated(Pair, pair_loss, make=sgd)
    torch.manual_seed(0)
    model = Pair()
    autoshard.fully_shard(model.first)
    in_form(model.first, form)
    torch_replicate(model)
    losses = train(model, pair_loss, sgd(model))
    assert isinstance(model.first.weight, DTensor)
    assert not isinstance(model.second.weight, DTensor)
    assert losses == want_losses
    assert_same(model, want)


@on_ranks(2)
def test_one_module_one_way(rank: int) -> None:
    """A module is sharded by torch or by autoshard, and whoever comes second says so."""
    model = autoshard.fully_shard(Pair())
    for apply in (torch_replicate, torch_fully_shard):
        with pytest.raises(AssertionError, match="already been applied"):
            apply(model)
    model = Pair()
    torch_fully_shard(model.first)
    with pytest.raises(ValueError, match=r"first \(FSDPLinear\|Linear\)|torch's fully_shard"):
        autoshard.fully_shard(model)


@on_ranks(2)
def test_the_default_mesh_is_that_of_torch(rank: int) -> None:
    """A DTensor that was made on `init_device_mesh("cpu", (world,))` can be loaded."""
    model = autoshard.fully_shard(Pair())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert model.first.weight.device_mesh == mesh
    value = torch.arange(42.0).view(7, 6)
    given = distribute_tensor(value, mesh, model.first.weight.placements)
    state = {
        name: given if name == "first.weight" else its for name, its in model.state_dict().items()
    }
    model.load_state_dict(state)
    assert torch.equal(model.first.weight.full_tensor(), value)
    model.load_state_dict(state, assign=True)
    assert torch.equal(model(torch.ones(1, 6)).isfinite(), torch.ones(1, 3, dtype=torch.bool))


@on_ranks(2)
def test_methods_before_the_first_call(rank: int) -> None:
    """`no_sync()`, and any method of a sharded module, shards a compiled one that nobody called."""

    def accumulated(model: nn.Module, call: Any, skip: Any) -> nn.Module:
        optimizer = adamw(model)
        for step in range(2):
            with skip():
                net_loss(call, rank, 2 * step).backward()
            net_loss(call, rank, 2 * step + 1).backward()
            if skip is torch.enable_grad:
                average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return model

    torch.manual_seed(0)
    want = SmallNet()
    accumulated(want, want, torch.enable_grad)
    torch.manual_seed(0)
    model = SmallNet()
    compiled = torch.compile(model, backend="autoshard", options=OPTIONS)
    accumulated(model, compiled, lambda: compiled.no_sync())
    assert_same(model, want)
    by_method = SmallNet()
    by_method.compile(backend="autoshard", options=OPTIONS)
    by_method.set_requires_gradient_sync(True)
    assert isinstance(by_method, autoshard.ShardedModule)
    assert isinstance(by_method.head.weight, DTensor)


@on_ranks(2)
def test_a_part_sharded_before_has_no_such_methods(rank: int) -> None:
    model = Pair()
    autoshard.fully_shard(model.first)
    compiled = torch.compile(model, backend="autoshard", options=OPTIONS)
    with pytest.raises(RuntimeError, match=r"heads no unit and has no no_sync\(\)"):
        compiled.no_sync()


@on_ranks(2)
def test_copies_of_a_compiled_module(rank: int) -> None:
    """What is compiled, and not called yet, is copied and pickled as what the user wrote."""
    model = Pair()
    model.compile(backend="autoshard", options=OPTIONS)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is Pair
        copied(torch.ones(1, 6))
        assert not isinstance(copied.first.weight, DTensor)
    model(torch.ones(1, 6))
    assert isinstance(model.first.weight, DTensor)


@in_both_forms
@on_ranks(2)
def test_an_average_of_weights(rank: int, form: str) -> None:
    """The way that the error of deepcopy names: copy, shard both, update one from the other."""

    def averaged(model: Any, average: Any, *, is_replicated: bool) -> nn.Module:
        optimizer = sgd(model)
        for step in range(3):
            pair_loss(model, rank, step).backward()
            if is_replicated:
                average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(param, 0.25)
        return average

    torch.manual_seed(0)
    model = Pair()
    want = averaged(model, copy.deepcopy(model), is_replicated=True)
    torch.manual_seed(0)
    model = Pair()
    average = autoshard.shard(copy.deepcopy(model))
    in_form(autoshard.shard(model), form)
    with pytest.raises(TypeError, match=r"EMA.*copy\.deepcopy\(\) the model before it is sharded"):
        copy.deepcopy(model)
    assert_same(averaged(model, average, is_replicated=False), want)
    assert torch.isfinite(average(torch.ones(2, 6))).all()


class Wrapper(nn.Module):
    """No parameter of its own, and none below."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * 2


@on_ranks(2)
def test_a_compiled_unit_without_parameters(rank: int) -> None:
    model = autoshard.fully_shard(Wrapper())
    model.compile(backend="autoshard", options=OPTIONS)
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
    compiled = torch.compile(autoshard.fully_shard(Wrapper()), backend="autoshard", options=OPTIONS)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


class Dropped(nn.Module):
    """Drops out a share of its output that changes from call to call, and is no tensor's factor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, rate: float) -> Tensor:
        return torch.nn.functional.dropout(self.layer(x), p=rate)


def dropped_loss(model: Any, rank: int, step: int) -> Tensor:
    torch.manual_seed(step)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x, 0.1 + step / 8).square().sum()


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@on_ranks(2)
def test_a_float_that_changes(rank: int, lowering: str) -> None:
    """Dynamo's wish to trace again, as a number is no constant, is no failure of a compilation.

    Not with `strict=True`, which hands a failure on to Dynamo, this one, too.
    """
    # The unsharded model compiled likewise: a number that is traced is rounded otherwise than one
    # that is read.
    plain = "aot_eager" if lowering == "eager" else "inductor"
    want, _ = replicated(Dropped, dropped_loss, make=sgd, backend=plain)
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Dropped()
    call = torch.compile(model, backend="autoshard", options={"lowering": lowering})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "autoshard could not compile")
        train(call, dropped_loss, sgd(model))
    assert_same(model, want)


class Router(nn.Module):
    """Converts its layer in each forward, to the dtype that it has, as Switch Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float32)
        return x + self.classifier(x)


class Routers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Router(), Router()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@in_both_forms
@on_ranks(2)
def test_a_forward_that_converts_to_what_is_there(rank: int, form: str) -> None:
    want, _ = replicated(Routers, pair_loss)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Routers()), form)
    train(model, pair_loss, adamw(model))
    assert_same(model, want)
