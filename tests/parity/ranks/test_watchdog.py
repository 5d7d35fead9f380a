"""What ranks say of a collective that does not end, or fails."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import recorded, warm
from support.models import Net, net_loss
from support.ranks import free_port, on_ranks
from support.training import in_both_forms
from torch.distributed.device_mesh import DeviceMesh

import autoshard
from autoshard.runtime.comm import flights
from autoshard.runtime.ranks import watchdog

LATE_S = 6.0


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def watched(after_s: float) -> Iterator[list[str]]:
    """What the watchdog of this rank says."""
    handler = Said()
    watchdog.log.addHandler(handler)
    autoshard.watchdog(after_s)
    try:
        yield handler.messages
    finally:
        autoshard.watchdog(None)
        watchdog.log.removeHandler(handler)


def model_of(form: str, **arguments: Any) -> Any:
    torch.manual_seed(0)
    model = autoshard.shard(Net(), **arguments)
    if form == "compiled":
        model.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    return model


def load_a_batch_slowly() -> None:
    time.sleep(LATE_S)


def said_while_one_is_late(rank: int, form: str, *, late: int) -> list[str]:
    """What this rank's watchdog says while rank `late` loads a batch slowly."""
    model = model_of(form)
    net_loss(model, rank, 0).backward()
    with watched(1.0) as said:
        net_loss(model, rank, 1).backward()
        if rank == late:
            load_a_batch_slowly()
        net_loss(model, rank, 2).backward()
        dist.barrier()
    return said


@pytest.mark.parametrize("form", ["eager", "compiled"])
@on_ranks(2)
def test_a_rank_that_is_late(rank: int, form: str) -> None:
    said = said_while_one_is_late(rank, form, late=1)
    # On a loaded machine there may be others, of ranks that are slow by themselves.
    late = [each for each in said if "behind" in each and "load_a_batch_slowly" in each]
    if rank == 1:
        assert not late
        return
    assert 1 <= len(late) <= 3, said  # once, and each time that it is twice as late
    first = late[0].splitlines()
    assert len(first) == 2, first
    assert first[0].startswith("rank 0 has waited ")
    assert "the gather of embed.weight" in first[0]
    assert "in forward: collective " in first[0]
    assert first[1].startswith("  rank 1 is behind: it has launched ")
    assert "the last one the reduce of " in first[1]
    assert first[1].endswith("in load_a_batch_slowly")
    if form == "compiled":
        assert "(bucket 0 of its graph)" in first[0]


@on_ranks(4)
def test_one_report_of_several_ranks(rank: int) -> None:
    """One of those that wait speaks, and those that are at the same place share a line."""
    said = said_while_one_is_late(rank, "eager", late=3)
    everything: list[Any] = [None] * 4
    dist.all_gather_object(everything, said)
    reports = [report for of_rank in everything for report in of_rank if "behind" in report]
    late = [report for report in reports if "rank 3 is behind" in report]
    assert 1 <= len(late) <= 4, reports  # twice as late, and again; not one a rank
    assert any(re.search(r"ranks \[\d, \d\] wait for it, too", report) for report in late), late


@on_ranks(2)
def test_what_nobody_waits_for_is_no_news(rank: int) -> None:
    """A forward that an exception ends leaves gathers that were launched ahead."""
    model = model_of("eager")
    net_loss(model, rank, 0).backward()
    with watched(1.0) as said:
        handle = model.layers[0].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            net_loss(model, rank, 1)
        handle.remove()
        model.reset_iter_state()
        before = list(said)  # a rank that is slow is news
        time.sleep(3.0)
        assert said == before
        net_loss(model, rank, 2).backward()


def fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("form", ["eager", "compiled"])
@on_ranks(2)
def test_a_collective_that_fails(rank: int, form: str) -> None:
    """After the group's timeout, on all ranks, by its name."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = model_of(form, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",)))
    for step in range(2):
        net_loss(model, rank, step).backward()
    if rank == 1:
        time.sleep(4.0)
    with pytest.raises(RuntimeError, match=rf"rank {rank}: the gather of embed\.weight.* over ran"):
        net_loss(model, rank, 2).backward()


def test_memory_that_is_not_there_is_no_other_rank_s_fault() -> None:
    issued = flights.Issued("gather", (), "shard")
    with pytest.raises(torch.OutOfMemoryError, match=r"^no room$"), flights.explained(issued):
        raise torch.OutOfMemoryError("no room")


@on_ranks(2)
def test_wrong_seconds(rank: int) -> None:
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="a number of seconds over 0, or None, is expected"):
            autoshard.watchdog(wrong)


@on_ranks(2)
def test_the_one_that_runs_goes_on_if_there_can_be_no_other(rank: int) -> None:
    autoshard.watchdog(20)
    running = list(watchdog._running)
    with (
        mock.patch.object(dist, "is_initialized", return_value=False),
        pytest.raises(RuntimeError, match="needs a process group"),
    ):
        autoshard.watchdog(30)
    assert watchdog._running == running
    assert running[0].is_running
    autoshard.watchdog(None)


@on_ranks(2)
def test_the_environment_starts_one(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(watchdog.VARIABLE, "soon")
        with pytest.raises(ValueError, match="AUTOSHARD_WATCHDOG='soon': a number of seconds"):
            autoshard.shard(Net())
        patch.setenv(watchdog.VARIABLE, "20")
        autoshard.shard(Net())
        assert [each.is_running for each in watchdog._running] == [True]
        autoshard.watchdog(None)
        assert not watchdog._running
        patch.setenv(watchdog.VARIABLE, "0")
        autoshard.shard(Net())
        assert not watchdog._running
        patch.delenv(watchdog.VARIABLE)
        autoshard.shard(Net())
        (running,) = watchdog._running
        assert running._after_s == watchdog.DEFAULT_S
        autoshard.shard(Net())
        assert watchdog._running == [running]


@in_both_forms
def test_the_flight_recorder_has_names(form: str) -> None:
    """Among the functions that called a collective is one with the name of what it is.

    Of three ranks, as gloo's messages, which two exchange instead, are not recorded.
    """
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [warm.python(), recorded.__file__, form],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "TORCH_FR_BUFFER_SIZE": "2000",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if not any(outputs):
        pytest.skip(f"torch {torch.__version__} records nothing of gloo")
    for output in outputs:
        assert " < the reduce of layers.2.norm.weight, " in output, output
