"""The page of `autoshard plan --html`, tokens a second and MFU, and plans in notebooks."""

from __future__ import annotations

import dataclasses
import doctest
import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoshard import Plan
from autoshard.passes.ir import picture, svg
from autoshard.passes.ir.layout import Member
from autoshard.passes.ir.plan import Bucket, BucketFigures, Event, Figures
from autoshard.passes.planner.costs import Costs
from autoshard.passes.planner.kernels import Attention, Kernel
from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.topology import Topology
from autoshard.tools.cli import main
from autoshard.tools.plan import front
from autoshard.tools.plan.estimate import Configuration, Parameters, StepGraphs, estimate
from autoshard.tools.plan.front import Tried, best_that_fit, pareto_front
from autoshard.tools.plan.graphs import Graph
from autoshard.tools.plan.page import STACKED, page, write
from autoshard.tools.plan.planning import Choices, PlannedModel, PlanReport, plan
from autoshard.tools.plan.report import as_json, text
from autoshard.tools.plan.speed import Work, forward_flops, tokens_of

LARGE = 50 << 20  # bytes of each parameter
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></svg>",
    "&lt;b&amp;",
    "a.1.<b>\n</b>",
    "\ud800\u202e",
)


@pytest.mark.parametrize("module", [svg, picture, front])
def test_doctests(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# ---- reports by hand, of layers with a product each


def step_of(layers: Sequence[Sequence[str]]) -> StepGraphs:
    """Make the graphs of a step: a layer for each list of names of parameters."""
    count = len(layers)
    kernels = (Kernel("bf16", LARGE, product=(1, 4096, 4096, 8192)),)
    costs = Costs({}, {}, copy_us_per_byte=0.0)

    def graph(kind: str) -> Graph:
        order = layers if kind == "forward" else layers[::-1]
        gathers = [
            Item(name, f"layers.{at}", "gather", LARGE, 0, at, at + 1)
            for at, names in enumerate(order)
            for name in names
        ]
        reduces = [
            Item(name, f"layers.{at}", "reduce", LARGE, at + 1, count, count)
            for at, names in enumerate(order)
            for name in names
            if kind == "backward"
        ]
        lives = [LARGE * (at + 2) for at in range(count)]
        lives = lives if kind == "forward" else lives[::-1]
        ops = (0.0,) * count
        problem = Problem(kind, ops, tuple(lives), tuple(gathers), tuple(reduces), costs)
        return Graph(problem, tuple(each - LARGE for each in lives), kernels)

    members = tuple(Member(torch.float32, (LARGE // 4,)) for names in layers for _ in names)
    graphs = {kind: graph(kind) for kind in ("forward", "backward")}
    return StepGraphs(graphs, Parameters(members, members), "adamw", casts=True, reduce_bytes=4)


CONFIGURATIONS = (
    Configuration(1, 16, True, 1, "none"),
    Configuration(1, 16, False, 1, "none"),
    Configuration(2, 8, True, 1, "full"),
    Configuration(16, 1, True, 2, "none"),
)


def report_of(
    layers: Sequence[Sequence[str]],
    *,
    name: str = "model",
    memory_bytes: int = 80 << 30,
    tokens: int | None = 128,
) -> PlanReport:
    topology = dataclasses.replace(Topology.load("h100"), memory_bytes=memory_bytes)
    step = step_of(layers)
    found = [estimate(step, each, topology, searched=True) for each in CONFIGURATIONS[:1]]
    rough = [estimate(step, each, topology, searched=False) for each in CONFIGURATIONS[1:]]
    return PlanReport(
        PlannedModel(name, nn.Module, None, 128, "bf16", "f32", "adamw", "inductor"),
        topology,
        16,
        1000,
        Work(tokens, 3 * forward_flops(step.graphs["forward"])),
        tuple(map(Tried.of, [*found, *rough])),
        tuple(found),
        0.0,
    )


def stack(count: int) -> list[list[str]]:
    inner = ("attention.query.weight", "attention.output.weight", "mlp.up.weight")
    return [[f"layers.{number}.{each}" for each in inner] for number in range(count)]


class Reader(HTMLParser):
    """Reads a page, and checks that elements are closed in the order in which they were opened."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}  # by the innermost element
        self.feed(written)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


def test_a_page_is_well_formed_and_alone() -> None:
    found = Reader(page(report_of(stack(4))))
    assert found.tags.count("script") == 1
    names = {name for name, _ in found.attributes}
    assert names.isdisjoint({"src", "href", "srcset", "data", "action"})
    assert not any(name.startswith("on") for name in names)
    styles = [*found.texts["style"], *(value or "" for _, value in found.attributes)]
    assert not any("url(" in each or "import" in each or "//" in each for each in styles)


def test_a_page_has_the_figures_of_the_text() -> None:
    report = report_of(stack(4))
    found = Reader(page(report))
    assert found.texts["h1"] == ["model on 16 x h100"]
    assert {"One step", "Memory over the step", "All configurations (4)"} == set(found.texts["h2"])
    rows = {each for each in found.texts["td"] if each}
    words = set(re.split(r"\s{2,}", text(report).replace("\n", "  ")))
    assert {"forward", "optimizer", "peak", "no_shard", "2x8", "searched", "one a unit"} <= rows
    assert {each for each in rows if each.endswith("%")} & words
    (best,) = report.estimates
    assert f"{best.step_time_us / 1e3:.2f}" in found.texts["b"]


def test_hovering_says_which_parameters() -> None:
    layers = stack(3)
    titles = Reader(page(report_of(layers))).texts["title"]
    gathers = [each for each in titles if each.startswith("gather of")]
    reduces = [each for each in titles if each.startswith("reduce of")]
    for found in (gathers, reduces):
        assert found
        said = "\n".join(found)
        assert "layers.0" in said
        assert all(name.split(".", 2)[2] in said for names in layers for name in names)
    assert any(each.startswith("compute waits") for each in titles)
    assert any("optimizer states" in each for each in titles)
    assert any(each.startswith("strategy: no_shard\nmesh: 16x1") for each in titles)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text(name: str, tmp_path: Path) -> None:
    """They show up as they are, make no element, and can be written."""
    harmless = Reader(page(report_of([["a.1.b"], ["b"]])))
    hostile = report_of([[name], ["b"]], name=name)
    found = Reader(page(hostile))
    assert found.tags == harmless.tags
    inner = name.rpartition(".")[2]
    titles = [each for each in found.texts["title"] if each.startswith("gather of")]
    assert any(inner in each for each in titles)
    assert found.texts["h1"] == [f"{name} on 16 x h100"]
    write(hostile, tmp_path / "page.html")
    assert Reader((tmp_path / "page.html").read_text()).tags == harmless.tags


@pytest.mark.parametrize("count", [1, 32, 80])
def test_pages_are_small(count: int) -> None:
    assert len(page(report_of(stack(count)))) < 500_000


def test_memory_over_time_has_the_peak() -> None:
    (best,) = report_of(stack(5)).estimates
    samples = [memory for found in best.usage.values() for _, memory in found]
    assert best.memory in samples
    assert max(each.peak_bytes for each in samples) == best.memory.peak_bytes
    assert list(best.usage) == ["forward", "backward", "optimizer"]
    assert set(STACKED) == {field.name for field in dataclasses.fields(best.memory)}


@pytest.mark.parametrize(("replicas", "shards"), [(1, 16), (16, 1), (2, 8)])
def test_memory_over_time_has_sums_of_gradients(replicas: int, shards: int) -> None:
    """Its peak is the estimate's where microbatches add up gradients: none is counted twice."""
    about = Configuration(replicas, shards, True, 1, "none", accumulate=4)
    found = estimate(step_of(stack(5)), about, Topology.load("h100"), searched=True)
    samples = [memory for each in found.usage.values() for _, memory in each]
    assert max(each.peak_bytes for each in samples) == found.memory.peak_bytes
    assert all(each.gradients for each in samples)


def test_a_page_of_what_does_not_fit() -> None:
    report = report_of(stack(4), memory_bytes=1 << 20)
    assert report.overflow == "parameters"
    found = Reader(page(report))
    assert "no" in found.texts["b"]
    assert any(each.startswith("does not fit, with parameters") for each in found.texts["p"])
    assert found.tags.count("circle") == len(CONFIGURATIONS)


def test_a_page_of_what_is_tight() -> None:
    peak = report_of(stack(4)).estimates[0].memory.peak_bytes
    for memory_bytes, is_tight in ((peak, True), (2 * peak, False)):
        found = Reader(page(report_of(stack(4), memory_bytes=memory_bytes)))
        assert any(each.startswith("tight: ") for each in found.texts["p"]) is is_tight


# ---- the Pareto front


COORDINATES = st.integers(0, 6).map(float)


@given(st.lists(st.tuples(COORDINATES, COORDINATES), max_size=12))
def test_pareto_front(points: list[tuple[float, float]]) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] <= other[1]

    found = pareto_front(points)
    best = [n for n, each in enumerate(points) if not any(beats(one, each) for one in points)]
    assert sorted(found) == best
    assert [points[number][0] for number in found] == sorted(points[number][0] for number in best)


def test_the_front_is_of_what_fits() -> None:
    sizes = [(5, 1.0), (1, 9.0), (2, 3.0), (3, 3.0)]
    tried = [Tried(CONFIGURATIONS[0], 1.0, time, peak, False) for peak, time in sizes]
    assert best_that_fit(tried, 4) == [1, 2]
    assert best_that_fit(tried, 0) == [1, 2, 0]


@given(st.floats(0, 1e9), st.floats(1e-6, 1e9), st.integers(1, 12))
def test_ticks_are_few_and_inside(low: float, span: float, most: int) -> None:
    high = low + span
    found = svg.ticks(low, high, most)
    assert len(found) <= most + 1
    assert all(low - 1e-6 * high <= each <= high * (1 + 1e-6) for each in found)


# ---- tokens a second, and MFU


def test_speed() -> None:
    work = Work(tokens=100, flops=5e6)
    assert work.per_second(200.0) == 500_000
    assert work.mfu(200.0, 1e5) == 0.25
    assert Work(None, 0.0).per_second(200.0) == 5_000
    assert Work(None, 0.0).mfu(200.0, 1e5) is None


def test_masks_and_what_is_no_product_do_not_count() -> None:
    attention = Attention(4, 10, 20, 8, is_causal=True, is_backward=False)
    kernels = (Kernel("bf16", attention=attention), Kernel("bf16", flops=7), None)
    problem = Problem("forward", (0.0, 1.0, 2.0, 1.0), (0,) * 4, (), (), Costs({}, {}, 0.0))
    assert forward_flops(Graph(problem, (0,) * 4, kernels)) == 4 * 4 * 10 * 20 * 8 + 2 * 7


def test_token_ids() -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    assert tokens_of(ids, 2, 16) == 16
    assert tokens_of({"pixel_values": torch.zeros(2, 16), "input_ids": ids}, 2, 16) == 16
    pictures = {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2)}
    assert tokens_of(pictures, 2, 16) is None
    assert tokens_of((torch.zeros(2, 16), 3), 2, 16) is None


def test_samples_of_what_has_no_tokens() -> None:
    report = report_of(stack(2), tokens=None)
    assert "samples/s per GPU" in text(report)
    assert as_json(report)["tokens_per_second_per_gpu"] is None
    assert as_json(report)["samples_per_second_per_gpu"] > 0
    assert "samples/s per GPU" in page(report)


def small_llama() -> nn.Module:
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="transformers' Llama is more than one graph")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("fake_world", [1024], indirect=True)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_operations_are_those_of_palm(checkpointing: str) -> None:
    """6 N + 12 L H Q T a token, without the embedding; and reports print, and show, themselves."""
    seq = 32
    planned = PlannedModel("llama", small_llama, None, seq, "bf16", "f32", "adamw", "inductor")
    choices = Choices(strategy="full_shard", micro_batches=(2,), checkpointing=checkpointing)
    report = plan(planned, Topology.load("h100"), 16, choices)
    model = small_llama()
    matrices = [each for each in model.parameters() if each.ndim == 2]
    multiplied = sum(map(torch.numel, matrices)) - 512 * 64
    assert report.work.tokens == seq
    assert report.work.flops == seq * (6 * multiplied + 12 * 3 * 64 * seq)
    (best,) = report.estimates
    found = as_json(report)
    assert found["tokens_per_second_per_gpu"] == pytest.approx(2 * seq * 1e6 / best.step_time_us)
    rate = report.work.flops * found["samples_per_second_per_gpu"]
    assert found["mfu"] == pytest.approx(rate / 989e12)
    assert json.loads(json.dumps(found)) == found
    assert str(report) == text(report)
    assert report._repr_html_() in page(report)


# ---- the command, and notebooks


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("fake_world", [1024], indirect=True)
def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "tests.unit.test_dry_run:Tower", "--seq", "16", "--gpus", "4xH100"]
    asked += ["--micro-batch", "1", "--checkpointing", "none", "--html"]
    path = tmp_path / "plan.html"
    assert main([*asked, str(path)]) == 0
    assert "tokens/s per GPU" in capsys.readouterr().out
    found = Reader(path.read_text())
    assert any("layers.0 to " in each for each in found.texts["title"])
    with pytest.raises(SystemExit, match="2"):
        main([*asked, str(tmp_path / "nowhere" / "plan.html")])
    assert "--html: " in capsys.readouterr().err


