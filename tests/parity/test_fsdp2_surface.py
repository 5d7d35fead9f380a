"""What FSDP2 offers: each method and argument of it, compared with the replicated model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.models import Net
from support.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import autoshard
from autoshard import fully_shard


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
