"""Microseconds of a collective and of the copies around it.

A collective of B whole bytes takes `alpha_us + B * us_per_byte` on its link. In a *packed* bucket
of several members a gather's shards are copied together before it and the parameters out of it
after, a reduce's gradients together before it and the sums out of it after; in a *grouped*
bucket nothing is copied to share memory, and each member after the first costs `member_us` on the
link. Nor is a gather of one member, or a reduce of one where the collective itself divides the sum.
What runs over gloo packs tiny members of a grouped bucket all the same; they are not told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PACKED, GROUPED = "packed", "grouped"
LAYOUTS: Mapping[str, Sequence[str]] = {"gather": (PACKED, GROUPED), "reduce": (PACKED,)}
"""Those that a graph's buckets may have, by kind: a gradient is divided where it is packed."""


@dataclass(frozen=True)
class Link:
    """One kind of collective over one group.

    name: collectives with the same name wait for each other.
    """

    name: str
    alpha_us: float
    us_per_byte: float
    member_us: float

    def time_us(self, num_bytes: int, num_members: int, layout: str) -> float:
        extra = (num_members - 1) * self.member_us if layout == GROUPED else 0.0
        return self.alpha_us + num_bytes * self.us_per_byte + extra


@dataclass(frozen=True)
class Costs:
    """Of every carrier.

    links:            a carrier's collectives, one after another: a reduce over replicas has two.
    shards:           ranks that a carrier's whole is cut over.
    copy_us_per_byte: of reading or writing one byte on the device.
    contention:       how much longer compute takes while a collective runs; at least 1.
    divides:          whether collectives divide sums. Those of a graph do not: gradients are
        divided where they are packed.
    call_us:          how long compute stands still for a launch and its wait themselves.
    """

    links: Mapping[str, tuple[Link, ...]]
    shards: Mapping[str, int]
    copy_us_per_byte: float
    contention: float = 1.0
    divides: bool = False
    call_us: float = 0.0

    def is_shared(self, kind: str, num_members: int, layout: str) -> bool:
        """Whether members are copied to memory that they share: a gather's out of it, too."""
        if layout == GROUPED:
            return False
        return num_members > 1 or (kind == "reduce" and not self.divides)

    def copy_in_us(self, kind: str, carrier: str, num_bytes: int) -> float:
        """Of copying so many bytes of the whole before a launch: a gather's are shards."""
        part = num_bytes / self.shards[carrier] if kind == "gather" else num_bytes
        return 2 * part * self.copy_us_per_byte

    def copy_out_us(self, num_bytes: int) -> float:
        """Of copying so many bytes after a gather's wait."""
        return 2 * num_bytes * self.copy_us_per_byte

    def hand_out_us(self, carrier: str, num_bytes: int, layout: str) -> float:
        """Of what comes after the wait of a reduce of so many bytes: each gradient's shard is
        copied out of memory that they share. Collectives that divide leave views of it."""
        if self.divides or layout == GROUPED:
            return 0.0
        return 2 * num_bytes / self.shards[carrier] * self.copy_us_per_byte
