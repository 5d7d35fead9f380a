"""Frames of one model that share a memory budget: compiled by blocks, or parted by graph breaks."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support.memory import train_measured
from support.models import Block
from support.ranks import on_ranks
from support.topologies import where_the_host_is_near
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
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


def trained(rank: int, way: str, **options: Any) -> tuple[Any, list[Tensor], float]:
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
@on_ranks(2, compiles=True)
def test_frames_share_a_budget(rank: int, way: str) -> None:
    """Bit for bit, and all frames together keep to it; before, each took all of it for itself."""
    plain, want, most = trained(rank, way, bucketing="per_unit")
    for share in (1.12, 0.85, 0.7, 0.6):
        budget = int(share * most)
        model, got, measured = trained(rank, way, memory_budget=budget + own_bytes(plain))
        assert all(map(torch.equal, got, want))
        assert measured <= OVER * budget
        saved = [block for plan in autoshard.plans(model) for block in plan.saved]
        assert share > 1 or sum(block.given_up_bytes for block in saved) > 0
        if share == 0.85:  # no more than it takes, in any block
            assert all(block.num_bytes > 0 for block in saved)


@on_ranks(2, compiles=True)
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


@on_ranks(2, compiles=True)
def test_with_inductor(rank: int) -> None:
    want = trained_unmeasured(autoshard.shard(seeded()), lowering="inductor")
    for _ in range(2):  # the second time from torch's caches
        torch._dynamo.reset()
        model: Any = autoshard.shard(seeded())
        got = trained_unmeasured(model, lowering="inductor", memory_budget=2_000_000)
        assert all(map(torch.allclose, got, want))  # Inductor may round otherwise
        (block,) = autoshard.plans(model)[0].saved
        assert block.given_up_bytes > 0
        _loss = model(torch.arange(8 * 64).view(8, 64) % 64)
        assert others_of(params_of(model.head)).num_bytes > others_of(params_of(plain())).num_bytes


def seeded() -> Tower:
    torch.manual_seed(0)
    return Tower()


def trained_unmeasured(model: Any, **options: Any) -> list[Tensor]:
    """Train for two steps, compiled by blocks: losses and shards."""
    by_blocks(model, **options)
    ids = torch.arange(8 * 64).view(8, 64) % 64
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for _ in range(2):
        loss = model(ids)
        loss.backward()
        values.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return values + [param.to_local().detach() for param in model.parameters()]


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
    _loss = model(ids)
    (kept,) = {plan.saved for plan in autoshard.plans(model) if plan.graph == "forward"}
    assert kept == ()  # all fits
    after = others_of(head)
    saved = after.num_bytes - before.num_bytes
    assert saved % BLOCKS == 0
    assert saved // BLOCKS >= 8 * 64 * (32 + 128) * 4
    assert after.per_byte == 0 < before.per_byte  # what is left is in a unit of its own


class Repeated(Tower):
    """Tower whose first layer runs as often as there are layers, or is in a checkpoint each time.

    uses: of the first layers, which are in checkpoints, or run again; see `is_checkpointed`.
    """

    def __init__(self, uses: int, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.uses, self.is_checkpointed = uses, is_checkpointed

    def first(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for number, layer in enumerate(self.layers):
            if self.is_checkpointed and number < self.uses:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        for _ in range(0 if self.is_checkpointed else self.uses - 1):
            x = self.layers[0](x)
        return x


def run_once(model: Any, **options: Any) -> float:
    """Train for three steps, compiled by blocks, and return the peak of the last one."""
    by_blocks(model, **options)
    ids = torch.arange(8 * 64).view(8, 64) % 64
    _, peak = train_measured(model, lambda: model(ids))
    return peak


BEYOND = "and others of its model need more memory than option 'memory_budget' allows"


@on_ranks(2, compiles=True)
def test_checkpointed_blocks(rank: int) -> None:
    """They save nothing, which is neither held against them nor against others."""
    torch._dynamo.reset()
    model: Any = autoshard.shard(Repeated(BLOCKS, is_checkpointed=True))
    peak = run_once(model, bucketing="per_unit")
    torch._dynamo.reset()
    model = autoshard.shard(Repeated(BLOCKS, is_checkpointed=True))
    assert run_once(model, memory_budget=int(peak) + own_bytes(model)) <= OVER * peak
    assert not autoshard.plans(model)[0].saved  # no warning, either
    _loss = model(torch.arange(8 * 64).view(8, 64) % 64)
    assert others_of(params_of(model.head)).num_bytes == 4 * sum(
        param.shard_bytes for part in (model.embed, model.layers) for param in params_of(part)
    )


@on_ranks(2, compiles=True)
def test_only_some_are_checkpointed(rank: int) -> None:
    """What is decided in a checkpoint runs outside of it, too: that is said."""
    torch._dynamo.reset()
    model: Any = autoshard.shard(Repeated(BLOCKS - 4, is_checkpointed=True))
    with pytest.warns(RuntimeWarning, match=BEYOND):
        run_once(model, memory_budget=1_500_000 + own_bytes(model))


@on_ranks(2, compiles=True)
def test_a_block_that_is_used_again(rank: int) -> None:
    """What it saves counts as often as it runs in a forward; that is known once it has run."""
    torch._dynamo.reset()
    model: Any = autoshard.shard(Repeated(BLOCKS, is_checkpointed=False))
    head = params_of(model.head)
    before = others_of(head).num_bytes
    with pytest.warns(RuntimeWarning, match=BEYOND):
        trained_unmeasured(model, memory_budget=2_600_000)
    assert others_of(head).num_bytes == before  # backward has let go of it
    _loss = model(torch.arange(8 * 64).view(8, 64) % 64)
    saved = (others_of(head).num_bytes - before) / (2 * BLOCKS - 1)
    assert saved == int(saved) > 0


@on_ranks(2, compiles=True)
def test_a_graph_of_another_model(rank: int) -> None:
    """Dynamo runs what it has for blocks that are alike: planned for two of them, run for six."""
    torch._dynamo.reset()
    small: Any = autoshard.shard(Tower())
    small.layers = small.layers[:2]
    budget = 2_000_000
    trained_unmeasured(small, memory_budget=budget)
    model: Any = autoshard.shard(Tower())
    with pytest.warns(RuntimeWarning, match=BEYOND):
        trained_unmeasured(model, memory_budget=budget)
    torch._dynamo.reset()
    gc.collect()
    assert run_once(autoshard.shard(Tower()), memory_budget=budget) <= budget


class Branches(Tower):
    """Tower with two heads, of which one is used in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(32, 64)

    def forward(self, ids: Tensor, *, is_other: bool = False) -> Tensor:
        x = self.first(ids)
        head = self.other if is_other else self.head
        return nn.functional.cross_entropy(head(x).flatten(0, 1), ids.flatten())


