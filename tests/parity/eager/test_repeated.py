"""Several forwards before one backward: gradients are summed whole, and reduced once.

And forwards without a backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.issue import kinds
from support.models import SmallNet as Net
from support.models import net_loss
from support.ranks import on_ranks
from support.selection import each_value
from support.training import (
    adamw,
    assert_same,
    average_gradients,
    in_both_forms,
    in_form,
    train,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import autoshard

N = 3  # units of Net


def twice(model: Any, rank: int, step: int) -> Tensor:
    return net_loss(model, rank, step) + net_loss(model, rank, step + 50)


def three_times(model: Any, rank: int, step: int) -> Tensor:
    return twice(model, rank, step) * net_loss(model, rank, step + 90)


def partly(model: Any, rank: int, step: int) -> Tensor:
    """One forward of the whole, and one of a part by itself."""
    alone = model.layers[1](torch.full((2, 6), float(rank + step)))
    return net_loss(model, rank, step) + alone.square().mean()


LOSSES: dict[str, Callable[[Any, int, int], Tensor]] = {
    "twice": twice,
    "three times": three_times,
    "partly": partly,
}


def build() -> nn.Module:
    """No parameter is used twice in one forward: of one that is, a forward's gradients are summed
    first, and those of the forwards after; the replicated model takes them as they come."""
    return Net(tied=False)


def arguments_of(strategy: str) -> dict[str, Any]:
    if strategy != "hybrid_shard":
        return {"strategy": strategy}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return {"strategy": strategy, "mesh": mesh}


@each_value(
    name=LOSSES,
    form=["eager", "compiled"],
    strategy=["full_shard", "shard_grad_op", "hybrid_shard"],
)
@on_ranks(2)
def test_one_backward(rank: int, strategy: str, name: str, form: str) -> None:
    torch.manual_seed(0)
    want = build()
    losses = train(want, LOSSES[name], adamw(want), replicated=True)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(build(), **arguments_of(strategy)), form)
    assert train(model, LOSSES[name], adamw(model)) == losses
    assert_same(model, want)


@in_both_forms
@on_ranks(2)
def test_reduced_once(rank: int, form: str) -> None:
    model = in_form(autoshard.shard(build()), form, bucketing="per_unit")
    twice(model, rank, 0).backward()
    model.zero_grad()
    loss = twice(model, rank, 1)
    assert kinds(loss.backward).count("reduce") == N
    assert all(param.grad is not None for param in model.parameters())


@in_both_forms
@on_ranks(2)
def test_two_backwards_of_two_forwards(rank: int, form: str) -> None:
    """Each is reduced by itself, whichever comes first; and a forward without a backward is no
    use that anybody waits for."""
    torch.manual_seed(0)
    model = in_form(autoshard.shard(build()), form)
    first, second, left = (net_loss(model, rank, step) for step in range(3))
    second.backward()
    after_second = [p.grad.to_local().clone() for p in model.parameters()]
    first.backward()
    assert left.requires_grad
    for number in (0, 1):
        model.zero_grad()
        net_loss(model, rank, 1 - number).backward()
        if number == 0:
            again = [p.grad.to_local().clone() for p in model.parameters()]
            assert all(map(torch.equal, again, after_second))


@in_both_forms
@on_ranks(2)
def test_micro_batches_of_two_forwards(rank: int, form: str) -> None:
    """With gradients that wait from an earlier backward, and in bf16 on the wire."""
    torch.manual_seed(0)
    want = build()
    torch.manual_seed(0)
    model = in_form(autoshard.shard(build()), form)
    for each in (want, model):
        optimizer = adamw(each)
        for step in range(2):
            if each is model:
                with model.no_sync():
                    twice(each, rank, 10 + step).backward()
            else:
                twice(each, rank, 10 + step).backward()
            twice(each, rank, 20 + step).backward()
            if each is want:
                average_gradients(want)
            optimizer.step()
            optimizer.zero_grad()
    # A step's gradients are summed in turn, those of a backward first in either case.
    assert_same(model, want)


@on_ranks(2)
def test_optimizer_in_backward(rank: int) -> None:
    """A59: with one reduce for both forwards, the hook runs once, after both."""
    torch.manual_seed(0)
    want = build()
    torch.manual_seed(0)
    model = autoshard.shard(build())
    runs: list[str] = []

    def step_in_backward(name: str, optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
        def run(param: nn.Parameter) -> None:
            runs.append(name)
            optimizer.step()
            optimizer.zero_grad()

        return run

    for name, param in model.named_parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(step_in_backward(name, optimizer))
    by_hand = torch.optim.SGD(want.parameters(), lr=0.1)
    for step in range(3):
        twice(want, rank, step).backward()
        average_gradients(want)
        by_hand.step()
        by_hand.zero_grad()
        twice(model, rank, step).backward()
    assert len(runs) == 3 * len(list(model.parameters()))
    assert_same(model, want)


class TwoLosses(nn.Module):
    """One forward, of which two losses are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 7)])
        self.first, self.second = nn.Linear(7, 3), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.first(x).square().mean(), self.second(x).square().mean()


@each_value(form=["eager", "compiled", "inductor"], retains_later=[True, False])
@on_ranks(2)
def test_two_losses_over_one_forward(rank: int, form: str, retains_later: bool) -> None:
    """D-17: `retain_graph=True`, from the first step on, or after one that did without.

    Each backward is reduced, as with DDP, so that a rank's gradients are averaged one by one.
    """

    def trained(model: Any, *, is_replicated: bool) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            first, second = model(x)
            if retains_later and step == 0:
                (first + second).backward()
                if is_replicated:
                    average_gradients(model)
            else:
                first.backward(retain_graph=True)
                if is_replicated:
                    average_gradients(model)
                    before = {p: p.grad for p in model.parameters()}
                    model.zero_grad()
                second.backward()
                if is_replicated:
                    average_gradients(model)
                    for param, grad in before.items():
                        if grad is not None and param.grad is not None:
                            param.grad = grad + param.grad
                        elif grad is not None:
                            param.grad = grad
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    want = TwoLosses()
    trained(want, is_replicated=True)
    torch.manual_seed(0)
    model = autoshard.shard(TwoLosses())
    if form != "eager":
        in_form(model, "compiled", lowering="eager" if form == "compiled" else "inductor")
    trained(model, is_replicated=False)
    assert_same(model, want, rtol=1e-5 if form == "inductor" else 0.0)


class Saturating(nn.Module):
    """Layers between which ops save their own results for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.made: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer, op in zip(self.layers, (torch.relu, torch.tanh, torch.exp), strict=True):
            x = op(layer(x))
            self.made.append(StorageWeakRef(x.untyped_storage()))
        return x.softmax(-1)


@on_ranks(2)
def test_a_forward_without_a_backward_is_freed(rank: int) -> None:
    """With its result, as without sharding: what autograd has saved does not hold itself."""
    model: Any = Saturating()
    for layer in model.layers:
        autoshard.fully_shard(layer)
    autoshard.fully_shard(model)
    loss = model(torch.ones(2, 8)).sum()
    assert not any(made.expired() for made in model.made)
    del loss
    assert all(made.expired() for made in model.made)
