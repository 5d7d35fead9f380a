"""Frames that come from AOTAutograd's cache have the plans that they were compiled with."""

from __future__ import annotations

import contextlib
import gc
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.caches import fresh_graphs
from support.ranks import on_ranks
from support.selection import each_value
from torch import Tensor, nn

import autoshard
from autoshard import _torch, plan_cache


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(*, at_first_call: bool = False, **options: Any) -> tuple[list[str], list[float], int]:
    """Texts of the plans, losses, and how many frames came from the cache."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model: Any = Net()
    if at_first_call:
        options["policy"] = autoshard.ModuleWrapPolicy({nn.Linear})
    else:
        model = autoshard.shard(model, policy=autoshard.ModuleWrapPolicy({nn.Linear}))
    model.compile(backend="autoshard", options={"strict": True, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, 6)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    return [plan.text() for plan in autoshard.plans(model)], losses, hits


@on_ranks(2)
def test_a_hit_has_its_plans(rank: int) -> None:
    with fresh_graphs():
        first = train()
        assert first[2] == 0
        assert train() == (*first[:2], 1)


@on_ranks(2)
def test_other_options_are_no_hit(rank: int) -> None:
    with fresh_graphs():
        plans, losses, _ = train()
        others, same, hits = train(bucketing="none")
        assert hits == 0
        assert others != plans
        assert same == losses


@each_value(ranks=[(0, 1), (0,), (1,)], strict=[True, False])
@on_ranks(2)
def test_plans_that_are_gone(rank: int, ranks: tuple[int, ...], strict: bool) -> None:
    """The frame is compiled again, and the plans are there the next time."""
    with fresh_graphs(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="autoshard could not compile")
        plans, losses, _ = train(strict=strict)
        if rank in ranks:
            for path in (Path(_torch.inductor.cache_folder()) / "autoshard").iterdir():
                path.unlink()
        assert train(strict=strict)[:2] == (plans, losses)
        assert train(strict=strict) == (plans, losses, 1)


@on_ranks(2)
def test_what_a_hit_depends_on(rank: int) -> None:
    """Functions in options have other addresses each time; some dtypes come from outside."""
    with fresh_graphs():
        for dtype, hits in ((torch.float32, 0), (torch.float64, 0), (torch.float64, 1)):
            torch.set_default_dtype(dtype)
            try:
                _, _, found = train(at_first_call=True, param_init_fn=lambda module: None)
                assert found == hits
            finally:
                torch.set_default_dtype(torch.float32)


@on_ranks(2)
def test_one_rank_alone_has_a_cache(rank: int) -> None:
    with fresh_graphs():
        first = train()
        with fresh_graphs() if rank == 1 else contextlib.nullcontext():
            again = train()
    assert again == (*first[:2], 1 if rank == 0 else 0)


@on_ranks(2)
def test_a_cache_that_the_user_has_turned_off(rank: int) -> None:
    """Nor is a decision kept under a memory budget where all caches are off."""
    functorch, everything = torch._functorch.config, torch.compiler.config
    for off in (
        functorch.patch(enable_autograd_cache=False),
        everything.patch(force_disable_caches=True),
    ):
        with fresh_graphs(), off, mock.patch.object(plan_cache, "save_decision") as kept:
            assert train() == train()
            assert train(memory_budget=10**6) == train(memory_budget=10**6)
            assert not kept.called


@on_ranks(2)
def test_compiling_leaves_the_garbage_collector_as_it_was(rank: int) -> None:
    before = gc.get_threshold()
    train()
    assert gc.get_threshold() == before
    assert gc.isenabled()


def test_a_file_that_is_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch.inductor, "cache_folder", lambda: str(tmp_path))
    plan_cache.save("a", None)
    assert plan_cache.load(["a"]) == []
    (tmp_path / "autoshard" / "a.json").write_text("{")
    assert plan_cache.load(["a"]) is None
    assert plan_cache.load(["b"]) is None
