"""Ranks that send and receive as ever, and train in different ways: all say so, soon."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import SmallNet, net_loss
from support.ranks import on_ranks
from support.training import adamw, in_both_forms, in_form, sgd
from torch import nn

import autoshard
from autoshard.runtime.ranks.ledger import Ledger
from autoshard.runtime.unit.unit import unit_of

LAST = 40  # step


def train(form: str, each: Callable[[Any, Any, int], None], make: Any = adamw) -> int:
    """Train until an error comes, which is returned, or LAST."""
    torch.manual_seed(0)
    model = in_form(autoshard.shard(SmallNet()), form)
    optimizer = make(model)
    for step in range(LAST):
        each(model, optimizer, step)
    return LAST


def backward(model: Any, rank: int, step: int) -> None:
    net_loss(model, rank, step).backward()


def update(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


@in_both_forms
@on_ranks(2)
def test_another_learning_rate(rank: int, form: str) -> None:
    def each(model: Any, optimizer: Any, step: int) -> None:
        backward(model, rank, step)
        if step == 3 and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.5
        update(optimizer)

    says = (
        r"rank \d and rank \d have not done the same: after backward 4, rank \d did a step of "
        r"AdamW\(lr=.*lr=0\.5, .* load a checkpoint from before that|lr=0\.5, .*lr=0\.0"
    )
    with pytest.raises(RuntimeError, match=says):
        train(form, each)


@on_ranks(2)
def test_a_save_compares_what_ranks_did(rank: int) -> None:
    """One more step of the optimizer since the last backward, which no later one has shown yet."""
    torch.manual_seed(0)
    model = autoshard.shard(SmallNet())
    optimizer = adamw(model)
    backward(model, rank, 0)
    optimizer.step()
    if rank == 1:
        optimizer.step()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    with pytest.raises(RuntimeError, match=r"save_checkpoint\(step=1\) after 1 backwards, and .*"):
        autoshard.save_checkpoint(folder[0], model, optimizer, step=1)


@on_ranks(3)
def test_all_of_three_ranks_raise_in_the_same_backward(rank: int) -> None:
    """And go on from a checkpoint, where all do the same."""
    done = [0]

    def each(model: Any, optimizer: Any, step: int) -> None:
        if rank == 1:
            time.sleep(0.01)  # it comes last to each comparison
        backward(model, rank, step)
        done[0] += 1
        if step == 3:
            optimizer.param_groups[0]["lr"] = (0.5, 0.1, 0.1)[rank]
        update(optimizer)

    with pytest.raises(RuntimeError, match="have not done the same: after backward 4"):
        train("eager", each)
    counts: list[Any] = [None] * 3
    dist.all_gather_object(counts, done[0])
    assert len(set(counts)) == 1, counts


@on_ranks(2)
def test_going_on_from_a_checkpoint(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = autoshard.shard(SmallNet())
    optimizer = sgd(model)
    autoshard.save_checkpoint(tmp_path, model, optimizer, step=0)

    def train(left_out: int) -> None:
        for step in range(LAST):
            backward(model, rank, step)
            if not (step == left_out and rank == 1):
                update(optimizer)

    with pytest.raises(RuntimeError, match="have not done the same"):
        train(2)
    model.reset_iter_state()
    assert autoshard.load_checkpoint(tmp_path, model, optimizer) == 0
    train(-1)


@in_both_forms
@on_ranks(2)
def test_a_step_that_is_left_out(rank: int, form: str) -> None:
    def each(model: Any, optimizer: Any, step: int) -> None:
        backward(model, rank, step)
        if not (step == 20 and rank == 1):
            update(optimizer)

    says = r"after backward 21, rank \d did (nothing, and rank \d a step|a step .* rank \d nothing)"
    with pytest.raises(RuntimeError, match=says):
        train(form, each, sgd)


@in_both_forms
@on_ranks(2)
def test_a_micro_batch_more_then_one_fewer(rank: int, form: str) -> None:
    def each(model: Any, optimizer: Any, step: int) -> None:
        count = 2 + {5: 1, 6: -1}.get(step, 0) * rank
        for number in range(count):
            backward(model, rank, number)
        update(optimizer)

    with pytest.raises(RuntimeError, match=r"after backward 12, rank \d did (nothing|a step)"):
        train(form, each, sgd)


@in_both_forms
@on_ranks(2)
def test_ranks_that_do_the_same(rank: int, form: str) -> None:
    """Schedules, micro-batches and two optimizers; a model of the same names after another."""

    def each(model: Any, optimizer: Any, step: int) -> None:
        for number in range(1 + step % 3):
            backward(model, rank, number)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        update(optimizer)

    for make in (adamw, sgd):
        assert train(form, each, make) == LAST


class Around(nn.Module):
    """Runs its parts by themselves, without a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = SmallNet(), nn.Linear(1, 1)


@on_ranks(2)
def test_a_model_without_a_forward(rank: int) -> None:
    """Backwards and steps are those of the model, whatever part of it has run."""
    torch.manual_seed(0)
    model = Around()
    autoshard.fully_shard(model.net)
    autoshard.fully_shard(model)
    optimizer = sgd(model)

    def train() -> None:
        for step in range(LAST):
            backward(model.net, rank, step)
            if not (step == 2 and rank == 1):
                update(optimizer)

    with pytest.raises(RuntimeError, match="have not done the same"):
        train()


@on_ranks(2)
def test_ranks_that_may_differ(rank: int) -> None:
    """With `strict_order=False` nothing is compared."""
    model = autoshard.shard(SmallNet(), strict_order=False)
    optimizer = sgd(model)
    for step in range(20):
        backward(model, rank, step)
        if not (rank == 1 and step % 2):
            update(optimizer)
    unit = unit_of(model)
    assert unit is not None
    assert unit.state(Ledger).backwards == 0
