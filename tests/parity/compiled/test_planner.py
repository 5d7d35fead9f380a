"""Plans of the planner, obeyed: the same numbers, in no more predicted time or memory."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import SmallNet as Net
from support.models import net_loss, tokens
from support.ranks import on_ranks
from support.selection import each_value
from support.topologies import where_calls_cost_little, where_copies_cost_most
from support.training import assert_same, compiled, replicated, sgd, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import deciding
from autoshard.compilation import Compilation
from autoshard.passes.planner.topology import Topology
from autoshard.runtime.comm import transport
from autoshard.tools.bench.calibrate import calibrate, fit
from autoshard.tools.bench.command import make_step


@each_value(
    strategy=["full_shard", "shard_grad_op", "hybrid_shard"],
    topology=["gloo", "h100"],
    checkpointing=[None, "non-reentrant"],
    tied=[False, True],
)
@on_ranks(2)
def test_parity(
    rank: int, strategy: str, topology: str, checkpointing: str | None, tied: bool
) -> None:
    build = functools.partial(Net, checkpointing=checkpointing, tied=tied)
    want, want_losses = replicated(build, net_loss)
    options: dict[str, Any] = {"strategy": strategy}
    if strategy == "hybrid_shard":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        options["mesh"] = mesh
    got, losses = compiled(build, net_loss, topology=topology, **options)
    assert losses == want_losses
    assert_same(got, want)
    torch._dynamo.reset()
    by_unit, _ = compiled(build, net_loss, topology=topology, bucketing="per_unit", **options)
    for plan, other in zip(autoshard.plans(got), autoshard.plans(by_unit), strict=True):
        assert plan.graph == other.graph
        assert plan.lower_bound_us <= plan.makespan_us * (1 + 1e-9)
        assert plan.makespan_us <= other.makespan_us
        assert plan.peak_bytes <= other.peak_bytes
        assert plan.lower_bound_us == other.lower_bound_us


class Wide(nn.Module):
    """Layers whose weights are most of the memory."""

    def __init__(self, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
            x = torch.relu(y)
        return x


def wide_loss(model: Any, rank: int, step: int) -> Tensor:
    return model(torch.ones(2, 64) * (1 + rank + step)).square().mean()


@each_value(
    lowering=["eager", "inductor"],
    checkpointing=[None, "non-reentrant"],
    strategy=["full_shard", "hybrid_shard"],
)
@on_ranks(2)
def test_kept_for_backward(
    rank: int, lowering: str, checkpointing: str | None, strategy: str
) -> None:
    """With room for them, backward gathers nothing that forward has gathered; without, all."""
    build = functools.partial(Net, checkpointing=checkpointing)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"lowering": lowering, "strategy": strategy, "topology": "gloo"}
    options |= {"mesh": mesh} if strategy == "hybrid_shard" else {}
    want, want_losses = compiled(build, net_loss, bucketing="per_unit", **options)
    again = [bucket.names for bucket in gathers_of(want)[1]]
    assert again
    torch._dynamo.reset()
    got, losses = compiled(build, net_loss, memory_budget=10**6, **options)
    assert losses == want_losses
    assert_same(got, want)
    forward, backward = gathers_of(got)
    assert sum(len(each.names) for each in forward) == len(dict(got.named_parameters()))
    assert not backward


@on_ranks(2)
def test_kept_for_backward_after_evaluation(rank: int) -> None:
    """A graph without a backward keeps nothing, and leaves the decision to those that have one."""
    model = autoshard.shard(Net())
    options = {"lowering": "eager", "memory_budget": 10**6, "topology": "gloo", "strict": True}
    model.compile(backend="autoshard", options=options)
    with torch.no_grad():
        model(tokens(rank, 0))
    net_loss(model, rank, 0).backward()
    plans = autoshard.plans(model)
    assert [plan.graph for plan in plans] == ["inference", "forward", "backward"]
    assert not [bucket for bucket in plans[-1].buckets if bucket.kind == "gather"]


@pytest.mark.parametrize(("budget", "is_kept"), [(10**6, True), (4_600, False)])
@on_ranks(2)
def test_parts_of_a_model_keep_what_all_have_room_for(
    rank: int, budget: int, is_kept: bool
) -> None:
    """What the others keep counts: with the second budget there is room for one frame's alone."""
    model = autoshard.shard(Net())
    options = {"lowering": "eager", "memory_budget": budget, "topology": "gloo", "strict": True}
    for layer in model.layers:
        layer.compile(backend="autoshard", options=options)
    net_loss(model, rank, 0).backward()
    assert (not gathers_of(model)[1]) == is_kept


