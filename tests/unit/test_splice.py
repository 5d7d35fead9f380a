"""Graphs with checkpoints in some blocks, beside traces of models that have them there."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from support.models import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoshard.tools.plan.graphs import Graph
from autoshard.tools.plan.splice import checkpointed, spliced
from autoshard.tools.plan.steps import PlannedModel, traced_step

BLOCKS = 8
BLOCK_INPUT = 2 * 128 * 64 * 4  # bytes
pytestmark = [
    pytest.mark.parametrize("fake_world", [1024], indirect=True),
    pytest.mark.usefixtures("fake_world"),
]


class Tower(nn.Module):
    def __init__(self, chosen: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.head = nn.Linear(64, 64)
        self.layers = nn.ModuleList(Block(64, 256) for _ in range(BLOCKS))
        for number in chosen:
            layer = self.layers[number]
            again = functools.partial(checkpoint, layer.forward, use_reentrant=False)
            layer.forward = again  # type: ignore[method-assign]  # as users wrap a block's

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().sum()


def batch(micro_batch: int, seq: int) -> Any:
    return torch.zeros(micro_batch, seq, 64)


@functools.cache
def graphs(checkpointing: str, chosen: tuple[int, ...] = ()) -> dict[str, Graph]:
    """Those of a step, with checkpoints of its own in the `chosen` blocks; traced once."""
    build = functools.partial(Tower, chosen)
    planned = PlannedModel("tower", build, batch, 128, "f32", "f32", "adamw", "eager")
    return dict(traced_step(planned, 2, checkpointing).graphs)


@pytest.mark.parametrize(
    ("way", "chosen"), [("layers:2", (0, 2, 4, 6)), ("first:3", (0, 1, 2)), ("layers:1", range(8))]
)
def test_as_traced(way: str, chosen: tuple[int, ...]) -> None:
    """As a trace, but where a block without checkpoints follows one that has them.

    There torch.compile computes the last product and its sum again, in place of keeping what the
    next block is given; an eager run keeps it, and so does a plan.
    """
    none, full = graphs("none"), graphs("full")
    want = graphs("none", tuple(chosen))
    names = checkpointed(way, none["forward"])
    assert names == {f"layers.{number}" for number in chosen}
    passed_on = sum(number + 1 < BLOCKS and number + 1 not in chosen for number in chosen)
    for kind, graph in want.items():
        got = spliced(none[kind], full[kind], names)
        again = passed_on * (kind == "backward")
        missing = kernels(graph) - kernels(got)
        assert not kernels(got) - kernels(graph)
        assert sorted(missing.values()) == ([again] * 3 if again else [])  # of them one is a view
        assert [each.name for each in got.problem.reduces] == [
            each.name for each in graph.problem.reduces
        ]
        more = max(got.problem.live_bytes) - max(graph.problem.live_bytes)
        assert 0 <= more <= passed_on * BLOCK_INPUT


def kernels(graph: Graph) -> Counter[Any]:
    return Counter(graph.kernels[int(number)] for number in graph.problem.op_us)


def test_all_and_none() -> None:
    none, full = graphs("none"), graphs("full")
    for kind in none:
        everything = checkpointed("layers:1", none[kind])
        assert spliced(none[kind], full[kind], frozenset()).problem == none[kind].problem
        got = spliced(none[kind], full[kind], everything).problem
        assert got.num_ops == full[kind].problem.num_ops
        assert got.gathers == full[kind].problem.gathers


@pytest.mark.parametrize("way", ["layers", "layers:0", "some:2", "layers:x"])
def test_other_ways(way: str) -> None:
    with pytest.raises(ValueError, match="layers:2"):
        checkpointed(way, graphs("none")["forward"])
