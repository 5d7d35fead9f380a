"""What every pass must keep, whatever the graph: order, values, and one wait for each launch."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

from autoshard import Plan, passes
from autoshard.passes import ParamInfo, PassError, ops
from autoshard.passes.layout import DTYPES, local_rows, read_members
from autoshard.passes.match import (
    bucket_of,
    is_launch,
    is_marker,
    is_reduce_grad,
    is_unshard,
    is_wait,
    kind_of,
    param_of,
)
from autoshard.passes.meta import PLAN, SOURCE
from autoshard.passes.text import parse, render
from autoshard.passes.verify import verify

WORLD = 2
quick = settings(deadline=None, max_examples=75)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """Rank 0 of two that never talk: enough for shapes."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def group_of_one() -> str:
    return str(dist.new_group([0]).group_name)


def group() -> str:
    return str(dist.group.WORLD.group_name)


@dataclass(frozen=True)
class Param:
    """A parameter of a random graph; `viewed` says that its shard comes flat."""

    unit: int
    dtype: str
    rows: int
    cols: int
    viewed: bool

    @property
    def whole(self) -> str:
        return f"{self.dtype}[{self.rows},{self.cols}]"

    @property
    def shard(self) -> str:
        return f"{self.dtype}[{local_rows(self.rows, WORLD, 0)},{self.cols}]"

    @property
    def flat(self) -> str:
        return f"{self.dtype}[{local_rows(self.rows, WORLD, 0) * self.cols}]"


@dataclass(frozen=True)
class Program:
    """A graph with markers, as text, and the parameters that they are for."""

    text: str
    params: tuple[Param, ...]

    @property
    def table(self) -> list[ParamInfo]:
        return [
            ParamInfo(f"layers.{p.unit}.w{n}", f"layers.{p.unit}", "shard")
            for n, p in enumerate(self.params)
        ]

    def module(self) -> fx.GraphModule:
        return module(self.text)

    def pipeline(self, bucketing: Any) -> tuple[passes.Pass, ...]:
        return passes.pipeline(self.table, graph="backward", bucketing=bucketing)

    def planned(self, bucketing: Any) -> fx.GraphModule:
        return passes.run(self.module(), self.pipeline(bucketing))


class _Writer:
    """Writes a graph's lines, and each parameter's markers at most once."""

    def __init__(self, params: Sequence[Param]) -> None:
        self.params = params
        self.lines: list[str] = []
        self.values = ["x", "y"]  # activations, f32[3]
        self.grads: list[str] = []
        self._gathered: set[int] = set()
        self._reduced: set[int] = set()

    def gather(self, n: int) -> None:
        if n in self._gathered:
            return
        self._gathered.add(n)
        param, shard = self.params[n], f"p{n}"
        if param.viewed:
            shard = f"v{n}"
            size = [local_rows(param.rows, WORLD, 0), param.cols]
            self.lines.append(f"%v{n}: {param.shard} = aten.view(%p{n}, {size})")
        self.lines.append(
            f"%u{n}: {param.whole} = autoshard.unshard"
            f"(%{shard}, '{param.whole}', '{group()}', False, {n})"
        )

    def compute(self, n: int, value: int) -> None:
        """Read the whole parameter."""
        self.gather(n)
        name = self._fresh("s")
        self.lines.append(f"%{name}: f32[] = aten.sum(%u{n}, dtype=torch.float32)")
        self._add(value, name)

    def mix(self, one: int, other: int) -> None:
        """Read activations alone."""
        self._add(one, self.values[other % len(self.values)])

    def reduce(self, n: int, value: int) -> None:
        """Make a gradient from an activation, and from the whole parameter if it is there."""
        if n in self._reduced:
            return
        self._reduced.add(n)
        param, at = self.params[n], self.values[value % len(self.values)]
        dtype, size = DTYPES[param.dtype], [param.rows, param.cols]
        self.lines.append(f"%t{n}: {param.dtype}[] = aten.sum(%{at}, dtype={dtype})")
        if n in self._gathered:
            self.lines.append(f"%g{n}: {param.whole} = aten.mul.Tensor(%u{n}, %t{n})")
        else:
            self.lines.append(f"%g{n}: {param.whole} = aten.expand(%t{n}, {size})")
        self._reduce(n, f"g{n}")

    def reduce_input(self, n: int) -> None:
        """Reduce a gradient that is an input of the graph."""
        if n in self._reduced:
            return
        self._reduced.add(n)
        self._reduce(n, f"d{n}")

    def read_grad(self, value: int) -> None:
        """Compute with a gradient that is reduced."""
        if not self.grads:
            return
        name = self._fresh("s")
        grad = self.grads[value % len(self.grads)]
        self.lines.append(f"%{name}: f32[] = aten.sum(%{grad}, dtype=torch.float32)")
        self._add(value, name)

    def text(self, outputs: Sequence[int]) -> str:
        inputs = [f"in %p{n}: {p.flat if p.viewed else p.shard}" for n, p in enumerate(self.params)]
        inputs += [f"in %d{n}: {p.whole}" for n, p in enumerate(self.params)]
        results = [f"%{self.values[n % len(self.values)]}" for n in outputs]
        results += [f"%{grad}" for grad in self.grads]
        results += [f"%u{n}" for n in outputs if n in self._gathered]
        body = "\n".join([*inputs, "in %x: f32[3]", "in %y: f32[3]", *self.lines])
        return f"{body}\nreturn [{', '.join(results)}]\n"

    def _reduce(self, n: int, grad: str) -> None:
        param = self.params[n]
        self.lines.append(
            f"%r{n}: {param.shard} = autoshard.reduce_grad"
            f"(%{grad}, '{param.whole}', '{group()}', {n})"
        )
        self.grads.append(f"r{n}")

    def _add(self, value: int, other: str) -> None:
        name = self._fresh("a")
        at = self.values[value % len(self.values)]
        self.lines.append(f"%{name}: f32[3] = aten.add.Tensor(%{at}, %{other})")
        self.values.append(name)

    def _fresh(self, prefix: str) -> str:
        return f"{prefix}{len(self.lines)}"


