"""Microseconds of a collective and of the copies around it.

A collective of B unsharded bytes takes `alpha_us + B * us_per_byte` on its link. In a *packed*
bucket of several members, a gather's shards are copied together before it and the parameters apart
after it; a reduce's gradients are copied together before it, in the same kernel that casts them.
Its sums are divided and copied apart after it, unless the collective itself divides them: then
shards stay where they were received. In a *grouped* bucket nothing is copied to a shared buffer,
and each member after the first costs `member_us` on the link. Nothing is copied either for a gather
of one member, unless its shard is cast. Over gloo, tiny members of a grouped bucket are packed all
the same; costs ignore that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PACKED, GROUPED = "packed", "grouped"
LAYOUTS: Mapping[str, Sequence[str]] = {"gather": (PACKED, GROUPED), "reduce": (PACKED,)}
"""Layouts that buckets may have, by kind: gradients are sent from one buffer."""


@dataclass(frozen=True)
class Link:
    """Cost of one kind of collective over one group.

    name: of the physical link; collectives on one link run one after another.
    alpha_us: start-up of a collective.
    us_per_byte: for each unsharded byte of the bucket.
    member_us: for each further member of a grouped bucket.
    """

    name: str
    alpha_us: float
    us_per_byte: float
    member_us: float

    def time_us(self, num_bytes: int, num_members: int, layout: str) -> float:
        """Microseconds of a collective of `num_bytes`, unsharded, without copies around it."""
        extra = (num_members - 1) * self.member_us if layout == GROUPED else 0.0
        return self.alpha_us + num_bytes * self.us_per_byte + extra


@dataclass(frozen=True)
class HostLink:
    """Costs of copies between a device and its host, of which each direction has its own.

    alpha_us: start-up of a copy. us_per_byte: of its bytes.
    call_us: for which compute stands still for a launch and its wait themselves.
    """

    alpha_us: float
    us_per_byte: float
    call_us: float

    def time_us(self, num_bytes: int) -> float:
        """Microseconds of a copy of `num_bytes`, in one direction."""
        return self.alpha_us + num_bytes * self.us_per_byte


@dataclass(frozen=True)
class Costs:
    """Costs of all bucket classes of a graph. The items of one bucket are of one class.

    links:            collectives of a class, one after another: a reduce over replicas has two.
    shards:           ranks that parameters of a class are sharded over.
    copy_us_per_byte: of reading or writing one byte on the device.
    contention:       factor by which compute slows down while a collective runs; at least 1.
    divides:          whether collectives divide sums themselves.
    call_us:          time for which compute stands still for a launch and its wait themselves.
    together_bytes:   members of a grouped gather that have fewer share one buffer, if there are
        several: they are sent together.
    is_flat:          whether members lie in one buffer all the time, as flat parameters of FSDP1
        and gradients of DDP do: then nothing is copied.
    """

    links: Mapping[str, tuple[Link, ...]]
    shards: Mapping[str, int]
    copy_us_per_byte: float
    contention: float = 1.0
    divides: bool = False
    call_us: float = 0.0
    is_flat: bool = False
    together_bytes: int = 0

    def are_shared(self, kind: str, sizes: Sequence[int], layout: str) -> list[bool]:
        """Tell of each member whether it is copied to a shared buffer before a launch.

        They are in a packed bucket of several, and for a reduce of one; and those of a grouped one
        that are sent together. If so, a gather's members are also copied out of it after the wait.

        sizes: bytes of each member, unsharded.
        """
        if layout == GROUPED:
            small = [num_bytes < self.together_bytes for num_bytes in sizes]
            return small if sum(small) > 1 else [False] * len(sizes)
        return [not self.is_flat and (len(sizes) > 1 or kind == "reduce")] * len(sizes)

    def copy_in_us(self, kind: str, bucket_class: str, moved_bytes: int) -> float:
        """Microseconds to copy what is sent before a launch: gradients, or shards for a gather.

        moved_bytes: read and written, of unsharded parameters or gradients.
        """
        part = moved_bytes / self.shards[bucket_class] if kind == "gather" else moved_bytes
        return part * self.copy_us_per_byte

    def copy_out_us(self, num_bytes: int) -> float:
        """Microseconds to copy unsharded parameters of `num_bytes` after a gather's wait."""
        return 2 * num_bytes * self.copy_us_per_byte

    def hand_out_us(self, bucket_class: str, num_bytes: int, layout: str) -> float:
        """Microseconds to copy shards of summed gradients out of their buffer, after the wait.

        0 for a grouped or flat bucket, and if `divides`: the collective then divides the sums
        itself, and the shards stay views of the buffer.

        num_bytes: of the bucket's gradients, unsharded.
        """
        if self.divides or self.is_flat or layout == GROUPED:
            return 0.0
        return 2 * num_bytes / self.shards[bucket_class] * self.copy_us_per_byte
