"""Ranks that wait for each other in vain, or for one that has left: all say so within seconds.

`benchmarks/divergence.py` has many more of these. The process groups here would wait for minutes.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import diverging
from support.models import SmallNet, net_loss
from support.ranks import in_processes, on_ranks

import autoshard
from autoshard.runtime.comm import flights
from autoshard.runtime.ranks import waits

LIMIT_S = 90.0  # with the start of processes, on a busy machine


def run(case: str, form: str, caches: Path) -> list[str]:
    """How each rank ended; "" for one that has not said it."""
    environments = [{"TORCHINDUCTOR_CACHE_DIR": str(caches / str(rank))} for rank in range(2)]
    ends = in_processes(diverging.run_rank, case, form, environments=environments, limit_s=LIMIT_S)
    return [end or "" for end in ends]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("case", "form", "what"),
    [
        ("a barrier", "eager", "a barrier of torch's"),
        ("a barrier", "compiled", "a barrier of torch's"),
        ("an all-reduce", "eager", "an all-reduce of torch's"),
        ("full_tensor", "eager", "a functional collective of torch's"),
    ],
)
def test_a_collective_of_one_rank(case: str, form: str, what: str, tmp_path: Path) -> None:
    """Both say what each of them waits for, and in which line."""
    ends = run(case, form, tmp_path)
    for end in ends:
        assert re.search(r"rank 0 waits for the gather of layers\.0\..*, at \w+\.py:\d+ in", end)
        assert re.search(rf"rank 1 waits for {what}, at diverging\.py:\d+ in <lambda>", end), end
    assert f"rank 1: {what} over ranks [0, 1] failed" in ends[1]


LEAVES = {
    "killed": r"rank 0: the gather of .* failed, as rank 1 has ended without a word",
    "raises": (
        r"rank 0: the gather of .* failed, as rank 1 has raised ValueError, at diverging\.py:\d+ "
        r"in fail: a file is missing"
    ),
    "has no more data": r"rank 0: the gather of .* failed, as rank 1 has ended: its script came to",
    "killed first": r"rank 0 came to .*, or have left: .*; rank 1 has ended without a word",
}
"""By case: what the rank says that stays."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", LEAVES)
def test_a_rank_that_leaves(case: str, tmp_path: Path) -> None:
    stays, _ = run(case, "eager", tmp_path)
    assert re.search(LEAVES[case], stays), stays


@pytest.mark.timeout(120)
def test_a_rank_that_is_slow(tmp_path: Path) -> None:
    """One waits for the other in a gather, then the other way about in a barrier of the user's."""
    assert run("slow", "eager", tmp_path) == ["done", "done"]


@on_ranks(2)
def test_what_other_code_launches_is_counted(rank: int) -> None:
    """By its own collectives alone, whatever ours are made of."""
    model = autoshard.shard(SmallNet())
    net_loss(model, rank, 0).backward()
    before, waited = flights.num_of_others(rank), waits.num_in_torch()
    net_loss(model, rank, 1).backward()
    assert flights.num_of_others(rank) == before
    dist.all_reduce(torch.ones(1))
    assert sum(flights.num_of_others(rank).values()) == sum(before.values()) + 1
    dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)  # for no one else
    assert waits.num_in_torch() == waited + 1


@on_ranks(2)
def test_a_collective_of_the_users_that_fails(rank: int) -> None:
    """It names the ranks, and its own error stays."""
    autoshard.shard(SmallNet())
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 0: an all-reduce of torch's over ranks \[0"):
            dist.all_reduce(torch.ones(1), group=group)
    else:
        time.sleep(2.0)
