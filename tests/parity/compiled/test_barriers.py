"""Ops that communicate by themselves, or have an effect, inside of a compiled step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.caches import fresh_graphs
from support.ranks import on_ranks
from support.training import (
    adamw,
    assert_same,
    compiled,
    in_both_forms,
    in_form,
    replicated,
    sgd,
    train,
)
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType

import autoshard
from autoshard.passes.lowering import inductor as lower_inductor

LAYERS = 2
SEEN: list[float] = []  # by the op with an effect


@torch.library.custom_op("autoshard_tests::sum_ranks", mutates_args=())
def sum_ranks(x: Tensor, group_name: str) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


@torch.library.custom_op("autoshard_tests::note", mutates_args=())
def note(x: Tensor) -> Tensor:
    SEEN.append(float(x.sum()))
    return x.clone()


@torch.library.custom_op("autoshard_tests::sum_ranks_", mutates_args=("x",))
def sum_ranks_(x: Tensor, group_name: str) -> None:
    dist.all_reduce(x)


@torch.library.custom_op("autoshard_tests::sum_and_copy", mutates_args=())
def sum_and_copy(x: Tensor, group_name: str) -> list[Tensor]:
    return [sum_ranks(x, group_name), x.clone()]


sum_ranks_.register_fake(lambda x, group_name: None)
sum_and_copy.register_fake(lambda x, group_name: [torch.empty_like(x), torch.empty_like(x)])
for op in (sum_ranks, note):
    op.register_fake(lambda x, *_: torch.empty_like(x))
sum_ranks.register_autograd(
    lambda ctx, grad: (sum_ranks(grad, "0"), None), setup_context=lambda ctx, inputs, output: None
)
note.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)
torch.library._register_effectful_op("autoshard_tests::note", _EffectType.ORDERED)


class SumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        sum_ranks_(total, "0")
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        sum_ranks_(total, "0")
        return total


class SumOfList(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return sum_and_copy(x, "0")[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return sum_and_copy(grad, "0")[0]


def call(kind: str, x: Tensor) -> Tensor:
    if kind == "in place":
        return SumInPlace.apply(x)
    if kind == "list":
        return SumOfList.apply(x)
    if kind == "local":
        checked = torch.linalg.inv(x.detach().T @ x.detach() + torch.eye(7))
        torch._higher_order_ops.print("{n} seen", n=x.shape[0])
        return nn.functional.group_norm(x, 1) + 0.1 * checked[0]
    if kind == "unknown":
        return sum_ranks(x, "0")
    if kind == "functional":
        total = functional.all_reduce(x.detach(), "sum", dist.group.WORLD)
        return x + 0.1 * total
    return note(x)


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(call(self.kind, torch.relu(self.up(x))))


class Layers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 6, generator=generator)).square().mean()


BARRIERS = {  # in the forward and in the backward graph, a layer
    "unknown": (1, 1),
    "in place": (1, 1),
    "list": (1, 1),
    "effect": (1, 0),
    "functional": (0, 0),
    "local": (0, 0),  # an op with a number of groups; a check; text
}
each_kind = pytest.mark.parametrize("kind", BARRIERS)


@pytest.mark.parametrize("bucketing", ["per_unit", "auto"])
@each_kind
@in_both_forms
@on_ranks()
def test_parity(rank: int, form: str, kind: str, bucketing: str) -> None:
    """Bit for bit; an effect comes once a call."""
    want, want_losses = replicated(lambda: Layers(kind), loss_of)
    expected = list(SEEN)
    SEEN.clear()
    torch.manual_seed(0)
    model = Layers(kind)
    for layer in model.layers:
        autoshard.fully_shard(layer)
    model = in_form(autoshard.fully_shard(model), form, bucketing=bucketing, topology="gloo")
    losses = train(model, loss_of, adamw(model))
    assert losses == want_losses
    assert_same(model, want)
    assert expected == SEEN
    SEEN.clear()


@each_kind
@on_ranks()
def test_order_of_lowered_code(rank: int, kind: str) -> None:
    """What Inductor generates has each barrier where the plan has it."""
    want, want_losses = replicated(lambda: Layers(kind), loss_of, make=sgd)
    planned: list[list[str]] = []

    def check(source: str, order: lower_inductor.Order) -> None:
        planned.append([what for what, *_ in order])
        lower_inductor_check(source, order)

    lower_inductor_check = lower_inductor.check_order
    with fresh_graphs(), mock.patch.object(lower_inductor, "check_order", check):
        model, losses = compiled(
            lambda: Layers(kind), loss_of, make=sgd, lowering="inductor", bucketing="per_unit"
        )
    torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=0)
    assert_same(model, want, rtol=1e-5)  # Inductor fuses sums
    SEEN.clear()
    forward, backward = planned
    found = forward.count("barrier"), backward.count("barrier")
    assert found == tuple(LAYERS * number for number in BARRIERS[kind])
    for events in planned:
        under_way = 0
        for what in events:
            under_way += {"launch": 1, "wait": -1}.get(what, 0)
            assert what != "barrier" or not under_way
