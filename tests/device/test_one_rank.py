"""A world of one rank, with the backend that the device has: NCCL on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import overlap
import pytest
import torch
import torch.distributed as dist
from support.link import ON_GPU, bench_of

from autoshard import _torch

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """With a process group of its backend."""
    torch._dynamo.reset()
    backend = BACKENDS[request.param]
    dist.init_process_group(backend, rank=0, world_size=1, store=_torch.dist.HashStore())
    yield request.param
    dist.destroy_process_group()


def test_parity(device: str) -> None:
    """Eager steps are those of the unsharded model, and compiled ones with the plain lowering
    those of the compiled one, bit for bit."""
    assert "bit for bit" in overlap.check(bench_of(device))
