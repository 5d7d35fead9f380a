"""Transforms of torch.func through sharded modules: what they give, and gradients through that."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.training import assert_same, average_gradients, in_both_forms, in_form, sgd
from torch import Tensor, nn

import autoshard


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def total(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad": lambda model, x: torch.func.grad(total(model))(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(4, 2))[0],
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "vmap of grad": lambda model, x: torch.func.vmap(torch.func.grad(total(model)))(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "hessian": lambda model, x: torch.func.hessian(total(model))(x),
}


@in_both_forms
@pytest.mark.parametrize("name", TRANSFORMS)
@on_ranks(2)
def test_a_penalty_on_a_transform(rank: int, name: str, form: str) -> None:
    """Trained by it, alone and beside an ordinary loss. Dynamo runs what is compiled eagerly inside
    of a transform, and from then on."""
    want = build()
    model: Any = build()
    autoshard.fully_shard(model[0])
    in_form(autoshard.fully_shard(model), form)
    warnings.filterwarnings("ignore", message="Dynamo captured no graph")
    for each in (want, model):
        optimizer = sgd(each)
        for step in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = TRANSFORMS[name](each, x).square().mean()
            (loss if step == 0 else loss + each(x).square().mean()).backward()
            if each is want:
                average_gradients(want)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, want)
