"""What the planner knows of costs: links, topologies and their files, plans made from them."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from autoshard.passes.planner.bound import lower_bound
from autoshard.passes.planner.costs import GROUPED, PACKED, Costs, Link
from autoshard.passes.planner.keep import worth_keeping
from autoshard.passes.planner.margin import Margin, margin
from autoshard.passes.planner.per_unit import per_unit
from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.programme import best_buckets
from autoshard.passes.planner.search import Decision, _Space, search, search_beside
from autoshard.passes.planner.simulate import (
    make_bucket,
    simulate,
    simulate_unless_worse,
)
from autoshard.passes.planner.topology import (
    NETWORK_SHARE,
    Residuals,
    Topology,
    default_topology,
    names,
)
from autoshard.passes.plans.fusion import fuse
from autoshard.passes.plans.roofline import node_us, num_flops, op_key
from autoshard.passes.plans.values import base_of
from autoshard.runtime.comm.transport import LEAST

H100 = Topology.load("h100")
BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
LAYERS = 32  # enough for a backward with an idle link to gather far ahead


def test_small_members_of_a_grouped_gather_are_sent_together() -> None:
    """As ranks that send messages do; one alone is not."""
    gloo = Topology.load("gloo")
    assert gloo.together_bytes == LEAST
    costs = gloo.costs({}, {})
    assert costs.are_shared("gather", [LEAST, 8, 16], GROUPED) == [False, True, True]
    assert costs.are_shared("gather", [LEAST, 8], GROUPED) == [False, False]
    h100 = Topology.load("h100").costs({}, {})
    assert h100.are_shared("gather", [LEAST, 8, 16], GROUPED) == [False] * 3


def test_every_topology_says_where_its_numbers_come_from() -> None:
    for name in names():
        topology = Topology.load(name)
        assert topology.name == name
        assert {"memory_bytes", "tflops", "node_gb_per_s"} <= topology.sources.keys(), name


def test_links() -> None:
    """Over a node, over nodes, over a rank of each; an all-reduce is a reduce and a gather."""
    cluster = dataclasses.replace(
        H100,
        node_alpha_us=40.0,
        node_gb_per_s=300.0,
        network_alpha_us=27.0,
        network_gb_per_s=45.0,
        step_alpha_us=0.5,
    )
    node = cluster.link("gather", 8, 8)
    assert (node.name, node.alpha_us) == ("node", 40.0 + 8 * 0.5)
    assert node.time_us(300_000, 1, PACKED) == pytest.approx(44 + 7 / 8)
    nodes = cluster.link("gather", 64, 8)
    assert nodes.name == "network"
    assert nodes.alpha_us == pytest.approx(40 + 3 * 27 + 64 * 0.5)
    assert nodes.us_per_byte > node.us_per_byte
    across = cluster.link("all_reduce", 8, 1)
    assert across.us_per_byte == pytest.approx(2 * 7 / 8 / 45e3)
    assert node.time_us(0, 3, GROUPED) == node.time_us(0, 1, GROUPED) + 2 * cluster.member_us
    assert cluster.link("gather", 1, 1).time_us(1000, 1, PACKED) == 0


@pytest.mark.parametrize("name", names())
def test_fitted_constants_say_on_which_runs(name: str) -> None:
    """Those that a fit is named for, and no others, say how well it fits."""
    topology = Topology.load(name)
    is_fitted = topology.sources.get("efficiency", "").startswith("fitted")
    assert (topology.residuals is not None) == is_fitted
    if topology.residuals is not None:
        assert topology.residuals.low < 1 < topology.residuals.high


def test_a_network_by_its_rate() -> None:
    """The rate is of a node's adapters together, and each rank has its share of it."""
    cluster = H100.with_network(800)
    assert cluster.network_gb_per_s == pytest.approx(800 / 8 / 8 * NETWORK_SHARE)


def test_contention_never_speeds_compute_up() -> None:
    found = [dataclasses.replace(H100, contention=each).costs({}, {}) for each in (0.5, 2.0)]
    assert [each.contention for each in found] == [1.0, 2.0]


def test_flat_members_are_not_copied() -> None:
    costs = Costs({}, {"reduce": 8}, copy_us_per_byte=1.0, is_flat=True)
    assert costs.are_shared("reduce", [8, 8, 8], PACKED) == [False] * 3
    assert costs.hand_out_us("reduce", 800, PACKED) == 0


