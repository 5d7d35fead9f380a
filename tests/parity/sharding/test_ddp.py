"""DistributedDataParallel around a model of ours, as Accelerate puts it: it lets go."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import Net, net_loss
from support.ranks import on_ranks
from support.training import adamw, assert_same, replicated, train
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import autoshard

OPTIONS = {"lowering": "eager", "strict": True}


def compiled_inside(model: nn.Module) -> Any:
    return DistributedDataParallel(torch.compile(model, backend="autoshard", options=OPTIONS))


def compiled_outside(model: nn.Module) -> Any:
    return torch.compile(DistributedDataParallel(model), backend="autoshard", options=OPTIONS)


def by_its_method(model: nn.Module) -> Any:
    model.compile(backend="autoshard", options=OPTIONS)
    return DistributedDataParallel(model)


def by_the_method_of_ddp(model: nn.Module) -> Any:
    ddp = DistributedDataParallel(model)
    ddp.compile(backend="autoshard", options=OPTIONS)
    return ddp


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    each.__name__: each
    for each in (compiled_inside, compiled_outside, by_its_method, by_the_method_of_ddp)
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_ddp_lets_go(rank: int, way: str) -> None:
    """It trains as without DDP, which keeps neither parameters nor buckets; one warning."""
    want, want_losses = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = Net()
    before = [weakref.ref(param) for param in model.parameters()]
    optimizer = adamw(model)
    call = WAYS[way](model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        losses = train(call, net_loss, optimizer, steps=4)
    said = [str(each.message) for each in caught if "DistributedDataParallel" in str(each.message)]
    assert len(said) == (1 if rank == 0 else 0)
    assert losses == want_losses
    assert_same(model, want)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    gc.collect()
    assert not any(ref() is not None for ref in before)
    shell = call if isinstance(call, DistributedDataParallel) else call._orig_mod
    assert shell.reducer is None
    with shell.no_sync():
        net_loss(call, rank, 4).backward()


@on_ranks(2)
def test_a_loss_that_is_compiled_around_it(rank: int) -> None:
    """The first call of the model, which shards it, is in a function that Dynamo traces."""
    want, want_losses = replicated(Net, net_loss)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    model.compile(backend="autoshard", options=OPTIONS)
    ddp = DistributedDataParallel(model)
    loss = torch.compile(net_loss, backend="autoshard", options=OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it lets go
        losses = train(ddp, loss, adamw(model))
    assert losses == pytest.approx(want_losses)
    assert_same(model, want)


@on_ranks(2)
def test_ddp_around_more_is_refused(rank: int) -> None:
    """Nobody would average the rest."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.net.compile(backend="autoshard", options=OPTIONS)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.net(ids) * self.scale

    call = DistributedDataParallel(Outer())
    with pytest.raises(RuntimeError, match=r"around Outer trains scale, too, which is not in Net"):
        net_loss(call, rank, 0)


@on_ranks(2)
def test_ddp_of_a_sharded_model_is_refused(rank: int) -> None:
    model = autoshard.shard(Net())
    with pytest.raises(
        RuntimeError, match=r"Net was given to DistributedDataParallel, and is shar"
    ):
        DistributedDataParallel(model)
