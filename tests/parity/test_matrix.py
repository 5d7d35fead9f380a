"""Modes in combination, against the replicated model, each rank's own part, bit for bit.

strategy x precision x accumulation x checkpointing x shape of the model x optimizer. Two
ranks sum two numbers, and powers of two divide exactly: every combination does the very
sums of the replicated model, in its order, but for cases that are `is_reduced_twice`.

AUTOSHARD_MATRIX=full runs all of them; otherwise each test takes an eighth, and its
neighbours another.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.models import Net, tokens
from support.ranks import on_ranks
from support.training import assert_same, average_gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import autoshard
from autoshard import MixedPrecisionPolicy

STEPS = 10
IS_FULL = os.environ.get("AUTOSHARD_MATRIX") == "full"
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Unused(Net):
    """A branch that is never taken."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.spare = nn.Linear(5, 3)


class Twice(Net):
    """Its first block is used again at the end."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](super().forward(ids) @ self.head.weight)
        return self.head(x)


def frozen_trunk(**arguments: Any) -> nn.Module:
    """The embedding trains: a reentrant checkpoint has a backward only if its input has."""
    model = Net(**arguments)
    model.layers[:2].requires_grad_(False)
    return model


SHAPES: dict[str, Callable[..., nn.Module]] = {
    "tied": functools.partial(Net, tied=True),
    "frozen trunk": functools.partial(frozen_trunk, tied=False),
    "uneven": functools.partial(Net, tied=False),
    "unused branch": functools.partial(Unused, tied=False),
    "used twice": functools.partial(Twice, tied=False),
    "two forwards": functools.partial(Net, tied=False),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": functools.partial(torch.optim.Adam, lr=1e-2),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
CHECKPOINTING = (None, "non-reentrant", "reentrant")


class Case(NamedTuple):
    shape: str
    optimizer: str
    batches: int
    checkpointing: str | None

    @property
    def is_reduced_twice(self) -> bool:
        """Whether a parameter is reduced twice in one backward: for each of two forwards, so that
        no whole gradients wait for the second; for each backward in a reentrant checkpoint.
        Summed over ranks first and uses then, not the reverse, gradients differ in the last bit.
        """
        twice = self.shape == "used twice" and self.checkpointing == "reentrant"
        return self.shape == "two forwards" or twice


def losses(model: Callable[[Tensor], Tensor], shape: str, rank: int, step: int) -> Tensor:
    ids = tokens(rank, step)
    value = functional.cross_entropy(model(ids).float(), ids.roll(-1))
    if shape == "two forwards":
        other = tokens(rank, step + 100)
        value = value + functional.cross_entropy(model(other).float(), other.roll(-1))
    return value


def train(case: Case, model: nn.Module, call: Any, rank: int, steps: int, end: Any) -> nn.Module:
    """`end(model, is_last)` runs before each backward, and at the end of a step."""
    made = OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        for batch in range(case.batches):
            end(model, batch == case.batches - 1)
            losses(call, case.shape, rank, case.batches * step + batch).backward()
        end(model, None)
        made.step()
        made.zero_grad()
    return model


@functools.cache
def replicated(case: Case, rank: int, low: bool, steps: int) -> nn.Module:
    """The truth, trained by hand; low: computing with parameters cast to bfloat16."""
    torch.manual_seed(0)
    model = SHAPES[case.shape]()

    def call(ids: Tensor) -> Tensor:
        if not low:
            return model(ids)
        # Each forward casts anew, as each would gather anew; a step's gradients add up in
        # full precision after that, as they do while they wait for a reduce.
        cast = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, cast, (ids,), tie_weights=True)

    def average(model: nn.Module, is_last: bool | None) -> None:
        if is_last is None:
            average_gradients(model)

    return train(case, model, call, rank, steps, average)


def meshes(strategy: str) -> Any:
    name, _, size = strategy.partition(" ")
    if not size:
        return name, None
    names = ("replicate", "shard")
    return name, init_device_mesh("cpu", tuple(map(int, size.split("x"))), mesh_dim_names=names)


def shard(model: nn.Module, strategy: str, policy: Any) -> nn.Module:
    name, mesh = meshes(strategy)
    if name != "replicate":
        return autoshard.shard(model, strategy=name, mesh=mesh, mp_policy=policy)
    for layer in model.layers:
        autoshard.replicate(layer, mp_policy=policy)
    return autoshard.replicate(model, mp_policy=policy)


STRATEGIES = (
    "full_shard",
    "shard_grad_op",
    "no_shard",
    "hybrid_shard 2x1",
    "hybrid_shard 1x2",
    "hybrid_shard_zero2 2x1",
    "replicate",
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, timeout=600)
def test_every_combination(rank: int, strategy: str, low: bool) -> None:
    """A7, D-1, D-2, D-3, D-14 to D-16, D-19, D-20, D-22, D-35, D-38."""
    cases = [Case(*each) for each in itertools.product(SHAPES, OPTIMIZERS, (1, 3), CHECKPOINTING)]
    if not IS_FULL:
        cases = cases[(STRATEGIES.index(strategy) + 7 * low) % 8 :: 8]
    for case in cases:
        # In bfloat16 a last bit of a gradient turns into one of an activation, 2 ** -8, and grows.
        loose = case.is_reduced_twice
        steps = 2 if loose and low else STEPS
        # Checkpointing changes no value: one truth for all three.
        want = replicated(case._replace(checkpointing=None), rank, low, steps)
        torch.manual_seed(0)
        made = SHAPES[case.shape](checkpointing=case.checkpointing)
        model = shard(made, strategy, LOW if low else None)

        def sync(model: Any, is_last: bool | None) -> None:
            if is_last is not None:
                model.set_requires_gradient_sync(is_last)

        got = train(case, model, model, rank, steps, sync)
        try:
            assert_same(got, want, rtol=(5e-2 if low else 1e-4) if loose else 0.0)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None
    if rank == 0:
        print(f"{strategy}: {len(cases)} combinations")
