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
from autoshard.passes.ir.layout import Member, rows_of
from autoshard.runtime.comm import custom_comms
from autoshard.runtime.comm.custom_comms import Comm


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """Layout of a bucket over `world` ranks, made once for all its collectives.

    lengths: elements of one rank's piece of each member, padding included.
    chunk: elements of all of these: what one rank sends of a gather, or gets of a reduce.
    """

    members: tuple[Member, ...]
    world: int
    lengths: list[int]
    chunk: int

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0].dtype


@functools.lru_cache(maxsize=4096)
def bucket_layout(members: tuple[Member, ...], world: int) -> BucketLayout:
    """Lay out `members`, all of one dtype, over `world` ranks."""
    lengths = [member.chunk_numel(world) for member in members]
    return BucketLayout(members, world, lengths, sum(lengths))


def pack_shards(
    shards: list[Tensor], layout: BucketLayout, rank: int, *, copies: bool, comm: Comm | None = None
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
        return first.detach().contiguous().view(-1), receive
    send = receive.narrow(0, rank * layout.chunk, layout.chunk)
    flat = [shard.detach().reshape(-1) for shard in shards]
    places = zip(send.split(layout.lengths), flat, strict=True)
    pieces = [to if len(to) == len(part) else to[: len(part)] for to, part in places]
    _torch.tensors.copy_each(pieces, flat)
    return send, receive


def parted(receive: Tensor, layout: BucketLayout) -> list[Tensor]:
    """Split `receive`, which members share: for each member, the pieces of all ranks in turn.

    These are copies, except that a single member gets `receive` itself.
    """
    if len(layout.members) == 1:
        return [receive]
    world = layout.world
    padded = [receive.new_empty(world * length) for length in layout.lengths]
    torch.split_with_sizes_copy(
        receive.view(world, -1),
        layout.lengths,
        dim=1,
        out=[out.view(world, -1) for out in padded],
    )
    return padded


def whole(padded: Tensor, member: Member, world: int) -> Tensor:
    """Return the unsharded parameter from `padded`, the pieces of all ranks in turn.

    It is a view of `padded` if the parameter is cut on dim 0, else a copy, unless `world` is 1. A
    scalar is the first rank's.
    """
    if member.dim == 0:
        return padded[: member.rows * member.row_numel].view(member.size)
    pieces = padded.view(world, *member.local_size(world, 0))
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
    pairs = zip(grads, layout.members, strict=True)
    cut = [_by_rank(grad, member, world) for grad, member in pairs if grad.numel()]
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
    if member.dim:  # which divides evenly
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


def own_parts(grads: list[Tensor], layout: BucketLayout, rank: int, divisor: float) -> list[Tensor]:
    """Copy the rows of `rank` of each gradient, cast and divided, to a storage of its own."""
    parts = []
    for grad, member in zip(grads, layout.members, strict=True):
        size = member.local_size(layout.world, rank)
        parts.append(grad.new_empty(size, dtype=member.dtype))
        _copy_divided(parts[-1], rows_of(grad, member, layout.world, rank), divisor)
    return parts


def _copy_divided(to: Tensor, source: Tensor, divisor: float) -> None:
    """Write `source`, cast to the dtype of `to` and divided by `divisor`, to `to`."""
    if divisor == 1.0 or to.dtype != source.dtype:
        to.copy_(source)  # a cast comes before the division, which may need its precision
        if divisor != 1.0:
            to.div_(divisor)
    else:
        torch.div(source, divisor, out=to)


def split_pieces(flat: Tensor, layout: BucketLayout, rank: int) -> list[Tensor]:
    """Split `flat` into the parts of members on `rank`, without padding, as views.

    flat: 1D, the padded chunk of each member in turn.
    """
    world = layout.world
    return [
        piece[: member.local_rows(world, rank) * member.row_numel].view(
            member.local_size(world, rank)
        )
        for piece, member in zip(flat.split(layout.lengths), layout.members, strict=True)
    ]
