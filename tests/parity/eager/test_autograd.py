"""Shapes of autograd graphs that hooks on outputs and storages have stumbled over elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.issue import counts, kinds
from support.models import Block, net_loss
from support.models import SmallNet as Net
from support.ranks import on_ranks
from support.selection import each_value
from support.training import adamw, assert_same, in_both_forms, in_form, replicated, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autoshard
from autoshard import CPUOffloadPolicy, fully_shard
from autoshard.runtime.eager.unit_steps import steps_of
from autoshard.runtime.unit.unit import unit_of
from autoshard.wrap import CustomPolicy


@dataclass
class Outputs:
    first: Tensor
    rest: dict[str, tuple[Tensor, ...]]


class Several(nn.Module):
    """A unit whose outputs are in a dataclass, a dict and a tuple; one of them is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Outputs:
        first, second, third = self.linear(x).chunk(3, -1)
        return Outputs(first, {"others": (second, third)})


class Multiple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Several(), Several()])
        self.inner = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.blocks[0](x)
        again = self.blocks[1](self.inner(made.first * made.rest["others"][0]))
        return again.first + again.rest["others"][1]


def multiple_loss(model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, 4, generator=generator)).square().sum()


@in_both_forms
@on_ranks(2)
def test_several_outputs(rank: int, form: str) -> None:
    """A13, D-14, D-15, D-26: one gather a unit in backward, whatever the outputs are in."""
    want, want_losses = replicated(Multiple, multiple_loss)
    torch.manual_seed(0)
    got = in_form(autoshard.shard(Multiple()), form, bucketing="per_unit")
    assert train(got, multiple_loss, adamw(got)) == want_losses
    assert_same(got, want)
    got.zero_grad()
    # Of the first block, whose input needs no gradient, backward needs no weight.
    assert counts(got, lambda: multiple_loss(got, rank, 0)) == (3, 1, 3, 0)


class Views(nn.Module):
    """Returns a view, which is written to outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(2, 2, -1)


class WritesToViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Views(), Views()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x.mul_(2)
        x = self.blocks[1](x.reshape(2, -1)[:, :4])
        x += 1
        return x


@in_both_forms
@on_ranks(2)
def test_writes_to_views_that_units_return(rank: int, form: str) -> None:
    """D-25."""
    want, _ = replicated(WritesToViews, multiple_loss)
    torch.manual_seed(0)
    got = in_form(autoshard.shard(WritesToViews()), form)
    train(got, multiple_loss, adamw(got))
    assert_same(got, want)


class WritesToSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = self.linear(x)
        x.zero_()
        return y


@on_ranks(2)
def test_writes_to_what_is_saved_are_still_found(rank: int) -> None:
    """D-24: autograd's own check of activations is as it was."""
    model = fully_shard(WritesToSaved())
    loss = multiple_loss(model, rank, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.reset_iter_state()


@in_both_forms
@on_ranks(2)
def test_inference_mode_then_training(rank: int, form: str) -> None:
    """D-24."""
    want, _ = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Net()), form)
    with torch.inference_mode():
        net_loss(model, rank, 0)
    optimizer = adamw(model)
    for step in range(4):
        net_loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, want)