def plan_by_hand(figures: Figures | None) -> Plan:
    bucket = Bucket("gather", "shard", "unit", ("<a>", "b"), (0, 1), "f32[4] f32[2]")
    events = (Event("launch", 0, 0), Event("wait", 0, 0))
    return Plan("forward", "auto", 2, (bucket,), events, figures)


def test_plans_in_notebooks() -> None:
    times = (BucketFigures(0.0, 2.0, 1.5),)
    known = Figures(9.0, 8.0, "link", 1.5, 1, times, ((2.0, 9.0, 0, 2),), ((0.0, 1),))
    for figures, pictures in ((None, 0), (known, 1)):
        made = plan_by_hand(figures)
        assert str(made) == made.text()
        found = Reader(made._repr_html_())
        assert found.texts["pre"] == [made.text()]
        titles = found.texts.get("title", [])
        assert any("<a>, b" in each for each in titles) == bool(pictures)
        assert Plan.from_json(made.to_json()) == made


def test_names_of_blocks_are_folded() -> None:
    names = ["embed", *(f"h.{number}.{each}" for number in (9, 8, 6) for each in ("x", "y.0.z"))]
    assert picture.show_names(names) == ["embed", "h.9 to 8: x, y.0.z", "h.6: x, y.0.z"]
    assert math.isfinite(svg.Axis(0, 0, 0, 1).at(1))
