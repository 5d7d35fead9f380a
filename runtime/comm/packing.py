"""Buffers that collectives send and receive: how members lie in them, copied in and out.

    send, of a gather:   a | b .      this rank's piece of each member, a chunk with its padding
    receive:             a | b . | a | b . | a | b .      the same of each rank in turn
    send, of a reduce:   the same, filled from whole gradients

Copies into a buffer cast to its dtype. They are one call for all members of a bucket, which a
device does in a kernel or two, and no loop here is over ranks. A bucket of one needs no copies on
the way out: the gathered chunks are the padded parameter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.passes.ir.layout import Member, read_members, rows_of
from autoshard.runtime.comm import custom_comms
from autoshard.runtime.comm.custom_comms import Comm


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """Layout of a bucket as `rank` of `world` sees it, made once for all its collectives.

    lengths: elements of one rank's piece of each member, padding included.
    chunk: elements of all of these: what one rank sends of a gather, or gets of a reduce.
    numels: elements of this rank's piece of each member, without padding.
    sizes: sizes of this rank's shards.
    rooms: sizes of tensors in which the pieces of all ranks fit, one for each member: the member's
        own where the pieces, whole rows, are in turn the parameter; else (elements,).
    fit: whether all of them do so.
    by_rows: whether every member is cut along its first dim, and is no scalar.
    """

    members: tuple[Member, ...]
    world: int
    rank: int
    lengths: list[int]
    chunk: int
    numels: list[int]
    sizes: list[tuple[int, ...]]
    rooms: list[tuple[int, ...]]
    fit: bool
    by_rows: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0].dtype

    @property
    def is_padded(self) -> bool:
        """Whether this rank's pieces end in padding."""
        return self.numels != self.lengths


@functools.lru_cache(maxsize=4096)
def bucket_layout(members: tuple[Member, ...], world: int, rank: int) -> BucketLayout:
    """Lay out `members`, all of one dtype, over `world` ranks, as `rank` sees it."""
    lengths = [member.chunk_numel(world) for member in members]
    whole = [
        member.dim == 0 and member.rows * member.row_numel == world * length
        for member, length in zip(members, lengths, strict=True)
    ]
    return BucketLayout(
        members,
        world,
        rank,
        lengths,
        chunk=sum(lengths),
        numels=[member.local_rows(world, rank) * member.row_numel for member in members],
        sizes=[member.local_size(world, rank) for member in members],
        rooms=[
            member.size if is_whole else (world * length,)
            for member, length, is_whole in zip(members, lengths, whole, strict=True)
        ],
        fit=all(whole),
        by_rows=all(member.size and member.dim == 0 for member in members),
    )


@functools.lru_cache(maxsize=4096)
def read_layout(members: str, world: int, rank: int) -> BucketLayout:
    """Lay out the members that `read_members` reads; found by their text, sooner than by them."""
    return bucket_layout(read_members(members), world, rank)


def pack_shards(
    shards: list[Tensor], layout: BucketLayout, *, copies: bool, comm: Comm | None = None
) -> tuple[Tensor, Tensor]:
    """Pack what is sent, as full chunks, and make room to receive: (send, receive), both 1D.

    Shards are cast to the layout's dtype. `send` is this rank's part of `receive`; or the shard
    itself if it is the only one, a full chunk of the right dtype, and `copies` is False. Padding is
    never read as data: it stays what the allocator left there.
    comm: allocates `receive`, if given.
    """
    first, dtype = shards[0], layout.dtype
    receive = custom_comms.buffer(comm, layout.world * layout.chunk, first, dtype)
    if layout.lengths == [first.numel()] and first.dtype == dtype and not copies:
        return first.contiguous().view(-1), receive
    send = receive.narrow(0, layout.rank * layout.chunk, layout.chunk)
    flat = [shard.reshape(-1) for shard in shards]
    pieces = list(send.split(layout.lengths))
    if layout.is_padded:
        pieces = [piece[:numel] for piece, numel in zip(pieces, layout.numels, strict=True)]
    _torch.tensors.copy_each(pieces, flat)
    return send, receive


