"""Ways of checkpointing beside those of torch, and several microbatches from one trace."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import Block
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autoshard.passes.planner.save import Value, choices
from autoshard.passes.planner.topology import Topology
from autoshard.tools.plan import batches, steps
from autoshard.tools.plan.steps import PlannedModel, traced_step, traced_steps
from autoshard.tools.plan.ways import BY_VALUES, saving, tagged

pytestmark = [
    pytest.mark.parametrize("fake_world", [1024], indirect=True),
    pytest.mark.usefixtures("fake_world"),
]


class Attending(nn.Module):
    """Block with attention, the same one for each of its two calls, then a `Block`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 3 * 64, bias=False)
        self.block = Block(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16))
        query, key, value = (each.transpose(1, 2) for each in heads.unbind(2))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.block(x + mixed.transpose(1, 2).flatten(2))


def kept_contexts() -> Any:
    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    return create_selective_checkpoint_contexts(
        [attention, aten.mm.default, aten.addmm.default, aten.bmm.default]
    )


class Tower(nn.Module):
    """Blocks with checkpoints of their own, if asked for; the second one is called twice."""

    def __init__(self, way: str = "none") -> None:
        super().__init__()
        self.head = nn.Linear(64, 64)
        self.layers = nn.ModuleList(Attending() for _ in range(3))
        more: dict[str, Any] = {"context_fn": kept_contexts} if way == "ops" else {}
        for layer in self.layers:
            if way != "none":
                again = functools.partial(checkpoint, layer.forward, use_reentrant=False, **more)
                layer.forward = again  # type: ignore[method-assign]  # as users wrap a block's

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 1, 2):
            x = self.layers[number](x)
        return self.head(x).float().sum()


class Experts(nn.Module):
    """Experts with room for a share of the tokens, rounded up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(64, 128) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            flat = x.flatten(0, 1)
            room = math.ceil(1.25 * flat.shape[0] / 8)
            x = x + layer(flat[:room].repeat(8, 1)[: flat.shape[0]]).view_as(x)
        return x.sum()


def batch(micro_batch: int, seq: int) -> Any:
    return torch.zeros(micro_batch, seq, 64)


def planned(build: Any, lowering: str, seq: int = 128) -> PlannedModel:
    return PlannedModel("tower", build, batch, seq, "bf16", "f32", "adamw", lowering)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_ways_are_those_of_torch(lowering: str) -> None:
    """One trace without checkpoints, for all ways: the graphs of models that have them."""
    found = traced_steps(planned(Tower, lowering), [2], ["none", "full", "ops"])
    for way in ("none", "full", "ops"):
        model = planned(functools.partial(Tower, way), lowering)
        assert found[2, way] == traced_step(model, 2, "none")
    ops = [len(found[2, way].graphs["backward"].problem.op_us) for way in ("none", "ops", "full")]
    assert ops[0] < ops[1] < ops[2]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_by_values(lowering: str) -> None:
    """The more is given up, the less is kept for backward, and the more ops it has."""
    found = traced_steps(planned(Tower, lowering), [2], ["none", *BY_VALUES], Topology.load("h100"))
    steps = [found[2, way] for way in ("none", *BY_VALUES)]
    kept = [max(each.graphs["forward"].activations) for each in steps]
    times = [sum(each.graphs["backward"].op_us(Topology.load("h100"))) for each in steps]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0] / 2
    assert times == sorted(times)


class NormedBlock(nn.Module):
    """Block of two parts that begin with a norm in float32, as those of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(64) for _ in range(2))
        self.mix = nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x, 0))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x, 1))))

    def norm(self, x: Tensor, number: int) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.scales[number] * wide.to(x.dtype)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NormedBlock() for _ in range(BLOCKS))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().sum()


BLOCKS = 8


@pytest.mark.parametrize("seq", [128, 8])  # with values that are larger than weights, or smaller
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_blocks_hand_on_what_the_next_is_given(
    lowering: str, seq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else, if all is computed again: no norm's wide copy. Each is done by itself.

    They are alike, so that few of them are traced.
    """
    traces = []
    trace = steps.trace
    monkeypatch.setattr(steps, "trace", lambda *a, **k: traces.append(1) or trace(*a, **k))
    given = 2 * seq * 64 * 2  # bytes, in bf16
    model = planned(Normed, lowering, seq)
    found = traced_steps(model, [2], ["full", *BY_VALUES], Topology.load("h100"))
    assert len(traces) == 1
    full, values = (found[2, way].graphs for way in ("full", "values:100"))
    kept = max(values["forward"].activations)
    assert (BLOCKS - 1) * given <= kept <= (BLOCKS + 3) * given
    peaks = [max(each["backward"].problem.live_bytes) for each in (values, full)]
    assert peaks[0] <= peaks[1] + 3 * given


def test_the_last_block_gives_up_nothing() -> None:
    """Backward begins with it, when memory is at its peak."""
    curve = choices((Value(8, 1.0, is_read=True), Value(4, 1.0, is_read=True)))
    values = mock.Mock(curves=(curve, curve, curve), names=mock.Mock(return_value=frozenset()))
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    saving(fx.GraphModule(nn.Module(), graph), values, "values:100")
    values.names.assert_called_once_with((len(curve) - 1, len(curve) - 1, 0))


def test_only_forward_is_tagged() -> None:
    """By region; backward has the annotations of what it is the gradient of, and no tags."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    outside = graph.call_function(torch.ops.aten.relu.default, (x,))
    inside = graph.call_function(torch.ops.aten.mm.default, (outside, x))
    backward = graph.call_function(torch.ops.aten.mm.default, (inside, x))
    graph.output(backward)
    for node in (inside, backward):
        node.meta["custom"] = {"autoshard.region": 3}
    backward.meta["partitioner_tag"] = "is_backward"
    joint = fx.GraphModule(nn.Module(), graph)
    want = {"none": None, "full": "PREFER_RECOMPUTE", "ops": "MUST_SAVE"}
    for way, policy in want.items():
        found = {
            node.name: (node.meta["ac_graph_id"], node.meta["recompute"].name)
            for node in tagged(joint, way).graph.nodes
            if "recompute" in node.meta
        }
        assert found == ({} if policy is None else {inside.name: (3, policy)})


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_microbatches_of_one_trace(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = planned(Tower, lowering)
    want = {(size, "full"): traced_step(model, size, "full") for size in (2, 3)}
    traces = []
    trace = steps.trace
    monkeypatch.setattr(steps, "trace", lambda *a, **k: traces.append(1) or trace(*a, **k))
    assert traced_steps(model, [2, 3], ["full"]) == want
    assert len(traces) == 1


def test_sizes_that_are_rounded_are_traced_each() -> None:
    """A room for 1.25 of an eighth of the tokens is in no proportion to them."""
    model = planned(Experts, "eager", seq=1000)
    found = traced_steps(model, [1, 3], ["none"])
    for size in (1, 3):
        assert found[size, "none"] == traced_step(model, size, "none")


def test_batches_that_a_model_refuses() -> None:
    def even(micro_batch: int, seq: int) -> Any:
        if micro_batch % 2:
            raise RuntimeError("a microbatch of pairs is expected")
        return batch(micro_batch, seq)

    model = dataclasses.replace(planned(Experts, "eager", seq=1000), batch=even)
    assert set(traced_steps(model, [2, 4], ["none"])) == {(2, "none"), (4, "none")}


def test_a_prime_that_is_no_size() -> None:
    sizes = [torch.empty(61 * 4), torch.empty(5, 67), torch.empty(0)]
    assert batches.prime_for(nn.Linear(71 * 73, 8), sizes) == 79