INDEX = st.integers(0, 7)
PARAM = st.builds(
    Param,
    unit=st.integers(0, 4),
    dtype=st.sampled_from(["f32", "bf16"]),
    rows=st.integers(1, 5),
    cols=st.integers(1, 3),
    viewed=st.booleans(),
)


KINDS = st.sampled_from(
    [*["compute", "reduce"] * 3, "gather", "mix", "reduce_input", "read_grad", "read_grad"]
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Straight-line graphs: whole parameters and activations mixed, gradients reduced."""
    params = draw(_lists(PARAM, 1, 6))
    writer = _Writer(params)
    for kind, n, value in draw(_lists(st.tuples(KINDS, INDEX, INDEX), 0, 24)):
        n %= len(params)
        if kind == "gather":
            writer.gather(n)
        elif kind == "compute":
            writer.compute(n, value)
        elif kind == "mix":
            writer.mix(n, value)
        elif kind == "reduce":
            writer.reduce(n, value)
        elif kind == "reduce_input":
            writer.reduce_input(n)
        else:
            writer.read_grad(value)
    return Program(writer.text(draw(st.lists(INDEX, max_size=3))), tuple(params))


def _lists(elements: st.SearchStrategy[Any], least: int, most: int) -> st.SearchStrategy[Any]:
    """Lists of every length alike; `st.lists` by itself makes mostly short ones."""
    lengths = st.integers(least, most)
    return lengths.flatmap(lambda length: st.lists(elements, min_size=length, max_size=length))


BUCKETINGS = st.sampled_from(
    [
        "per_unit",
        "none",
        "auto",
        [],
        ["layers.0", ["layers.1", "layers.2"]],
        [["layers.0", "layers.1", "layers.2", "layers.3"]],
        [["layers.0.w0", "layers.1"], "layers.0"],
        ["layers.1.w1", "absent"],
    ]
)


def module(text: str) -> fx.GraphModule:
    return fx.GraphModule(nn.Module(), parse(text))


def small(text: str, **groups: str) -> fx.GraphModule:
    """A hand-written graph; GROUP stands for the group of all ranks."""
    text = textwrap.dedent(text).lstrip()
    for name, value in {**groups, "GROUP": group()}.items():
        text = text.replace(name, repr(value))
    return module(text)


def is_compute(node: fx.Node) -> bool:
    """Whether `node` is neither an input, a marker, nor part of a collective."""
    if node.op in ("placeholder", "output") or is_marker(node) or is_launch(node) or is_wait(node):
        return False
    return not (node.target is operator.getitem and is_wait(node.args[0]))  # type: ignore[arg-type]


def is_view_of_shard(node: fx.Node) -> bool:
    return node.name.startswith("v")


def named(graph: fx.Graph, name: str) -> fx.Node:
    (found,) = (node for node in graph.nodes if node.name == name)
    return found


@quick
@given(programs(), BUCKETINGS)
def test_input_is_untouched(program: Program, bucketing: Any) -> None:
    gm = program.module()
    assert render(gm.graph) == program.text
    passes.run(gm, program.pipeline(bucketing))
    assert render(gm.graph) == program.text
    assert not gm.meta
    assert not any(SOURCE.get(node) for node in gm.graph.nodes)


@quick
@given(programs(), BUCKETINGS)
def test_every_collective_is_launched_and_waited_for_once(program: Program, bucketing: Any) -> None:
    before = program.module().graph
    gm = program.planned(bucketing)
    gm.graph.lint()
    verify(gm)
    assert not any(map(is_marker, gm.graph.nodes))
    launches = [bucket_of(node) for node in gm.graph.nodes if is_launch(node)]
    waits = [bucket_of(node) for node in gm.graph.nodes if is_wait(node)]
    plan = plan_of(gm)
    assert sorted(launches) == sorted(waits) == list(range(len(plan.buckets)))
    for kind, is_kind in (("gather", is_unshard), ("reduce", is_reduce_grad)):
        wanted = [param_of(n) for n in before.nodes if is_kind(n) and (n.users or kind == "reduce")]
        planned = [n for bucket in plan.buckets if bucket.kind == kind for n in bucket.params]
        assert sorted(planned) == sorted(wanted)
    for bucket in plan.buckets:
        members = read_members(bucket.members)
        assert bucket.names == tuple(program.table[n].name for n in bucket.params)
        assert [str(member) for member in members] == [
            program.params[n].whole for n in bucket.params
        ]
        assert len({member.dtype for member in members}) == 1


@quick
@given(programs(), BUCKETINGS)
def test_compute_keeps_its_order(program: Program, bucketing: Any) -> None:
    before = [n for n in program.module().graph.nodes if is_compute(n)]
    after = [n for n in program.planned(bucketing).graph.nodes if is_compute(n)]
    assert [(n.name, n.target) for n in after if not is_view_of_shard(n)] == [
        (n.name, n.target) for n in before if not is_view_of_shard(n)
    ]
    assert sorted(map(str, after)) == sorted(map(str, before))


class Ranks(fx.Interpreter):
    """Runs a graph on rank 0 as if rank 1 held each shard plus one, and the same gradients."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.in_flight: dict[int, list[Tensor]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            assert shapes(n.meta["val"]) == shapes(result), n.name
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ops.unshard:
            return _gathered([args[0]], args[1])[0]
        if target is ops.reduce_grad:
            return _reduced([args[0]], args[1])[0]
        if target in (ops.launch_gather, ops.launch_reduce):
            collective = _gathered if target is ops.launch_gather else _reduced
            assert args[3] not in self.in_flight
            self.in_flight[args[3]] = collective(args[0], args[1])
            return torch.empty(1, dtype=torch.uint8)
        if target in (ops.wait_gather, ops.wait_reduce):
            return self.in_flight.pop(args[3])
        return super().call_function(target, args, kwargs)


def shapes(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [shapes(each) for each in value]
    return value.dtype, tuple(value.shape)


def _gathered(shards: Sequence[Tensor], members: str) -> list[Tensor]:
    return [
        torch.cat([shard, shard + 1])[: member.rows]
        for shard, member in zip(shards, read_members(members), strict=True)
    ]


def _reduced(grads: Sequence[Tensor], members: str) -> list[Tensor]:
    return [
        grad[: member.local_rows(WORLD, 0)] / WORLD
        for grad, member in zip(grads, read_members(members), strict=True)
    ]


@quick
@given(programs(), BUCKETINGS)
def test_values_are_the_same(program: Program, bucketing: Any) -> None:
    gm = program.module()
    inputs = []
    for number, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        val = node.meta["val"]
        inputs.append((torch.arange(val.numel()) % 5 + number).to(val.dtype).view(val.shape))
    want = Ranks(gm).run(*inputs)
    ranks = Ranks(program.planned(bucketing))
    got = ranks.run(*inputs)
    assert not ranks.in_flight
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def plan_of(gm: fx.GraphModule) -> Plan:
    plan = PLAN.get(gm)
    return plan if plan is not None else Plan("", "", 0, (), ())


def events_of(gm: fx.GraphModule, kind: str) -> list[tuple[str, int]]:
    return [
        ("launch" if is_launch(node) else "wait", bucket_of(node))
        for node in gm.graph.nodes
        if (is_launch(node) or is_wait(node)) and kind_of(node) == kind
    ]


def readers(value: fx.Node) -> set[fx.Node]:
    """The nodes that read what a wait returns."""
    return {user for result in value.users for user in result.users}


@quick
@given(programs(), BUCKETINGS)
def test_gathers_follow_first_use_one_ahead(program: Program, bucketing: Any) -> None:
    gm = program.planned(bucketing)
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    count = sum(is_launch(node) and kind_of(node) == "gather" for node in gm.graph.nodes)
    buckets = [bucket for what, bucket in events_of(gm, "gather") if what == "launch"]
    waits = [n for n in gm.graph.nodes if is_wait(n) and kind_of(n) == "gather"]
    assert [bucket_of(wait) for wait in waits] == buckets
    first_uses = [min(order[reader] for reader in readers(wait)) for wait in waits]
    assert first_uses == sorted(first_uses)
    for wait, first_use in zip(waits, first_uses, strict=True):
        between = list(gm.graph.nodes)[order[wait] : first_use]
        assert not any(map(is_compute, between)), "waited for before it is needed"
    expected: list[tuple[str, int]] = []
    for n in range(count):
        expected.append(("launch", buckets[n]))
        if n:
            expected.append(("wait", buckets[n - 1]))
    if count:
        expected.append(("wait", buckets[-1]))
    assert events_of(gm, "gather") == expected


@quick
@given(programs(), BUCKETINGS)
def test_reduces_follow_readiness(program: Program, bucketing: Any) -> None:
    gm = program.planned(bucketing)
    nodes = list(gm.graph.nodes)
    order = {node: number for number, node in enumerate(nodes)}
    ready = []
    for launch in nodes:
        if not is_launch(launch) or kind_of(launch) != "reduce":
            continue
        last = max(launch.all_input_nodes, key=order.__getitem__)
        between = nodes[order[last] + 1 : order[launch]]
        if last.op != "placeholder":
            assert not any(map(is_compute, between)), "launched later than it could be"
        ready.append(order[last] if last.op != "placeholder" else -1)
    assert ready == sorted(ready)


@quick
@given(programs(), BUCKETINGS)
def test_at_most_two_are_in_flight(program: Program, bucketing: Any) -> None:
    gm = program.planned(bucketing)
    for kind in ("gather", "reduce"):
        in_flight: set[int] = set()
        for what, bucket in events_of(gm, kind):
            if what == "launch":
                in_flight.add(bucket)
            else:
                in_flight.remove(bucket)
            assert len(in_flight) <= 2
        assert not in_flight


@quick
@given(programs())
def test_one_gather_a_unit_and_dtype(program: Program) -> None:
    used = [
        program.params[param_of(node)]
        for node in program.module().graph.nodes
        if is_unshard(node) and node.users
    ]
    plan = plan_of(program.planned("per_unit"))
    gathers = [bucket for bucket in plan.buckets if bucket.kind == "gather"]
    assert len(gathers) == len({(param.unit, param.dtype) for param in used})
    plan = plan_of(program.planned("none"))
    gathers = [bucket for bucket in plan.buckets if bucket.kind == "gather"]
    assert len(gathers) == len(used)


@quick
@given(programs(), BUCKETINGS)
def test_again_changes_nothing(program: Program, bucketing: Any) -> None:
    gm = program.planned(bucketing)
    again = passes.run(gm, program.pipeline(bucketing))
    assert render(again.graph) == render(gm.graph)
    assert PLAN.get(again) == PLAN.get(gm)


@quick
@given(programs(), BUCKETINGS)
def test_text_of_every_stage_is_read_back(program: Program, bucketing: Any) -> None:
    texts: list[str] = []
    passes.run(
        program.module(),
        program.pipeline(bucketing),
        after_each=lambda name, gm: texts.append(render(gm.graph)),
    )
    assert len(texts) == len(program.pipeline(bucketing))
    for text in texts:
        assert render(parse(text)) == text


@quick
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


def _reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reversed_keys(value[key]) for key in reversed(value)}
    return [_reversed_keys(each) for each in value] if isinstance(value, list) else value


STEP = """
in %p0: f32[4,2]
in %p1: bf16[4]
in %p2: f32[1,3]
in %x: f32[3]
%u0: f32[7,2] = autoshard.unshard(%p0, 'f32[7,2]', GROUP, False, 0)
%u1: bf16[8] = autoshard.unshard(%p1, 'bf16[8]', GROUP, False, 1)
%u2: f32[2,3] = autoshard.unshard(%p2, 'f32[2,3]', GROUP, False, 2)
%s0: f32[] = aten.sum(%u0)
%a: f32[3] = aten.add.Tensor(%x, %s0)
%s1: f32[] = aten.sum(%u1, dtype=torch.float32)
%b: f32[3] = aten.add.Tensor(%a, %s1)
%s2: f32[] = aten.sum(%u2)
%c: f32[3] = aten.add.Tensor(%b, %s2)
%g: f32[2,3] = aten.expand(%c, [2, 3])
%r: f32[1,3] = autoshard.reduce_grad(%g, 'f32[2,3]', GROUP, 2)
return [%c, %r]
"""
STEP_TABLE = [
    ParamInfo("first.w", "first", "shard"),
    ParamInfo("first.b", "first", "shard"),
    ParamInfo("second.w", "second", "shard"),
]


def step() -> fx.GraphModule:
    transforms = passes.pipeline(STEP_TABLE, graph="forward", bucketing="per_unit")
    return passes.run(small(STEP), transforms)


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
        %wait_gather_first: (f32[7,2]) = \
autoshard.wait_gather(%launch_gather_first, 'f32[7,2]', 'shard', 0)  # first
        %whole_first_w: f32[7,2] = getitem(%wait_gather_first, 0)  # first.w
        %s0: f32[] = aten.sum(%whole_first_w)
        %a: f32[3] = aten.add.Tensor(%x, %s0)
        %launch_gather_second: u8[1] = \
autoshard.launch_gather([%second_w], 'f32[2,3]', 'shard', 2)  # second
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
        %launch_reduce_second: u8[1] = \
autoshard.launch_reduce([%g], 'f32[2,3]', 'shard', 3)  # second
        %wait_reduce_second: (f32[1,3]) = \
autoshard.wait_reduce(%launch_reduce_second, 'f32[2,3]', 'shard', 3)  # second
        %grad_second_w: f32[1,3] = getitem(%wait_reduce_second, 0)  # second.w
        return [%c, %grad_second_w]
        """
    assert render(gm.graph, axes={group(): "shard"}) == textwrap.dedent(want).lstrip()


def test_digest_is_the_same_in_another_process() -> None:
    """Another hash seed is another order of sets: no such order may reach the plan."""
    script = f"""
import torch.distributed as dist
from torch import fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
import autoshard
from autoshard import passes
from autoshard.passes.meta import PLAN, ParamInfo
from autoshard.passes.text import parse, render
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


def planned(text: str, *names: str, graph: str = "forward") -> fx.GraphModule:
    """`text` through the pipeline; each name's unit is what stands before its last dot."""
    table = [ParamInfo(name, name.rpartition(".")[0] or "root", "shard") for name in names]
    return passes.run(small(text), passes.pipeline(table, graph=graph, bucketing="per_unit"))


def test_unused_parameter_is_not_gathered() -> None:
    gm = planned(
        """
        in %p0: f32[4,2]
        in %x: f32[3]
        %u0: f32[7,2] = autoshard.unshard(%p0, 'f32[7,2]', GROUP, False, 0)
        %a: f32[3] = aten.relu(%x)
        return [%a]
        """,
        "layers.0.w",
    )
    assert [node.name for node in gm.graph.nodes if is_compute(node)] == ["a"]
    assert not any(is_launch(node) or is_marker(node) for node in gm.graph.nodes)


def test_unused_gradient_is_reduced() -> None:
    """Another rank may read it, and would wait for this one."""
    gm = planned(
        """
        in %g: f32[7,2]
        %r: f32[4,2] = autoshard.reduce_grad(%g, 'f32[7,2]', GROUP, 0)
        return []
        """,
        "layers.0.w",
    )
    assert events_of(gm, "reduce") == [("launch", 0), ("wait", 0)]


def test_shards_made_by_views() -> None:
    gm = planned(
        """
        in %p0: f32[8]
        in %x: f32[3]
        %a: f32[3] = aten.relu(%x)
        %v: f32[4,2] = aten.view(%p0, [4, 2])
        %v2: f32[4,2] = aten.alias(%v)
        %u0: f32[7,2] = autoshard.unshard(%v2, 'f32[7,2]', GROUP, False, 0)
        %s0: f32[] = aten.sum(%u0)
        %u1: f32[7,2] = autoshard.unshard(%v, 'f32[7,2]', GROUP, False, 1)
        %s1: f32[] = aten.sum(%u1)
        return [%a, %s0, %s1]
        """,
        "layers.0.w",
        "layers.1.w",
    )
    names = [node.name for node in gm.graph.nodes]
    assert names[2:6] == ["v", "v2", "launch_gather_layers_0", "a"]


@pytest.mark.parametrize(
    "names",
    [("s0", "s1"), ("a.b", "a_b"), ("x", "p0"), ("t", "whole_t"), ("in-proj.w", "0.w")],
)
def test_names_that_are_taken_or_not_allowed(names: tuple[str, str]) -> None:
    gm = planned(
        """
        in %p0: f32[4,2]
        in %p1: f32[4,2]
        in %x: f32[3]
        %u0: f32[7,2] = autoshard.unshard(%p0, 'f32[7,2]', GROUP, False, 0)
        %u1: f32[7,2] = autoshard.unshard(%p1, 'f32[7,2]', GROUP, False, 1)
        %s0: f32[] = aten.sum(%u0)
        %s1: f32[] = aten.sum(%u1)
        return [%s0, %s1, %x]
        """,
        *names,
    )
    found = [node.name for node in gm.graph.nodes]
    assert len(set(found)) == len(found)
    assert all(name.isidentifier() for name in found)
    assert render(parse(render(gm.graph))) == render(gm.graph)


def test_parameter_read_twice_is_gathered_once() -> None:
    """In an inference graph: no other pass has merged its markers."""
    gm = planned(
        """
        in %p0: f32[4,2]
        %u0: f32[7,2] = autoshard.unshard(%p0, 'f32[7,2]', GROUP, False, 0)
        %s0: f32[] = aten.sum(%u0)
        %u1: f32[7,2] = autoshard.unshard(%p0, 'f32[7,2]', GROUP, False, 0)
        %s1: f32[] = aten.sum(%u1)
        return [%s0, %s1]
        """,
        "embed.weight",
        graph="inference",
    )
    assert events_of(gm, "gather") == [("launch", 0), ("wait", 0)]


def test_group_of_one_rank_has_no_collectives(group_of_one: str) -> None:
    gm = small(
        """
        in %p0: f32[7,2]
        in %g: f32[7,2]
        %u0: f32[7,2] = autoshard.unshard(%p0, 'f32[7,2]', ALONE, False, 0)
        %s0: f32[] = aten.sum(%u0)
        %r: f32[7,2] = autoshard.reduce_grad(%g, 'f32[7,2]', ALONE, 0)
        return [%s0, %r]
        """,
        ALONE=group_of_one,
    )
    table = [ParamInfo("w", "root", "shard")]
    gm = passes.run(gm, passes.pipeline(table, graph="backward", bucketing="per_unit"))
    assert render(gm.graph) == textwrap.dedent(
        """\
        in %p0: f32[7,2]
        in %g: f32[7,2]
        %s0: f32[] = aten.sum(%p0)
        return [%s0, %g]
        """
    )


BROKEN = {
    "missing wait": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        return [%w]
        """,
        r"%ticket must go to one wait but goes to nothing",
    ),
    "wait used twice": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %one: (f32[8]) = autoshard.wait_gather(%ticket, 'f32[8]', GROUP, 0)
        %two: (f32[8]) = autoshard.wait_gather(%ticket, 'f32[8]', GROUP, 0)
        return [%one, %two]
        """,
        r"%ticket must go to one wait but goes to %one, %two",
    ),
    "ticket read": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        return [%ticket]
        """,
        r"%ticket must go to one wait but goes to %output",
    ),
    "wrong bucket": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %got: (f32[8]) = autoshard.wait_gather(%ticket, 'f32[8]', GROUP, 1)
        return [%got]
        """,
        r"%ticket and its wait %got differ in bucket: 0 and 1",
    ),
    "wrong members": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %got: (f32[7]) = autoshard.wait_gather(%ticket, 'f32[7]', GROUP, 0)
        return [%got]
        """,
        r"%ticket and its wait %got differ in members: 'f32\[8\]' and 'f32\[7\]'",
    ),
    "wrong group": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %got: (f32[8]) = autoshard.wait_gather(%ticket, 'f32[8]', 'another', 0)
        return [%got]
        """,
        r"%ticket and its wait %got differ in group",
    ),
    "wrong kind": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %got: (f32[4]) = autoshard.wait_reduce(%ticket, 'f32[8]', GROUP, 0)
        return [%got]
        """,
        r"%ticket and its wait %got differ in kind: 'gather' and 'reduce'",
    ),
    "no launch": (
        """
        in %ticket: u8[1]
        %got: (f32[8]) = autoshard.wait_gather(%ticket, 'f32[8]', GROUP, 0)
        return [%got]
        """,
        r"%got waits for ticket, which is no launch",
    ),
    "bucket launched twice": (
        """
        in %w: f32[4]
        %one: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %got: (f32[8]) = autoshard.wait_gather(%one, 'f32[8]', GROUP, 0)
        %two: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %more: (f32[8]) = autoshard.wait_gather(%two, 'f32[8]', GROUP, 0)
        return [%got, %more]
        """,
        r"%two launches bucket 0 a second time",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_graph_is_rejected(name: str) -> None:
    text, message = BROKEN[name]
    with pytest.raises(ValueError, match=message):
        verify(small(text))


def test_order_against_the_plan_is_rejected() -> None:
    gm = step()
    verify(gm)
    late = named(gm.graph, "launch_gather_first_1")
    named(gm.graph, "s0").prepend(late)  # valid but for the plan, which launches it before a wait
    gm.graph.lint()
    with pytest.raises(ValueError, match=r"%(launch|wait)_gather_first.*plan"):
        verify(gm)


def test_missing_bucket_of_the_plan_is_rejected() -> None:
    gm = step()
    results = named(gm.graph, "grad_second_w")
    results.replace_all_uses_with(named(gm.graph, "second_w"))
    for name in ("grad_second_w", "wait_reduce_second", "launch_reduce_second"):
        gm.graph.erase_node(named(gm.graph, name))
    gm.graph.lint()
    with pytest.raises(ValueError, match="plan"):
        verify(gm)


def test_pass_that_breaks_the_graph_is_named() -> None:
    def forget_a_wait(gm: fx.GraphModule) -> fx.GraphModule:
        wait = named(gm.graph, "wait_reduce_second")
        named(gm.graph, "grad_second_w").replace_all_uses_with(named(gm.graph, "second_w"))
        gm.graph.erase_node(named(gm.graph, "grad_second_w"))
        gm.graph.erase_node(wait)
        return gm

    with pytest.raises(PassError, match=r"forget_a_wait .*%launch_reduce_second"):
        passes.run(step(), (forget_a_wait,))


def test_observer_sees_every_pass() -> None:
    seen: list[str] = []
    transforms = passes.pipeline(STEP_TABLE, graph="forward", bucketing="none")
    passes.run(small(STEP), transforms, after_each=lambda name, gm: seen.append(name))
    assert seen[-2:] == ["plan_buckets", "insert_collectives"]
    assert len(seen) == len(transforms)


def after(text: str, transform: Callable[[fx.GraphModule], fx.GraphModule]) -> str:
    return render(passes.run(small(text), (transform,)).graph, axes={group(): "GROUP"}).replace(
        "'GROUP'", "GROUP"
    )


def dedent(text: str) -> str:
    return textwrap.dedent(text).lstrip()


TIED = """
    in %w: f32[4,2]
    in %x: f32[2]
    in %tangent: f32[7]
    %embed: f32[7,2] = autoshard.unshard(%w, 'f32[7,2]', GROUP, False, 0)
    %a: f32[7] = aten.mv(%embed, %x)
    %head: f32[7,2] = autoshard.unshard(%w, 'f32[7,2]', GROUP, False, 0)
    %b: f32[7] = aten.mv(%head, %x)
    %g: f32[7,2] = aten.outer(%tangent, %x)
    %r: f32[4,2] = autoshard.reduce_grad(%g, 'f32[7,2]', GROUP, 0)
    %h: f32[7,2] = aten.outer(%b, %x)
    %q: f32[4,2] = autoshard.reduce_grad(%h, 'f32[7,2]', GROUP, 0)
    %add: f32[4,2] = aten.add.Tensor(%r, %q)
    return [%a, %b, %add]
    """


def test_tied_parameter_is_merged() -> None:
    assert after(TIED, passes.merge_markers) == dedent(
        """
        in %w: f32[4,2]
        in %x: f32[2]
        in %tangent: f32[7]
        %embed: f32[7,2] = autoshard.unshard(%w, 'f32[7,2]', GROUP, False, 0)
        %a: f32[7] = aten.mv(%embed, %x)
        %b: f32[7] = aten.mv(%embed, %x)
        %g: f32[7,2] = aten.outer(%tangent, %x)
        %h: f32[7,2] = aten.outer(%b, %x)
        %add_tensor: f32[7,2] = aten.add.Tensor(%g, %h)
        %reduce_grad_default: f32[4,2] = \
