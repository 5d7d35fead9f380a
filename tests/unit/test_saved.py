"""Values that forward saves: who owns them, who reads them, and in which blocks they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.programs import small
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autoshard import _torch, passes
from autoshard.passes.ir.meta import ParamInfo
from autoshard.passes.planner.costs import HostLink
from autoshard.passes.planner.save import Value, choices
from autoshard.passes.planner.topology import Topology
from autoshard.passes.plans.liveness import live_bytes
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.saved import SavedValues
from autoshard.passes.plans.values import numbered, owner_of, tensors_of

pytestmark = pytest.mark.usefixtures("process_group")

PRICES = Prices(Topology.load("h100"), is_fused=False)


def node(graph: fx.Graph, name: str) -> fx.Node:
    return next(each for each in graph.nodes if each.name == name)


def saved_values(text: str, *names: str, pieces: int = 1, units: int = 0) -> SavedValues:
    table = [ParamInfo(f"w{at}", f"layers.{at}", "shard", "shard") for at in range(units)]
    return SavedValues(small(text).graph, names, PRICES, table).in_pieces(pieces)


def test_names_stay_when_a_node_is_gone() -> None:
    """As where the partitioner drops one that computes what another does."""
    gm = small(
        """
        in %primals_1: f32[4]
        in %tangents_1: f32[4]
        %a: f32[4] = aten.sin(%primals_1)
        %b: f32[4] = aten.sin(%primals_1)
        %c: f32[4] = aten.sin(%b)
        %d: f32[4] = aten.mul.Tensor(%tangents_1, %c)
        return [%c, %d]
        """
    )
    passes.tag_saved(gm, saved=None)
    node(gm.graph, "b").replace_all_uses_with(node(gm.graph, "a"))
    gm.graph.erase_node(node(gm.graph, "b"))
    copy = fx.Graph()
    copy.output(copy.graph_copy(gm.graph, {}))
    assert [name for name in numbered(copy.nodes) if "sin" in name] == ["sin:0", "sin:2"]
    values = SavedValues(copy, ["c"], PRICES, [])
    assert values.names((0,)) == {"sin:2"}


RESULTS = """
    in %primals_1: f32[4,8]
    in %tangents_1: f32[4,8]
    %op: (f32[4,8], b8[4,8]) = aten.native_dropout(%primals_1, 0.5, True)
    %out: f32[4,8] = getitem(%op, 0)
    %mask: b8[4,8] = getitem(%op, 1)
    %mask_v: b8[32] = aten.view(%mask, [32])
    %c: f32[4,8] = aten.sin(%out)
    %d: f32[4,8] = aten.mul.Tensor(%tangents_1, %mask)
    %e: f32[4,8] = aten.mul.Tensor(%d, %c)
    return [%c, %e]
    """


def test_results_of_an_op_own_their_memory() -> None:
    graph = small(RESULTS).graph
    assert owner_of(node(graph, "mask_v")) is node(graph, "mask")
    assert owner_of(node(graph, "out")) is node(graph, "out")
    live = live_bytes(graph, "inference")
    ops = [each.name for each in graph.nodes if each.op == "call_function"]
    at = {name: number for number, name in enumerate(ops)}
    total = [a + t for a, t in zip(live.activations, live.temporaries, strict=True)]
    assert total[at["op"]] == 128 + 32
    assert total[at["c"]] == 128 + 32 + 128
    assert total[at["d"]] == 32 + 128 + 128  # what the dropout gives is no longer there


def test_a_result_is_saved_alone() -> None:
    values = saved_values(RESULTS, "mask")
    assert values.curves[0][0].num_bytes == 32
    assert values.names((0,)) == {"getitem:1"}


def test_results_are_computed_again_together() -> None:
    """Once: the op has the time of one, and what it reads is needed once."""
    block = (
        Value(4, 1.0, is_fixed=True),
        Value(64, 5.0, (0,), is_read=True, op=1),
        Value(16, 0.0, (0,), is_read=True, op=1),
    )
    first, last = choices(block)
    assert (first.saved, first.num_bytes, first.again_us) == ({1, 2}, 80, 0)
    assert (last.saved, last.num_bytes, last.again_us) == ({0}, 4, 5.0)
    fixed = (Value(4, 1.0), Value(64, 5.0, (0,), is_read=True, is_fixed=True, op=1), block[2])
    (only,) = choices(fixed)  # what makes one of them is not done again
    assert only.saved == {1, 2}


def test_views_of_backward_are_seen() -> None:
    """What backward saves may be its own view of what forward computes."""
    text = """
        in %primals_1: f32[4,8]
        in %tangents_1: f32[4,8]
        %a: f32[4,8] = aten.sin(%primals_1)
        %b: f32[4,8] = aten.cos(%a)
        %t: f32[8,4] = aten.t(%b)
        %d: f32[4,4] = aten.mm(%tangents_1, %t)
        return [%b, %d]
        """
    gm = small(text)
    node(gm.graph, "t").meta["partitioner_tag"] = "is_backward"
    values = SavedValues(gm.graph, ["t"], PRICES, [])
    assert values.curves[0][0].num_bytes == 128


def test_what_may_lie_on_the_host() -> None:
    """What backward alone reads, and lies in its memory without gaps; not what the user gets."""
    text = """
        in %primals_1: f32[4,8]
        in %tangents_1: f32[4,8]
        %a: f32[4,8] = aten.sin(%primals_1)
        %b: f32[4,8] = aten.cos(%a)
        %c: f32[4,8] = aten.exp(%b)
        %c_v: f32[32] = aten.view(%c, [32])
        %d: f32[4,8] = aten.mul.Tensor(%tangents_1, %b)
        %e: f32[4,8] = aten.mul.Tensor(%d, %c)
        %f: f32[4,8] = aten.mul.Tensor(%e, %a)
        return [%c_v, %f]
        """
    gm = small(text)
    node(gm.graph, "a").meta["val"] = node(gm.graph, "a").meta["val"].new_empty((8, 16))[:4, :8]
    near = HostLink(alpha_us=0.0, us_per_byte=0.001, call_us=0.001)
    block = SavedValues(gm.graph, ["a", "b", "c"], PRICES, []).near(near)
    assert block.blocks == ("start",)
    (curve,) = block.curves
    assert not any(choice.moved for choice in curve)  # of the last block nothing is hidden
    two = SavedValues(gm.graph, ["a", "b", "c"], PRICES, []).in_pieces(2).near(near)
    found = {two.moved((*at, 0)) for at in itertools.product(range(len(two.curves[0])))}
    assert set().union(*found) == {"cos:0"}


TWO = """
    in %primals_1: f32[4]
    in %primals_2: f32[4]
    in %x: f32[8]
    in %tangents_1: f32[8]
    %w: f32[8] = autoshard.unshard(%primals_1, 'f32[8]', GROUP, False, 0)
    %a: f32[8] = aten.mul.Tensor(%x, %w)
    %b: f32[8] = aten.sin(%a)
    %v: f32[2,4] = aten.view(%b, [2, 4])
    %vv: f32[8] = aten.view(%v, [8])
    %vvv: f32[8] = aten.view(%vv, [8])
    %z: f32[8] = autoshard.unshard(%primals_2, 'f32[8]', GROUP, False, 1)
    %c: f32[8] = aten.mul.Tensor(%vvv, %z)
    %d: f32[8] = aten.mul.Tensor(%tangents_1, %b)
    %e: f32[8] = aten.mul.Tensor(%d, %c)
    return [%c, %e]
    """


def test_a_reader_in_another_block_may_read_a_view_of_a_view() -> None:
    values = saved_values(TWO, "b", "c", units=2)
    assert values.blocks == ("layers.0", "layers.1")
    assert len(values.curves[0]) == 1  # what another block reads is saved


LONG = """
    in %primals_1: f32[4]
    in %x: f32[8]
    in %tangents_1: f32[8]
    %w: f32[8] = autoshard.unshard(%primals_1, 'f32[8]', GROUP, False, 0)
    %a: f32[8] = aten.mul.Tensor(%x, %w)
    %b: f32[8] = aten.sin(%a)
    %c: f32[8] = aten.cos(%a)
    %op: (f32[8], b8[8]) = aten.native_dropout(%c, 0.5, True)
    %out: f32[8] = getitem(%op, 0)
    %mask: b8[8] = getitem(%op, 1)
    %d: f32[8] = aten.add.Tensor(%b, %out)
    %e: f32[8] = aten.exp(%d)
    %f: f32[8] = aten.sin(%d)
    %g: f32[8] = aten.add.Tensor(%e, %f)
    %h: f32[8] = aten.mul.Tensor(%tangents_1, %g)
    return [%g, %h]
    """


def test_pieces_meet_where_little_is_handed_on() -> None:
    whole, cut = (saved_values(LONG, "b", "e", "f", pieces=pieces, units=1) for pieces in (1, 2))
    assert whole.blocks == ("layers.0",)
    assert cut.blocks == ("layers.0", "layers.0")
    graph = small(LONG).graph
    second = [each for each, at in cut.blocks_of(graph).items() if at == 1]
    assert [each.name for each in second] == ["e", "f", "g"]  # %d alone is handed on
    (described,) = cut.saved_blocks((0, 0))
    assert described.name == "layers.0"
    assert described.num_bytes == sum(curve[0].num_bytes for curve in cut.curves)


def dropping(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5).sin()


def adding(x: Tensor) -> Tensor:
    """Take a random op that reads no tensor."""
    return (x + torch.rand(4, 8)).sin()


@pytest.mark.parametrize("op", [dropping, adding])
def test_random_ops_that_are_computed_again_have_values(op: Callable[[Tensor], Tensor]) -> None:
    """Without them a plan would take their results for nothing."""
    found: list[fx.GraphModule] = []

    def partition(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        found.extend(_torch.aot.min_cut_rematerialization_partition(gm, inputs, **kwargs))

    def backend(gm: Any, inputs: Any) -> Any:
        _torch.aot.partition_joint(gm, inputs, partition)
        return gm

    def loss(x: Tensor) -> Any:
        return checkpoint(op, x, use_reentrant=False).sum()

    torch._dynamo.reset()
    torch.compile(loss, backend=backend)(torch.ones(4, 8, requires_grad=True))
    around = [
        each for part in found for each in part.graph.nodes if _torch.ops.is_around_random(each)
    ]
    assert len(around) == 2
    for each in around:
        assert [4, 8] in [list(value.shape) for value in tensors_of(each)]
        assert isinstance(_torch.ops.call_of(each).target, torch._ops.OpOverload)
