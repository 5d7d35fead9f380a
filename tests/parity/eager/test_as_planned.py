"""Eager steps that save what a memory budget has decided for compiled ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from parity.compiled.test_memory_budget import BUILDS, HOSTED, SHARES, Tower, built, needs_of
from support.memory import PeakMemory
from support.models import Block
from support.ranks import on_ranks
from support.topologies import where_the_host_is_near
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import _torch
from autoshard.passes.ir.plan import Plan, SavedBlock
from autoshard.runtime.eager import decided
from autoshard.runtime.eager.step import Step
from autoshard.runtime.training import as_planned
from autoshard.runtime.unit.unit import Unit

BLOCK = (32 + 1 + 1 + 32 + 128) * 8 * 64 * 4  # bytes that a block of a tower saves, without plans


def within(rank: int, build: Callable[[], Any], share: float, **options: Any) -> tuple[Any, Tensor]:
    """Build a model, compiled with a share of what a step needs without a budget."""
    model, batch = built(rank, build, lowering="eager", bucketing="per_unit")
    model(batch)
    peak, beside = needs_of(model)
    budget = int(share * peak) + beside
    return built(rank, build, lowering="eager", memory_budget=budget, **options)


def trained(model: Any, batch: Tensor) -> list[Tensor]:
    """Train for three steps: losses and state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    losses = []
    for _ in range(3):
        loss = model(batch)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict().values()
    return losses + [each.to_local() if isinstance(each, DTensor) else each for each in state]


def left_by(model: Any, batch: Tensor) -> tuple[int, int]:
    """Bytes that a forward leaves in memory, and on the host."""
    memory, on_host = PeakMemory(), []
    own = map(_torch.dtensor.local_of, (*model.parameters(), *model.buffers()))
    stay = {_torch.tensors.storage_id(each) for each in own}

    class Noted(decided._HostMemory):
        """The host is the device here."""

        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            assert _torch.tensors.storage_id(tensor) not in stay
            memory.roles[memory.number(self._host)] = "host"
            on_host.append(self.num_bytes)

    with mock.patch.object(decided, "_HostMemory", Noted), memory:
        loss = model(batch)
    left = sum(memory.alive().values())
    loss.backward()
    model.zero_grad()
    return left, sum(on_host)