autoshard.reduce_grad(%add_tensor, 'f32[7,2]', GROUP, 0)
        return [%a, %b, %reduce_grad_default]
        """
    )


def test_three_uses_are_merged() -> None:
    text = """
        in %w: f32[4]
        in %x: f32[7]
        %u0: f32[7] = autoshard.unshard(%w, 'f32[7]', GROUP, False, 3)
        %u1: f32[7] = autoshard.unshard(%w, 'f32[7]', GROUP, False, 3)
        %u2: f32[7] = autoshard.unshard(%w, 'f32[7]', GROUP, False, 3)
        %a: f32[7] = aten.mul.Tensor(%u0, %x)
        %b: f32[7] = aten.mul.Tensor(%u1, %x)
        %c: f32[7] = aten.mul.Tensor(%u2, %x)
        %r0: f32[4] = autoshard.reduce_grad(%a, 'f32[7]', GROUP, 3)
        %r1: f32[4] = autoshard.reduce_grad(%b, 'f32[7]', GROUP, 3)
        %add: f32[4] = aten.add.Tensor(%r0, %r1)
        %r2: f32[4] = autoshard.reduce_grad(%c, 'f32[7]', GROUP, 3)
        %add_1: f32[4] = aten.add.Tensor(%add, %r2)
        return [%add_1]
        """
    gm = passes.run(small(text), (passes.merge_markers,))
    assert sum(map(is_unshard, gm.graph.nodes)) == 1
    (reduce,) = filter(is_reduce_grad, gm.graph.nodes)
    assert gm.graph.output_node().args[0] == [reduce]
    assert [str(node) for node in gm.graph.nodes if node.target is torch.ops.aten.add.Tensor] == [
        "add_tensor",
        "add_tensor_1",
    ]
    assert named(gm.graph, "add_tensor_1").args == (
        named(gm.graph, "add_tensor"),
        named(gm.graph, "c"),
    )


def test_gradient_added_to_itself_is_merged() -> None:
    text = """
        in %g: f32[7]
        %r: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', GROUP, 0)
        %add: f32[4] = aten.add.Tensor(%r, %r)
        return [%add]
        """
    assert after(text, passes.merge_markers) == dedent(
        """
        in %g: f32[7]
        %add_tensor: f32[7] = aten.add.Tensor(%g, %g)
        %reduce_grad_default: f32[4] = autoshard.reduce_grad(%add_tensor, 'f32[7]', GROUP, 0)
        return [%reduce_grad_default]
        """
    )


NOTHING_TO_MERGE = {
    "no markers": """
        in %x: f32[4]
        %add: f32[4] = aten.add.Tensor(%x, %x)
        return [%add]
        """,
    "two parameters": """
        in %w: f32[4]
        in %v: f32[4]
        in %x: f32[7]
        %u0: f32[7] = autoshard.unshard(%w, 'f32[7]', GROUP, False, 0)
        %u1: f32[7] = autoshard.unshard(%v, 'f32[7]', GROUP, False, 1)
        %r0: f32[4] = autoshard.reduce_grad(%u0, 'f32[7]', GROUP, 0)
        %r1: f32[4] = autoshard.reduce_grad(%u1, 'f32[7]', GROUP, 1)
        %add: f32[4] = aten.add.Tensor(%r0, %r1)
        return [%add]
        """,
    "a summand that others read": """
        in %g: f32[7]
        in %h: f32[7]
        %r0: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', GROUP, 0)
        %r1: f32[4] = autoshard.reduce_grad(%h, 'f32[7]', GROUP, 0)
        %add: f32[4] = aten.add.Tensor(%r0, %r1)
        return [%add, %r0]
        """,
    "a weighted sum": """
        in %g: f32[7]
        in %h: f32[7]
        %r0: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', GROUP, 0)
        %r1: f32[4] = autoshard.reduce_grad(%h, 'f32[7]', GROUP, 0)
        %add: f32[4] = aten.add.Tensor(%r0, %r1, alpha=2)
        return [%add]
        """,
    "a sum with something else": """
        in %g: f32[7]
        in %x: f32[4]
        %r0: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', GROUP, 0)
        %add: f32[4] = aten.add.Tensor(%r0, %x)
        return [%add]
        """,
}


@pytest.mark.parametrize("name", NOTHING_TO_MERGE)
def test_nothing_to_merge(name: str) -> None:
    text = NOTHING_TO_MERGE[name]
    assert after(text, passes.merge_markers) == dedent(text)


def test_merging_again_changes_nothing() -> None:
    once = passes.run(small(TIED), (passes.merge_markers,))
    again = passes.run(once, (passes.merge_markers,))
    assert render(again.graph) == render(once.graph)


def test_merging_keeps_values(group_of_one: str) -> None:
    """Alone in its group a rank's markers are copies, which really run."""
    text = TIED.replace("GROUP", "ALONE").replace("f32[4,2]", "f32[7,2]")
    gm = small(text, ALONE=group_of_one)
    merged = passes.run(gm, (passes.merge_markers,))
    inputs = [torch.arange(14.0).view(7, 2), torch.tensor([2.0, 3.0]), torch.arange(7.0)]
    want = fx.Interpreter(gm).run(*inputs)
    got = fx.Interpreter(merged).run(*inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)  # small integers: exact in any order


