"""Tables of parameters for compiled code, which finds one by a number that travels as a tensor.

A graph is the same on every rank, may come out of a cache, and runs all blocks that are alike,
so that it can't name objects. It gets the number of a table as an input, saves it for backward
as it saves shards, and hands it to reduces.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor

from autoshard.passes.ir.plan import Plan
from autoshard.runtime.compiled.plans import record
from autoshard.runtime.unit.param import ShardedParam, resolve
from autoshard.runtime.unit.unit import Unit, listed, root_unit

_numbers = itertools.count()
_tables: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()

num_runs = 0
"""How often graphs that read sharded parameters have run, of all models."""

num_graphs = 0
"""How many graphs Dynamo has captured, of all models, whatever they read."""


def count_graph() -> None:
    """Count a graph that Dynamo has captured."""
    global num_graphs
    num_graphs += 1


def counts() -> tuple[int, int]:
    """Return `num_runs` and `num_graphs`."""
    return num_runs, num_graphs


class Table:
    """Table of one model's parameters that a graph runs with; it keeps none of them alive.

    tensor: i64[1], its number. On the host, where it is read.
    unused_outputs: numbers of forward's outputs for which the running backward has no gradient.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        """Give the table the process's next number, by which `table_at` finds it while it lives.

        `params` are referred to weakly, in this order.
        """
        self._params = [weakref.ref(param) for param in params]
        number = next(_numbers)
        self.tensor = torch.tensor([number])
        self.unused_outputs: frozenset[int] = frozenset()
        _tables[number] = self

    def __getitem__(self, index: int) -> ShardedParam:
        param = self._params[index]()
        assert param is not None
        return param

    def params(self) -> list[ShardedParam]:
        """List its parameters, in order."""
        found = [ref() for ref in self._params]
        assert None not in found
        return cast(list[ShardedParam], found)

    @property
    def root(self) -> Unit:
        """Unit of the outermost sharded module that the parameters are in, by the first of them."""
        return root_unit(self[0].unit)

    @functools.cached_property
    def members(self) -> weakref.WeakSet[ShardedParam]:
        """Set of its parameters, to look one up among them."""
        return weakref.WeakSet(self.params())

    def lacks(self, outputs: Collection[int]) -> bool:
        """Tell whether the running backward has a gradient for none of `outputs`.

        False if `outputs` is empty, which stands for all of them.
        """
        return bool(outputs) and self.unused_outputs.issuperset(outputs)

    @property
    def units(self) -> list[Unit]:
        """Units that the parameters are in."""
        return list(dict.fromkeys(param.unit for param in self.params()))

    @functools.cached_property
    def where(self) -> str:
        """Names of their units, as ranks compare them."""
        return listed([unit.name for unit in self.units])

    def is_of(self, params: Sequence[Tensor]) -> bool:
        """Tell whether it is a table of these `nn.Parameter`s, in this order."""
        own = [None if each is None else each.param for each in (ref() for ref in self._params)]
        return all(map(operator.is_, own, params))


class Tables:
    """Tables of one graph: one for each block that it runs, of one model or several.

    compiled_for: the parameters with which the graph was compiled.
    plans: of the graph and its backward, recorded for each model when it runs them first.
    """

    def __init__(self, compiled_for: Sequence[ShardedParam], plans: Sequence[Plan]) -> None:
        self._by_ids: dict[tuple[int, ...], Table] = {}
        self._layouts = [param.layout for param in compiled_for]
        self._plans = plans
        self._recorded_for: weakref.WeakSet[Unit] = weakref.WeakSet()  # units of models

    def of(self, params: Sequence[Tensor]) -> Table:
        """Return the table of these `nn.Parameter`s, made when they are first met.

        Counts in `num_runs`. A new table records the graph's plans for its model, if that is new.
        It raises RuntimeError if a parameter is not sharded, stands in two places, or is laid out
        otherwise than the one that the graph was compiled with: Dynamo doesn't look at that, see
        `_torch.dynamo.leave_layouts_unguarded`.
        """
        global num_runs
        num_runs += 1
        key = tuple(map(id, params))
        table = self._by_ids.get(key)
        if table is None or not table.is_of(params):  # ids are used again
            table = self._by_ids[key] = Table(self._resolved(params))
            if table.root not in self._recorded_for:
                self._recorded_for.add(table.root)
                record(table.units, self._plans)
        return table

    def _resolved(self, params: Sequence[Tensor]) -> list[ShardedParam]:
        """Find the sharded parameters of `params`. Raises RuntimeError as `of` does."""
        found = [resolve(param) for param in params]
        for sharded, layout in zip(found, self._layouts, strict=True):
            if sharded is None or sharded.layout != layout:
                what = "a parameter" if sharded is None else f"parameter {sharded.name}"
                raise RuntimeError(
                    f"{what} stands where compiled code has one of size {list(layout.size)}, "
                    f"placed as {layout.placements}: call torch._dynamo.reset() after parameters "
                    "have changed places"
                )
        known = [sharded for sharded in found if sharded is not None]
        if len(set(known)) < len(known):
            tied = next(sharded for sharded in known if known.count(sharded) > 1)
            raise RuntimeError(
                f"parameter {tied.name} stands in two places where compiled code has two "
                "parameters: call torch._dynamo.reset() after parameters were tied"
            )
        return known


def table_at(table: Tensor | None) -> Table | None:
    """Return the table whose number the tensor `table` holds.

    None for None, as in a graph that is run by itself. Raises KeyError if the table is gone.
    """
    return None if table is None else _tables[int(table.item())]


def look_up(table: Tensor | None, params: Sequence[int]) -> list[ShardedParam]:
    """Return the parameters at the indices `params` of the table whose number `table` holds.

    An empty list if `table` is None.
    """
    known = table_at(table)
    return [] if known is None else [known[number] for number in params]
