"""Peak memory of a step: eagerly at most FSDP2's, compiled at most that, measured in one run."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from support.memory import PeakMemory, PeakOfGraphs
from support.ranks import on_ranks
from support.selection import IS_FULL, each_value
from support.training import in_form
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import autoshard


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, checkpointing: str | None) -> None:
        super().__init__()
        self.start = nn.Linear(32, 64)
        self.layers = nn.ModuleList(Wide() for _ in range(12))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        return x


def peak(model: Any, *, keeps: bool, compiled: bool = False) -> int:
    """The least of the third step and two more: gloo's threads hold what they send a while longer,
    or don't. keeps: gradients of the step before, as while accumulating.
    """
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    memory = PeakOfGraphs() if compiled else PeakMemory()
    with memory.compiling() if isinstance(memory, PeakOfGraphs) else contextlib.nullcontext():
        for _ in range(2):
            model(x).sum().backward()
    peaks = []
    for _ in range(3):
        if not keeps:
            model.zero_grad()
        memory.reset()
        with memory:
            model(x).sum().backward()
        peaks.append(memory.peak)
    return min(peaks)


STRATEGIES = ("full_shard", "shard_grad_op", "hybrid 2x1", "hybrid 1x2", "replicate")
CHECKPOINTING = (None, "non-reentrant", "reentrant")


def build(library: str, strategy: str, checkpointing: str | None) -> nn.Module:
    """Each layer a unit, and the root; library: "autoshard" or "FSDP2"."""
    shard: Any = autoshard.fully_shard if library == "autoshard" else fsdp.fully_shard
    arguments: dict[str, Any] = {"reshard_after_forward": strategy != "shard_grad_op"}
    if strategy == "replicate":
        shard = autoshard.replicate if library == "autoshard" else replicate_with_fsdp.replicate
        arguments = {}
    elif strategy.startswith("hybrid"):
        size = tuple(int(each) for each in strategy.removeprefix("hybrid ").split("x"))
        arguments["mesh"] = init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Tower(checkpointing)
    for layer in model.layers:
        shard(layer, **arguments)
    arguments.pop("reshard_after_forward", None)
    return shard(model, **arguments)


@each_value(strategy=STRATEGIES, checkpointing=CHECKPOINTING)
@on_ranks(2)
def test_not_above_fsdp2(rank: int, strategy: str, checkpointing: str | None) -> None:
    ours, theirs = (
        peak(build(each, strategy, checkpointing), keeps=True) for each in ("autoshard", "FSDP2")
    )
    print(f"{strategy}, {checkpointing}: {ours} bytes, FSDP2 {theirs}, {ours / theirs:.2f}")
    assert ours <= theirs


@each_value(
    strategy=STRATEGIES if IS_FULL else ("shard_grad_op", "full_shard", "hybrid 2x1"),
    checkpointing=(None, "non-reentrant"),
)
@on_ranks(2)
def test_plain_lowering(rank: int, strategy: str, checkpointing: str | None) -> None:
    """As in training, with gradients empty before the step."""
    found = {}
    for bucketing in ("per_unit", "auto"):
        model = build("autoshard", strategy, checkpointing)
        in_form(model, "compiled", bucketing=bucketing)
        found[bucketing] = peak(model, keeps=False, compiled=True)
        torch._dynamo.reset()
    eagerly = peak(build("autoshard", strategy, checkpointing), keeps=False)
    theirs = peak(build("FSDP2", strategy, checkpointing), keeps=False)
    print(f"{strategy}, {checkpointing}: {found} bytes, eagerly {eagerly}, FSDP2 {theirs}")
    assert eagerly <= theirs
    assert found["per_unit"] <= eagerly
    # A plan that was searched for needs no more by prediction, which with whole gradients alone is
    # off by a small one.
    is_whole = strategy in ("hybrid 2x1", "replicate")
    assert found["auto"] <= (1.005 if is_whole else 1.0) * eagerly
    assert found["auto"] <= theirs
