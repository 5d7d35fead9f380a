"""Gathers and reduces that are messages, as those see them who look at ops.

torch's collectives are ops, which a dispatch mode sees, as `CommDebugMode` is one; gloo's messages
are none that it counts. So each gather or reduce by messages calls an op of its own, which does
nothing, if there is a mode. (The Flight Recorder and torch's own tools on a network see messages
as such, or not at all: `AUTOSHARD_MESSAGES=0` is for these.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.passes.ir.ops import library

_SCHEMA = "(Tensor[] receive, Tensor[] send) -> ()"
_NAMES = ("all_gather_by_messages", "reduce_scatter_by_messages")


def _nothing(receive: list[Tensor], send: list[Tensor]) -> None:
    """Do nothing: the op is there to be seen."""


for _name in _NAMES:
    library.define(f"{_name}{_SCHEMA}")
    library.impl(_name, _nothing, "CompositeExplicitAutograd")


def show_gather(receive: Sequence[Tensor], send: Sequence[Tensor]) -> None:
    """Call `autoshard::all_gather_by_messages`, if there is a dispatch mode to see it."""
    if _torch.ops.is_observed():
        _torch.dist.count_as_collectives(_packets())
        torch.ops.autoshard.all_gather_by_messages(list(receive), list(send))


def show_reduce(receive: Tensor, send: Tensor) -> None:
    """Call `autoshard::reduce_scatter_by_messages`, if there is a dispatch mode to see it."""
    if _torch.ops.is_observed():
        _torch.dist.count_as_collectives(_packets())
        torch.ops.autoshard.reduce_scatter_by_messages([receive], [send])


def _packets() -> list[Any]:
    return [getattr(torch.ops.autoshard, name) for name in _NAMES]
