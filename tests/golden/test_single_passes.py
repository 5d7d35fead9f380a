"""One pass at a time: golden/<pass>/<case>.txt is a small graph, before the pass and after it.

So is the example in the docstring of a pass's file.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from torch import fx

from autoshard import passes
from autoshard.passes.ir import groups
from autoshard.passes.ir.meta import PLAN
from autoshard.passes.ir.text import render
from autoshard.tools import opt

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
NUM_RANKS = {"alone": 1, "four": 4}  # in groups that the graphs name
OTHERS = ("plans", "transformer", "eager", "modes")  # folders that other tests here write
NEEDS = {  # what a pass obeys is written by others, which run before the picture is taken
    "plan_buckets": ("name_params",),
    "insert_collectives": ("name_params", "plan_buckets"),
}


EVERY_PASS = opt.every_pass([], graph="forward")
PASSES = tuple(name for name, several in EVERY_PASS.items() if len(several) == 1)
CASES = [f"{name}/{path.name}" for name in PASSES for path in sorted(GOLDEN.glob(f"{name}/*.txt"))]


@pytest.mark.parametrize("case", CASES)
def test_before_and_after(case: str, golden: Callable[[str, str], None]) -> None:
    """A file is a line `# title: why this case`, the graph, a line `# -> <pass>`, and what
    comes out: the graph, or `# unchanged`, then what the pass wrote beside it, tags or a
    plan. To add a case, write what is above the arrow; EXPECTTEST_ACCEPT=1 writes the rest.
    """
    name = case.partition("/")[0]
    path = GOLDEN / case
    text, shown = run(name, path.read_text())
    assert re.match(r"# [^:\n]+: .", text), f"{path}: the first line is `# title: why this case`"
    golden(case, f"{text}# -> {name}\n{shown}")


@pytest.mark.parametrize("name", PASSES)
def test_example(name: str) -> None:
    """The docstring of passes/<pass>.py has a graph after `before:`, and, after `after:`, what
    comes out, as in a golden file. A line that is indented further goes on the line above.
    """
    doc = import_module(f"autoshard.passes.{name}").__doc__ or ""
    found = re.search(r"^before:\n((?: {4}.*\n)+)after:\n((?: {4}.*(?:\n|\Z))+)", doc, re.MULTILINE)
    assert found, f"passes/{name}.py: its docstring shows a graph before and after"
    before, after = (joined(textwrap.dedent(each)) for each in found.groups())
    _, shown = run(name, before)
    assert re.sub(" +", " ", shown) == re.sub(" +", " ", after)


def joined(text: str) -> str:
    return re.sub(r"\n {4}", " ", text.replace("\n    #", "  #").rstrip("\n") + "\n")


def run(name: str, text: str) -> tuple[str, str]:
    """Run a pass over a graph's text; that text, as it is written, and what came out."""
    head, gm = opt.read(text)
    kind = opt.graph_kind(gm)
    saved, moved = opt.saved_of(head), opt.saved_of(head, "moved") or ()
    table = opt.table_of(head, gm)
    known = opt.every_pass(table, graph=kind, kept={0}, saved=saved, moved=moved)
    with groups.pretended(NUM_RANKS, opt.OTHERWISE):
        before = passes.run(gm, opt.choose(NEEDS.get(name, ()), known))
        after = passes.run(before, known[name])
    return head + render(gm.graph), show(before, after)


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_has_a_case(name: str) -> None:
    assert any(case.startswith(f"{name}/") for case in CASES), f"no golden/{name}/<case>.txt"


def test_every_file_is_read() -> None:
    """The others are, by the other tests here."""
    files = [path.relative_to(GOLDEN) for path in GOLDEN.rglob("*") if path.is_file()]
    names = {path.as_posix() for path in files if path.parts[0] not in OTHERS}
    assert names == set(CASES), "a file here is golden/<pass>/<case>.txt"


def show(before: fx.GraphModule, after: fx.GraphModule) -> str:
    text = render(after.graph)
    if text == render(before.graph):
        text = "# unchanged\n"
    text += opt.show_tags(after)
    plan = PLAN.get(after)
    return text if plan is None or plan == PLAN.get(before) else text + plan.text()
