"""Whom a collective reaches, as ops carry it: the names under which c10d registered groups.

"0"      the ranks that share the shards of a parameter
"0+1"    of a reduce: those, then the ranks that hold copies of this one's shards
"+1"     copies alone: parameters are not cut
""       nobody else
"0*"     of a reduce, any of these: and the user's settings of the unit (hooks, a number to divide
         by, sums that wait for their all-reduce) have a say, when it is launched
"""

from __future__ import annotations

from autoshard import _torch
from autoshard.passes.layout import Member


def join(shard_group: str, replicate_group: str) -> str:
    """The group of a reduce over both; "" for none."""
    return f"{shard_group}+{replicate_group}" if replicate_group else shard_group


def customized(group: str) -> str:
    """`group`, of a reduce in which the user's settings have a say."""
    return f"{group}*"


def is_custom(group: str) -> bool:
    """Whether a reduce does not simply give the mean over `group`."""
    return group.endswith("*")


def shard_part(group: str) -> str:
    return group.rstrip("*").partition("+")[0]


def replicate_part(group: str) -> str:
    return group.rstrip("*").partition("+")[2]


def size(group: str) -> int:
    """Over how many ranks a gradient is averaged, or a parameter gathered."""
    return shards(group) * _size(replicate_part(group))


def shards(group: str) -> int:
    """Into how many shards a parameter is cut."""
    return _size(shard_part(group))


def shard_rank(group: str) -> int:
    """Which of them is this rank's."""
    name = shard_part(group)
    return _torch.group_rank(name) if name else 0


def local_size(member: Member, group: str) -> tuple[int, ...]:
    """The size of what this rank holds of `member`."""
    return member.local_size(shards(group), shard_rank(group))


def _size(name: str) -> int:
    return _torch.group_size(name) if name else 1
