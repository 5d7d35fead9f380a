"""Forecasts of parts that save other values, beside parts that do, written by hand."""

from __future__ import annotations

import pytest
from support.programs import small

from autoshard.passes.planner.topology import Topology
from autoshard.passes.plans.auto_buckets import PricedGraph
from autoshard.passes.plans.forecast import Forecast
from autoshard.passes.plans.liveness import handed_bytes
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.saved import SavedValues

pytestmark = pytest.mark.usefixtures("process_group")

JOINT = """
    in %primals_1: bf16[256,256]
    in %primals_2: bf16[256,262144]
    in %primals_3: bf16[262144,256]
    in %tangents_1: bf16[256,256]
    %m: bf16[256,256] = aten.mm(%primals_2, %primals_3)
    %wide: f32[256,256] = aten._to_copy(%m, dtype=torch.float32)
    %s: f32[256,256] = aten.sin(%wide)
    %o: f32[256,256] = aten.mm(%s, %s)
    %d: bf16[256,256] = aten.mm(%tangents_1, %primals_1)
    %c: f32[256,256] = aten.cos(%wide)
    %g: f32[256,256] = aten.mul.Tensor(%d, %c)
    %h: f32[256,256] = aten.mm(%g, %g)
    return [%o, %h]
    """
FORWARD = """
    in %primals_1: bf16[256,256]
    in %primals_2: bf16[256,262144]
    in %primals_3: bf16[262144,256]
    %m: bf16[256,256] = aten.mm(%primals_2, %primals_3)
    %wide: f32[256,256] = aten._to_copy(%m, dtype=torch.float32)
    %s: f32[256,256] = aten.sin(%wide)
    %o: f32[256,256] = aten.mm(%s, %s)
    return [%o, SAVED]
    """
BACKWARD = """
    in %SAVED
    in %primals_1: bf16[256,256]
    in %tangents_1: bf16[256,256]
    %d: bf16[256,256] = aten.mm(%tangents_1, %primals_1)
    AGAIN
    %c: f32[256,256] = aten.cos(%wide)
    %g: f32[256,256] = aten.mul.Tensor(%d, %c)
    %h: f32[256,256] = aten.mm(%g, %g)
    return [%h]
    """
CAST = "%wide: f32[256,256] = aten._to_copy(%m, dtype=torch.float32)"


@pytest.mark.parametrize("is_fused", [False, True])
def test_what_is_computed_where_it_is_read(is_fused: bool) -> None:
    """Inductor has it nowhere in memory; without it, it is there from where it is needed."""
    prices = Prices(Topology.load("h100"), is_fused)

    def priced(kind: str, text: str) -> PricedGraph:
        return PricedGraph(small(text).graph, kind, prices)

    forward = priced("forward", FORWARD.replace("SAVED", "%wide"))
    saving = BACKWARD.replace("%SAVED", "%wide: f32[256,256]").replace("    AGAIN\n", "")
    backward = priced("backward", saving)
    again = BACKWARD.replace("%SAVED", "%m: bf16[256,256]").replace("AGAIN", CAST)
    joint = small(JOINT).graph
    values = SavedValues(joint, ["wide"], prices, [])
    numbers = range(len(values.curves[0]))
    (taken,) = ((number,) for number in numbers if values.names((number,)) == {"mm:0"})
    forecast = Forecast(joint, forward, backward, None)
    _, found = forecast.problems(values, taken)
    want = priced("backward", again).problem
    # What is read to compute it again counts as there until the op that needs it has run.
    beside = 0 if is_fused else 256 * 256 * 2
    assert max(found.live_bytes) == max(want.live_bytes) + beside

    handed = handed_bytes(forward.graph, backward.graph, [])
    assert handed == 256 * 256 * (4 + 2)  # %wide and an input
    shared = Forecast(joint, forward, backward, None, handed, beside=2.0)
    for alone, together in zip(
        forecast.problems(values, taken), shared.problems(values, taken), strict=True
    ):
        more = 2 * 256 * 256 * (2 + 2)  # twice what is handed on now, for other frames
        assert together.live_bytes == tuple(each + more for each in alone.live_bytes)
