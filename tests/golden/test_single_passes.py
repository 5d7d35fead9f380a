"""One pass at a time: golden/<pass>/<case>.txt is a small graph, before the pass and after it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch import fx, nn

from autoshard import _torch, passes
from autoshard.passes import ParamInfo
from autoshard.passes.ir.match import is_gradient, is_marker, is_reduce_grad, param_of
from autoshard.passes.ir.meta import PLAN, SOURCE
from autoshard.passes.ir.text import parse, render
from autoshard.passes.pipeline import pass_name

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
NUM_RANKS = {
    "shard": 2,
    "replicate": 2,
    "alone": 1,
    "four": 4,
}  # in the groups that the graphs name
OTHERS = ("plans", "transformer", "eager", "modes")  # folders that other tests here write
NEEDS = {  # what a pass obeys is written by others, which run before the picture is taken
    "plan_buckets": ("name_params",),
    "insert_collectives": ("name_params", "plan_buckets"),
}


def every_pass(table: Sequence[ParamInfo], graph: str) -> dict[str, passes.Pass]:
    after_partition = passes.pipeline(table, graph=graph, bucketing="per_unit")
    return {pass_name(each): each for each in (*passes.joint({0}), *after_partition)}


PASSES = tuple(every_pass([], "forward"))
CASES = [f"{name}/{path.name}" for name in PASSES for path in sorted(GOLDEN.glob(f"{name}/*.txt"))]


@pytest.mark.parametrize("case", CASES)
def test_before_and_after(
    case: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is a line `# title: why this case`, the graph, a line `# -> <pass>`, and what
    comes out: the graph, or `# unchanged`, then what the pass wrote beside it, tags or a
    plan. To add a case, write what is above the arrow; EXPECTTEST_ACCEPT=1 writes the rest.
    """
    monkeypatch.setattr(_torch, "group_size", NUM_RANKS.__getitem__)
    monkeypatch.setattr(_torch, "group_rank", lambda name: 0)
    name = case.partition("/")[0]
    head, body = read(GOLDEN / case)
    gm = fx.GraphModule(nn.Module(), parse(body))
    graph = "backward" if any(map(is_reduce_grad, gm.graph.nodes)) else "forward"
    known = every_pass(table_of(head, gm), graph)
    before = passes.run(gm, [known[each] for each in NEEDS.get(name, ())])
    after = passes.run(before, [known[name]])
    golden(case, f"{head}{render(gm.graph)}# -> {name}\n{show(before, after)}")


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_has_a_case(name: str) -> None:
    assert any(case.startswith(f"{name}/") for case in CASES), f"no golden/{name}/<case>.txt"


def test_every_file_is_read() -> None:
    """The others are, by the other tests here."""
    files = [path.relative_to(GOLDEN) for path in GOLDEN.rglob("*") if path.is_file()]
    names = {path.as_posix() for path in files if path.parts[0] not in OTHERS}
    assert names == set(CASES), "a file here is golden/<pass>/<case>.txt"


def read(path: Path) -> tuple[str, str]:
    """A file's comments on top, and the graph below them, up to the arrow."""
    before = path.read_text().partition("# -> ")[0]
    body = re.sub(r"\A(#.*\n)*", "", before)
    head = before.removesuffix(body)
    assert re.match(r"# [^:\n]+: .", head), f"{path}: the first line is `# title: why this case`"
    return head, body


def table_of(head: str, gm: fx.GraphModule) -> list[ParamInfo]:
    """The parameters: from a line `# params: <name> ...`, else from the markers' comments."""
    listed = re.search(r"^# params: (.*)$", head, re.MULTILINE)
    if listed:
        return [info(name) for name in listed[1].split()]
    markers = [node for node in gm.graph.nodes if is_marker(node) or is_gradient(node)]
    names = {param_of(marker): SOURCE.get(marker) for marker in markers}
    return [info(names[number] or "") for number in sorted(names)]


def info(name: str) -> ParamInfo:
    """A parameter whose unit is the module that it is in."""
    return ParamInfo(name, name.rpartition(".")[0] or "root", "shard", "shard")


def show(before: fx.GraphModule, after: fx.GraphModule) -> str:
    text = render(after.graph)
    if text == render(before.graph):
        text = "# unchanged\n"
    for node in after.graph.nodes:
        if "recompute" in node.meta:
            text += f"# recompute: {node.name} {node.meta['recompute'].name}\n"
    plan = PLAN.get(after)
    return text if plan is None or plan == PLAN.get(before) else text + plan.text()
