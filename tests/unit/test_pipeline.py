"""What the pipeline makes of small graphs: what it gathers, reduces, moves and renames."""

from __future__ import annotations

import textwrap

import pytest
from support.programs import events_of, is_compute, small
from torch import fx

from autoshard import passes
from autoshard.passes import ParamInfo
from autoshard.passes.match import is_launch, is_marker
from autoshard.passes.text import parse, render

pytestmark = pytest.mark.usefixtures("process_group")


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
    launched = [argument for node in gm.graph.nodes if is_launch(node) for argument in node.args[0]]
    assert [node.name for node in launched] == ["g", "h"]
    assert not any(map(is_marker, gm.graph.nodes))
