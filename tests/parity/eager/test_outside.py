"""Parameters read outside of a forward: it works, or the error says what does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import warm
from support.models import Net, net_loss
from support.ranks import free_port, on_ranks
from support.training import adamw, assert_same, average_gradients, by_hand, in_both_forms, in_form
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import autoshard
from autoshard.wrap import ModuleWrapPolicy

WORKS = r"register_forward_method.*full_params\(\)"


class Encoder(nn.Module):
    """A body that is a unit, and parameters of the root's that several methods read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.head = nn.Linear(6, 11, bias=False)

    def encode(self, ids: Tensor) -> Tensor:
        return self.body(self.embed(ids))

    def score(this, ids: Tensor) -> Tensor:  # whatever a method calls it
        return this.encode(ids) @ this.head.weight.t()

    def initialise(self) -> None:
        nn.init.constant_(self.embed.weight, 0.25)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encode(ids))


def ids_of(rank: int, step: int) -> Tensor:
    return torch.randint(11, (5,), generator=torch.Generator().manual_seed(10 * step + rank))


def encoded(model: Any, rank: int, step: int) -> Tensor:
    return model.encode(ids_of(rank, step)).square().mean()


def scored(model: Any, rank: int, step: int) -> Tensor:
    return functional.cross_entropy(model.score(ids_of(rank, step)), ids_of(rank, step + 1))


def by_parts(model: Any, rank: int, step: int) -> Tensor:
    hidden = model.body(model.embed(ids_of(rank, step)))
    return functional.cross_entropy(model.head(hidden), ids_of(rank, step + 1))


def by_both(model: Any, rank: int, step: int) -> Tensor:
    loss = functional.cross_entropy(model(ids_of(rank, step)), ids_of(rank, step + 1))
    return loss + encoded(model, rank, step)


LOSSES = {"encoded": encoded, "scored": scored, "by parts": by_parts, "by both": by_both}


def build() -> Any:
    torch.manual_seed(0)
    return Encoder()


@in_both_forms
@pytest.mark.parametrize("name", LOSSES)
@on_ranks(2)
def test_another_method_than_forward(rank: int, name: str, form: str) -> None:
    """First of all, and later; with an evaluation by forward in between."""
    want = build()
    model = in_form(autoshard.shard(build(), policy=ModuleWrapPolicy({nn.Sequential})), form)
    for each in (want, model):
        optimizer = adamw(each)
        for step in range(4):
            LOSSES[name](each, rank, step).backward()
            if each is want:
                average_gradients(want)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                each(ids_of(rank, step))
                each.encode(ids_of(rank, step))
    assert_same(model, want)


class Trainer(Encoder):
    """A model whose own methods train it, as Lightning's do."""

    def fit(self, step_of: Callable[[Any, int], None]) -> None:
        for step in range(4):
            step_of(self, step)


def fit(model: Any, step_of: Callable[[Any, int], None]) -> None:
    """A loop in a function whose first argument is the model."""
    for step in range(4):
        step_of(model, step)


LOOPS: dict[str, Callable[[Any, Callable[[Any, int], None]], None]] = {
    "a function": fit,
    "a method": lambda model, step_of: model.fit(step_of),
}


@in_both_forms
@pytest.mark.parametrize("name", ["encoded", "by parts", "by both"])
@pytest.mark.parametrize("loop", LOOPS)
@on_ranks(2)
def test_a_loop_around_several_steps(rank: int, loop: str, name: str, form: str) -> None:
    """What is read after a step is what the optimizer has left there."""
    torch.manual_seed(0)
    want = Trainer()
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Trainer(), policy=ModuleWrapPolicy({nn.Sequential})), form)
    for each in (want, model):
        optimizer = adamw(each)

        def step_of(model: Any, step: int, optimizer: Any = optimizer) -> None:
            with torch.no_grad():
                model.encode(ids_of(rank, step))
            LOSSES[name](model, rank, step).backward()
            if model is want:
                average_gradients(want)
            optimizer.step()
            optimizer.zero_grad()

        LOOPS[loop](each, step_of)
    assert_same(model, want)


@on_ranks(2)
def test_a_method_that_writes_to_parameters_in_between(rank: int) -> None:
    """Also where no backward comes between two reads."""
    torch.manual_seed(0)
    want, seen = Trainer(), []
    torch.manual_seed(0)
    model = autoshard.shard(Trainer(), policy=ModuleWrapPolicy({nn.Sequential}))

    def step_of(model: Any, step: int) -> None:
        with torch.no_grad():
            seen.append(model.encode(ids_of(rank, 0)))
            for param in model.parameters():
                param.mul_(0.5)

    want.fit(step_of)
    model.fit(step_of)
    assert len(seen) == 8
    assert all(torch.equal(*pair) for pair in zip(seen[:4], seen[4:], strict=True))


