"""Implementations of the ops of `passes/ops.py`, on top of `collectives.py`.

What is in flight is kept here, found by the address of its ticket. The entry holds
the ticket itself, so no other ticket can have that address while it is there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.passes.layout import read_members
from autoshard.passes.ops import library
from autoshard.runtime import collectives
from autoshard.runtime.collectives import InFlight

_in_flight: dict[int, tuple[Tensor, InFlight]] = {}


def _unshard(shard: Tensor, members: str, group: str, keep: bool, param: int) -> Tensor:
    (member,) = read_members(members)
    if _torch.group_size(group) == 1:
        return shard.detach().clone()  # an op's output may not alias its input
    return collectives.wait_gather(collectives.launch_gather([shard], (member,), group))[0]


def _reduce_grad(grad: Tensor, members: str, group: str, param: int) -> Tensor:
    if _torch.group_size(group) == 1:
        return grad.detach().clone()
    mean = collectives.division(_torch.group_size(group))
    flight = collectives.launch_reduce([grad], read_members(members), group, divisor=mean.before)
    return collectives.wait_reduce(flight, divisor=mean.after)[0]


def _launch_gather(tensors: list[Tensor], members: str, group: str, bucket: int) -> Tensor:
    return _ticket(collectives.launch_gather(tensors, read_members(members), group))


def _wait_gather(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    return collectives.wait_gather(_redeem(ticket))


def _launch_reduce(tensors: list[Tensor], members: str, group: str, bucket: int) -> Tensor:
    mean = collectives.division(_torch.group_size(group))
    return _ticket(
        collectives.launch_reduce(tensors, read_members(members), group, divisor=mean.before)
    )


def _wait_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    mean = collectives.division(_torch.group_size(group))
    return collectives.wait_reduce(_redeem(ticket), divisor=mean.after)


def _ticket(flight: InFlight) -> Tensor:
    ticket = flight.receive.new_empty(1, dtype=torch.uint8)
    _in_flight[ticket.data_ptr()] = (ticket, flight)
    return ticket


def _redeem(ticket: Tensor) -> InFlight:
    try:
        return _in_flight.pop(ticket.data_ptr())[1]
    except KeyError:
        raise RuntimeError(
            "a wait found no launch for its ticket: the graph waits twice for one launch, "
            "or an exception dropped what was in flight"
        ) from None


for _name, _kernel in (
    ("unshard", _unshard),
    ("reduce_grad", _reduce_grad),
    ("launch_gather", _launch_gather),
    ("wait_gather", _wait_gather),
    ("launch_reduce", _launch_reduce),
    ("wait_reduce", _wait_reduce),
):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