def test_copies_are_sent_shards() -> None:
    """A reduce goes on among the ranks that hold the same shard; a gather does not."""
    shards, copies = (8, 8), (4, 1)
    first, second = H100.links("reduce", shards, copies)
    assert first == H100.link("reduce", *shards)
    assert second.us_per_byte == H100.link("all_reduce", *copies).us_per_byte / 8
    assert H100.links("gather", shards, copies) == (H100.link("gather", *shards),)
    assert H100.links("reduce", shards, (1, 1)) == (first,)


def test_a_collective_costs_a_call() -> None:
    """Whatever its layout, and however little it carries."""
    link = Link("node", alpha_us=10.0, us_per_byte=0.0, member_us=0.0)
    costs = Costs({"gather": (link,)}, {"gather": 2}, 0.0, call_us=3.0)
    items = [Item(f"w{n}", "unit", "gather", 1, 0, 0, 1) for n in range(2)]
    problem = Problem("forward", (100.0,), (0,), tuple(items), (), costs)
    for layout in (PACKED, GROUPED):
        together = simulate(
            problem, [make_bucket(problem, "gather", items, layout)], [], budget_bytes=99
        )
        assert together.time_us == 3 + 10 + 100
    apart = [make_bucket(problem, "gather", [item], PACKED) for item in items]
    assert simulate(problem, apart, [], budget_bytes=99).time_us == 3 + 10 + 10 + 100
    assert best_buckets(problem, items, PACKED).time_us == 3 + 10 + 100


def test_gathers_of_no_bytes() -> None:
    """Of empty parameters: they are best together, too."""
    link = Link("node", alpha_us=10.0, us_per_byte=1.0, member_us=0.0)
    costs = Costs({"gather": (link,)}, {"gather": 2}, 0.0, call_us=3.0)
    items = [Item(f"w{n}", "unit", "gather", 0, 0, 0, 1) for n in range(2)]
    problem = Problem("forward", (100.0,), (0,), tuple(items), (), costs)
    assert best_buckets(problem, items, PACKED).ends == (2,)


def test_a_link_never_runs_dry() -> None:
    """Where it is what takes long, compute's waits for it among that: nothing else is added."""
    link = Link("node", alpha_us=100.0, us_per_byte=0.0, member_us=0.0)
    costs = Costs(
        {"gather": (link,), "reduce": (link,)}, {"gather": 2, "reduce": 2}, copy_us_per_byte=0.0
    )
    gathers = [Item(f"w{n}", f"{n}", "gather", 1, 0, n, n + 1) for n in range(6)]
    reduces = [Item(f"w{n}", f"{n}", "reduce", 1, n + 1, 6, 6) for n in range(6)]
    problem = Problem("backward", (30.0,) * 6, (0,) * 6, tuple(gathers), tuple(reduces), costs)
    timeline = simulate(
        problem,
        [make_bucket(problem, "gather", [item], PACKED) for item in gathers],
        [make_bucket(problem, "reduce", [item], PACKED) for item in reduces],
        budget_bytes=99,
    )
    assert timeline.time_us == 2 * 6 * 100


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "gloo"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-efa"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "b200-nvl72"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("new", "h100"),
    ],
)
def test_default_topology(device: str, name: str) -> None:
    assert default_topology(device) == name


def as_dict() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(H100.to_json())
    return data


