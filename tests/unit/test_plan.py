"""A plan as text, JSON and digest, and the graph that obeys it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs import (
    BUCKETINGS,
    STEP,
    STEP_TABLE,
    WORLD,
    Program,
    group,
    plan_of,
    programs,
    step,
)

from autoshard import Plan
from autoshard.passes.ir.plan import Bucket, Event, Figures, SavedBlock
from autoshard.passes.ir.text import render

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(("kind", "layout"), [("gather", "loose"), ("reduce", "grouped")])
def test_layouts_that_no_bucket_can_have(kind: str, layout: str) -> None:
    bucket = Bucket(kind, "shard", "unit", ("weight",), (0,), "f32[4]", layout)
    with pytest.raises(ValueError, match=f"a {kind} can't be '{layout}'"):
        Plan.from_json(Plan("forward", "auto", 1, (bucket,), ()).to_json())


def test_a_bucket_has_as_many_params_as_names() -> None:
    bucket = Bucket("gather", "shard", "unit", ("a", "b"), (0,), "f32[4] f32[2]")
    with pytest.raises(ValueError, match=r"a gather of \('a', 'b'\) has params \(0,\)"):
        Plan.from_json(Plan("forward", "auto", 1, (bucket,), ()).to_json())


def test_layouts_are_agreed_on() -> None:
    buckets = [
        Bucket("gather", "shard", "unit", ("a", "b"), (0, 1), "f32[4] f32[2]", layout)
        for layout in ("packed", "grouped")
    ]
    plans = [Plan("forward", "auto", 1, (each,), (Event("launch", 0, 0),)) for each in buckets]
    assert plans[0].digest != plans[1].digest
    assert Plan.from_json(plans[1].to_json()) == plans[1]


@given(programs(), BUCKETINGS)
def test_plan_is_read_back_from_json(program: Program, bucketing: Any) -> None:
    plan = plan_of(program.planned(bucketing))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    assert again.text() == plan.text()
    other_order = json.dumps(_reversed_keys(json.loads(plan.to_json())))
    assert Plan.from_json(other_order) == plan
    assert Plan.from_json(other_order).digest == plan.digest


def test_figures_of_other_buckets() -> None:
    """Found by the test below: such a plan could be read, and not be shown."""
    bucket = Bucket("gather", "shard", "unit", ("weight",), (0,), "f32[4]")
    figures = Figures(1.0, 1.0, "link", 0.0, 1, (), (), ())
    plan = Plan("forward", "auto", 1, (bucket,), (), figures=figures)
    with pytest.raises(ValueError, match=r"plan.figures is of 0 buckets, of 1"):
        Plan.from_json(plan.to_json())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(programs(), BUCKETINGS, st.data())
def test_files_that_are_nearly_plans(program: Program, bucketing: Any, data: st.DataObject) -> None:
    """One place in it has another value, or is gone: ValueError, or a plan that can be used."""
    file = json.loads(plan_of(program.planned(bucketing)).to_json())
    place, key = data.draw(st.sampled_from(list(_places(file))))
    if data.draw(st.booleans()):
        place[key] = data.draw(JSON)
    else:
        del place[key]
    check_file(json.dumps(file))


@given(JSON.map(json.dumps) | st.text())
def test_files_that_are_no_plans(text: str) -> None:
    check_file(text)


def check_file(text: str) -> None:
    try:
        plan = Plan.from_json(text)
    except ValueError:
        return
    assert plan.text()
    assert plan.digest
    assert len(plan.launches()) == sum(event.what == "launch" for event in plan.schedule)
    assert Plan.from_json(plan.to_json()).digest == plan.digest


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(what holds it, its key or position) of every value inside."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in pairs:
        yield value, key
        if isinstance(each, (dict, list)):
            yield from _places(each)


def _reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reversed_keys(value[key]) for key in reversed(value)}
    return [_reversed_keys(each) for each in value] if isinstance(value, list) else value


def test_planned_step() -> None:
    gm = step()
    want = """
        in %first_w: f32[4,2]
        in %first_b: bf16[4]
        in %second_w: f32[1,3]
        in %x: f32[3]
        %launch_gather_first: u8[1] = \
autoshard.launch_gather([%first_w], 'f32[7,2]', 'shard', 0)  # first
        %launch_gather_first_1: u8[1] = \
autoshard.launch_gather([%first_b], 'bf16[8]', 'shard', 1)  # first
        %launch_gather_second: u8[1] = \