@on_ranks(2)
def test_one_rank_can_not_tell_what_to_keep(rank: int) -> None:
    """The first one says for all."""
    want, want_losses = replicated(Net, net_loss)
    broken = mock.patch.object(deciding, "decide", side_effect=ValueError("no draft"))
    with broken if rank == 1 else contextlib.nullcontext():
        got, losses = compiled(Net, net_loss, memory_budget=10**6, topology="gloo")
    assert losses == want_losses
    assert_same(got, want)
    assert not gathers_of(got)[1]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("place", ["_partition", "_decision_key"])
@on_ranks(2, compiles=True)
def test_a_rank_fails_before_it_is_decided_what_to_keep(
    rank: int, failing: int, place: str
) -> None:
    """No other one waits for it in vain."""
    want, want_losses = replicated(Net, net_loss)
    why = f"{failing} has no {place}"  # a warning comes once
    broken = mock.patch.object(Compilation, place, side_effect=ValueError(why))
    options = {"memory_budget": 10**6, "topology": "gloo", "strict": False}
    warned = pytest.warns(RuntimeWarning, match=why)
    with broken if rank == failing else contextlib.nullcontext(), warned:
        got, losses = compiled(Net, net_loss, **options)
    assert losses == want_losses
    assert_same(got, want)


def gathers_of(model: nn.Module) -> list[list[Any]]:
    return [
        [bucket for bucket in plan.buckets if bucket.kind == "gather"]
        for plan in autoshard.plans(model)[:2]
    ]


@on_ranks(2)
def test_like_blocks_are_planned_once(rank: int) -> None:
    """Compiled each by itself, they share a graph and its plan."""
    model = autoshard.shard(Net())
    options = {"topology": "h100", "lowering": "eager", "strict": True}
    for layer in model.layers:
        layer.compile(backend="autoshard", options=options)
    net_loss(model, rank, 0).backward()
    plans = autoshard.plans(model)
    assert [plan.graph for plan in plans] == ["forward", "backward"]
    assert {bucket.unit for plan in plans for bucket in plan.buckets} == {"layers.0"}


@on_ranks(2)
def test_budget(rank: int) -> None:
    """More memory, fewer gathers and less time; never more than is allowed."""
    weight, states = 64 * 64 * 4, 6 * 3 * 64 * 64 * 4 // 2
    policy = autoshard.ModuleWrapPolicy({nn.Linear})
    found = []
    for room in (10, 40):
        torch._dynamo.reset()
        budget = states + room * weight
        options = {"topology": "h100", "memory_budget": budget, "policy": policy}
        with mock.patch.object(Compilation, "host_states", return_value=None):  # they stay
            model, _ = compiled(Wide, wide_loss, **options)
        found.append(autoshard.plans(model))
        assert all(plan.peak_bytes <= budget - states for plan in found[-1])
    for small, large in zip(*found, strict=True):
        assert small.makespan_us > large.makespan_us
    few, many = (
        sum(bucket.kind == "gather" for plan in plans for bucket in plan.buckets)
        for plans in reversed(found)
    )
    assert few < many


@on_ranks(2)
def test_budget_that_nothing_keeps_to(rank: int) -> None:
    with pytest.warns(RuntimeWarning, match=r"'memory_budget' allows, by [\d.]+ KiB .*most"):
        compiled(Wide, wide_loss, memory_budget=2**17, strategy="full_shard")


