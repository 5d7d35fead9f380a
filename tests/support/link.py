"""Collectives over the emulated link, and what they are to give; models to train on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from overlap import Bench
from support.models import Block
from support.null_cuda import device as null_cuda
from torch import Tensor, nn

from autoshard import _torch
from autoshard.tools.bench.contestants import Setting
from autoshard.tools.bench.workloads import Workload

WORLD, RANK = 4, 1  # of whom the others are imagined
AVG, MAX = dist.ReduceOp.AVG, dist.ReduceOp.MAX

Run = Callable[[torch.device], Tensor]


def _part(device: torch.device) -> Tensor:
    return torch.arange(6.0, device=device).view(3, 2)


def _whole(device: torch.device) -> Tensor:
    return torch.arange(24.0, device=device).view(12, 2)


def _gather(device: torch.device) -> Tensor:
    whole = torch.zeros(12, 2, device=device)
    _torch.dist.all_gather_flat(whole, _part(device))
    return whole


def _gather_in_place(device: torch.device) -> Tensor:
    whole = torch.zeros(12, 2, device=device)
    part = whole[3 * RANK : 3 * RANK + 3]
    part.copy_(_part(device))
    _torch.dist.all_gather_flat(whole, part)
    return whole


def _gather_list(device: torch.device) -> Tensor:
    parts = [torch.zeros(3, 2, device=device) for _ in range(WORLD)]
    dist.all_gather(parts, _part(device))
    return torch.cat(parts)


def _gather_grouped(device: torch.device) -> Tensor:
    wholes = [torch.zeros(12, 2, device=device), torch.zeros(4, device=device)]
    parts = [_part(device), torch.ones(1, device=device)]
    for work in _torch.dist.all_gather_grouped(wholes, parts, dist.group.WORLD):
        work.wait()
    assert wholes[1].tolist() == [1.0] * WORLD
    return wholes[0]


def _reduce(op: dist.ReduceOp.RedOpType, device: torch.device) -> Tensor:
    part = torch.zeros(3, 2, device=device)
    _torch.dist.reduce_scatter_flat(part, _whole(device), op)
    return part


def _reduce_in_place(device: torch.device) -> Tensor:
    whole = _whole(device)
    part = whole[3 * RANK : 3 * RANK + 3]
    _torch.dist.reduce_scatter_flat(part, whole)
    return part


def _reduce_list(device: torch.device) -> Tensor:
    part = torch.zeros(3, 2, device=device)
    dist.reduce_scatter(part, list(_whole(device).split(3)))
    return part


def _all_reduce(op: dist.ReduceOp.RedOpType, device: torch.device) -> Tensor:
    part = _part(device)
    dist.all_reduce(part, op)
    return part


def _all_reduce_numbers(device: torch.device) -> Tensor:
    numbers = torch.tensor([1, 2], device=device)
    dist.all_reduce(numbers)
    return numbers


def _all_reduce_grouped(device: torch.device) -> Tensor:
    parts = [_part(device), torch.ones(1, device=device)]
    dist.group.WORLD.allreduce_coalesced(parts).wait()
    assert parts[1].item() == WORLD
    return parts[0]


def _broadcast(device: torch.device) -> Tensor:
    part = _part(device)
    dist.broadcast(part, 0)
    dist.barrier()
    return part


def _scatter(device: torch.device) -> Tensor:
    part = torch.zeros(3, 2, device=device)
    dist.scatter(part, list(_whole(device).split(3)), src=RANK)
    return part


def _all_to_all(device: torch.device) -> Tensor:
    result = torch.zeros(12, 2, device=device)
    dist.all_to_all_single(result, _whole(device))
    return result


_CPU = torch.device("cpu")
_PART = _part(_CPU)
_ROWS = _whole(_CPU)[3 * RANK : 3 * RANK + 3]

COLLECTIVES: dict[str, tuple[Run, Tensor]] = {
    "gather": (_gather, _PART.repeat(WORLD, 1)),
    "gather in place": (_gather_in_place, _PART.repeat(WORLD, 1)),
    "gather to a list": (_gather_list, _PART.repeat(WORLD, 1)),
    "grouped gather": (_gather_grouped, _PART.repeat(WORLD, 1)),
    "sum": (lambda device: _reduce(dist.ReduceOp.SUM, device), WORLD * _ROWS),
    "mean": (lambda device: _reduce(AVG, device), _ROWS),
    "sum in place": (_reduce_in_place, WORLD * _ROWS),
    "sum of a list": (_reduce_list, WORLD * _ROWS),
    "sum for all": (lambda device: _all_reduce(dist.ReduceOp.SUM, device), WORLD * _PART),
    "mean for all": (lambda device: _all_reduce(AVG, device), _PART),
    "largest": (lambda device: _all_reduce(MAX, device), _PART),
    "sum of integers": (_all_reduce_numbers, torch.tensor([WORLD, 2 * WORLD])),
    "grouped sums": (_all_reduce_grouped, WORLD * _PART),
    "broadcast": (_broadcast, _PART),
    "scatter": (_scatter, _ROWS),
    "all to all": (_all_to_all, _whole(_CPU)),
}
"""By name: what runs one, and its result."""


class Result(NamedTuple):
    """As models of `transformers` give it."""

    loss: Tensor


class Stack(nn.Module):
    """Blocks, and a loss: what `benchmarks/` measures, small."""

    def __init__(self, layers: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Result:
        for layer in self.layers:
            x = layer(x)
        return Result(x.square().mean())


def bench_of(
    device: str, *, layers: int = 3, dim: int = 6, hidden: int = 7, rows: int = 5
) -> Bench:
    """Of a `Stack`, on as many ranks as there are."""
    work = Workload(
        lambda: Stack(layers, dim, hidden),
        lambda model: model.layers,
        lambda rank: {"x": torch.randn(rows, dim, generator=torch.Generator().manual_seed(rank))},
        rows,
    )
    setting = Setting(torch.device(device), work.blocks, torch.float32, {})
    return Bench(work, setting, dist.get_world_size(), rounds=1)


ON_GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available() or null_cuda.is_there(),
            reason="there is no CUDA device that computes",
        ),
    ],
)

on_each_device = pytest.mark.parametrize("device", ["cpu", ON_GPU])
"""The same test on a CPU shows that there is no mistake in the test itself."""
