"""Repeated blocks of a model: a list of them is cut before it is traced, and grown again after.

0 1 2 3 4 .. 31  ->  0 1 2 3 31  ->  traced  ->  0 1 2 2 .. 2 3 31
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.repeat import repeat
from autoshard.runtime.sharding.find_units import find_units
from autoshard.tools.plan.graphs import Graph, TracedGraph

KEPT = 3  # two are compared, up to a third


@dataclass(frozen=True)
class Stack:
    """Like blocks that follow each other in a list of a model's; the first `KEPT` were kept.

    path: of the `nn.ModuleList`. first: number of the first of them; one like them stands before
        it, and another one behind the last. num_blocks: how many there were.
    ahead: of them, blocks that were kept besides, as forward may not run them as those behind.
    """

    path: str
    first: int
    num_blocks: int
    ahead: int = 0

    @property
    def num_cut(self) -> int:
        return self.num_blocks - KEPT - self.ahead


def cut_stacks(model: nn.Module, ahead: int = 0) -> list[Stack]:
    """Cut runs of like blocks in `model`, to five each or more; return what was cut, in order.

    ahead: blocks that are kept besides, as of `Stack`.

    Blocks are units in an `nn.ModuleList` that has no others. They are alike if they are of one
    class, with parameters of the same names and shapes. The first block of a run, and the last, may
    be computed otherwise, for what they share with other blocks, and backward of the second, too.
    """
    units = find_units(model, None)
    found = []
    for path, module in list(model.named_modules()):
        children = list(module.children())
        if not isinstance(module, nn.ModuleList) or not all(child in units for child in children):
            continue
        begin, stacks = 0, []
        for _, run in itertools.groupby(children, _looks):
            length = len(list(run))
            stacks.append(Stack(path, begin + 1, length - 2, ahead))
            begin += length
        stacks = [each for each in stacks if each.num_cut > 0]
        for each in reversed(stacks):
            del module[each.first + KEPT + ahead : each.first + each.num_blocks]
        found += stacks
    return found


def _looks(block: nn.Module) -> tuple[Any, ...]:
    params = ((name, tuple(param.shape)) for name, param in block.named_parameters())
    return type(block), tuple(params)


def grown(graphs: Mapping[str, TracedGraph], stacks: Iterable[Stack]) -> dict[str, Graph]:
    """Return `graphs` in numbers, as they are if `stacks` have all their blocks.

    graphs: as `trace` gives them, of a model that `cut_stacks` has cut.
    stacks: the lists that were cut.
    Raises ValueError if blocks that look alike are not computed alike, or if there are barriers.
    """
    found = {}
    for kind, traced in graphs.items():
        live = traced.live
        temporary = [each + live.inputs for each in live.temporaries]
        lives = (
            tuple(a + t for a, t in zip(live.activations, temporary, strict=True)),
            live.activations,
        )
        problem, activations = (
            _grown(dataclasses.replace(traced.problem, live_bytes=each), stacks) for each in lives
        )
        found[kind] = Graph(problem, activations.live_bytes, traced.kernels)
    return found


def _grown(problem: Problem, stacks: Iterable[Stack]) -> Problem:
    """Return `problem` with the blocks that were cut out of `stacks`: copies of a middle block.

    Blocks behind them get the numbers that they had before. Raises ValueError as `grown` does.
    """
    for stack in stacks:
        # Blocks behind the run keep their places at the end, and in backward so does the run.
        first, added = stack.first, stack.num_cut
        if problem.graph == "forward":
            first += stack.ahead
            problem = _renamed(problem, stack, first + 2)
            numbers, step = (first, first + 1, first + 2 + added), 1
        else:  # which begins with the last block
            problem = _renamed(problem, stack, first + 1)
            numbers, step = (first + 2 + added, first + 1 + added, first), -1
        units = [f"{stack.path}.{number}" for number in numbers]
        problem = repeat(problem, units, added, functools.partial(_name, stack, step))
    return problem


def _name(stack: Stack, step: int, name: str, copy: int) -> str:
    return _numbered(stack, name, lambda number: number + step * copy)


def _renamed(problem: Problem, stack: Stack, first: int) -> Problem:
    """Return `problem` with the blocks of a list from `first` on numbered as before the cut."""

    def renamed(name: str) -> str:
        return _numbered(
            stack, name, lambda number: number + (stack.num_cut if number >= first else 0)
        )

    gathers, reduces = (
        tuple(
            dataclasses.replace(item, name=renamed(item.name), unit=renamed(item.unit))
            for item in items
        )
        for items in (problem.gathers, problem.reduces)
    )
    return dataclasses.replace(problem, gathers=gathers, reduces=reduces)


def _numbered(stack: Stack, name: str, change: Callable[[int], int]) -> str:
    """Return `name`, with its block's number changed by `change`, if it is in `stack`."""
    pattern = rf"^({re.escape(stack.path)}\.)(\d+)(?=\.|$)"
    return re.sub(pattern, lambda found: f"{found[1]}{change(int(found[2]))}", name)