def batches_by_rank(model: Any, rank: int, step: int) -> Tensor:
    """Of other sizes on each rank, and on one rank alone of another in a later step."""
    sizes = [[2, 4096], [2, 4096], [600, 4096], [600, 17]]
    return model(torch.ones(sizes[step][rank], 64) * (1 + rank + step)).square().mean()


@each_value(lowering=["eager", "inductor"], checkpointing=[True, False])
@on_ranks(2)
def test_ranks_with_batches_of_other_sizes(rank: int, lowering: str, checkpointing: bool) -> None:
    """D-69: what is fastest for one is not for the other; all do what rank 0 finds."""
    with where_calls_cost_little() as topology:
        check_batches_of_other_sizes(topology, lowering, checkpointing)


def check_batches_of_other_sizes(topology: str, lowering: str, checkpointing: bool) -> None:
    if lowering == "eager":
        alone = []
        for size in (2, 4096):
            torch._dynamo.reset()
            model, _ = compiled(
                Wide,
                lambda model, rank, step, size=size: model(torch.ones(size, 64)).sum(),
                topology=topology,
                steps=1,
            )
            alone.append([plan.digest for plan in autoshard.plans(model)])
        assert alone[0] != alone[1]
    torch._dynamo.reset()
    build = functools.partial(Wide, checkpointing=checkpointing)
    want, _ = replicated(build, batches_by_rank, make=sgd)
    got, _ = compiled(build, batches_by_rank, make=sgd, topology=topology, lowering=lowering)
    assert_same(got, want, rtol=0.0 if lowering == "eager" else 1e-5)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {plan.digest for plan in autoshard.plans(got)})
    assert found[0] == found[1]


@on_ranks(2)
def test_host_shards_are_left_to_one_bucket_a_unit(rank: int) -> None:
    offload = autoshard.CPUOffloadPolicy()
    model, _ = compiled(Net, net_loss, topology="gloo", offload_policy=offload)
    torch._dynamo.reset()
    by_unit, _ = compiled(Net, net_loss, bucketing="per_unit", offload_policy=offload)
    for plan, other in zip(autoshard.plans(model), autoshard.plans(by_unit), strict=True):
        assert plan.buckets == other.buckets
        assert plan.schedule == other.schedule


@on_ranks(2)
def test_calibrated_topology(rank: int) -> None:
    """Ranks read what rank 0 has written, ops of the model too, and their plans agree."""
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = str(Path(folder[0]) / "here.json")
    names = {"model": "support.models:Net", "batch": "support.models:tokens", "loss": None}
    steps = [make_step(argparse.Namespace(**names))]
    found = calibrate(path, sizes=(2**12, 2**18, 2**24), rounds=3, steps=steps)
    assert found == Topology.load(path)
    assert set(found.measured) == {"gather 2", "reduce 2", "all_reduce 2"}
    assert all(us_per_byte > 0 for _, us_per_byte in found.measured.values())
    assert found.ops["aten.addmm.default(f32[7], f32[5, 6], f32[6, 7])"] > 0
    assert any(key.startswith("aten.threshold_backward") for key in found.ops)
    got, _ = compiled(Net, net_loss, topology=path)
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, [plan.text() for plan in autoshard.plans(got)])
    assert texts[0] == texts[1]


