"""What FSDP2 offers: each method and argument of it, compared with the replicated model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import Net, net_loss
from support.ranks import on_ranks
from support.training import adamw, assert_same, in_both_forms, in_form, replicated, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import autoshard
from autoshard import fully_shard
from autoshard.runtime.collectives import Issued, observe


def build(**arguments: Any) -> Any:
    torch.manual_seed(0)
    return autoshard.shard(Net(tied=False), **arguments)


@on_ranks(2)
def test_errors_are_also_those_of_fsdp2(rank: int) -> None:
    """Misuse for which it raises AssertionError or NotImplementedError raises that, too."""
    unnamed = init_device_mesh("cpu", (1, 2))
    with pytest.raises(AssertionError, match="without names"):
        fully_shard(nn.Linear(2, 2), mesh=unnamed)
    with pytest.raises(AssertionError, match="is sharded already"):
        fully_shard(fully_shard(nn.Linear(2, 2)))
    with pytest.raises(AssertionError, match="which has 2 dims"):
        fully_shard(nn.Linear(2, 2, bias=False), shard_placement_fn=lambda _: Shard(2))
    with pytest.raises(NotImplementedError, match="only dim 0 may be uneven"):
        fully_shard(nn.Linear(3, 2, bias=False), shard_placement_fn=lambda _: Shard(1))
    half = fully_shard(nn.Linear(2, 2, bias=False))
    half.weight._local_tensor.fsdp_pre_all_gather = None
    with pytest.raises(AssertionError, match="fsdp_pre_all_gather alone"):
        half(torch.ones(1, 2))
    with pytest.raises(AssertionError, match="can't be deep-copied"):
        copy.deepcopy(fully_shard(nn.Linear(2, 2)))


def most_in_flight(run: Callable[[], object]) -> int:
    """Of reduces, while `run` runs."""
    now = most = 0

    def launched(issued: Issued) -> None:
        nonlocal now, most
        now += issued.kind == "reduce"
        most = max(most, now)

    def waited(issued: Issued) -> None:
        nonlocal now
        now -= issued.kind == "reduce"

    with observe(launched, waited):
        run()
    return most


@in_both_forms
@on_ranks(2)
def test_reduces_in_flight(rank: int, form: str) -> None:
    """As many as asked for, eagerly; the values are the same, and compiled the plan decides."""
    want, _ = replicated(Net, net_loss)
    seen = []
    for number in (None, 1, 2, 99):
        torch.manual_seed(0)
        model = in_form(autoshard.shard(Net()), form, bucketing="per_unit")
        if number is not None:
            model.set_reduce_scatter_max_input_buffers(number)
        optimizer = adamw(model)
        seen.append(most_in_flight(lambda m=model, o=optimizer: train(m, net_loss, o)))
        assert_same(model, want)
    if form == "eager":
        assert seen == [1, 1, 2, 4]
    else:
        assert len(set(seen)) == 1
    model.set_reduce_scatter_max_input_buffers(3, recurse=False)
    assert model.layers[0]._autoshard_unit.reducer.in_flight == 99
    with pytest.raises(TypeError, match="should be an int, not bool"):
        model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="should be positive, not 0"):
        model.set_reduce_scatter_max_input_buffers(0)