def state_of(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("where", ["again", "host"])
@pytest.mark.parametrize("name", BUILDS)
@on_ranks(2)
def test_bit_for_bit_with_less_memory(rank: int, name: str, where: str) -> None:
    share = (SHARES if where == "again" else HOSTED)[name][0]
    with where_the_host_is_near() as near:
        options = {"topology": near} if where == "host" else {}
        model, batch = within(rank, BUILDS[name], share, **options)
        first = state_of(model)
        want = trained(model, batch)
    model.load_state_dict(first)
    with autoshard.as_planned(model):
        got = trained(model, batch)
    assert all(map(torch.equal, got, want))

    with torch.compiler.set_stance("force_eager"):
        most, _ = left_by(model, batch)
    with autoshard.as_planned(model):
        left, on_host = left_by(model, batch)
    saved = autoshard.plans(model)[0].saved
    given_up = [block for block in saved if block.given_up_bytes]
    assert left <= most - 0.6 * sum(block.given_up_bytes for block in given_up)
    if name != "stages":
        num_bytes = len(given_up) * BLOCK
        inputs = len(given_up) * 8 * 64 * 32 * 4 if where == "again" else 0
        assert on_host == (0 if where == "again" else num_bytes)
        kept = sum(4 * param.numel() for param in _kept(model))
        assert left <= most - num_bytes + inputs + kept
    assert not any("forward" in module.__dict__ for module in model.modules())


def _kept(model: Any) -> list[nn.Parameter]:
    """Parameters that compiled code keeps from forward to backward, or does not need there."""
    first, again = (
        {name for bucket in plan.buckets if bucket.kind == "gather" for name in bucket.names}
        for plan in autoshard.plans(model)
    )
    return [model.get_parameter(name) for name in first - again]


@on_ranks(2)
def test_parameters_that_stay(rank: int) -> None:
    """Backward does not gather them again."""
    model, batch = within(rank, BUILDS["tower"], 1.5, topology="gloo")
    first = state_of(model)
    want = trained(model, batch)
    assert not autoshard.plans(model)[0].saved
    model.load_state_dict(first)
    asked = []
    needs_again = Step.needs_again

    def noted(step: Step, unit: Unit) -> None:
        asked.append(unit.name)
        needs_again(step, unit)

    with mock.patch.object(Step, "needs_again", noted):
        with autoshard.as_planned(model):
            got = trained(model, batch)
        assert not asked
        with torch.compiler.set_stance("force_eager"):
            model(batch).backward()
        assert {*asked} == {f"layers.{number}" for number in range(5)}
    assert all(map(torch.equal, got, want))


class Counting(Block):
    """Block with dropout, and with a buffer that it writes, and that its result depends on."""

    def __init__(self) -> None:
        super().__init__(32, 128)
        self.register_buffer("runs", torch.zeros(()))
        self.runs: Tensor
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.drop(super().forward(x)) * torch.sigmoid(self.runs)


class CountingTower(Tower):
    """Tower of blocks that count, of which the last runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number in (0, 1, 2, 3, 4, 4):
            x = self.layers[number](x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@on_ranks(2)
def test_what_a_block_runs_again(rank: int) -> None:
    """Once in backward, with the same random numbers, and buffers as forward has left them."""
    model, batch = within(rank, CountingTower, 0.7)
    first = state_of(model)
    with torch.compiler.set_stance("force_eager"):
        want = trained(model, batch)
    trained(model, batch)
    given_up = {block.name for block in autoshard.plans(model)[0].saved if block.given_up_bytes}
    assert "layers.0" in given_up
    model.load_state_dict(first)
    runs: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(lambda *_, name=name: runs.update([name]))
    with autoshard.as_planned(model):
        got = trained(model, batch)
    assert all(map(torch.equal, got, want))
    for number in range(5):
        calls = 2 if number == 4 else 1
        is_again = any(name.startswith(f"layers.{number}") for name in given_up)
        assert runs[f"layers.{number}.norm"] == 3 * calls * (1 + is_again)


class Hard(Block):
    """Block that is hard to run again: shared and late buffers, and arguments by odd names."""

    def __init__(self) -> None:
        super().__init__(32, 128)
        self.inner = nn.Module()
        self.register_buffer("runs", torch.zeros(()))
        self.inner.register_buffer("runs", self.runs)
        self.register_buffer("cache", None)
        self.cache: Tensor | None
        self.runs: Tensor

    def forward(self, x: Tensor, *, debug: Tensor, function: object = None) -> Tensor:
        self.runs.add_(1)
        self.cache = self.runs + 1 if self.cache is None else self.cache * 0.5
        scale = torch.sigmoid(self.inner.get_buffer("runs") + self.cache)
        turned = torch.complex(x, x.tanh()).conj()
        turned = turned * torch.complex(debug, turned.imag)
        return super().forward(x + turned.real) * scale


class HardTower(Tower):
    """Tower of such blocks, which are given a view of a buffer of the tower's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hard() for _ in range(5))
        self.register_buffer("table", torch.linspace(0, 1, 4096 * 64 * 32).view(4096, 64, 32))
        self.table: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, debug=self.table[:8], function=None)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def both_backwards(model: Any, batch: Tensor) -> list[Tensor]:
    """Gradients after one and after two backwards through a graph, and in a transform."""
    found = []
    loss = model(batch)
    for retains in (True, False):
        loss.backward(retain_graph=retains)
        found += [param.grad.to_local().clone() for param in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("where", ["again", "host"])
@on_ranks(2)
def test_blocks_that_are_hard_to_run_again(rank: int, where: str, strategy: str) -> None:
    """Plans say so for them, whatever a budget would decide."""
    torch.manual_seed(0)
    model: Any = autoshard.shard(HardTower(), strategy=strategy)
    batch = model.batch(rank)
    first = state_of(model)
    with torch.compiler.set_stance("force_eager"):
        want = both_backwards(model, batch)
    want_state = state_of(model)
    model.load_state_dict(first, strict=False)
    for layer in model.layers:
        layer.cache = None
    room = 1 << 30 if where == "host" else 0
    saved = tuple(SavedBlock(f"layers.{n}", 0, room or 1, 1.0, room) for n in range(5))
    plan = Plan("forward", "auto", 0, (), (), None, saved)
    with mock.patch.object(as_planned, "plans_by_root", return_value={model: [plan]}):
        with autoshard.as_planned(model):
            got = both_backwards(model, batch)
        assert all(map(torch.equal, got, want))
        got_state = state_of(model)
        assert all(torch.equal(got_state[name], value) for name, value in want_state.items())
        with autoshard.as_planned(model):
            _, on_host = left_by(model, batch)
        # of a block: values of the batch's size, but neither the table nor parameters
        assert (5 * BLOCK <= on_host <= 5 * 4 * BLOCK) if where == "host" else on_host == 0


class Writing(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x if scale is None else x * scale.mul_(0.5))


class WritingTower(Tower):
    """Tower of blocks that write to an argument."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writing(32, 128) for _ in range(5))
        self.by_name = by_name

    def forward(self, ids: Tensor) -> Tensor:
        x, scale = self.embed(ids), torch.ones(32)
        for layer in self.layers:
            x = layer(x, scale=scale) if self.by_name else layer(x, scale)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@on_ranks(2)
def test_arguments_that_a_block_writes_to(rank: int) -> None:
    """Raises as autograd does, rather than to compute something else."""
    for by_name in (False, True):
        model: Any = autoshard.shard(WritingTower(by_name=by_name))
        plan = Plan("forward", "auto", 0, (), (), None, (SavedBlock("layers.2", 0, 1, 1.0),))
        with mock.patch.object(as_planned, "plans_by_root", return_value={model: [plan]}):
            with autoshard.as_planned(model):
                loss = model(model.batch(rank))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@on_ranks(2)
def test_only_in_the_context(rank: int) -> None:
    model, batch = within(rank, BUILDS["tower"], 0.6)
    with pytest.raises(ValueError, match=r"Tower has no plans to follow: compile it with"):
        autoshard.as_planned(model).__enter__()
    model(batch).backward()
    model.zero_grad()
    with torch.compiler.set_stance("force_eager"):
        most, _ = left_by(model, batch)
    with autoshard.as_planned(model):
        with torch.no_grad():
            model(batch)
        assert torch.func.grad(lambda x: model(batch) * x)(torch.tensor(2.0)) > 0
        with pytest.raises(ZeroDivisionError), autoshard.as_planned(model):
            raise ZeroDivisionError
        assert left_by(model, batch)[0] < 0.8 * most
    with torch.compiler.set_stance("force_eager"):
        assert left_by(model, batch) == (most, 0)
    del model.layers[4]
    with pytest.raises(ValueError, match=r"plans of Tower are of layers\.4, which is no module"):
        autoshard.as_planned(model).__enter__()


@on_ranks(2)
def test_blocks_that_are_compiled_one_by_one(rank: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = autoshard.shard(Tower())
    batch = model.batch(rank)
    options = {"strict": True, "topology": "h100", "lowering": "eager", "memory_budget": 2_000_000}
    for layer in model.layers:
        layer.compile(backend="autoshard", options=options)
    first = state_of(model)
    want = trained(model, batch)
    saved = [block for plan in autoshard.plans(model) for block in plan.saved]
    given_up = [block for block in saved if block.given_up_bytes]
    assert given_up
    model.load_state_dict(first)
    with torch.compiler.set_stance("force_eager"):
        most, _ = left_by(model, batch)
    with autoshard.as_planned(model):
        left, _ = left_by(model, batch)
        model.load_state_dict(first)
        got = trained(model, batch)
    assert all(map(torch.equal, got, want))
    assert left <= most - sum(block.given_up_bytes for block in given_up)
