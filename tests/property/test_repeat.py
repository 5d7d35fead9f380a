"""A block repeated in the numbers of a graph is the graph of more blocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.passes.planner.costs import Costs
from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.repeat import repeat


@dataclass(frozen=True)
class Model:
    """A head, like blocks, and a tail, in ops of a forward or a backward graph.

    gathers: (first op, one after the last) of a block's parameters; reduces: ops of its gradients.
    change: bytes that each block leaves behind, or frees.
    tied: whether the head's parameter is read once more in the tail.
    kept: whether parameters of blocks outlive the graph.
    """

    head: tuple[float, ...]
    block: tuple[float, ...]
    tail: tuple[float, ...]
    live: tuple[int, ...]  # of a block's ops, beyond what blocks before it left
    gathers: tuple[tuple[int, int], ...]
    reduces: tuple[int, ...]
    change: int
    tied: bool
    kept: bool = False

    def problem(self, num_blocks: int) -> Problem:
        backward = self.change < 0
        numbers = range(num_blocks)[:: -1 if backward else 1]
        op_us = [*self.head, *(self.block * num_blocks), *self.tail]
        base = -self.change * num_blocks if backward else 0
        live = [base] * len(self.head)
        live += [base + n * self.change + each for n in range(num_blocks) for each in self.live]
        live += [base + num_blocks * self.change] * len(self.tail)
        end = len(op_us)
        gathers = [Item("head", "root", "gather", 7, 0, 0, end if self.tied else 1)]
        reduces = []
        for place, number in enumerate(numbers):
            at, unit = len(self.head) + place * len(self.block), f"layers.{number}"
            for n, (used, freed) in enumerate(self.gathers):
                gone = end + 1 if self.kept else at + freed
                gathers.append(Item(f"{unit}.{n}", unit, "gather", 5, 0, at + used, gone))
            for n, made in enumerate(self.reduces):
                name = f"{unit}.{n}"
                reduces.append(Item(name, unit, "reduce", 3, at + made + 1, end, end))
        gathers.append(Item("tail", "root", "gather", 2, 0, end - 1, end))
        reduces.append(Item("head", "root", "reduce", 7, end, end, end))
        return Problem(
            "backward" if backward else "forward",
            tuple(op_us),
            tuple(live),
            tuple(gathers),
            tuple(reduces),
            Costs({}, {}, 0.0),
        )


@st.composite
def models(draw: st.DrawFn) -> Model:
    times = st.sampled_from([1.0, 2.5, 10.0])
    num_ops = draw(st.integers(2, 6))
    spans = st.tuples(st.integers(0, num_ops - 1), st.integers(1, num_ops))
    gathers = draw(st.lists(spans.filter(lambda span: span[0] < span[1]), max_size=3))
    reduces = draw(st.lists(st.integers(0, num_ops - 1), max_size=3))
    return Model(
        head=tuple(draw(st.lists(times, min_size=1, max_size=3))),
        block=tuple(draw(st.lists(times, min_size=num_ops, max_size=num_ops))),
        tail=tuple(draw(st.lists(times, min_size=1, max_size=3))),
        live=tuple(draw(st.lists(st.integers(0, 9), min_size=num_ops, max_size=num_ops))),
        # The first op of a block is where it begins: something of it is read there.
        gathers=((0, 1), *sorted(gathers)),
        reduces=tuple(sorted(reduces)),
        change=draw(st.sampled_from([-4, 0, 6])),
        tied=draw(st.booleans()),
        kept=draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None)
@given(models(), st.integers(0, 5))
def test_as_if_all_blocks_were_there(model: Model, times: int) -> None:
    problem = model.problem(4)
    names = ["layers.1", "layers.2", "layers.3"]
    if problem.graph == "backward":
        names = ["layers.2", "layers.1", "layers.0"]
    got = repeat(problem, names, times, lambda name, copy: f"{name} copy {copy}")
    want = model.problem(4 + times)
    for field in ("op_us", "live_bytes"):
        assert getattr(got, field) == getattr(want, field), field
    assert places(got.gathers) == places(want.gathers)
    assert places(got.reduces) == places(want.reduces)
    copies = {item.unit for item in got.gathers} - {item.unit for item in problem.gathers}
    assert copies == {f"{names[1]} copy {copy}" for copy in range(1, times + 1)}


def places(items: tuple[Item, ...]) -> list[Item]:
    """`items` without names, which `repeat` gives to copies in its own way."""
    return [dataclasses.replace(item, name="", unit="") for item in items]


def test_blocks_that_are_not_alike() -> None:
    model = Model((1.0,), (1.0, 2.0), (1.0,), (1, 2), ((0, 1),), (1,), 3, tied=False)
    problem = model.problem(4)
    other = dataclasses.replace(problem, op_us=(1.0, 1.0, 9.0, *problem.op_us[3:]))
    units = ["layers.0", "layers.1", "layers.2"]
    with pytest.raises(ValueError, match=r"layers\.0 .* and layers\.1 .* are not alike"):
        repeat(other, units, 2, lambda name, copy: name)
    with pytest.raises(ValueError, match=r"layers\.9 is not in the forward graph"):
        repeat(problem, ["layers.9", *units[1:]], 2, lambda name, copy: name)
