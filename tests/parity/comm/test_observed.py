"""What torch's own tools see of gathers and reduces, by messages and by collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import SmallNet, net_loss
from support.ranks import on_ranks
from support.training import FORMS, assert_same, in_form, sgd, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import autoshard
from autoshard.runtime.comm import transport


@contextlib.contextmanager
def collectives_alone() -> Iterator[None]:
    """As AUTOSHARD_MESSAGES=0 does, which is read once a process."""
    with mock.patch.object(transport, "may_send", return_value=False):
        yield


def counted(model: Any, rank: int) -> dict[str, int]:
    """Collectives of a step, by name, as `CommDebugMode` counts them."""
    with CommDebugMode() as mode:
        net_loss(model, rank, 0).backward()
    return {packet.__name__: number for packet, number in mode.get_comm_counts().items()}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_counts(rank: int, form: str) -> None:
    """Three units are gathered, and two of them again for backward; three are reduced."""
    model = in_form(autoshard.shard(SmallNet()), form, bucketing="per_unit")
    net_loss(model, rank, 0).backward()
    assert counted(model, rank) == {
        "all_gather_by_messages": 5,
        "reduce_scatter_by_messages": 3,
    }
    torch._dynamo.reset()  # else it skips what it has met in a dispatch mode
    with collectives_alone():
        model = in_form(autoshard.shard(SmallNet()), form, bucketing="per_unit")
        net_loss(model, rank, 0).backward()
        assert counted(model, rank) == {"_allgather_base_": 5, "_reduce_scatter_base_": 3}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@on_ranks(4)
def test_counts_with_replicas(rank: int) -> None:
    """Reduces are in one piece then, for the all-reduces, which are gloo's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = autoshard.shard(SmallNet(), strategy="hybrid_shard", mesh=mesh)
    net_loss(model, rank, 0).backward()
    assert counted(model, rank) == {
        "all_gather_by_messages": 5,
        "reduce_scatter_by_messages": 3,
        "allreduce_": 3,
    }


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_values(rank: int, form: str) -> None:
    """They are the same by collectives alone, and nothing is left to messages."""
    trained = []
    for is_alone in (False, True):
        torch.manual_seed(0)
        model: Any = autoshard.shard(SmallNet())
        with contextlib.ExitStack() as stack:
            if is_alone:
                stack.enter_context(collectives_alone())
                stack.enter_context(mock.patch.object(transport, "Exchange", None))
            train(in_form(model, form), net_loss, sgd(model))
        trained.append(model)
    assert_same(*trained)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_off_on_one_rank(rank: int, form: str) -> None:
    """Both say so, before one sends what the other does not receive."""
    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(collectives_alone())
        model = in_form(autoshard.shard(SmallNet()), form)
        with pytest.raises(RuntimeError, match="AUTOSHARD_MESSAGES=0"):
            net_loss(model, rank, 0).backward()
    assert dist.get_world_size() == 2


def test_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_MESSAGES", "off")
    transport.may_send.cache_clear()
    with pytest.raises(ValueError, match=r"AUTOSHARD_MESSAGES='off': expected 0, .* or 1"):
        transport.may_send()
    monkeypatch.setenv("AUTOSHARD_MESSAGES", "0")
    assert not transport.may_send()
    transport.may_send.cache_clear()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_spans_of_a_profile(rank: int, form: str) -> None:
    """What is launched, waited for and copied has a name, and the group's, while one profiles."""
    model = in_form(autoshard.shard(SmallNet()), form, bucketing="per_unit")
    net_loss(model, rank, 0).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        net_loss(model, rank, 0).backward()
    names = [each.name for each in found.events() if each.name.startswith("autoshard::")]
    spans = {name.split()[0].removeprefix("autoshard::") for name in names if " " in name}
    gather = "launch_grouped_gather" if form == "eager" else "launch_gather"
    assert spans == {gather, "wait_gather", "pack_grads", "launch_reduce", "split_reduced"}
