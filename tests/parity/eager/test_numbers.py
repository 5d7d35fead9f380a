"""Infinity and NaN on one rank, and torch's deterministic mode: as in the replicated model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import Net, net_loss
from support.ranks import on_ranks
from support.training import (
    assert_same,
    average_gradients,
    in_both_forms,
    in_form,
    replicated,
    sgd,
    train,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard

AT = 1  # the step in which one rank's loss is no number


def built(form: str) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Net() if form == "replicated" else in_form(autoshard.shard(Net()), form)


def spoiled(value: float, model: Any, rank: int, step: int) -> Tensor:
    loss = net_loss(model, rank, step)
    return loss * value if (rank, step) == (1, AT) else loss


def assert_same_numbers(got: nn.Module, want: nn.Module) -> None:
    """Bit for bit; where one is no number, so is the other."""
    theirs = dict(want.named_parameters())
    for name, param in got.named_parameters():
        assert isinstance(param, DTensor)
        torch.testing.assert_close(
            param.full_tensor(), theirs[name].detach(), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@in_both_forms
@on_ranks(2)
def test_a_loss_that_is_no_number(rank: int, form: str, value: float) -> None:
    """No rank stops, none is spared: all shards are what the replicated model has there."""
    models = {}
    for each in ("replicated", form):
        model = models[each] = built(each)
        optimizer = sgd(model)
        for step in range(3):
            spoiled(value, model, rank, step).backward()
            if each == "replicated":
                average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_numbers(models[form], models["replicated"])
    assert any(not param.isfinite().all() for param in models["replicated"].parameters())


@in_both_forms
@on_ranks(2)
def test_a_scaler_skips_as_in_the_replicated_model(rank: int, form: str) -> None:
    """One rank's loss is infinite: no rank takes that step, and all go on alike."""
    models, scales = {}, {}
    for each in ("replicated", form):
        model = models[each] = built(each)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales[each] = []
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(spoiled(math.inf, model, rank, step)).backward()
            if each == "replicated":
                average_gradients(model)
            scaler.step(optimizer)
            scaler.update()
            scales[each].append(scaler.get_scale())
    assert scales[form] == scales["replicated"] == [1024.0, 512.0, 512.0, 1024.0]
    assert all(param.isfinite().all() for param in models["replicated"].parameters())
    assert_same_numbers(models[form], models["replicated"])


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@in_both_forms
@on_ranks(2, compiles=True)
def test_deterministic_mode(rank: int, form: str) -> None:
    """Nothing of ours is refused there (it also fills what is not written with NaN)."""
    with deterministic():
        want, _ = replicated(Net, net_loss, steps=3, make=sgd)
        model = built(form)
        train(model, net_loss, sgd(model), steps=3)
    assert_same(model, want)