def test_topology_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**as_dict(), "measured": {"gather 2": [1.5, 0.25]}}))
    link = Topology.load(str(path)).link("gather", 2, 2)
    assert (link.alpha_us, link.us_per_byte) == (1.5, 0.25)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"op_us": "fast"}, "op_us is 'fast'; expected .* float"),
        ({"op_us": -1.0}, "op_us is -1.0"),
        ({"name": 1}, "name is 1; expected .* str"),
        ({"tflops": {"bf16": 1.0}}, "any other dtype"),
        ({"measured": {"gather 2": [1.0]}}, r"measured\['gather 2'\] is \[1.0\]"),
        ({"ops": {"aten.mm.default()": "fast"}}, r"ops\['aten.mm.default\(\)'\] is 'fast'"),
        ({"ops": {"aten.mm.default()": -3.0}}, "ops has -3.0"),
        ({"bandwidth": 3}, "unknown .'bandwidth'."),
        ({"op_us": None}, "missing .'op_us'."),
    ],
)
def test_wrong_topology(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    data = {**as_dict(), **change}
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    with pytest.raises(ValueError, match=says):
        Topology.load(str(path))


def test_no_topology(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no topology 'h1000'; expected one of .*'h100'"):
        Topology.load("h1000")
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(ValueError, match="can't be read"):
        Topology.load(str(tmp_path / "empty.json"))


def problem(op_us: float, num_bytes: int, *, alpha_us: float = 10.0) -> Problem:
    """Four layers of one parameter and one op each."""
    link = Link("node", alpha_us, 0.001, 1.0)
    items = [Item(f"w{n}", f"u{n}", "gather", num_bytes, 0, n, n + 1) for n in range(4)]
    costs = Costs({"gather": (link,)}, {"gather": 2}, 0.0)
    return Problem("forward", (op_us,) * 4, (0,) * 4, tuple(items), (), costs)


@pytest.mark.parametrize(
    ("op_us", "num_bytes", "binding"),
    [(100.0, 1000, "start-up"), (1e9, 0, "compute"), (0.0, 10**6, "link")],
)
def test_what_binds(op_us: float, num_bytes: int, binding: str) -> None:
    alpha_us = 10.0 if binding == "start-up" else 0.0
    assert lower_bound(problem(op_us, num_bytes, alpha_us=alpha_us)).binding == binding


def test_timeline_by_hand() -> None:
    """Four gathers of 110 us on the link, four ops of 50 us: compute waits for each."""
    each = problem(50.0, 100_000)
    buckets = [make_bucket(each, "gather", [item], PACKED) for item in each.gathers]
    timeline = simulate(each, buckets, [], budget_bytes=10**9)
    assert [run.finish_us for run in timeline.runs] == [110.0, 220.0, 330.0, 440.0]
    assert timeline.time_us == 490.0
    assert timeline.exposed_us == 110 + 60 + 60 + 60
    assert lower_bound(each).time_us == 4 * 100 + 10 + 50
    assert search(each, budget_bytes=10**9).timeline.time_us == 480.0  # of 2, 1 and 1


def test_budget_holds_gathers_back() -> None:
    """With room for two parameters there are never three."""
    each = problem(1000.0, 100_000)
    buckets = [make_bucket(each, "gather", [item], PACKED) for item in each.gathers]
    timeline = simulate(each, buckets, [], budget_bytes=200_000)
    assert [run.launch for run in timeline.runs] == [0, 0, 1, 2]
    assert timeline.peak_bytes == 200_000


def _launches(budget_bytes: int, *, live_bytes: int = 0, reduced_at: int = 4) -> list[int]:
    """Of two gathers of 100 bytes, used one after the other.

    live_bytes: at the second one's op. reduced_at: the first position after a gradient is there,
        of 100 bytes, too, with a sum of 50.
    """
    link = Link("node", alpha_us=10.0, us_per_byte=0.0, member_us=0.0)
    costs = Costs(
        {"gather": (link,), "reduce": (link,)}, {"gather": 2, "reduce": 2}, copy_us_per_byte=0.0
    )
    gathers = [Item(f"w{n}", f"{n}", "gather", 100, 0, n, n + 1) for n in range(2)]
    reduces = [Item("w0", "0", "reduce", 100, reduced_at, 4, 4)]
    live = (0, live_bytes, 0, 0)
    each = Problem("backward", (5.0,) * 4, live, tuple(gathers), tuple(reduces), costs)
    timeline = simulate(
        each,
        [make_bucket(each, "gather", [item], GROUPED) for item in gathers],
        [make_bucket(each, "reduce", [item], GROUPED) for item in reduces],
        budget_bytes=budget_bytes,
    )
    return [run.launch for run in timeline.runs[:2]]


def test_a_gather_wants_room_until_it_is_freed() -> None:
    assert _launches(200) == [0, 0]
    assert _launches(200, live_bytes=100) == [0, 0]  # the first one is freed by then
    assert _launches(200, live_bytes=101) == [0, 1]


def test_a_sum_has_room_to_arrive() -> None:
    """Where it is launched before a gather is freed, and only there."""
    assert _launches(200, reduced_at=2) == [0, 0]
    assert _launches(300, reduced_at=1) == [0, 1]
    assert _launches(350, reduced_at=1) == [0, 0]


def test_a_gather_in_flight_has_room_to_be_copied_out() -> None:
    """A second gather begins ahead only if a first one fits twice at its wait, beside gradients."""
    assert _second_of_two_gathers(300) == (0, 300)
    assert _second_of_two_gathers(299) == (2, 200)
    assert _second_of_two_gathers(400, made_bytes=100)[0] == 0
    assert _second_of_two_gathers(399, made_bytes=100)[0] == 2


def _second_of_two_gathers(budget_bytes: int, *, made_bytes: int = 0) -> tuple[int, int]:
    """Simulate gathers of 100 bytes, used at ops 1 and 2, of which the first is copied out.

    made_bytes: of a gradient that op 0 makes. Returns where the second gather is launched, and
        bytes at the peak.
    """
    link = Link("node", alpha_us=1.0, us_per_byte=0.0, member_us=0.0)
    costs = Costs(
        {"gather": (link,), "reduce": (link,)}, {"gather": 2, "reduce": 2}, copy_us_per_byte=0.0
    )
    gathers = [
        Item(f"w{n}", f"{n}", "gather", 100, 0, n + 1, n + 2, is_copied_out=n == 0)
        for n in range(2)
    ]
    reduces = [Item("w0", "0", "reduce", made_bytes, 1, 3, 3)]
    each = Problem("backward", (5.0,) * 3, (0,) * 3, tuple(gathers), tuple(reduces), costs)
    timeline = simulate(
        each,
        [make_bucket(each, "gather", [item], PACKED) for item in gathers],
        [make_bucket(each, "reduce", reduces, GROUPED)],
        budget_bytes=budget_bytes,
    )
    return timeline.runs[1].launch, timeline.peak_bytes


def test_roofline() -> None:
    """A product by its operations, a copy by its bytes; what is fused is not counted twice."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    nodes = []
    for target in (torch.ops.aten.mm.default, torch.ops.aten.relu.default):
        node = graph.call_function(target, (x, x) if not nodes else (nodes[-1],))
        node.meta["val"] = x.meta["val"]
        nodes.append(node)
    last = graph.call_function(torch.ops.aten.neg.default, (nodes[-1],))
    last.meta["val"] = x.meta["val"]
    view = graph.call_function(torch.ops.aten.t.default, (last,))
    graph.output(view)
    product, relu = nodes
    fusion = fuse(graph)
    assert num_flops(product) == 2 * 4096**3
    plain = dataclasses.replace(H100, processors=0)
    want_us = 2 * 4096**3 / (989e6 * H100.efficiency)
    assert node_us(product, plain, fusion) == pytest.approx(want_us)
    assert want_us < node_us(product, H100, fusion) < 1.5 * want_us
    twice_us = 2 * 2 * 4096 * 4096 / (3350e3 * H100.memory_efficiency)
    assert node_us(relu, H100, None) == node_us(last, H100, None) == pytest.approx(twice_us)
    assert node_us(relu, H100, fusion) == 0  # it is computed where it is read
    assert node_us(last, H100, fusion) == pytest.approx(twice_us)
    assert node_us(view, H100, None) == 0
    assert base_of(view) is last
    key = "aten.mm.default(bf16[4096, 4096], bf16[4096, 4096])"
    neg_key = "aten.neg.default(bf16[4096, 4096])"
    timed = dataclasses.replace(H100, ops={key: 7.0, neg_key: 3.0})
    assert op_key(product.target, (x.meta["val"], x.meta["val"])) == key
    assert node_us(product, timed, fusion) == 7
    assert node_us(last, timed, None) == 3
    assert node_us(last, timed, fusion) == pytest.approx(twice_us)


def test_what_is_kept_for_backward() -> None:
    """As much as there is room for, what forward gathers last first; nothing that costs no time."""
    forward = problem(50.0, 100_000)
    items = [
        dataclasses.replace(item, used=3 - n, freed=4 - n) for n, item in enumerate(forward.gathers)
    ]
    backward = dataclasses.replace(forward, graph="backward", gathers=tuple(items[::-1]))
    names = [item.name for item in forward.gathers]

    def kept(budget: int, candidates: Sequence[str] = names) -> list[str]:
        return list(worth_keeping(forward, backward, candidates, budget))

    found = [kept(budget * 100_000) for budget in range(1, 8)]
    assert found[0] == names[-1:]  # it is the last in the one, and the first in the other
    assert all(each == names[len(names) - len(each) :] for each in found)
    assert all(len(few) <= len(many) for few, many in itertools.pairwise(found))
    assert found[-1] == names[1:]  # the first is there by the time backward comes to it
    assert kept(10**6, names[:2]) == names[:2]
    assert kept(10**6, []) == []
    forward, backward = (
        dataclasses.replace(each, op_us=(1e6,) * 4, gathers=each.gathers[1:])
        for each in (forward, backward)
    )
    assert kept(10**6) == []  # compute hides them all but the first, which is not among them


@pytest.mark.parametrize("layout", ["packed", "grouped"])
@pytest.mark.parametrize("regime", ["compute-bound", "balanced", "link-bound"])
@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_plans_keep_to_the_memory_of_one_bucket_a_unit(
    graph: str, regime: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    planner = importlib.import_module("planner")
    problem = planner.make_problem(
        planner.MODELS["8b"], planner.REGIMES[regime], graph, layers=LAYERS
    )
    unit = per_unit(problem)
    only = {"gather": (layout,), "reduce": (layout,)}
    found = search(problem, budget_bytes=unit.peak_bytes, layouts=only, steps=100).timeline
    assert found.peak_bytes <= unit.peak_bytes
    assert found.time_us <= unit.time_us


def test_a_margin_where_times_err() -> None:
    """Two buckets against one: as predicted all are hidden; where links are slow they are not."""
    link = Link("node", alpha_us=30.0, us_per_byte=1.0, member_us=0.0)
    items = [Item(f"w{n}", f"u{n}", "gather", 10, 0, n + 1, n + 2) for n in range(2)]
    costs = Costs({"gather": (link,)}, {"gather": 2}, 0.0)
    problem = Problem("forward", (100.0,) * 3, (0,) * 3, tuple(items), (), costs)
    errors = Residuals(10, "runs", 8, low=0.5, high=2.0)
    bucket = make_bucket(problem, "gather", items, GROUPED)
    one, each = simulate(problem, [bucket], [], budget_bytes=math.inf), per_unit(problem)
    assert one.time_us == each.time_us == 300
    # Where ops take 50: compute waits for one bucket until 100; for two until 80, and 130 to 160.
    assert margin(problem, one, each, errors) == Margin(0.0, pytest.approx(210 / 200 - 1))
    assert margin(problem, each, one, errors) == Margin(pytest.approx(200 / 210 - 1), 0.0)


@pytest.mark.parametrize(
    ("errors", "is_found"),
    [(None, True), ((1.0, 1.0), True), ((0.9, 1.1), True), ((0.9, 1.5), False)],
)
def test_better_by_less_than_times_err(
    errors: tuple[float, float] | None, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bucket saves a call of 20 us, and has compute wait for 15 bytes more on the link."""
    link = Link("node", alpha_us=30.0, us_per_byte=1.0, member_us=0.0)
    items = [
        Item(f"w{n}", f"u{n}", "gather", num_bytes, 0, n + 1, n + 2)
        for n, num_bytes in enumerate((15, 100))
    ]
    costs = Costs({"gather": (link,)}, {"gather": 2}, 0.0, call_us=20.0)
    problem = Problem("forward", (100.0,) * 3, (0,) * 3, tuple(items), (), costs)
    bucket = make_bucket(problem, "gather", items, GROUPED)
    one, each = simulate(problem, [bucket], [], budget_bytes=math.inf), per_unit(problem)
    monkeypatch.setattr(
        importlib.import_module("autoshard.passes.planner.search"),
        "search",
        lambda problem, *, budget_bytes: Decision(one, lower_bound(problem), budget_bytes),
    )
    residuals = None if errors is None else Residuals(10, "runs", 8, *errors)
    decision = search_beside(problem, each, budget_bytes=math.inf, errors=residuals)
    assert one.time_us < each.time_us
    assert decision.timeline is (one if is_found else each)
    assert (decision.margin is None) == (errors is None)
    assert is_found or decision.margin == Margin(0.0, 0.0)


def test_no_move_is_simulated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    evaluate, best_seed = _Space.evaluate, _Space.best_seed

    def note(space: _Space, cuts: Any, **known: Any) -> Any:
        tried.append(cuts)
        return evaluate(space, cuts, **known)

    def begin(space: _Space) -> Any:
        best = best_seed(space)
        tried[:] = [best[0][1]]
        return best

    monkeypatch.setattr(_Space, "evaluate", note)
    monkeypatch.setattr(_Space, "best_seed", begin)
    search(problem(50.0, 100_000), budget_bytes=10**9)
    assert len(tried) == len(set(tried)) > 1


def test_what_is_worse_is_given_up() -> None:
    costs = Costs({"r": (Link("node", 1.0, 1.0, 0.0),)}, {"r": 2}, copy_us_per_byte=0.0)
    items = tuple(Item(f"w{n}", "u", "r", 10, 0, n, n + 1) for n in range(3))
    problem = Problem("any", (5.0, 5.0, 5.0), (0, 0, 0), items, (), costs)
    buckets = [make_bucket(problem, "gather", [item], PACKED) for item in items]
    whole = simulate(problem, buckets, [], budget_bytes=99)
    for known, is_given_up in [((0, whole.time_us), False), ((0, whole.time_us - 2), True)]:
        found = simulate_unless_worse(problem, buckets, [], budget_bytes=99, known=known)
        assert (found is None) == is_given_up
    assert not simulate_unless_worse(problem, buckets, [], budget_bytes=5, known=(1, 1e9))