@on_ranks(2)
def test_frames_of_other_steps_do_not_count(rank: int) -> None:
    """Without a warning, and nothing is given up for what is not in memory with it."""
    torch._dynamo.reset()
    model: Any = autoshard.shard(Branches())
    by_breaks(model, memory_budget=4_500_000, strict=True)
    ids = torch.arange(8 * 64).view(8, 64) % 64
    for is_other in (False, True, False):
        model(ids, is_other=is_other).backward()
    assert len(autoshard.plans(model)) == 4
    assert not any(plan.saved for plan in autoshard.plans(model))


@on_ranks(2)
def test_reentrant_checkpoints(rank: int) -> None:
    """Blocks are computed again one at a time, in backward."""
    torch._dynamo.reset()
    model: Any = autoshard.shard(Tower())
    by_blocks(model, memory_budget=1_500_000 + own_bytes(model))
    found, head = [], params_of(model.head)

    def run(x: Tensor) -> Tensor:
        found.append(others_of(head))
        return layer(x)

    x = torch.randn(8, 64, 32, requires_grad=True)
    layer = model.layers[0]
    y = checkpoint(run, x, use_reentrant=True)
    layer = model.layers[1]
    checkpoint(run, y, use_reentrant=True).sum().backward()
    assert len(found) == 4
    assert {each.num_bytes for each in found} == {others_of(head).num_bytes}
    assert found[-1].per_byte == 0


