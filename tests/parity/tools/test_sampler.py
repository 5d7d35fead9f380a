"""Random combinations of options; `autoshard parity --matrix` runs as many as one likes."""

from __future__ import annotations

import unittest.mock

import pytest
import torch
from support.ranks import on_ranks
from torch import nn

from autoshard.runtime.eager import step as steps
from autoshard.tools.parity.compare import compare_local
from autoshard.tools.parity.matrix import CHOICES, draw, try_case
from autoshard.tools.parity.random_models import try_model


def test_a_seed_is_a_case() -> None:
    assert draw(3) == draw(3)
    drawn = [draw(seed) for seed in range(100)]
    for name, values in CHOICES.items():
        assert {getattr(case, name) for case in drawn} == set(values), name
    assert draw(3).text()


@pytest.mark.parametrize("seed", [100, 102])
@on_ranks(2)
def test_samples(rank: int, seed: int) -> None:
    """D-1 to D-3, D-15, D-16, D-19, D-20, D-35, D-38, D-58: whatever a seed brings together."""
    outcome = try_case(seed)
    assert outcome.problem is None, f"{outcome.problem}\n{outcome.text}"


@pytest.mark.parametrize("seed", range(4))
@on_ranks(2)
def test_random_models(rank: int, seed: int) -> None:
    """`autoshard parity --fuzz` trains as many as one likes."""
    sample = try_model(seed)
    assert sample.problem is None, f"{sample.problem}\n{sample.text}"


@on_ranks(2)
def test_a_problem_on_one_rank_is_told_on_all(rank: int) -> None:
    """A gradient that is lost on rank 1, eagerly: compiled code has it."""
    original = steps.Step.reduce

    def reduce(self: steps.Step, unit: object, grads: dict[object, object], wanted: object) -> None:
        if rank == 1:
            for param, grad in grads.items():
                grads[param] = None if grad is None else torch.zeros_like(grad)
        original(self, unit, grads, wanted)

    with unittest.mock.patch.object(steps.Step, "reduce", reduce):
        outcome = try_case(100)
    assert outcome.problem is not None
    assert outcome.problem.startswith("rank ")
    assert "differ" in outcome.problem


def test_rounding_is_not_told() -> None:
    def one(value: float) -> nn.Module:
        module = nn.Linear(1, 1, bias=False)
        nn.init.constant_(module.weight, value)
        return module

    assert compare_local(one(1.02), one(0.99), 0.01) == "weight by 0.03 (0.0303 relative)"
    assert compare_local(one(1.02), one(0.99), 0.01, exact=one(1.01)) is None
    assert compare_local(one(1.02), one(0.99), 0.01, exact=one(1.0)) is not None
