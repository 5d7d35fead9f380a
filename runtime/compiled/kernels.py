"""Implementations of the ops of `passes/ir/ops.py`, on top of `comm/collectives.py`.

Collectives and copies in flight are kept here, by the addresses of their tickets, until they are
waited for. If an exception drops a ticket, its entry goes, too, and compute on a device waits for
what is in flight, as its buffers are free from then on. An alias of a ticket does not keep its
entry.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.passes.ir import groups, ops
from autoshard.passes.ir.layout import part_of, read_members
from autoshard.passes.ir.ops import library
from autoshard.runtime.comm import collectives, copies
from autoshard.runtime.comm.copies import Copies
from autoshard.runtime.comm.flights import GroupedFlight, InFlight
from autoshard.runtime.comm.packing import BucketLayout, bucket_layout, read_layout
from autoshard.runtime.comm.streams import on_all_reduce_stream
from autoshard.runtime.compiled import extensions, reduce
from autoshard.runtime.compiled.reduce import Flags, UnitReductions
from autoshard.runtime.compiled.tables import look_up, table_at

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

Flight = InFlight | GroupedFlight | UnitReductions | Copies


@dataclass(frozen=True)
class _Entry:
    """Entry for a ticket: what was launched, or packed, and is not waited for yet."""

    ticket: weakref.ref[Tensor]  # whose callback drops this
    flight: Flight
    keep: InFlight | None = None  # what it followed upon


_in_flight: dict[int, _Entry] = {}


def _implements(op: Any) -> Callable[[_Kernel], _Kernel]:
    """Register the decorated function as the implementation of `op`, on every device."""

    def register(kernel: _Kernel) -> _Kernel:
        library.impl(op, kernel, "CompositeExplicitAutograd")
        return kernel

    return register


@_implements(ops.unshard)
def _unshard(
    shard: Tensor, members: str, group: str, keep: bool, param: int, *, reduce: str = ""
) -> Tensor:
    """Gather `shard`, and wait; a copy, cast, if the group has one rank.

    A shard that lives on the host is first copied to the device that `reduce` names.
    """
    (member,) = read_members(members)
    shard = shard.detach().to(ops.UnshardOptions.read(reduce).host_device or shard.device)
    if groups.size(group) == 1:  # an op's output may not alias its input
        return shard.to(member.dtype, copy=True)
    return collectives.wait_gather(
        collectives.launch_gather([shard], _layout(members, group), group)
    )[0]


@_implements(ops.reduce_grad)
def _reduce_grad(
    grad: Tensor,
    members: str,
    group: str,
    param: int,
    *,
    table: Tensor | None = None,
    outputs: Sequence[int] = (),
) -> Tensor:
    """Reduce `grad`, wait, and return its shard: the ops of a bucket one after another.

    The result is on the host if the member says so. Gradients that wait are added, users' settings
    followed, and `is_withheld` set, as by `_pack_grads` and `_wait_reduce`.
    """
    told = ops.show_outputs([outputs]) if outputs else ""
    packed = _pack_grads([grad], members, group, 0, table, [param], told)
    ticket = _launch_reduce(packed, members, group, 0)
    if groups.replicate_part(group):
        ticket = _all_reduce(ticket, members, group, 0)
    (member,) = read_members(members)
    shard = _wait_reduce(ticket, members, group, 0)[0]
    return shard.cpu() if member.on_host else shard


@_implements(ops.cut)
def _cut(whole: Tensor, members: str, group: str) -> Tensor:
    """Copy out of `whole`, unsharded, the rows that this rank has in `group`."""
    (member,) = read_members(members)
    return part_of(whole, member, groups.shards(group), groups.shard_rank(group))


@_implements(ops.before_gather)
def _before_gather(
    shard: Tensor, pieces: str, metadata: str, param: int, *, table: Tensor | None = None
) -> list[Tensor]:
    """Ask the shard of parameter `param` of the table for what to gather: `extensions.answer`."""
    (owner,) = look_up(table, [param])
    return extensions.answer(owner, pieces, metadata)


@_implements(ops.hold_grad)
def _hold_grad(
    grad: Tensor,
    members: str,
    group: str,
    param: int,
    *,
    table: Tensor | None = None,
    outputs: Sequence[int] = (),
) -> Tensor:
    """Let `grad` wait for a later backward, and return zeros for its shard; see `reduce.hold`.

    If `torch.autograd.grad` asks for it, it is reduced instead, waited for, and its shard returned.
    It is absent on this rank if the backward has a gradient for none of `outputs`. Needs a `table`.
    """
    known = table_at(table)
    assert known is not None
    has_grad = not known.lacks(outputs)
    return reduce.hold(known[param], grad if has_grad else None, members, group, like=grad)


@_implements(ops.to_device)
def _to_device(shard: Tensor, device: str) -> Tensor:
    return shard.detach().to(device, copy=True, non_blocking=True)


@_implements(ops.to_host)
def _to_host(shard: Tensor) -> Tensor:
    return shard.detach().to("cpu", copy=True)


@_implements(ops.launch_load)
def _launch_load(shards: list[Tensor], device: str, bucket: int) -> Tensor:
    return _copy_ticket(copies.launch_load(shards, torch.device(device)))


@_implements(ops.wait_load)
def _wait_load(ticket: Tensor, shards: list[Tensor], device: str, bucket: int) -> list[Tensor]:
    return _redeem_copy(ticket).wait_on_device()


@_implements(ops.launch_store)
def _launch_store(shards: list[Tensor], bucket: int) -> Tensor:
    return _copy_ticket(copies.launch_store(shards))


@_implements(ops.wait_store)
def _wait_store(ticket: Tensor, shards: list[Tensor], bucket: int) -> list[Tensor]:
    return _redeem_copy(ticket).wait_on_host()


@_implements(ops.launch_offload)
def _launch_offload(value: Tensor, copy: int) -> Tensor:
    return _copy_ticket(copies.launch_store([value]))


@_implements(ops.wait_offload)
def _wait_offload(ticket: Tensor, value: Tensor, copy: int) -> Tensor:
    """Wait for a copy to the host: on the device, and on the host where hooks of a user's read it.

    What autograd saves goes to the saved-tensor hooks that are on top.
    """
    flight = _redeem_copy(ticket)
    (copied,) = flight.wait_on_device()
    if _torch.autograd.saved_tensors_hooks_on_top() is not None:
        flight.wait_on_host()
    return copied


@_implements(ops.launch_reload)
def _launch_reload(value: Tensor, device: str, copy: int) -> Tensor:
    return _copy_ticket(copies.launch_load([value], torch.device(device)))


@_implements(ops.wait_reload)
def _wait_reload(ticket: Tensor, value: Tensor, device: str, copy: int) -> Tensor:
    return _redeem_copy(ticket).wait_on_device()[0]


@_implements(ops.launch_gather)
def _launch_gather(
    tensors: list[Tensor],
    members: str,
    group: str,
    bucket: int,
    copies: bool = False,
    grouped: bool = False,
) -> Tensor:
    """Launch a bucket's gather, and return a ticket for it."""
    launch = collectives.launch_grouped_gather if grouped else collectives.launch_gather
    flight = launch(tensors, _layout(members, group), group, copies=copies, bucket=bucket)
    return _ticket(flight, tensors[0])


