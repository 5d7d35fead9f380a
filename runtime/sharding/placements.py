"""Where a parameter is cut: along which dim, or through its rows."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Literal

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard

from autoshard import _torch
from autoshard.errors import UnsupportedError, UsageError
from autoshard.passes.ir.layout import FLAT, dim_with_little_padding
from autoshard.runtime.comm.flat_layout import FlatShard
from autoshard.runtime.unit.extensions import has_methods

PlacementFn = Callable[[nn.Parameter], Placement | None]
"""Function that says how a parameter is cut: `Shard(dim)` or `FlatShard()`; None is `Shard(0)`."""

Placing = PlacementFn | Literal["auto"] | None
"""How parameters of a unit are cut: as a function says, with little padding, or on dim 0."""

AUTO: Literal["auto"] = "auto"


def check_placing(placing: object) -> None:
    """Raise TypeError unless `placing` is a function or None, ValueError for a word but "auto"."""
    if isinstance(placing, str) and placing != AUTO:
        raise ValueError(f'shard_placement_fn is {placing!r}; expected a function or "auto"')
    if placing is not None and placing != AUTO and not callable(placing):
        raise TypeError(
            "shard_placement_fn should be a function that takes a parameter, or "
            f'"auto", not {type(placing).__name__}'
        )


def placement_dim(name: str, param: nn.Parameter, placing: Placing, world: int) -> int:
    """Return the dim along which to cut `param` over `world` ranks, FLAT for none of its own.

    It is 0 by default, and for a scalar.
    Raises ValueError if `placing` returns neither a `Shard` nor a `FlatShard` nor None, or a dim
    that `param` has not; NotImplementedError for a `FlatShard` with an all-gather extension, or
    where this version of torch can't have one.
    """
    if placing == AUTO:
        return _with_little_padding(param, world)
    placement = placing(param) if callable(placing) else None
    if placement is None or param.dim() == 0:  # a scalar is not cut
        return 0
    if isinstance(placement, FlatShard):
        if has_methods(_torch.dtensor.local_of(param)):
            raise UnsupportedError(
                f"shard_placement_fn returned FlatShard() for {name}, whose all-gather extension "
                "works by rows: return Shard(0)"
            )
        if not _torch.dtensor.SUBCLASSES_DISPATCH:
            raise NotImplementedError(
                f"shard_placement_fn returned FlatShard() for {name}, which torch has no way to "
                "compute with before 2.12: return Shard(dim), or use a later torch"
            )
        return FLAT if param.dim() > 1 and world > 1 else 0
    if not isinstance(placement, Shard):
        raise ValueError(
            f"shard_placement_fn returned {placement!r} for {name}; expected Shard(dim), "
            "FlatShard() or None"
        )
    dim = placement.dim + param.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.dim():
        raise UsageError(
            f"shard_placement_fn returned {placement!r} for {name}, which has {param.dim()} dims"
        )
    return dim


def _with_little_padding(param: nn.Parameter, world: int) -> int:
    """Return the dim with which `world` ranks share `param` best.

    A parameter with an all-gather extension, which works by rows, is never cut flat.
    """
    local = _torch.dtensor.local_of(param)
    placements = param.placements if isinstance(param, DTensor) else ()
    taken = {at.dim for at in placements if isinstance(at, Shard)}
    return dim_of(tuple(local.shape), world, may_be_flat=not has_methods(local), taken=taken)


def dim_of(
    size: tuple[int, ...], world: int, *, may_be_flat: bool = True, taken: Set[int] = frozenset()
) -> int:
    """Return the dim with which `world` ranks share a parameter of `size` best.

    See `dim_with_little_padding`; where that is FLAT, and it may not be, or before torch 2.12, the
    first dim that ranks share evenly, if any.
    taken: dims along which tensor parallelism has cut.
    """
    dim = dim_with_little_padding(size, world)
    if dim != FLAT or (may_be_flat and _torch.dtensor.SUBCLASSES_DISPATCH):
        return dim
    even = [dim for dim in range(1, len(size)) if size[dim] % world == 0 and dim not in taken]
    return even[0] if even else 0