def tags(text: str) -> dict[str, CheckpointPolicy | None]:
    gm = passes.run(small(text), (passes.tag_recompute,))
    assert render(gm.graph) == render(small(text).graph)
    return {
        node.name: node.meta.get("recompute")
        for node in gm.graph.nodes
        if node.op == "call_function"
    }


RECOMPUTE, SAVE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def test_resharded_parameter_is_recomputed_and_all_it_determines() -> None:
    assert tags(
        """
        in %w: f32[4,2]
        in %b: f32[4]
        in %x: f32[3,2]
        %u0: f32[7,2] = autoshard.unshard(%w, 'f32[7,2]', GROUP, False, 0)
        %t: f32[2,7] = aten.t(%u0)
        %cast: bf16[2,7] = aten._to_copy(%t, dtype=torch.bfloat16)
        %back: f32[2,7] = aten._to_copy(%cast, dtype=torch.float32)
        %u1: f32[7] = autoshard.unshard(%b, 'f32[7]', GROUP, False, 1)
        %both: f32[2,7] = aten.add.Tensor(%back, %u1)
        %halves: (f32[2,4], f32[2,3]) = aten.split.Tensor(%both, 4, 1)
        %half: f32[2,4] = getitem(%halves, 0)
        %y: f32[3,7] = aten.mm(%x, %both)
        %z: f32[3,7] = aten.add.Tensor(%y, %u1)
        %relu: f32[3,7] = aten.relu(%z)
        %noise: f32[7,2] = aten.rand_like(%u0)
        %drop: f32[7,2] = aten.mul.Tensor(%u0, %noise)
        return [%relu, %half, %drop]
        """
    ) == {
        "u0": RECOMPUTE,
        "t": RECOMPUTE,
        "cast": RECOMPUTE,
        "back": RECOMPUTE,
        "u1": RECOMPUTE,
        "both": RECOMPUTE,
        "halves": RECOMPUTE,
        "half": RECOMPUTE,
        "y": None,  # from here on an activation is in it
        "z": None,
        "relu": None,
        "noise": None,  # drawn again, it would be another
        "drop": None,
    }


