"""A step's graphs from a few blocks, and `autoshard plan`, in a group that moves no data."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import Block
from support.topologies import where_the_host_is_near
from torch import Tensor, nn

from autoshard import MixedPrecisionPolicy
from autoshard.passes.ir.layout import Member
from autoshard.passes.planner.topology import Topology
from autoshard.tools.cli import main
from autoshard.tools.plan import planning
from autoshard.tools.plan.blocks import Stack, cut_stacks, grown
from autoshard.tools.plan.dry_run import mean_loss, trace
from autoshard.tools.plan.estimate import Parameters, StepGraphs
from autoshard.tools.plan.graphs import in_numbers
from autoshard.tools.plan.steps import PlannedModel, _Traces, traced_steps
from autoshard.tools.plan.ways import BY_VALUES

pytestmark = [
    pytest.mark.usefixtures("fake_world"),
    pytest.mark.parametrize("fake_world", [1024], indirect=True),
]
BLOCKS = 7


class Tower(nn.Module):
    """Like blocks between an embedding and a head."""

    def __init__(self, num_blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block(32, 128) for _ in range(num_blocks))
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Tall(Tower):
    """Blocks of which several are cut."""

    def __init__(self) -> None:
        super().__init__(14)


class TwoKinds(Tower):
    """Narrow blocks below wide ones."""

    def __init__(self) -> None:
        super().__init__(6)
        self.layers.extend(Block(32, 256) for _ in range(7))


class Masked(Tower):
    """Blocks that are given no mask, as those of a library may be."""

    def __init__(self) -> None:
        super().__init__(2)
        for layer in self.layers:
            forward = layer.forward
            layer.forward = lambda x, mask, _forward=forward: _forward(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask=None)
        return self.head(x)


class Frozen(Tower):
    def __init__(self) -> None:
        super().__init__(2)
        self.requires_grad_(False)


class Breaking(Tower):
    def forward(self, ids: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(ids)


def traced(model: nn.Module, *, checkpointing: str, lowering: str = "inductor") -> Any:
    def call(compiled: Any) -> None:
        mean_loss(compiled(torch.zeros(2, 16, dtype=torch.long))).backward()

    graphs = trace(
        model,
        call,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        ways=[checkpointing],
        lowering=lowering,
    )
    is_fused = lowering == "inductor"
    return {
        kind: in_numbers(gm, kind, is_fused=is_fused) for kind, gm in graphs[checkpointing].items()
    }


def on_meta(build: Any = Tower) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build()
    return model


@pytest.mark.parametrize(  # Inductor's partitions differ at a tower's foot: all are traced then
    ("checkpointing", "lowering"),
    [("none", "eager"), ("full", "eager"), ("full", "inductor"), ("ops", "inductor")],
)
def test_few_blocks_give_the_graphs_of_all(checkpointing: str, lowering: str) -> None:
    model = on_meta()
    stacks = cut_stacks(model)
    assert stacks == [Stack("layers", 1, BLOCKS - 2)]
    assert [name for name, _ in model.layers.named_children()] == ["0", "1", "2", "3", "4"]
    got = grown(traced(model, checkpointing=checkpointing, lowering=lowering), stacks)
    want = grown(traced(on_meta(), checkpointing=checkpointing, lowering=lowering), [])
    for kind in ("forward", "backward"):
        assert got[kind].problem == want[kind].problem
        assert got[kind].activations == want[kind].activations


def test_runs_of_a_list_are_cut_each() -> None:
    model = on_meta(TwoKinds)
    stacks = cut_stacks(model)
    assert stacks == [Stack("layers", 1, 4), Stack("layers", 7, 5)]
    got = grown(traced(model, checkpointing="full"), stacks)
    want = grown(traced(on_meta(TwoKinds), checkpointing="full"), [])
    for kind in ("forward", "backward"):
        assert got[kind].problem == want[kind].problem


def test_units_may_be_given_none() -> None:
    """Casts of a unit's inputs pass it on, in one graph."""
    assert set(traced(on_meta(Masked), checkpointing="none")) == {"forward", "backward"}


def test_short_lists_are_left_alone() -> None:
    assert cut_stacks(on_meta(partial(Tower, 5))) == []


