"""Groups of collectives as ops carry them, made of the names under which c10d registers groups.

"0"      the ranks that share the shards of a parameter
"0+1"    of a reduce: over group "0", then over "1", the ranks that hold replicas of this rank's
         shards
"+1"     replicas alone: parameters are not cut
""       no other rank
"0*"     of a reduce, over any of the above: the user's settings of the unit (hooks, a divide
         factor, sums that wait for their all-reduce) apply when it is launched
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from autoshard import _torch
from autoshard.passes.ir.layout import Member

_pretended: ContextVar[Callable[[str], int] | None] = ContextVar("_pretended", default=None)


def join(shard_group: str, replicate_group: str) -> str:
    """Group of a reduce over `shard_group`, then `replicate_group`; "" stands for no group."""
    return f"{shard_group}+{replicate_group}" if replicate_group else shard_group


def customized(group: str) -> str:
    """Mark `group`, of a reduce, as one to which the user's settings of the unit apply."""
    return f"{group}*"


def is_custom(group: str) -> bool:
    """Tell whether a reduce over `group` follows the user's settings, rather than give the mean."""
    return group.endswith("*")


def shard_part(group: str) -> str:
    """Name of the group that shares the shards of a parameter; "" if parameters are not cut."""
    return group.rstrip("*").partition("+")[0]


def replicate_part(group: str) -> str:
    """Name of the group that holds replicas; "" if there is none."""
    return group.rstrip("*").partition("+")[2]


def size(group: str) -> int:
    """Number of ranks in all parts of `group`: those that share shards times the replicas."""
    return shards(group) * _size(replicate_part(group))


def shards(group: str) -> int:
    """Number of shards that a parameter is cut into; 1 if it is not cut."""
    return _size(shard_part(group))


def shard_rank(group: str) -> int:
    """Number of this rank's shard: its rank in the group that shares the shards, 0 if it is alone.

    0 under `pretended`, too.
    """
    name = shard_part(group)
    return _torch.dist.group_rank(name) if name and not _pretended.get() else 0


def local_size(member: Member, group: str) -> tuple[int, ...]:
    """Size of this rank's shard of `member`, cut over the shard part of `group`."""
    return member.local_size(shards(group), shard_rank(group))


@contextlib.contextmanager
def pretended(sizes: Mapping[str, int], otherwise: int) -> Iterator[None]:
    """Have this module answer, in this context, for groups of given sizes, with rank 0 in each.

    For graphs whose process groups do not exist, such as graphs read from text. An inner context
    replaces the outer one.

    sizes: ranks of a process group, by its name, which is a part of the names in graphs.
    otherwise: ranks of every other process group.
    """
    before = _pretended.set(lambda name: sizes.get(name, otherwise))
    try:
        yield
    finally:
        _pretended.reset(before)


def _size(name: str) -> int:
    """Number of ranks in process group `name`, 1 for ""; within `pretended`, as given there."""
    if not name:
        return 1
    size_of = _pretended.get()
    return size_of(name) if size_of else _torch.dist.group_size(name)