@each_value(
    lowering=["eager", "inductor"],
    checkpointing=[None, "non-reentrant"],
    dtype=[torch.float32, torch.bfloat16],
    ranks=[2, 4],
    replicas=[1, 2],
)
def test_grouped(
    lowering: str,
    checkpointing: str | None,
    dtype: torch.dtype,
    ranks: int,
    replicas: int,
) -> None:
    """Where copies cost more than members do, gathers go from shards straight to parameters."""
    with where_copies_cost_most() as topology:
        grouped_on[ranks](
            lowering=lowering,
            checkpointing=checkpointing,
            dtype=dtype,
            replicas=min(replicas, ranks // 2),
            topology=topology,
        )


def grouped(
    rank: int,
    lowering: str,
    checkpointing: str | None,
    dtype: torch.dtype,
    replicas: int,
    topology: str,
) -> None:
    build = functools.partial(Net, checkpointing=checkpointing)
    policy = autoshard.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"lowering": lowering, "mp_policy": policy, "topology": topology}
    if replicas > 1:
        shape = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        options |= {"mesh": mesh, "strategy": "hybrid_shard"}
    with mock.patch.object(transport, "sends_alone", return_value=False):
        want, want_losses = compiled(build, net_loss, bucketing="per_unit", **options)
    plans = autoshard.plans(want)
    assert {bucket.layout for plan in plans for bucket in plan.buckets} == {"packed"}
    torch._dynamo.reset()
    got, losses = compiled(build, net_loss, **options)
    assert losses == want_losses
    assert_same(got, want)
    for plan in autoshard.plans(got):
        layouts = {(each.kind, each.layout) for each in plan.buckets if len(each.names) > 1}
        assert ("gather", "grouped") in layouts
        assert ("reduce", "grouped") not in layouts
        assert "grouped" in plan.text()


grouped_on = {ranks: on_ranks(ranks)(grouped) for ranks in (2, 4)}


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(64, 12), nn.Linear(12, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(torch.relu(self.inward(x)))


@each_value(lowering=["eager", "inductor"])
@on_ranks(2)
def test_grouped_along_other_dims(rank: int, lowering: str) -> None:
    """What arrives is copied once more, to lie as it is read."""
    made = []
    for bucketing in ("per_unit", "auto"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Narrow()
        autoshard.fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
        with where_copies_cost_most() as topology:
            options = {"topology": topology, "bucketing": bucketing, "lowering": lowering}
            model.compile(backend="autoshard", options={**options, "strict": True})
            train(model, wide_loss, sgd(model))
        made.append(model)
    assert_same(*made)
    plans = autoshard.plans(made[1])
    assert "grouped" in {each.layout for plan in plans for each in plan.buckets}
    made[1](torch.ones(5, 64)).sum().backward()  # another shape: the plans are kept
    later = autoshard.plans(made[1])[len(plans) :]
    assert [plan.digest for plan in later] == [plan.digest for plan in plans]


def test_fit() -> None:
    sizes = (1000, 10_000, 100_000)
    alpha_us, us_per_byte = fit(sizes, [50 + 0.002 * size for size in sizes])
    assert alpha_us == pytest.approx(50)
    assert us_per_byte == pytest.approx(0.002)
    assert fit(sizes, [10.0, 9.0, 8.0])[1] == 0.0


@on_ranks(2)
def test_chrome_trace(rank: int) -> None:
    """Compute, collectives and memory, and a measured trace beside."""
    model, _ = compiled(Net, net_loss, topology="gloo")
    plan = autoshard.plans(model)[0]
    with tempfile.TemporaryDirectory() as folder:
        path, profile = Path(folder) / "plan.json", Path(folder) / "profile.json"
        measured = {"name": "mm", "ph": "X", "ts": 70.0, "dur": 5.0, "pid": 9, "tid": 3}
        profile.write_text(json.dumps({"traceEvents": [measured]}))
        plan.to_chrome_trace(path, profile=profile)
        events = json.loads(path.read_text())["traceEvents"]
        for text in ("{", "[]", '{"traceEvents": [{"ph": "X"}]}'):
            profile.write_text(text)
            with pytest.raises(ValueError, match=f"{profile} is no trace"):
                plan.to_chrome_trace(path, profile=profile)
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(plan.makespan_us)
    gathers = [event for event in spans if event["name"].startswith("gather")]
    assert len(gathers) == sum(bucket.kind == "gather" for bucket in plan.buckets)
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == plan.peak_bytes
    assert [(e["name"], e["ts"]) for e in events if e["ph"] == "X" and e["pid"] == 1] == [("mm", 0)]