def test_kept_parameter_is_saved() -> None:
    assert tags(
        """
        in %w: f32[4,2]
        in %b: f32[4]
        %kept: f32[7,2] = autoshard.unshard(%w, 'f32[7,2]', GROUP, True, 0)
        %t: f32[2,7] = aten.t(%kept)
        %freed: f32[7] = autoshard.unshard(%b, 'f32[7]', GROUP, False, 1)
        %twice: f32[7] = aten.mul.Tensor(%freed, 2)
        %both: f32[2,7] = aten.add.Tensor(%t, %twice)
        return [%both]
        """
    ) == {"kept": SAVE, "t": None, "freed": RECOMPUTE, "twice": RECOMPUTE, "both": None}


def test_views_between_input_and_marker_are_recomputed() -> None:
    assert tags(
        """
        in %w: f32[8]
        in %x: f32[3]
        %view: f32[4,2] = aten.view(%w, [4, 2])
        %alias: f32[4,2] = aten.alias(%view)
        %other: f32[3] = aten.alias(%x)
        %u0: f32[7,2] = autoshard.unshard(%alias, 'f32[7,2]', GROUP, False, 0)
        return [%u0, %other]
        """
    ) == {"view": RECOMPUTE, "alias": RECOMPUTE, "other": None, "u0": RECOMPUTE}


def test_nothing_to_tag() -> None:
    assert tags(
        """
        in %x: f32[3]
        in %g: f32[7]
        %relu: f32[3] = aten.relu(%x)
        %ones: f32[3] = aten.ones([3])
        %r: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', GROUP, 0)
        return [%relu, %ones, %r]
        """
    ) == {"relu": None, "ones": None, "r": None}


def test_tags_have_one_region() -> None:
    """The partitioner saves what leaves its region for a higher one."""
    gm = passes.run(small(STEP), (passes.tag_recompute,))
    regions = {n.meta["ac_graph_id"] for n in gm.graph.nodes if "recompute" in n.meta}
    assert len(regions) == 1
