"""Frames of one model that share a memory budget: compiled by blocks, or parted by graph breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support.memory import train_measured
from support.models import Block
from support.ranks import on_ranks
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.compilation import Compilation
from autoshard.runtime.compiled.other_frames import others_of
from autoshard.runtime.unit.param import ShardedParam, resolve

OVER = 1.02  # of a budget, at most: what the allocator's pieces and gloo add is not planned
OPTIONS = {"topology": "h100", "lowering": "eager"}
BLOCKS = 6


class Tower(nn.Module):
    """Transformer whose parts can be compiled by themselves."""

    def __init__(self, breaks_after: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block(32, 128) for _ in range(BLOCKS))
        self.head = nn.Linear(32, 64)
        self.breaks_after = breaks_after

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(ids)
        if self.breaks_after is not None:
            torch._dynamo.graph_break()
        return nn.functional.cross_entropy(self.second(x).flatten(0, 1), ids.flatten())

    def first(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for layer in self.layers[: self.breaks_after]:
            x = layer(x)
        return x

    def second(self, x: Tensor) -> Tensor:
        for layer in self.layers[self.breaks_after or BLOCKS :]:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def by_blocks(model: Any, **options: Any) -> None:
    for layer in model.layers:
        layer.compile(backend="autoshard", options={"strict": True, **OPTIONS, **options})


def by_breaks(model: Any, **options: Any) -> None:
    model.compile(backend="autoshard", options={**OPTIONS, **options})


WAYS: dict[str, tuple[Callable[..., None], int | None]] = {
    "blocks": (by_blocks, None),
    "breaks": (by_breaks, 4),
}


def trained(rank: int, way: str, **options: Any) -> tuple[Any, list[Tensor], int]:
    """Train for three steps: the model, losses and parameters, and the peak of the last step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled, breaks_after = WAYS[way]
    model: Any = autoshard.shard(Tower(breaks_after))
    compiled(model, **options)
    ids = torch.arange(8 * 64).add(rank).remainder(64).view(8, 64)
    return model, *train_measured(model, lambda: model(ids))


def own_bytes(model: Any) -> int:
    """Bytes of gradients and two optimizer states."""
    return 3 * sum(param.to_local().nbytes for param in model.parameters())


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_frames_share_a_budget(rank: int, way: str) -> None:
    """Bit for bit, and all frames together keep to it; before, each took all of it for itself."""
    plain, want, most = trained(rank, way, bucketing="per_unit")
    for share in (1.12, 0.85, 0.7, 0.6):
        budget = int(share * most)
        model, got, measured = trained(rank, way, memory_budget=budget + own_bytes(plain))
        assert all(map(torch.equal, got, want))
        assert measured <= OVER * budget
        saved = [block for plan in autoshard.plans(model) for block in plan.saved]
        assert (sum(block.given_up_bytes for block in saved) > 0) == (share < 1)
        if share == 0.85:  # no more than it takes, in any block
            assert all(block.num_bytes > 0 for block in saved)


@on_ranks(2)
def test_buckets_keep_to_a_share(rank: int) -> None:
    """Gathers ahead of time have what other frames leave, and not what these save."""
    found: dict[str, tuple[int | None, int]] = {}

    def apply(self: Compilation, gm: fx.GraphModule, graph: str) -> fx.GraphModule:
        assert self.prices is not None
        found.setdefault(graph, (self.prices.budget_bytes, self.handed.num_bytes))
        return planned(self, gm, graph)

    planned = Compilation.apply
    fresh: Any = autoshard.shard(Tower(4))
    read = params_of(fresh.embed) + params_of(fresh.layers[:4])
    beside = others_of(read)
    with mock.patch.object(Compilation, "apply", apply):
        trained(rank, "breaks", memory_budget=2_600_000)
    budget, saved = found["forward"]  # of the first frame
    own = 3 * sum(param.shard_bytes for param in read)
    assert saved > 0 < beside.per_byte
    assert budget == 2_600_000 - own - beside.num_bytes - round(beside.per_byte * saved)
    assert found["backward"] == (budget, saved)


@on_ranks(2)
def test_with_inductor(rank: int) -> None:
    _, want, _ = trained(rank, "blocks", lowering="inductor")
    for _ in range(2):  # the second time from torch's caches
        model, got, _ = trained(rank, "blocks", lowering="inductor", memory_budget=2_000_000)
        assert all(map(torch.allclose, got, want))  # Inductor may round otherwise
        (block,) = autoshard.plans(model)[0].saved
        assert block.given_up_bytes > 0
        assert others_of(params_of(model.head)).num_bytes > others_of(params_of(plain())).num_bytes


def plain() -> Any:
    """Head of a model that has not run."""
    return autoshard.shard(Tower()).head


def params_of(module: nn.Module) -> list[ShardedParam]:
    found = (resolve(param) for param in module.parameters())
    return [param for param in found if param is not None]


@on_ranks(2)
def test_what_others_have(rank: int) -> None:
    """Unread parameters, with gradients and states; what ran; and a share of what is to come."""
    model: Any = autoshard.shard(Tower())
    everything = params_of(model)
    assert others_of(everything) == others_of([])
    assert not others_of(everything).num_bytes
    layer, head = params_of(model.layers[0]), params_of(model.head)
    unread = set(everything) - set(layer)
    beside = others_of(layer)
    assert beside.num_bytes == 4 * sum(param.shard_bytes for param in unread)
    sizes = {param: param.param.numel() for param in everything}
    assert beside.per_byte == sum(map(sizes.__getitem__, unread)) / sum(
        map(sizes.__getitem__, layer)
    )
    for param in params_of(model.embed):
        param.param.requires_grad_(False)
    fewer = 3 * sum(param.shard_bytes for param in params_of(model.embed))
    assert others_of(layer).num_bytes == beside.num_bytes - fewer
    before = others_of(head)
    by_blocks(model, memory_budget=1 << 30)
    ids = torch.arange(8 * 64).view(8, 64) % 64
    with torch.no_grad():
        model(ids)
    assert others_of(head) == before  # nothing was saved
    model(ids).backward()
    (kept,) = {plan.saved for plan in autoshard.plans(model) if plan.graph == "forward"}
    assert kept == ()  # all fits
    after = others_of(head)
    saved = after.num_bytes - before.num_bytes
    assert saved % BLOCKS == 0
    assert saved // BLOCKS >= 8 * 64 * (32 + 128) * 4
    assert after.per_byte == model.embed.weight.numel() / sum(sizes[param] for param in head)


@on_ranks(2)
def test_in_a_checkpoint_others_save_nothing(rank: int) -> None:
    model: Any = autoshard.shard(Tower())
    layer = params_of(model.layers[0])
    found = []

    def run(x: Tensor) -> Tensor:
        found.append(others_of(layer))
        return x * 1

    x = torch.ones(1, requires_grad=True)
    checkpoint(run, x, use_reentrant=False)
    assert found[0].per_byte == 0 < others_of(layer).per_byte
    assert found[0].num_bytes == others_of(layer).num_bytes