@on_ranks(2)
def test_by_units_where_the_first_frame_is_small(rank: int) -> None:
    model: Any = autoshard.shard(Tower())
    norm = params_of(model.layers[0].norm)
    units = BLOCKS - 1 + 1  # the other layers, and the root
    assert others_of(norm).per_byte == units


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@on_ranks(2)
def test_another_batch_is_counted_anew(rank: int, lowering: str) -> None:
    """Also where torch's caches have its graphs, as the second and the third time."""
    for _ in range(3):
        torch._dynamo.reset()
        model: Any = autoshard.shard(Tower())
        head = params_of(model.head)
        by_blocks(model, memory_budget=1 << 30, lowering=lowering)
        before = others_of(head).num_bytes
        saved = []
        for rows in (2, 8):
            loss = model(torch.arange(rows * 64).view(rows, 64) % 64)
            saved.append(others_of(head).num_bytes - before)
            loss.backward()
        assert 0 < saved[0] < saved[1] / 3


@on_ranks(2)
def test_frozen_blocks_save_nothing(rank: int) -> None:
    torch._dynamo.reset()
    model: Any = autoshard.shard(Tower())
    for part in (model.embed, *model.layers[:4]):
        part.requires_grad_(False)
    before = others_of(params_of(model.head))
    by_blocks(model, memory_budget=1 << 30)
    ids = torch.arange(8 * 64).view(8, 64) % 64
    _loss = model(ids)  # what it saves counts as long
    assert others_of(params_of(model.head)).per_byte == 0 < before.per_byte


@on_ranks(2)
def test_tied_to_another_frame(rank: int) -> None:
    """A parameter that both read makes them no one frame."""
    torch._dynamo.reset()
    tower = Tower(breaks_after=BLOCKS)
    tower.head.weight = tower.embed.weight
    model: Any = autoshard.shard(tower)
    head = params_of(model.head)
    before = others_of(head)
    by_breaks(model, memory_budget=1 << 30)
    _loss = model(torch.arange(8 * 64).view(8, 64) % 64)
    after = others_of(head)
    assert after.per_byte == 0 < before.per_byte
    assert after.num_bytes - before.num_bytes > BLOCKS * 8 * 64 * 128 * 4


@pytest.mark.parametrize("strategy", ["no_shard", "hybrid"])
@on_ranks(2, compiles=True)
def test_parameters_that_no_rank_shares(rank: int, strategy: str) -> None:
    """Gathered over one rank, they are no values that forward saves."""
    torch._dynamo.reset()
    if strategy == "hybrid":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model: Any = autoshard.shard(Tower(), strategy="hybrid_shard", mesh=mesh)
    else:
        model = autoshard.shard(Tower(), strategy="no_shard")
    head = params_of(model.head)
    before = others_of(head)
    by_blocks(model, memory_budget=1 << 30)
    _loss = model(torch.arange(8 * 64).view(8, 64) % 64)
    saved = (others_of(head).num_bytes - before.num_bytes) // BLOCKS
    # What the block reads, the norm of it, two statistics of that, and what goes into the GELU.
    assert saved == 8 * 64 * (32 + 32 + 2 + 128) * 4


@on_ranks(2)
def test_forwards_without_a_backward(rank: int) -> None:
    """What one has saved is gone when the next one begins, and its frames are to come again."""
    torch._dynamo.reset()
    model: Any = autoshard.shard(Tower())
    head, layer = params_of(model.head), params_of(model.layers[0])
    at_first, at_last = [], []
    model.embed.register_forward_hook(lambda *_: at_first.append(others_of(layer)))
    model.head.register_forward_pre_hook(lambda *_: at_last.append(others_of(head)))
    by_blocks(model, memory_budget=1 << 30)
    for _ in range(3):
        model(torch.arange(8 * 64).view(8, 64) % 64)
    assert len(set(at_first)) == len(set(at_last)) == 1
    assert at_first[0].per_byte > 0 == at_last[0].per_byte
    assert at_last[0].num_bytes > at_first[0].num_bytes


@on_ranks(2)
def test_states_of_a_part_stay(rank: int) -> None:
    """On the host they would leave room that other frames know nothing of."""
    torch._dynamo.reset()
    model: Any = autoshard.shard(Tower())
    with where_the_host_is_near(for_states=True) as topology, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*memory_budget")
        by_blocks(model, topology=topology, memory_budget=900_000)
        model(torch.arange(8 * 64).view(8, 64) % 64).backward()
    assert not any(plan.host_state_bytes for plan in autoshard.plans(model))


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