autoshard.launch_gather([%second_w], 'f32[2,3]', 'shard', 2)  # second
        %wait_gather_first: (f32[7,2]) = \
autoshard.wait_gather(%launch_gather_first, 'f32[7,2]', 'shard', 0)  # first
        %whole_first_w: f32[7,2] = getitem(%wait_gather_first, 0)  # first.w
        %s0: f32[] = aten.sum(%whole_first_w)
        %a: f32[3] = aten.add.Tensor(%x, %s0)
        %wait_gather_first_1: (bf16[8]) = \
autoshard.wait_gather(%launch_gather_first_1, 'bf16[8]', 'shard', 1)  # first
        %whole_first_b: bf16[8] = getitem(%wait_gather_first_1, 0)  # first.b
        %s1: f32[] = aten.sum(%whole_first_b, dtype=torch.float32)
        %b: f32[3] = aten.add.Tensor(%a, %s1)
        %wait_gather_second: (f32[2,3]) = \
autoshard.wait_gather(%launch_gather_second, 'f32[2,3]', 'shard', 2)  # second
        %whole_second_w: f32[2,3] = getitem(%wait_gather_second, 0)  # second.w
        %s2: f32[] = aten.sum(%whole_second_w)
        %c: f32[3] = aten.add.Tensor(%b, %s2)
        %g: f32[2,3] = aten.expand(%c, [2, 3])
        %pack_grads_second: u8[1] = autoshard.pack_grads([%g], 'f32[2,3]', 'shard', 3)  # second
        %launch_reduce_second: u8[1] = \
autoshard.launch_reduce(%pack_grads_second, 'f32[2,3]', 'shard', 3)  # second
        %wait_reduce_second: (f32[1,3]) = \
autoshard.wait_reduce(%launch_reduce_second, 'f32[2,3]', 'shard', 3)  # second
        %grad_second_w: f32[1,3] = getitem(%wait_reduce_second, 0)  # second.w
        return [%c, %grad_second_w]
        """
    assert render(gm.graph, axes={group(): "shard"}) == textwrap.dedent(want).lstrip()


def test_digest_is_the_same_in_another_process() -> None:
    """D-69: Another hash seed is another order of sets: no such order may reach the plan."""
    script = f"""
import torch.distributed as dist
from torch import fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
import autoshard
from autoshard import passes
from autoshard.passes.ir.meta import PLAN, ParamInfo
from autoshard.passes.ir.text import parse, render
dist.init_process_group("fake", rank=1, world_size={WORLD}, store=FakeStore())
text = {STEP.lstrip()!r}.replace("GROUP", repr(dist.group.WORLD.group_name))
transforms = passes.pipeline({STEP_TABLE!r}, graph="forward", bucketing="per_unit")
plan = PLAN.get(passes.run(fx.GraphModule(nn.Module(), parse(text)), transforms))
print(plan.digest)
print(plan.to_json())
"""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plan = plan_of(step())
    assert done.stdout.splitlines()[-2:] == [plan.digest, plan.to_json()]


def test_digest_tells_plans_apart() -> None:
    plan = plan_of(step())
    bucket = dataclasses.replace(plan.buckets[0], members="f32[8,2]")
    buckets = (bucket, *plan.buckets[1:])
    assert dataclasses.replace(plan, buckets=buckets).digest != plan.digest
    assert dataclasses.replace(plan, graph="backward").digest != plan.digest
    launches = [event for event in plan.schedule if event.what == "launch"]
    waits = tuple(event for event in plan.schedule if event.what == "wait")
    assert dataclasses.replace(plan, schedule=(*launches, *waits)).digest == plan.digest
    launches[:2] = reversed(launches[:2])
    assert dataclasses.replace(plan, schedule=(*launches, *waits)).digest != plan.digest


def test_text_of_what_is_saved() -> None:
    """Blocks in turn with the same numbers have one line; a plan without a decision has none."""
    plan = Plan("forward", "auto", 0, (), ())
    blocks = [SavedBlock(f"layers.{n}", 2**20, 3 * 2**19, 12.4) for n in range(3)]
    decided = dataclasses.replace(plan, saved=(SavedBlock("root", 0, 0, 0.0), *blocks))
    assert decided.text().splitlines()[2:] == [
        "block                          saved    given up  again us",
        "root                           0.0 KiB  0.0 KiB   0",
        "layers.0..layers.2, each of 3  1.0 MiB  1.5 MiB   12",
    ]
    assert len(plan.text().splitlines()) == 2
    assert Plan.from_json(decided.to_json()) == decided
    assert decided.digest == plan.digest