class Nested(nn.Module):
    """A checkpoint around a unit that has a unit inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.start = nn.Linear(6, 6)
        self.outer = nn.Sequential(Block(), nn.Linear(6, 6))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.outer, self.start(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@in_both_forms
@on_ranks(2)
def test_nested_units_checkpointed_twice_forward(rank: int, reentrant: bool, form: str) -> None:
    """D-19, D-21: two forwards before one backward."""

    def loss(model: Any, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return sum(model(torch.randn(2, 6, generator=generator)).square().sum() for _ in range(2))

    want, _ = replicated(lambda: Nested(reentrant), loss)
    torch.manual_seed(0)
    model = Nested(reentrant)
    fully_shard(model.outer[0])
    fully_shard(model.outer)
    in_form(fully_shard(model), form)
    optimizer = adamw(model)
    for step in range(4):
        loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, want, rtol=1e-4)  # each forward is reduced by itself


def save_products() -> Any:
    """Make the contexts of a checkpoint that saves products of matrices."""
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


class Selective(Nested):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(
            self.outer, self.start(x), use_reentrant=False, context_fn=save_products
        )
        return made


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@in_both_forms
@on_ranks(2)
def test_selective_checkpoints(rank: int, form: str, strategy: str) -> None:
    """D-20: they count ops by kind, and a gather in the first forward is one less in the second."""

    def loss(model: Any, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return model(torch.randn(2, 6, generator=generator)).square().sum()

    want, losses = replicated(lambda: Selective(False), loss)
    torch.manual_seed(0)
    policy = CustomPolicy(lambda module: isinstance(module, Block | nn.Sequential))
    model = autoshard.shard(Selective(False), policy=policy, strategy=strategy)
    assert train(in_form(model, form), loss, adamw(model)) == losses
    assert_same(model, want)


@on_ranks(2)
def test_the_root_is_who_is_called_first(rank: int) -> None:
    """A9: nothing is decided before; every unit knows whether it is inside another."""
    model = autoshard.shard(Net())
    units = [each._autoshard_unit for each in (model, *model.layers)]
    assert [unit.is_root for unit in units] == [True, *(False for _ in model.layers)]
    assert all(steps_of(unit).last_step is None for unit in units)
    net_loss(model, rank, 0).backward()
    assert {steps_of(unit).last_step.owner for unit in units} == {units[0]}


@in_both_forms
@on_ranks(2)
def test_strategies_mixed_by_unit(rank: int, form: str) -> None:
    """A27, A33: a block that keeps its parameters costs one gather less in backward."""
    want, _ = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = Net()
    keeps = model.layers[1]
    policy = CustomPolicy(
        lambda module: (
            {"strategy": "shard_grad_op"} if module is keeps else isinstance(module, Block)
        )
    )
    model = in_form(autoshard.shard(model, policy=policy), form, bucketing="per_unit")
    n = len(model.layers)
    assert counts(model, lambda: net_loss(model, rank, 0)) == (n + 1, n - 1, n + 1, 0)
    model.zero_grad()
    optimizer = adamw(model)
    for step in range(4):
        net_loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, want)


@each_value(strategy=["full_shard", "shard_grad_op", "no_shard"], pin_memory=[True, False])
@in_both_forms
@on_ranks(2)
def test_offload(rank: int, form: str, strategy: str, pin_memory: bool) -> None:
    """A18: on a CPU, shards are where they would be anyway; compiled code copies them all the
    same.
    """
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    want, losses = replicated(Net, net_loss)
    torch.manual_seed(0)
    got = autoshard.shard(Net(), strategy=strategy, offload_policy=policy)
    assert train(in_form(got, form), net_loss, adamw(got)) == losses
    assert_same(got, want)
    assert all(param.to_local().device.type == "cpu" for param in got.parameters())
    with torch.no_grad():
        assert torch.equal(net_loss(got, rank, 5), net_loss(want, rank, 5))


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@on_ranks(2)
def test_copies_of_offloaded_shards(rank: int, lowering: str) -> None:
    """A18: a plan has them; each is waited for; gradients arrive where the optimizer is."""
    model = autoshard.shard(Net(), offload_policy=CPUOffloadPolicy())
    in_form(model, "compiled", lowering=lowering)
    net_loss(model, rank, 0).backward()
    for plan in autoshard.plans(model):
        counts = Counter(event.what for event in plan.schedule)
        gathers = sum(bucket.kind == "gather" for bucket in plan.buckets)
        reduces = len(plan.buckets) - gathers
        assert counts["load"] == counts["loaded"] == gathers
        assert counts["store"] == counts["stored"] == reduces
    for param in model.parameters():
        assert param.grad.to_local().untyped_storage().nbytes() == param.to_local().nbytes


@in_both_forms
@on_ranks(2)
def test_no_gather_for_a_frozen_first_block(rank: int, form: str) -> None:
    """D-38: its inputs need no gradient, so backward never comes to it."""
    model = Net(tied=False)
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    model = in_form(autoshard.shard(model), form, bucketing="per_unit")
    seen = kinds(net_loss(model, rank, 0).backward)
    assert seen.count("gather") == len(model.layers) - 1  # FSDP2 gathers the frozen block, too


class Watch(torch.autograd.Function):
    """Tells `seen`, in backward, how many units are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Any, seen: list[int]) -> Tensor:
        ctx.unit, ctx.seen = unit, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.seen.append(steps_of(ctx.unit).last_step.num_gathered if ctx.unit is not None else 0)
        return grad, None, None


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Watch.apply(layer(x), unit_of(layer), self.seen)
        return x


@pytest.mark.parametrize("how", ["grad", "inputs"])
@on_ranks(2)
def test_gradients_of_the_input_alone(rank: int, how: str) -> None:
    """Units are gathered one after the other, and let go of though nothing is reduced."""

    def gradient(model: nn.Module) -> Tensor:
        x = (torch.linspace(-1, 1, 12).view(2, 6) * (rank + 1)).requires_grad_()
        loss = model(x).square().sum()
        if how == "grad":
            return torch.autograd.grad(loss, x)[0]
        loss.backward(inputs=[x])
        return x.grad

    torch.manual_seed(0)
    plain = Watched()
    torch.manual_seed(0)
    model = autoshard.shard(Watched())
    assert torch.equal(gradient(model), gradient(plain))
    assert max(model.seen) <= 2
    assert all(param.grad is None for param in model.parameters())
    assert steps_of(model.layers[0]._autoshard_unit).last_step.num_gathered == 0