def pack_each(
    shards: list[Tensor], layout: BucketLayout, *, copies: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """List what is sent of each shard by itself, a full chunk, and tensors to receive into.

    The latter have the layout's `rooms`. A shard that is a full chunk of the right dtype is sent
    from where it lies, unless `copies`; others are copied, cast, to their place in what is received
    into. What is sent has the size of a rank's part of the room, cut along its first dim.
    """
    sizes = zip(shards, layout.rooms, strict=True)
    receive = [shard.new_empty(size, dtype=layout.dtype) for shard, size in sizes]
    send: list[Tensor] = []
    places: list[Tensor] = []
    copied: list[Tensor] = []
    for shard, room, length in zip(shards, receive, layout.lengths, strict=True):
        is_whole = shard.numel() == length and shard.is_contiguous()
        if copies or shard.dtype != room.dtype or not is_whole:
            rows = len(room) // layout.world
            place = room.narrow(0, layout.rank * rows, rows)
            send.append(place)
            if room.dim() == 1:
                place, shard = place[: shard.numel()], shard.reshape(-1)
            places.append(place)
            copied.append(shard)
        else:
            send.append(shard.view(-1) if room.dim() == 1 else shard)
    if copied:
        _torch.tensors.copy_each(places, copied)
    return send, receive


def split_gathered(receive: Tensor, layout: BucketLayout) -> list[Tensor]:
    """Split `receive`, which members share: for each member, the pieces of all ranks in turn.

    Each has the size of its room. These are copies, except that a single member gets `receive`
    itself, as it is.
    """
    if len(layout.members) == 1:
        return [receive]
    world = layout.world
    rooms = [receive.new_empty(size) for size in layout.rooms]
    torch.split_with_sizes_copy(
        receive.view(world, -1), layout.lengths, dim=1, out=[room.view(world, -1) for room in rooms]
    )
    return rooms


def unsharded(rooms: list[Tensor], layout: BucketLayout) -> list[Tensor]:
    """Return the unsharded parameters from `rooms`: for each, the pieces of all ranks in turn.

    Each is its room, or a view of it, if the parameter is cut on dim 0 or flat; else a copy, unless
    there is one rank. A scalar is the first rank's. `rooms` is emptied, unless it is returned: what
    is copied is freed before the next one is.
    """
    if layout.fit and len(layout.members) > 1:
        return rooms
    return [_unsharded(rooms.pop(0), member, layout.world) for member in layout.members]


def _unsharded(room: Tensor, member: Member, world: int) -> Tensor:
    if member.lies_in_turn:
        if room.shape == member.size:
            return room
        return room.view(-1)[: member.rows * member.row_numel].view(member.size)
    pieces = room.view(world, *member.local_size(world, 0))
    return pieces.movedim(0, member.dim).reshape(member.size)


@dataclass(frozen=True)
class Division:
    """Divisors of gradients that give their mean: `before` they are summed, and `after`."""

    before: float
    after: float


def division(total: float, dtype: torch.dtype, *, is_free: bool = False) -> Division:
    """Split the divisor `total` of sums in `dtype` in two.

    Undivided, a sum of float16 over many ranks overflows; divided by all of it beforehand, small
    gradients underflow. So float16 is divided by a power of two near the root of `total` first,
    then by the rest. Other dtypes have room for the sum, and are divided once, afterwards, as part
    of the copy out of the buffer. Powers of two divide exactly: both give the same numbers.
    Source: the factors of PyTorch's FSDP (pull request 106034): 2 -> 2, 1; 3 -> 2, 1.5; 4 -> 2, 2;
    8 -> 4, 2; 16 -> 4, 4; and those of its FSDP2, which divides float32 and bfloat16 once.
    is_free: whether a division beforehand costs nothing: any dtype is divided twice then.
    """
    before = 1.0
    if is_free or dtype == torch.float16:
        while total % before == 0 and total / before > before:
            before *= 2
    return Division(before, total / before)


def pack_grads(
    grads: list[Tensor], layout: BucketLayout, divisor: float, comm: Comm | None = None
) -> Tensor:
    """Pack unsharded gradients into one 1D buffer: for each rank in turn, its chunk of each member.

    They are cast to the layout's dtype, then divided by `divisor`. A scalar goes to every rank.
    Padding is filled with zeros: it is summed with the others', and kept finite.
    comm: allocates the buffer, if given.
    """
    world = layout.world
    send = custom_comms.buffer(comm, world * layout.chunk, grads[0], layout.dtype)
    if layout.by_rows:
        cut = [grad.contiguous() for grad in grads]
    else:
        pairs = zip(grads, layout.members, strict=True)
        cut = [_by_rank(grad, member, world) for grad, member in pairs]
    if 0 in layout.lengths:
        cut = [grad for grad in cut if grad.numel()]
    if len({grad.dtype for grad in cut}) > 1:
        cut = [grad.to(layout.dtype) for grad in cut]
    if cut:
        chunks = send.view(world, -1)
        if _is_cast_by_chunk_cat(cut[0].dtype, layout.dtype):
            _torch.tensors.chunk_cat(cut, 0, world, out=chunks)
        else:
            chunks.copy_(_torch.tensors.chunk_cat(cut, 0, world))
    return send if divisor == 1.0 else send.div_(divisor)


def _is_cast_by_chunk_cat(source: torch.dtype, to: torch.dtype) -> bool:
    """Tell whether `chunk_cat` casts from `source` to `to`, as CUDA's does it."""
    return source == to or (source, to) == (torch.bfloat16, torch.float32)


def _by_rank(grad: Tensor, member: Member, world: int) -> Tensor:
    """Return `grad`, contiguous, so that `world` equal cuts of its first dim are the ranks' pieces.

    The last cuts may lack rows. A scalar is repeated for each rank. Copies only if it has to.
    """
    if member.is_scalar:
        return grad.expand(world).contiguous()
    if member.is_flat:
        return grad.reshape(-1)
    if member.dim:  # it divides evenly
        cut = grad.unflatten(member.dim, (world, member.chunk_rows(world)))
        grad = cut.movedim(member.dim, 0)
    return grad.contiguous()


def pack_part(grads: list[Tensor], layout: BucketLayout, rank: int, divisor: float) -> Tensor:
    """Pack the chunk of each gradient for `rank`, cast and divided by `divisor`, into a 1D buffer.

    It is the part of `pack_grads` for `rank`, but that padding, which nothing reads, is left
    uninitialized.
    """
    send = grads[0].new_empty(layout.chunk, dtype=layout.dtype)
    places = zip(send.split(layout.lengths), grads, layout.members, strict=True)
    for to, grad, member in places:
        piece = rows_of(grad, member, layout.world, rank)
        _copy_divided(to[: piece.numel()].view(piece.shape), piece, divisor)
    return send


def own_parts(grads: list[Tensor], layout: BucketLayout, divisor: float) -> list[Tensor]:
    """Copy this rank's rows of each gradient, cast and divided, to a storage of its own."""
    parts = []
    for grad, member, size in zip(grads, layout.members, layout.sizes, strict=True):
        parts.append(grad.new_empty(size, dtype=member.dtype))
        _copy_divided(parts[-1], rows_of(grad, member, layout.world, layout.rank), divisor)
    return parts


def _copy_divided(to: Tensor, source: Tensor, divisor: float) -> None:
    """Write `source`, cast to the dtype of `to` and divided by `divisor`, to `to`."""
    if divisor == 1.0 or to.dtype != source.dtype:
        to.copy_(source)  # a cast comes before the division, which may need its precision
        if divisor != 1.0:
            to.div_(divisor)
    else:
        torch.div(source, divisor, out=to)


def split_pieces(flat: Tensor, layout: BucketLayout) -> list[Tensor]:
    """Split `flat` into this rank's parts of members, without padding, as views.

    flat: 1D, the padded chunk of each member in turn.
    """
    pieces = list(flat.split(layout.lengths))
    if layout.is_padded:
        pieces = [piece[:numel] for piece, numel in zip(pieces, layout.numels, strict=True)]
    return [piece.view(size) for piece, size in zip(pieces, layout.sizes, strict=True)]
