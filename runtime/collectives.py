"""Launch and wait: the only code that issues a collective, and no policy.

Both the eager runtime and the compiled graphs move bytes through these four
functions, so their results can only agree.

    gather:  shards -> one send buffer -> all-gather -> copied out to whole parameters
    reduce:  whole gradients -> one send buffer -> reduce-scatter -> mean, per shard

A bucket of one needs no copies on the way out: the gathered chunks are the padded
parameter. A group of one rank issues no collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from autoshard import _torch
from autoshard.passes.layout import Member


@dataclass(frozen=True)
class Issued:
    """What an observer sees of one launch: the kind, its members, the group's name."""

    kind: str  # "gather" or "reduce"
    members: tuple[Member, ...]
    group: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole, unsharded members."""
        return sum(member.num_bytes for member in self.members)


@dataclass(frozen=True)
class InFlight:
    """A launched collective, with everything that must outlive it.

    `send` is read by the collective until it is waited for: dropping it sooner
    would let the allocator hand its memory to the next layer.
    """

    issued: Issued
    work: dist.Work
    send: Tensor  # [numel of one rank's pieces], 1D
    receive: Tensor  # gather: [world * send.numel()], reduce: [numel of one rank's pieces], 1D
    world: int
    rank: int


_observers: list[Callable[[Issued], None]] = []


@contextlib.contextmanager
def observe(observer: Callable[[Issued], None]) -> Iterator[None]:
    """Call `observer` for every collective launched inside the block, eager and compiled."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def launch_gather(shards: list[Tensor], members: tuple[Member, ...], group: str) -> InFlight:
    """Start gathering `members` from this rank's `shards`, one dtype for all.

    shards: one a member, (local rows, *rest).
    """
    process_group = _torch.resolve_group(group)
    world, rank = process_group.size(), process_group.rank()
    issued = Issued("gather", members, group)
    with record_function(f"autoshard::launch_gather {group}"), torch.no_grad():
        send = _pack_shards(shards, members, world)
        receive = send.new_empty(world * send.numel())
        _announce(issued)
        work = _torch.all_gather_flat(receive, send, group=process_group, async_op=True)
    return InFlight(issued, work, send, receive, world, rank)


def wait_gather(flight: InFlight) -> list[Tensor]:
    """Whole parameters, each contiguous in a storage of its own, (rows, *rest)."""
    members, world = flight.issued.members, flight.world
    with record_function(f"autoshard::wait_gather {flight.issued.group}"), torch.no_grad():
        flight.work.wait()
        if len(members) == 1:
            padded = [flight.receive]
        else:
            lengths = [member.chunk_numel(world) for member in members]
            padded = [flight.receive.new_empty(world * length) for length in lengths]
            torch.split_with_sizes_copy(
                flight.receive.view(world, -1),
                lengths,
                dim=1,
                out=[out.view(world, -1) for out in padded],
            )
        return [
            out[: member.rows * member.row_numel].view(member.size)
            for out, member in zip(padded, members, strict=True)
        ]


def launch_reduce(grads: list[Tensor], members: tuple[Member, ...], group: str) -> InFlight:
    """Start averaging `grads` over the group, each rank to keep its own rows.

    grads: one a member, (rows, *rest), read before this returns.
    """
    process_group = _torch.resolve_group(group)
    world, rank = process_group.size(), process_group.rank()
    issued = Issued("reduce", members, group)
    with record_function(f"autoshard::launch_reduce {group}"), torch.no_grad():
        send = _pack_grads(grads, members, world)
        receive = send.new_empty(send.numel() // world)
        _announce(issued)
        work = _torch.reduce_scatter_flat(receive, send, group=process_group, async_op=True)
    return InFlight(issued, work, send, receive, world, rank)


def wait_reduce(flight: InFlight) -> list[Tensor]:
    """This rank's rows of the mean gradients, each in a storage of its own."""
    members, world, rank = flight.issued.members, flight.world, flight.rank
    with record_function(f"autoshard::wait_reduce {flight.issued.group}"), torch.no_grad():
        flight.work.wait()
        pieces = flight.receive.split([member.chunk_numel(world) for member in members])
        shards = [
            piece[: member.local_rows(world, rank) * member.row_numel].view(
                member.local_rows(world, rank), *member.size[1:]
            )
            for piece, member in zip(pieces, members, strict=True)
        ]
        # The division is also the copy out of the shared buffer: an op's outputs may not alias.
        return list(torch._foreach_div(shards, world))


def _pack_shards(shards: list[Tensor], members: tuple[Member, ...], world: int) -> Tensor:
    """One send buffer of whole chunks; the shard itself where it already is one."""
    first = shards[0]
    if len(members) == 1 and first.numel() == members[0].chunk_numel(world):
        return first.detach().contiguous().view(-1)
    lengths = [member.chunk_numel(world) for member in members]
    send = first.new_empty(sum(lengths))
    for piece, shard in zip(send.split(lengths), shards, strict=True):
        # Padding is never read as data: it stays what the allocator left there.
        piece[: shard.numel()].copy_(shard.detach().reshape(-1))
    return send


def _pack_grads(grads: list[Tensor], members: tuple[Member, ...], world: int) -> Tensor:
    """Rank-major send buffer: for each rank, its chunk of every member in turn."""
    lengths = [member.chunk_numel(world) for member in members]
    send = grads[0].new_empty((world, sum(lengths)))
    for columns, grad, member in zip(send.split(lengths, dim=1), grads, members, strict=True):
        chunk = member.chunk_rows(world)
        if member.rows == chunk * world:
            # Splitting a dim is always a view: one copy, whatever the gradient's strides.
            columns.view(world, chunk, *member.size[1:]).copy_(grad.unflatten(0, (world, chunk)))
            continue
        for rank in range(world):
            rows = member.local_rows(world, rank)
            used = rows * member.row_numel
            if rows:
                columns[rank, :used].copy_(grad.narrow(0, rank * chunk, rows).reshape(-1))
            columns[rank, used:].zero_()  # summed with the others' padding; kept finite
    return send.view(-1)


def _announce(issued: Issued) -> None:
    for observer in _observers:
        observer(issued)
