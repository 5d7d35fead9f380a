"""Ops by which dispatch modes see gathers and reduces that are messages.

A dispatch mode sees torch's collectives, as they are ops: `CommDebugMode` counts them. It counts no
messages. So each gather or reduce by messages calls an op that does nothing, if there is a mode,
and `CommDebugMode` counts that. For tools beneath ops, as the Flight Recorder, there is
AUTOSHARD_MESSAGES=0; see `transport.may_send`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autoshard import _torch
from autoshard.passes.ir.ops import declare, library


@declare("(Tensor[] receive, Tensor[] send) -> ()")
def all_gather_by_messages(receive: Sequence[Tensor], send: Sequence[Tensor]) -> None:
    """Do nothing: the op says that a gather from `send` into `receive` begins."""


@declare("(Tensor[] receive, Tensor[] send) -> ()")
def reduce_scatter_by_messages(receive: Sequence[Tensor], send: Sequence[Tensor]) -> None:
    """Do nothing: the op says that a reduce from `send` into `receive` begins."""


OPS = (all_gather_by_messages, reduce_scatter_by_messages)

for _op in OPS:
    library.impl(_op, lambda receive, send: None, "CompositeExplicitAutograd")


def show(op: Any, receive: Sequence[Tensor], send: Sequence[Tensor]) -> None:
    """Call `op`, one of `OPS`, if a dispatch mode is active; `CommDebugMode` counts it then."""
    if _torch.ops.is_observed():
        _torch.dist.count_as_collectives(each.overloadpacket for each in OPS)
        op(list(receive), list(send))
