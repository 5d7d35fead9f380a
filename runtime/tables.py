"""How compiled code finds its parameters: by the number of a table, which travels as a tensor.

A graph is the same on every rank and may come out of a cache, so that it can't name objects.
It gets the number of its frame's table as an input, saves it for backward as it saves shards,
and hands it to reduces.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.runtime.param import ShardedParam

_numbers = itertools.count()
_tables: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()


class Table:
    """The parameters of one frame.

    tensor: i64[1], its number. On the host, where it is read.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.params = tuple(params)
        number = next(_numbers)
        self.tensor = torch.tensor([number])
        _tables[number] = self


def look_up(table: Tensor | None, params: Sequence[int]) -> list[ShardedParam]:
    """The parameters at `params` in the table of that number; none if there is no table."""
    if table is None:
        return []
    known = _tables[int(table.item())].params
    return [known[number] for number in params]
