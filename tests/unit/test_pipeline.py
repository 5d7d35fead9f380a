"""What the pipeline makes of small graphs: what it gathers, reduces, moves and renames."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from support.programs import STEP, STEP_TABLE, events_of, is_compute, small
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from autoshard import passes
from autoshard.passes import ParamInfo
from autoshard.passes.ir.match import is_launch, is_marker, is_pack
from autoshard.passes.ir.meta import PLAN
from autoshard.passes.ir.text import parse, render
from autoshard.passes.ir.verify import verify
from autoshard.passes.lowering.inductor import keep_order, planned_order

pytestmark = pytest.mark.usefixtures("process_group")


def planned(text: str, *names: str, graph: str = "forward") -> fx.GraphModule:
    """`text` through the pipeline; each name's unit is what stands before its last dot."""
    table = [ParamInfo(name, name.rpartition(".")[0] or "root", "shard", "shard") for name in names]
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
    """D-78: Another rank may read it, and would wait for this one."""
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
    """D-66: In an inference graph: no other pass has merged its markers."""
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
    table = [ParamInfo("w", "root", "shard", "shard")]
    gm = passes.run(gm, passes.pipeline(table, graph="backward", bucketing="per_unit"))
    assert render(gm.graph) == textwrap.dedent(
        """\
        in %p0: f32[7,2]
        in %g: f32[7,2]
        %s0: f32[] = aten.sum(%p0)
        return [%s0, %g]
        """
    )


def test_weight_that_is_its_own_gradient() -> None:
    gm = planned(
        """
        in %w: f32[4]
        %whole: f32[7] = autoshard.unshard(%w, 'f32[7]', GROUP, False, 0)
        %reduced: f32[4] = autoshard.reduce_grad(%whole, 'f32[7]', GROUP, 0)
        return [%reduced]
        """,
        "a.w",
    )
    assert events_of(gm, "gather") == [("launch", 0), ("wait", 0)]
    assert events_of(gm, "reduce") == [("launch", 1), ("wait", 1)]


def test_two_gradients_of_one_parameter_are_both_reduced() -> None:
    """As where their sum is taken of views, which merge_markers leaves alone."""
    gm = planned(
        """
        in %g: f32[7]
        in %h: f32[7]
        %first: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', GROUP, 0)
        %a: f32[2,2] = aten.view(%first, [2, 2])
        %second: f32[4] = autoshard.reduce_grad(%h, 'f32[7]', GROUP, 0)
        %b: f32[2,2] = aten.view(%second, [2, 2])
        %total: f32[2,2] = aten.add.Tensor(%a, %b)
        return [%total]
        """,
        "a.w",
    )
    packed = [argument for node in gm.graph.nodes if is_pack(node) for argument in node.args[0]]
    assert [node.name for node in packed] == ["g", "h"]
    assert not any(map(is_marker, gm.graph.nodes))


def test_a_reduce_is_launched_behind_what_frees_but_behind_no_other() -> None:
    """The second is read by the op that frees, and has to be there: the first stays before it."""
    gm = planned(
        """
        in %x: f32[4,4]
        in %y: f32[4,4]
        in %z: f32[2,4]
        %u: f32[2,4] = aten.relu(%z)
        %v: f32[2,4] = aten.neg(%z)
        %g: f32[4,4] = aten.mm(%x, %y)
        %first: f32[2,4] = autoshard.reduce_grad(%g, 'f32[4,4]', GROUP, 0)
        %h: f32[4,4] = aten.mul.Tensor(%x, %y)
        %second: f32[2,4] = autoshard.reduce_grad(%h, 'f32[4,4]', GROUP, 1)
        %total: f32[2,4] = aten.addcmul(%second, %u, %v)
        return [%first, %total]
        """,
        "a.w",
        "b.w",
    )
    verify(gm)
    order = [event[0::2] for event in planned_order(gm.graph)]
    assert order == [("launch", 0), ("wait", 0), ("launch", 1), ("wait", 1)]


TWO_OF_ONE_UNIT = """
in %p0: f32[4,2]
in %p1: f32[4]
in %x: f32[3]
%u0: f32[7,2] = autoshard.unshard(%p0, 'f32[7,2]', GROUP, False, 0)
%s0: f32[] = aten.sum(%u0)
%a: f32[3] = aten.add.Tensor(%x, %s0)
%u1: f32[8] = autoshard.unshard(%p1, 'f32[8]', GROUP, False, 1)
%s1: f32[] = aten.sum(%u1)
%b: f32[3] = aten.add.Tensor(%a, %s1)
return [%b]
"""


def test_order_is_fixed_for_buckets_and_not_for_markers() -> None:
    """D-63: chained to what stands between them, two markers could share no bucket."""
    markers = small(TWO_OF_ONE_UNIT)
    keep_order(markers.graph)
    assert render(markers.graph) == render(small(TWO_OF_ONE_UNIT).graph)
    gm = planned(TWO_OF_ONE_UNIT, "block.w", "block.b")
    (launch,) = filter(is_launch, gm.graph.nodes)
    assert [node.name for node in launch.args[0]] == ["block_w", "block_b"]
    keep_order(gm.graph)
    assert planned_order(gm.graph) == [("launch", "gather", 0), ("wait", "gather", 0)]


@pytest.mark.parametrize("graph", ["forward", "backward", "inference"])
def test_buckets_come_last_in_the_pipeline(graph: str) -> None:
    """D-63: no pass before them launches anything, and none after them moves a launch."""
    launches: dict[str, int] = {}

    def note(name: str, gm: fx.GraphModule) -> None:
        launches[name] = sum(map(is_launch, gm.graph.nodes))

    transforms = passes.pipeline(STEP_TABLE, graph=graph, bucketing="per_unit")
    passes.run(small(STEP), transforms, after_each=note)
    assert list(launches)[-2:] == ["plan_buckets", "insert_collectives"]
    assert launches.pop("insert_collectives") == 4  # two dtypes and a unit, and a reduce
    assert set(launches.values()) == {0}


@pytest.mark.parametrize("text", [STEP, TWO_OF_ONE_UNIT])
def test_passes_under_a_fake_mode_of_somebody_elses(text: str) -> None:
    """D-72: values in the graph are of its own mode, and so are those that passes make."""
    gm = small(text)
    transforms = (*passes.joint(), *passes.pipeline(STEP_TABLE, graph="forward", bucketing="auto"))
    want = passes.run(gm, transforms)
    with FakeTensorMode():
        got = passes.run(gm, transforms)
    assert render(got.graph) == render(want.graph)
    modes = {
        value.fake_mode
        for node in got.graph.nodes
        for value in tree_leaves(node.meta.get("val"))
        if isinstance(value, FakeTensor)
    }
    assert len(modes) == 1


@pytest.mark.parametrize("bucketing", ["auto", "per_unit", "none", [], [[]], ["absent"]])
def test_graphs_without_parameters(bucketing: Any) -> None:
    """D-76: nothing to gather, nothing to plan."""
    for text in ("in %x: f32[3]\nreturn [%x]", "return []"):
        transforms = passes.pipeline([], graph="forward", bucketing=bucketing)
        gm = passes.run(small(text), transforms)
        assert render(gm.graph) == render(small(text).graph)
        assert PLAN.get(gm) is None
