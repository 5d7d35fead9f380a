"""Parameters without a gradient: None is not zero, in graphs neither."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import Block
from support.ranks import on_ranks
from support.selection import each_value
from support.training import (
    assert_same,
    average_gradients,
    in_both_forms,
    in_form,
    local_rows_of,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard


class Heads(nn.Module):
    """A trunk, and heads of which each is an output; a loss may use some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 5)
        self.third = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        for layer in self.layers:
            x = layer(x)
        second = self.second(x)
        return self.first(x), second, self.third(second), x.detach()


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: Any, rank: int, *, picks: Any, is_replicated: bool = False) -> list[set[str]]:
    """Train by the outputs that `picks(rank, step)` says; which parameters had a gradient."""
    optimizer = decaying(model)
    found = []
    for step in range(4):
        outputs = model(data(rank, step))
        sum(outputs[number].square().mean() for number in picks(rank, step)).backward()
        if is_replicated:
            average_gradients(model)
        found.append({n for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def one_head(rank: int, step: int) -> list[int]:
    return [0]


def another_by_step(rank: int, step: int) -> list[int]:
    return [[0], [1], [2], [0, 2]][step]


def another_by_rank(rank: int, step: int) -> list[int]:
    return [rank, 0] if step % 2 else [rank]


ARGUMENTS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "no_shard": {"strategy": "no_shard"},
    "hybrid_shard": {"strategy": "hybrid_shard"},
    "bf16": {"mp_policy": autoshard.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
}


@each_value(
    name=ARGUMENTS,
    form=["eager", "compiled", "inductor"],
    picks=[one_head, another_by_step, another_by_rank],
)
@on_ranks(2)
def test_an_output_that_no_loss_uses(rank: int, name: str, form: str, picks: Any) -> None:
    """D-42: a head that no rank uses has no gradient, and AdamW passes it by; one that some rank
    uses has one on all."""
    torch.manual_seed(0)
    want = Heads()
    had = trained(want, rank, picks=picks, is_replicated=True)
    arguments = dict(ARGUMENTS[name])
    if name == "hybrid_shard":
        arguments["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = autoshard.shard(Heads(), **arguments)
    if form != "eager":
        in_form(model, "compiled", lowering="eager" if form == "compiled" else "inductor")
    assert trained(model, rank, picks=picks) == had
    if name != "bf16":
        assert_same(model, want, rtol=1e-5 if form == "inductor" else 0.0)


@pytest.mark.parametrize("bucketing", ["none", "per_unit", [["first", "second", "third"]]])
@on_ranks(2)
def test_buckets_with_flags(rank: int, bucketing: Any) -> None:
    torch.manual_seed(0)
    want = Heads()
    had = trained(want, rank, picks=another_by_rank, is_replicated=True)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Heads()), "compiled", bucketing=bucketing)
    assert trained(model, rank, picks=another_by_rank) == had
    assert_same(model, want)


@in_both_forms
@on_ranks(2)
def test_gradients_that_wait_and_outputs(rank: int, form: str) -> None:
    """A head used in the micro-batch that waits, and not in the one that reduces; and one in
    neither."""
    torch.manual_seed(0)
    want = Heads()
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Heads()), form)
    had = []
    for each in (want, model):
        optimizer = decaying(each)
        for step in range(3):
            for micro, output in enumerate((1, 0)):
                if each is model:
                    model.set_requires_gradient_sync(micro == 1)
                each(data(rank, 2 * step + micro))[output].square().mean().backward()
            if each is want:
                average_gradients(each)
            had.append({n for n, p in each.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    assert had[:3] == had[3:]
    assert "third.weight" not in had[0]
    assert_same(model, want)


@in_both_forms
@on_ranks(2)
def test_autograd_grad_of_one_output(rank: int, form: str) -> None:
    model = in_form(autoshard.shard(Heads()), form)
    outputs = model(data(rank, 0))
    params = [model.first.weight, model.second.weight]
    first, second = torch.autograd.grad(outputs[0].sum(), params, allow_unused=True)
    assert first is not None
    assert second is None


def test_one_process(process_group_of_one: None) -> None:
    """A world of one sends nothing, and None is None there, too."""
    torch.manual_seed(0)
    want = Heads()
    had = trained(want, 0, picks=another_by_step)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Heads()), "compiled")
    assert trained(model, 0, picks=another_by_step) == had
    assert_same(model, want)


@pytest.fixture
def process_group_of_one() -> Any:
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


class Broken(nn.Module):
    """A graph break between a head and its output: backward of what follows gives zeros for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        torch._dynamo.graph_break()
        doubled = first * 2, second * 2
        return doubled[0].square().mean(), doubled[1]


@on_ranks(2)
def test_parity_names_what_cannot_be_told(rank: int) -> None:
    report = autoshard.parity(
        Broken,
        [data(rank, step) for step in range(2)],
        loss=lambda model, x: model(x)[0],
        optimizer=lambda params: torch.optim.AdamW(params, weight_decay=0.5),
        options={"lowering": "eager"},
    )
    eager, _, compiled = report.comparisons
    assert eager.only_here == ()
    assert compiled.only_here == ("second.bias", "second.weight")
    assert "gradients in compiled alone: second.bias, second.weight" in report.text()


def fail(grad: Tensor) -> None:
    raise ValueError("no more")


@in_both_forms
@on_ranks(2)
def test_a_backward_that_fails_withholds_nothing_later(rank: int, form: str) -> None:
    """Its gradients were to wait; those of the next backward, which succeeds, are not."""
    torch.manual_seed(0)
    want = Heads()
    want(data(rank, 1))[0].square().mean().backward()
    average_gradients(want)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Heads()), form)
    model.set_requires_gradient_sync(False)
    x = data(rank, 0).requires_grad_()
    x.register_hook(fail)  # compiled code has run by then, and its gradients go on after it
    with pytest.raises(ValueError, match="no more"):
        model(x)[0].square().mean().backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(data(rank, 1))[0].square().mean().backward()
    for (name, param), whole in zip(model.named_parameters(), want.parameters(), strict=True):
        assert (param.grad is None) == (whole.grad is None), name
        if whole.grad is not None:
            assert torch.equal(local_rows_of(param.grad, param), local_rows_of(whole.grad, param))