@pytest.mark.parametrize(
    ("build", "message"),
    [(Frozen, "there is nothing to train"), (Breaking, "can't be planned as one graph")],
)
def test_models_that_have_no_step(build: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        traced(on_meta(build), checkpointing="none")


# ---- the command


Steps = dict[tuple[int, str], StepGraphs]


_traced: dict[Any, Steps] = {}


def traced_once(
    planned: PlannedModel, sizes: Collection[int], ways: Collection[str], topology: Topology
) -> Steps:
    """Steps as `traced_steps` gives them, of a test before if there are; times are for values."""
    times = topology.to_json() if {*ways} & {*BY_VALUES} else None
    key = planned, frozenset(sizes), frozenset(ways), times
    if key not in _traced:
        _traced[key] = traced_steps(planned, sizes, ways, topology)
    return _traced[key]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this file trace what others of it have not traced."""
    monkeypatch.setattr(planning, "traced_steps", traced_once)


def arguments(*more: str, gpus: str = "16xH100") -> list[str]:
    model = "tests.unit.test_dry_run:Tower"
    return ["plan", "--model", model, "--seq", "16", "--gpus", gpus, *more]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("--micro-batch", "2", "--checkpointing", "none", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["peak_bytes"] == sum(found["memory"].values()) / 2
    assert found["fits"]
    assert len(found["configurations"]) == 3
    times = [each["step_time_us"] for each in found["configurations"]]
    assert times == sorted(times)
    assert found["step_time_us"] == times[0]
    assert [plan["graph"] for plan in found["plans"]] == ["forward", "backward"]
    for plan in found["plans"]:
        assert plan["gap"] == pytest.approx(plan["time_us"] / plan["lower_bound_us"])
        assert plan["gap"] >= 1
        assert plan["binding"] in ("compute", "link", "start-up")
        for bucket in plan["buckets"]:
            assert bucket["launch_us"] <= bucket["finish_us"]


@pytest.mark.usefixtures("shared")
def test_hybrid_reduces_twice(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--mesh", "2x8", "--strategy", "hybrid_shard", "--micro-batch", "1")
    assert main(arguments(*asked, "--checkpointing", "full", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    (only,) = found["configurations"]
    assert only["mesh"] == [2, 8]
    kinds = [bucket["kind"] for bucket in found["plans"][1]["buckets"]]
    assert kinds.count("reduce") == kinds.count("all_reduce") > 0
    assert "gather" in kinds


@pytest.mark.usefixtures("shared")
def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("--micro-batch", "1", "--checkpointing", "none", "--buckets")) == 0
    printed = capsys.readouterr().out
    assert "best of 5 configurations" in printed
    assert "parameters in f32, computed with in bf16; adamw; sequences of 16" in printed
    assert "layers.6" in printed


@pytest.mark.usefixtures("shared")
def test_what_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """The category that is one too many, and exit status 1."""
    small = json.loads(Topology.load("h100").to_json()) | {"memory_bytes": 100_000}
    path = tmp_path / "small.json"
    path.write_text(json.dumps(small))
    asked = arguments("--topology", str(path), "--micro-batch", "1", gpus="4")
    assert main(asked) == 1
    assert "does not fit, with optimizer" in capsys.readouterr().out


@pytest.mark.usefixtures("shared")
def test_what_is_tight(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """It fits, but not with a fifth more that the allocator reserves; with more, no word."""
    asked = arguments("--micro-batch", "1", "--checkpointing", "none", "--mesh", "16")
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    peak, reserved = found["memory"]["peak_bytes"], found["reserved_bytes"]
    assert reserved == round(1.2 * peak)
    for memory_bytes, is_tight in ((peak, True), (reserved - 1, True), (reserved, False)):
        card = json.loads(Topology.load("h100").to_json()) | {"memory_bytes": memory_bytes}
        path = tmp_path / f"{memory_bytes}.json"
        path.write_text(json.dumps(card))
        assert main([*asked, "--topology", str(path)]) == 0
        assert ("\ntight: in published runs" in capsys.readouterr().out) is is_tight


@pytest.mark.usefixtures("shared")
def test_a_front_of_values(capsys: pytest.CaptureFixture[str]) -> None:
    """From no values that are computed again to all of them: less memory, more time."""
    asked = arguments("--micro-batch", "4", "--mesh", "16", "--strategy", "full_shard", "--json")
    assert main([*asked, "--checkpointing", "values"]) == 0
    front = json.loads(capsys.readouterr().out)["front"]
    assert len(front) >= 3
    peaks = [each["peak_bytes"] for each in front]
    assert peaks == sorted(peaks)
    assert main([*asked[:-1], "--checkpointing", "values"]) == 0
    printed = capsys.readouterr().out
    table = printed.partition("no other is less")[2]
    assert all(each["checkpointing"] in table for each in front)
    assert "values:35 gives up 35 %" in printed


def test_values_on_the_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More is given up; and few blocks are traced, as copies are as regular as blocks."""
    found = {}
    for gb_per_s in (0.0, 400.0):
        if gb_per_s:
            monkeypatch.setattr(_Traces, "whole", property(mock.Mock(side_effect=AssertionError)))
        with where_the_host_is_near(host_gb_per_s=gb_per_s) as topology:
            asked = ["plan", "--model", "tests.unit.test_dry_run:Tall", "--seq", "16"]
            asked += ["--gpus", "16", "--mesh", "16", "--strategy", "full_shard"]
            asked += ["--micro-batch", "64", "--checkpointing", "values:100"]
            assert main([*asked, "--topology", topology, "--json"]) == 0
            found[gb_per_s] = json.loads(capsys.readouterr().out)
            assert main([*asked, "--topology", topology]) == 0
            is_told = "\non the host, for each device: " in capsys.readouterr().out
        assert is_told == (found[gb_per_s]["host_bytes"] > 0) == (gb_per_s > 0)
    without, near = found.values()
    assert near["memory"]["activations"] < without["memory"]["activations"]


def test_blocks_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two shares whose graphs can't be spliced, the larger one stands for those between."""
    about: Any = {"casts": False, "reduce_bytes": 4, "tokens": None}
    less, more = (
        StepGraphs({"forward": mock.Mock()}, Parameters((), ()), "sgd", **about) for _ in range(2)
    )
    monkeypatch.setattr(planning, "first_blocks", mock.Mock())
    monkeypatch.setattr(planning, "spliced", mock.Mock(side_effect=ValueError))
    steps = planning._Steps({(1, "values:20"): less, (1, "values:40"): more})
    assert steps.of(1, "values:30").graphs == more.graphs != less.graphs


@pytest.mark.parametrize("share", [0.9, 0.75])
@pytest.mark.usefixtures("shared")
def test_a_budget(share: float, capsys: pytest.CaptureFixture[str]) -> None:
    """As few values are computed again as it takes; not as slow as full checkpointing."""
    asked = arguments("--micro-batch", "4", "--mesh", "16", "--strategy", "full_shard", "--json")

    def planned(*more: str) -> Any:
        main([*asked, *more])
        return json.loads(capsys.readouterr().out)

    none, full = (planned("--checkpointing", way) for way in ("none", "full"))
    budget = round(share * none["memory"]["peak_bytes"])
    found = planned("--budget", str(budget))
    assert found["fits"]
    assert found["memory"]["peak_bytes"] <= budget < none["memory"]["peak_bytes"]
    assert found["step_time_us"] <= full["step_time_us"]
    way = found["configurations"][0]["checkpointing"]
    kind, _, percent = way.partition(":")
    assert kind == "values"
    less = planned("--checkpointing", f"values:{int(percent) - 1}") if percent != "1" else none
    assert less["memory"]["peak_bytes"] > budget


@pytest.mark.usefixtures("shared")
def test_states_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for; and where a budget is too small for all else."""
    asked = arguments("--micro-batch", "4", "--mesh", "1x16", "--checkpointing", "full", "--json")

    def planned(*more: str) -> Any:
        main([*asked, *more])
        return json.loads(capsys.readouterr().out)

    near, far = planned("--states", "device"), planned("--states", "host")
    assert far["host_state_bytes"] > 0 == near["host_state_bytes"]
    assert far["step_time_us"] > near["step_time_us"]
    assert far["memory"]["peak_bytes"] < near["memory"]["peak_bytes"]
    found = planned("--budget", str(far["memory"]["peak_bytes"]))
    assert found["fits"]
    assert found["configurations"][0]["states_on_host"]
    main([*asked[:-1], "--states", "host"])
    printed = capsys.readouterr().out
    assert "full_shard, states on host" in printed
    assert " of optimizer states, pinned, from step to step" in printed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--states", "host", "--topology", "gloo"), "gloo has no host memory beside its own"),
        (("--gpus", "many"), "expected a number and a kind, such as 64xH100"),
        (("--gpus", "8"), "names no kind: write 8xH100, or add --topology"),
        (("--gpus", "8xABC"), "no topology is known of 'ABC'"),
        (("--mesh", "3x8"), "mesh 3x8 has 24 ranks, not 16"),
        (("--mesh", "x"), "expected replicas x shards"),
        (("--dtype", "float"), "--dtype 'float': expected one of"),
        (("--optimizer", "lion"), "--optimizer 'lion': expected one of"),
        (("--budget", "40 apples"), "--budget is '40 apples'; expected bytes, or text like"),
        (("--checkpointing", "values:0"), "'values:0' is no way of checkpointing; expected one"),
        (("--checkpointing", "values:101"), "is no way of checkpointing; expected one such as"),
        (("--seq", "0"), "--seq 0: expected a number from 1 on"),
        (("--strategy", "zero"), "strategy 'zero' has no mesh of 16 ranks"),
        (("--model", "no_such:thing"), "expected package.module:function"),
        (("--model", "none.json"), "none.json is no configuration"),
        (("--topology", "mars"), "there is no topology 'mars'"),
    ],
)
def test_bad_input(
    given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments(*given))
    assert message in capsys.readouterr().err


def test_stacked_experts_are_shared_by_all_ranks() -> None:
    """Eight experts on 64 ranks: a 64th each, and not an eighth."""
    experts = Member(torch.float32, (8, 28672, 4096))
    parameters = Parameters((experts, experts), (experts,))
    assert parameters.shard_bytes(64) == 2 * experts.num_bytes // 64
    assert parameters.largest_trained_bytes(8) == experts.num_bytes // 8
