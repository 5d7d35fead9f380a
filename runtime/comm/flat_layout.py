"""Layout of tensors that are cut flat: which element lies where, and how to gather and cut them.

A parameter of 8 experts on 64 ranks has too few rows for all of them, and one of 4,096 rows on
3,000 ranks is sent with twice as many. Cut through its rows, it is shared evenly by any number of
ranks, and what a gather receives is still the parameter, without a copy:

    [3, 4] over 2 ranks:   0 0 0 0      [3, 4] over 5 ranks:   0 0 0 1
                           0 0 1 1                             1 1 2 2
                           1 1 1 1                             2 3 3 3

Two other forms of such a tensor are DTensors that torch knows. Its *line* is the same memory as a
tensor of one dim, which `Shard(0)` cuts in just this way. Gathered, it is replicated over the flat
axis, and placed as before over others; a *box* is what these leave of it on a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autoshard import _torch
from autoshard.passes.ir.layout import FLAT, Member, first_row, rows_of, split_run

Made = TypeVar("Made", bound=DTensor)


class FlatShard(Placement):
    """Placement over a mesh axis on whose ranks lie equal runs of a tensor's elements.

    Elements are taken in row-major order, ceil(elements / ranks) a rank; the last ranks may have
    fewer, or none. The local tensor has one dim. At most one axis of a mesh may have it.
    """

    def __eq__(self, other: object) -> bool:
        return type(other) is FlatShard

    def __hash__(self) -> int:
        return hash(FlatShard)

    def __repr__(self) -> str:
        return "FlatShard()"

    def __str__(self) -> str:
        return "F"

    def __reduce__(self) -> tuple[type[FlatShard], tuple[()]]:
        return FlatShard, ()


def is_flat(value: object) -> TypeGuard[DTensor]:
    """Tell whether `value` is a DTensor that is cut flat."""
    return isinstance(value, DTensor) and FlatShard() in value.placements


def cut_box(
    kind: type[Made],
    box: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    size: tuple[int, ...],
) -> Made:
    """Cut `box`, what the axes other than the flat one have left of a tensor of `size`.

    Raises ValueError for a mesh of several axes that have no names.
    """
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise ValueError(
            f"FlatShard() needs {mesh} to have names: init_device_mesh(..., mesh_dim_names=(...))"
        )
    axis = list(placements).index(FlatShard())
    member = Member(box.dtype, tuple(box.shape), FLAT)
    run = rows_of(box, member, mesh.size(axis), mesh.get_local_rank(axis))
    return _torch.dtensor.make(
        kind, run, _torch.dtensor.make_spec(mesh, placements, size, box.dtype)
    )


def gathered(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements of the tensor once it was gathered over the flat axis."""
    return tuple(Replicate() if each == FlatShard() else each for each in placements)


def gather(flat: DTensor) -> DTensor:
    """Gather `flat` to an ordinary DTensor, replicated over the flat axis; all ranks join in."""
    mesh, axis = flat.device_mesh, flat.placements.index(FlatShard())
    names = mesh.mesh_dim_names
    own = mesh if mesh.ndim == 1 else mesh[(names or ())[axis]]
    local = _torch.dtensor.local_tensor(flat)
    size = box(flat)[0]
    spec = _torch.dtensor.make_spec(own, (Shard(0),), (math.prod(size),), local.dtype)
    whole = _torch.dtensor.from_spec(local, spec).full_tensor().view(size)
    placements = gathered(flat.placements)
    return _torch.dtensor.from_spec(
        whole, _torch.dtensor.make_spec(mesh, placements, tuple(flat.shape), local.dtype)
    )


def cut_like(tensor: DTensor, like: Made) -> DTensor:
    """Cut `tensor`, which can be expanded to the size of `like`, as `like` is cut."""
    if layout(tensor) == layout(like):
        return tensor
    if tensor.shape != like.shape:
        expanded = tensor.expand(like.shape)
        assert isinstance(expanded, DTensor)
        tensor = expanded
    around = tensor.redistribute(like.device_mesh, gathered(like.placements))
    local = _torch.dtensor.local_tensor(around)
    return cut_box(type(like), local, like.device_mesh, like.placements, tuple(like.shape))


def layout(tensor: DTensor) -> tuple[Any, ...]:
    """Return what two tensors have alike whose elements lie alike."""
    return tensor.device_mesh, tensor.placements, tensor.shape


def line(flat: DTensor) -> DTensor:
    """Return the line of `flat`: a DTensor of one dim, in the same memory."""
    local, mesh = _torch.dtensor.local_tensor(flat), flat.device_mesh
    spec = _torch.dtensor.make_spec(mesh, line_placements(flat), (flat.numel(),), local.dtype)
    return _torch.dtensor.from_spec(local, spec)


def line_placements(flat: DTensor) -> tuple[Placement, ...]:
    """Placements of the line of `flat`."""
    return tuple(Replicate() if each == Replicate() else Shard(0) for each in flat.placements)


def from_line(line: DTensor, like: Made) -> Made:
    """Make the flat tensor, placed and sized as `like`, whose line is `line`, moved if need be."""
    wanted = line_placements(like)
    if line.placements != wanted:
        line = line.redistribute(like.device_mesh, wanted)
    spec = _torch.dtensor.make_spec(
        like.device_mesh, like.placements, tuple(like.shape), line.dtype
    )
    return _torch.dtensor.make(type(like), _torch.dtensor.local_tensor(line), spec)


def box(flat: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and offset of what the axes other than the flat one have left of `flat` here."""
    return _torch.dtensor.local_box(tuple(flat.shape), flat.device_mesh, gathered(flat.placements))


def boxes(flat: DTensor) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split this rank's run of `flat` into boxes: (offsets, sizes, where it begins in the run)."""
    size, corner = box(flat)
    world, rank = place(flat)
    numel = math.prod(size)
    start, end = first_row(numel, world, rank), first_row(numel, world, rank + 1)
    return [
        (tuple(map(sum, zip(corner, offsets, strict=True))), sizes, first - start)
        for offsets, sizes, first in split_run(size, start, end)
    ]


def place(flat: DTensor) -> tuple[int, int]:
    """Number of ranks that share the tensor, or this rank's box of it, and this rank's."""
    axis = flat.placements.index(FlatShard())
    return flat.device_mesh.size(axis), flat.device_mesh.get_local_rank(axis)


def has_empty_runs(flat: DTensor) -> bool:
    """Tell whether there are ranks that have no element of `flat`, or of this rank's box of it."""
    numel, (world, _) = math.prod(box(flat)[0]), place(flat)
    return first_row(numel, world, world - 1) == numel
