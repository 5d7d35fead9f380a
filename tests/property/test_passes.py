"""What every pass must keep, whatever the graph: order, values, and one wait for each launch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.programs import (
    BUCKETINGS,
    WORLD,
    Program,
    events_of,
    is_compute,
    plan_of,
    programs,
)
from torch import Tensor, fx

from autoshard import passes
from autoshard.passes.ir import ops
from autoshard.passes.ir.layout import read_members
from autoshard.passes.ir.match import (
    bucket_of,
    is_barrier,
    is_launch,
    is_marker,
    is_pack,
    is_reduce_grad,
    is_unshard,
    is_wait,
    kind_of,
    param_of,
)
from autoshard.passes.ir.meta import PLAN, SOURCE
from autoshard.passes.ir.text import parse, render
from autoshard.passes.ir.verify import verify
from autoshard.passes.plans.fusion import is_pointwise
from autoshard.passes.plans.values import is_view

pytestmark = pytest.mark.usefixtures("process_group")


WITH_BARRIERS = programs(more=["exchange", "exchange"])


@given(programs(), BUCKETINGS)
def test_input_is_untouched(program: Program, bucketing: Any) -> None:
    gm = program.module()
    assert render(gm.graph) == program.text
    passes.run(gm, program.pipeline(bucketing))
    assert render(gm.graph) == program.text
    assert not gm.meta
    assert not any(SOURCE.get(node) for node in gm.graph.nodes)


@given(st.one_of(programs(), WITH_BARRIERS), BUCKETINGS)
def test_every_collective_is_launched_and_waited_for_once(program: Program, bucketing: Any) -> None:
    """D-75."""
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


def is_view_of_shard(node: fx.Node) -> bool:
    return node.name.startswith("v")


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
        if target in (ops.launch_gather, ops.pack_grads):
            collective = _gathered if target is ops.launch_gather else _reduced
            assert args[3] not in self.in_flight
            self.in_flight[args[3]] = collective(args[0], args[1])
            return torch.empty(1, dtype=torch.uint8)
        if target is ops.launch_reduce:
            assert args[3] in self.in_flight
            return args[0].clone()
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


@given(st.one_of(programs(), WITH_BARRIERS), BUCKETINGS)
def test_values_are_the_same(program: Program, bucketing: Any) -> None:
    """D-62."""
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


def readers(value: fx.Node) -> set[fx.Node]:
    """The nodes that read what a wait returns."""
    return {user for result in value.users for user in result.users}


@given(programs(), BUCKETINGS)
def test_gathers_follow_first_use_one_ahead(program: Program, bucketing: Any) -> None:
    """D-65: a unit ahead, which has a bucket a dtype; "auto" looks for how far ahead."""
    gm = program.planned(bucketing)
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    launches = [n for n in gm.graph.nodes if is_launch(n) and kind_of(n) == "gather"]
    buckets = [bucket for what, bucket in events_of(gm, "gather") if what == "launch"]
    waits = [n for n in gm.graph.nodes if is_wait(n) and kind_of(n) == "gather"]
    assert [bucket_of(wait) for wait in waits] == buckets
    first_uses = [min(order[reader] for reader in readers(wait)) for wait in waits]
    assert first_uses == sorted(first_uses)
    for wait, first_use in zip(waits, first_uses, strict=True):
        between = list(gm.graph.nodes)[order[wait] : first_use]
        assert not any(map(is_compute, between)), "waited for before it is needed"
    if bucketing == "auto":
        return
    units = [list(map(bucket_of, unit)) for _, unit in itertools.groupby(launches, SOURCE.get)]
    expected: list[tuple[str, int]] = []
    for unit, before in itertools.zip_longest(units, [[], *units]):
        expected += [("launch", bucket) for bucket in unit or []]
        expected += [("wait", bucket) for bucket in before]
    assert events_of(gm, "gather") == expected


@given(programs(), BUCKETINGS)
def test_reduces_follow_readiness(program: Program, bucketing: Any) -> None:
    """At once, but for pointwise ops that then free something."""
    gm = program.planned(bucketing)
    nodes = list(gm.graph.nodes)
    order = {node: number for number, node in enumerate(nodes)}
    ready = []
    for pack in filter(is_pack, nodes):
        (launch,) = pack.users
        assert pack.next is launch
        last = max(pack.all_input_nodes, key=order.__getitem__)
        between = list(filter(is_compute, nodes[order[last] + 1 : order[pack]]))
        if last.op != "placeholder" and between:
            assert all(is_view(op) or is_pointwise(op) for op in between), "launched too late"
            read = between[-1].all_input_nodes
            assert any(max(each.users, key=order.__getitem__) is between[-1] for each in read)
        ready.append(order[last] if last.op != "placeholder" else -1)
    assert ready == sorted(ready)


@given(programs(), BUCKETINGS)
def test_at_most_two_are_in_flight(program: Program, bucketing: Any) -> None:
    """One reduce, and the gathers of two units, which have a bucket a dtype; "auto" looks."""
    gm = program.planned(bucketing)
    units = {bucket_of(n): SOURCE.get(n) for n in gm.graph.nodes if is_launch(n)}
    for kind in ("gather", "reduce"):
        in_flight: set[int] = set()
        for what, bucket in events_of(gm, kind):
            if what == "launch":
                in_flight.add(bucket)
            else:
                in_flight.remove(bucket)
            if kind == "reduce":
                assert len(in_flight) <= 1
            elif bucketing != "auto":
                assert len({units[each] for each in in_flight}) <= 2
        assert not in_flight


@given(programs(), BUCKETINGS)
def test_copies_surround_collectives(program: Program, bucketing: Any) -> None:
    """A18: shards are there when their gather is launched, gradients go when they are reduced."""
    gm = program.planned(bucketing)
    plan = plan_of(gm)
    for number, bucket in enumerate(plan.buckets):
        happens = [event.what for event in plan.schedule if event.bucket == number]
        on_host = {program.params[n].on_host for n in bucket.params}
        assert len(on_host) == 1
        want = ["launch", "wait"]
        if on_host.pop():
            is_gather = bucket.kind == "gather"
            want = ["load", "loaded", *want] if is_gather else [*want, "store", "stored"]
        assert happens == want


@given(programs())
def test_one_gather_a_unit_and_dtype(program: Program) -> None:
    """D-61, D-64."""
    used = [
        program.params[param_of(node)]
        for node in program.module().graph.nodes
        if is_unshard(node) and node.users
    ]
    plan = plan_of(program.planned("per_unit"))
    gathers = [bucket for bucket in plan.buckets if bucket.kind == "gather"]
    assert len(gathers) == len({(param.unit, param.dtype, param.on_host) for param in used})
    plan = plan_of(program.planned("none"))
    gathers = [bucket for bucket in plan.buckets if bucket.kind == "gather"]
    assert len(gathers) == len(used)


@given(WITH_BARRIERS, BUCKETINGS)
def test_nothing_is_under_way_across_a_barrier(program: Program, bucketing: Any) -> None:
    before = list(program.module().graph.nodes)
    under_way: set[int] = set()
    passed: list[str] = []
    for node in program.planned(bucketing).graph.nodes:
        if is_launch(node):
            under_way.add(bucket_of(node))
        elif is_wait(node):
            under_way.remove(bucket_of(node))
        elif is_barrier(node):
            assert not under_way
            passed.append(node.name)
    assert passed == [node.name for node in before if is_barrier(node)]


@given(st.one_of(programs(), WITH_BARRIERS), BUCKETINGS)
def test_again_changes_nothing(program: Program, bucketing: Any) -> None:
    gm = program.planned(bucketing)
    again = passes.run(gm, program.pipeline(bucketing))
    assert render(again.graph) == render(gm.graph)
    assert PLAN.get(again) == PLAN.get(gm)


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