class Event:
    """The end of an optimizer's step, on another stream."""

    waits = 0

    def wait(self) -> None:
        Event.waits += 1


@on_ranks(2)
def test_each_step_of_a_method_waits_for_the_optimizer(rank: int) -> None:
    torch.manual_seed(0)
    model: Any = autoshard.shard(Trainer(), policy=ModuleWrapPolicy({nn.Sequential}))

    def step_of(model: Any, step: int) -> None:
        encoded(model, rank, step).backward()
        model.set_post_optim_event(Event())

    model.fit(step_of)
    assert Event.waits == 3


@on_ranks(2)
def test_a_registered_method_is_a_first_call(rank: int) -> None:
    """Also of what torch.compile gives back, and of a module that compiles itself."""
    want = build()
    whole = build()
    compiled = torch.compile(whole, backend="autoshard")
    autoshard.register_forward_method(compiled, "encode")
    own = build()
    own.compile(backend="autoshard")
    autoshard.register_forward_method(own, "encode")
    for each in (want, compiled, own):
        optimizer = adamw(each)
        for step in range(3):
            encoded(each, rank, step).backward()
            if each is want:
                average_gradients(want)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(whole, want)
    assert_same(own, want)


@on_ranks(2)
def test_another_method_first_names_what_works(rank: int) -> None:
    model = build()
    compiled = torch.compile(model, backend="autoshard")
    optimizer = adamw(model)
    compiled.encode(ids_of(rank, 0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"Encoder\.embed.*register_forward_method"):
        optimizer.step()


@on_ranks(2)
def test_who_initialises_meets_dtensors(rank: int) -> None:
    model = autoshard.shard(build())
    model.initialise()
    model.embed.reset_parameters()
    model.initialise()
    assert isinstance(model.embed.weight, DTensor)
    assert torch.equal(model.embed.weight.full_tensor(), torch.full((11, 6), 0.25))


PENALTIES: dict[str, Callable[[Any], Tensor]] = {
    "a parameter": lambda model: model.body[0].weight.square().sum(),
    "all parameters": lambda model: sum(p.square().sum() for p in model.parameters()),
}


@in_both_forms
@pytest.mark.parametrize("name", PENALTIES)
@on_ranks(2)
def test_a_penalty_on_weights(rank: int, name: str, form: str) -> None:
    """A loss that is a DTensor sends gradients that are: where they arrive at the model, the error
    says so, and what works. Before, torch's own error comes, with a note if nobody catches it."""
    model = in_form(autoshard.shard(build(), policy=ModuleWrapPolicy({nn.Sequential})), form)
    loss = model(ids_of(rank, 0)).sum() + PENALTIES[name](model)
    with pytest.raises(RuntimeError, match=WORKS):
        loss.backward()
    model.reset_iter_state()
    model.zero_grad()
    penalty = sum(p.full_tensor().square().sum() for p in model.parameters())
    (model(ids_of(rank, 0)).square().mean() + penalty).backward()
    assert all(p.grad is not None for p in model.parameters())


class Fused(nn.Module):
    """A loss that is given a weight."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(self.encoder(ids), weight.t() @ torch.ones(11, 11))


@on_ranks(2)
def test_a_weight_given_to_a_loss(rank: int) -> None:
    """Where a call of ours sees the error, it has a note with the parameter's name."""
    model = autoshard.shard(Fused(build()))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        model(ids_of(rank, 0), model.encoder.head.weight)
    (note,) = caught.value.__notes__
    assert "encoder.head.weight was the latest" in note
    assert "register_forward_method" in note


SCRIPT = """
import torch, autoshard
from torch import nn
from torch.nn import functional
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
autoshard.shard(model)
x = torch.ones(2, 4)
"""
MISTAKES = (
    "functional.linear(model[0](x), model[1].weight)",
    "(model(x).square().mean() + model[1].weight.square().sum()).backward()",
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_that_nobody_catches(mistake: str) -> None:
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ended = subprocess.run(
        [warm.python(), "-c", SCRIPT + mistake],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "1.weight was the latest" in ended.stderr
    assert "register_forward_method" in ended.stderr


@on_ranks(2)
def test_a_forward_where_an_exception_is_handled(rank: int) -> None:
    """A model that is called in an `except:` block has not failed: `parameters()` gives what is
    left unsharded for backward, as it does elsewhere."""
    model = by_hand(autoshard.fully_shard, reshard_after_forward=False)(Net())
    try:
        raise ValueError("a batch that is too large")
    except ValueError:
        loss = net_loss(model, rank, 0)
    assert not any(isinstance(each, DTensor) for each in model.layers[0].parameters())
    loss.backward()