@_implements(ops.wait_gather)
def _wait_gather(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    """Wait for the gather of `ticket`, and return the unsharded parameters. Raises as `_take`."""
    flight = _take(ticket)
    assert isinstance(flight, (InFlight, GroupedFlight))
    return collectives.wait_gather(flight)


@_implements(ops.pack_grads)
def _pack_grads(
    tensors: list[Tensor],
    members: str,
    group: str,
    bucket: int,
    table: Tensor | None = None,
    params: Sequence[int] = (),
    outputs: str = "",
) -> Tensor:
    """Pack a bucket's gradients into one buffer for one reduce; return a ticket for it.

    Gradients that wait for this reduce are added first. If a unit asks for more than a plain reduce
    (`reduce.is_plain`), each unit's reduce is packed and launched here already, gradients that are
    not to be reduced now are kept to wait, and the ticket stands for these (`UnitReductions`).
    table, params: where the graph's parameters are found, and the numbers of these in it; without a
        table nothing is known of them.
    outputs: which outputs of forward each gradient comes from: one that comes from unused ones
        alone is absent on this rank, which the buffer tells the others.
    """
    known, layout = table_at(table), _layout(members, group)
    owners = [] if known is None else [known[number] for number in params]
    dtype, grads = layout.dtype, list(tensors)
    sources = ops.read_outputs(outputs)
    has = [known is None or not known.lacks(each) for each in sources]
    if not reduce.is_plain(owners):
        is_there = has or [True] * len(grads)
        there = [grad if its else None for grad, its in zip(grads, is_there, strict=True)]
        reductions = UnitReductions(there, owners, dtype)  # packed and launched one by one
        return _ticket(reductions, tensors[0])
    flags = None
    if sources:
        flags = Flags.of(owners, sources, has)
        parts = (*layout.members, flags.member(dtype, layout.world))
        layout = bucket_layout(parts, layout.world, layout.rank)
    reduce.add_pending(owners, grads, dtype)
    if flags is not None:
        grads.append(flags.tensor(grads[0].dtype, tensors[0].device, layout.world))
    packed = collectives.pack_grads(
        grads,
        layout,
        groups.shard_part(group),
        divisor=float(groups.size(group)),
        is_mean=not any(owner.unit.reducer.only_sums for owner in owners),
        is_last=not groups.replicate_part(group),
        bucket=bucket,
        names=[owner.name for owner in owners],
        flags=flags,
    )
    return _ticket(packed, tensors[0])


@_implements(ops.launch_reduce)
def _launch_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> Tensor:
    """Launch the reduce-scatter of what `_pack_grads` has packed; return a new ticket.

    Launches nothing if each unit's reduce was launched there already, or over one rank. Raises as
    `_take`.
    """
    flight = _redeem(ticket)
    if isinstance(flight, InFlight):
        flight = collectives.launch_reduce(flight)
    return _ticket(flight, ticket)


@_implements(ops.all_reduce)
def _all_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> Tensor:
    """Launch the all-reduce of what `ticket` reduce-scatters; return a new ticket.

    On a device, the stream of all-reduces waits for the reduce-scatter, not compute; on a CPU the
    host does. What the reduce-scatter reads is kept until the all-reduce is waited for. Reduces
    that `_pack_grads` launched unit by unit go on as their units are configured: sums may be left
    for a later all-reduce, and then none is launched. Raises as `_take`.
    """
    flight = _redeem(ticket)
    if isinstance(flight, UnitReductions):
        flight.advance()
        return _ticket(flight, ticket)
    with on_all_reduce_stream(ticket.device, after_compute=not flight.work):
        launched = collectives.launch_all_reduce(flight.wait(), groups.replicate_part(group))
    # What the other stream reads must outlive it: until the all-reduce is waited for.
    return _ticket(launched, ticket, keep=flight)


@_implements(ops.wait_reduce)
def _wait_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    """Wait for the reduce of `ticket`, and return this rank's shards of the mean gradients.

    Where a gradient may be absent on some ranks, sets `is_withheld` of its parameter: whether it is
    on all; if it is on this one, the host waits for a device to know. Where `_pack_grads` launched
    reduces unit by unit, zeros stand for gradients that wait, and `is_withheld` is set, too; see
    `UnitReductions.wait`. Raises as `_take`.
    """
    flight = _redeem(ticket)
    if isinstance(flight, UnitReductions):
        return flight.wait(ticket, members, group)
    flight = flight.wait()
    shards = collectives.split_reduced(flight, copies=False)
    if flight.flags is not None:
        flight.flags.withhold(shards.pop())
    return shards


def _layout(members: str, group: str) -> BucketLayout:
    """Lay out `members` over the shards of `group`."""
    return read_layout(members, groups.shards(group), groups.shard_rank(group))


def _ticket(flight: Flight, like: Tensor, keep: InFlight | None = None) -> Tensor:
    """Make a ticket for `flight`, one byte on the device of `like`.

    `flight` is kept until `_take` has it, or until the ticket is freed: then `_drop` is called.
    keep: what must outlive `flight`.
    """
    ticket = like.new_empty(1, dtype=torch.uint8)
    address = ticket.data_ptr()
    is_on_host = ticket.device.type == "cpu"
    dropped = weakref.ref(ticket, lambda _: _drop(address, is_on_host=is_on_host))
    _in_flight[address] = _Entry(dropped, flight, keep)
    return ticket


def _drop(address: int, *, is_on_host: bool) -> None:
    """Drop the entry of a ticket that was freed without a wait; compute on a device waits then.

    address: the ticket's. Does nothing if its entry was taken.
    is_on_host: whether the ticket lay on a CPU: then only copies are waited for.
    `UnitReductions` see to the wait themselves.
    """
    entry = _in_flight.pop(address, None)
    if entry is None:
        return
    if isinstance(entry.flight, Copies):  # their tickets are the host's, wherever they go
        entry.flight.wait_on_device()
    elif not is_on_host and not isinstance(entry.flight, UnitReductions):
        entry.flight.wait()  # a host's collectives hold on to their buffers themselves


def _redeem(ticket: Tensor) -> InFlight | UnitReductions:
    flight = _take(ticket)
    assert isinstance(flight, (InFlight, UnitReductions))
    return flight


def _copy_ticket(begun: Copies) -> Tensor:
    return _ticket(begun, torch.empty(0))


def _redeem_copy(ticket: Tensor) -> Copies:
    flight = _take(ticket)
    assert isinstance(flight, Copies)
    return flight


def _take(ticket: Tensor) -> Flight:
    """Return what `ticket` stands for, and forget it. Raises RuntimeError for one taken before.

    So it does if an exception has dropped what was in flight.
    """
    try:
        entry = _in_flight.pop(ticket.data_ptr())
    except KeyError:
        raise RuntimeError(
            "a wait found no launch for its ticket: the graph waits twice for one launch, "
            "or an exception dropped what was in flight"
        ) from None
    return entry.flight
