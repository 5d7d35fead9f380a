"""Implementations of the ops of `passes/ops.py`, on top of `collectives.py`.

What is in flight is kept here, found by the address of its ticket. The entry holds
the ticket itself, so no other ticket can have that address while it is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.passes import groups
from autoshard.passes.layout import read_members
from autoshard.passes.ops import library
from autoshard.runtime import collectives
from autoshard.runtime.collectives import InFlight
from autoshard.runtime.streams import on_all_reduce_stream


@dataclass(frozen=True)
class _Entry:
    ticket: Tensor
    flight: InFlight
    keep: InFlight | None  # what it followed upon


_in_flight: dict[int, _Entry] = {}


def _unshard(
    shard: Tensor, members: str, group: str, keep: bool, param: int, *, reduce: str = ""
) -> Tensor:
    (member,) = read_members(members)
    if groups.size(group) == 1:  # an op's output may not alias its input
        return shard.detach().to(member.dtype, copy=True)
    return collectives.wait_gather(collectives.launch_gather([shard], (member,), group))[0]


def _reduce_grad(grad: Tensor, members: str, group: str, param: int) -> Tensor:
    if groups.size(group) == 1:
        (member,) = read_members(members)
        return grad.detach().to(member.dtype, copy=True).to(member.shard_dtype or member.dtype)
    flight = _start_reduce([grad], members, group)
    if groups.replicate_part(group):
        flight = collectives.launch_all_reduce(flight.wait(), groups.replicate_part(group))
    return collectives.wait_reduce(flight, divisor=_mean(group).after)[0]


def _launch_gather(tensors: list[Tensor], members: str, group: str, bucket: int) -> Tensor:
    return _ticket(collectives.launch_gather(tensors, read_members(members), group))


def _wait_gather(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    return collectives.wait_gather(_redeem(ticket))


def _launch_reduce(tensors: list[Tensor], members: str, group: str, bucket: int) -> Tensor:
    return _ticket(_start_reduce(tensors, members, group))


def _all_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> Tensor:
    flight = _redeem(ticket)
    with on_all_reduce_stream(ticket.device, after_compute=not flight.work):
        launched = collectives.launch_all_reduce(flight.wait(), groups.replicate_part(group))
    # What the other stream reads must outlive it: until the all-reduce is waited for.
    return _ticket(launched, keep=flight)


def _wait_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    return collectives.wait_reduce(_redeem(ticket), divisor=_mean(group).after)


def _start_reduce(grads: list[Tensor], members: str, group: str) -> InFlight:
    return collectives.launch_reduce(
        grads, read_members(members), groups.shard_part(group), divisor=_mean(group).before
    )


def _ticket(flight: InFlight, keep: InFlight | None = None) -> Tensor:
    ticket = flight.receive.new_empty(1, dtype=torch.uint8)
    _in_flight[ticket.data_ptr()] = _Entry(ticket, flight, keep)
    return ticket


def _redeem(ticket: Tensor) -> InFlight:
    try:
        entry = _in_flight.pop(ticket.data_ptr())
    except KeyError:
        raise RuntimeError(
            "a wait found no launch for its ticket: the graph waits twice for one launch, "
            "or an exception dropped what was in flight"
        ) from None
    return entry.flight


def _mean(group: str) -> collectives.Division:
    return collectives.division(groups.size(group))


for _name, _kernel in (
    ("unshard", _unshard),
    ("reduce_grad", _reduce_grad),
    ("launch_gather", _launch_gather),
    ("wait_gather", _wait_gather),
    ("launch_reduce", _launch_reduce),
    ("all_reduce", _all_reduce),
    ("wait_reduce", _wait_reduce),
):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
