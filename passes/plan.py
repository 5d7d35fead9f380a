"""The plan of one graph: its buckets, and when each is launched and waited for.

A plan is a value: frozen, the same on every rank and in every process, made from
the graph before any collective is in it. Positions count the graph's compute nodes
(calls that are no markers): an event at position p stands before compute node p.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from autoshard.passes.layout import read_members

SHOWN = ("load", "launch", "all_reduce", "wait", "stored")  # loaded: at launch; store: at wait


@dataclass(frozen=True)
class Bucket:
    """Parameters that share one collective.

    kind:    "gather" or "reduce".
    axis:    the mesh axis it runs over, or both, of a reduce, "shard+replicate".
    unit:    the unit, or the given list's name, that it stands for.
    names:   its parameters' names, in the order in which they are packed.
    params:  their numbers in the compilation's table.
    members: their dtypes and whole sizes, "f32[64,32] f32[64]".
    """

    kind: str
    axis: str
    unit: str
    names: tuple[str, ...]
    params: tuple[int, ...]
    members: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole, unsharded members."""
        return sum(member.num_bytes for member in read_members(self.members))


@dataclass(frozen=True)
class Event:
    """Bucket number `bucket` is launched, or waited for, before compute node `position`.

    A reduce whose axis is "shard+replicate" goes on from the first to the second in between.
    Where shards live on the host, a bucket's are first sent for (load) and there (loaded); and
    after a reduce's wait they are sent back (store) and there (stored).
    """

    what: str  # "load", "loaded", "launch", "all_reduce", "wait", "store" or "stored"
    bucket: int
    position: int


@dataclass(frozen=True)
class Plan:
    """Buckets, and the order of their launches and waits.

    graph:    "forward", "backward" or "inference".
    num_ops:  compute nodes in the graph.
    schedule: in program order; every bucket is launched once and waited for once, and all-reduced
        once in between if its axis is that of replicas too.
    """

    graph: str
    bucketing: str
    num_ops: int
    buckets: tuple[Bucket, ...]
    schedule: tuple[Event, ...]

    def text(self) -> str:
        """A table for people, the same on every rank: one line a bucket."""
        gathers = sum(bucket.kind == "gather" for bucket in self.buckets)
        head = (
            f"{self.graph}: {gathers} gathers, {len(self.buckets) - gathers} reduces, "
            f"{self.num_ops} ops, bucketing {self.bucketing}"
        )
        at = {what: self._positions(what) for what in SHOWN}
        events = [what for what, positions in at.items() if positions]
        rows = [["bucket", "kind", "axis", "unit", "params", "bytes", *events]]
        for number, bucket in enumerate(self.buckets):
            about = [bucket.kind, bucket.axis, bucket.unit, len(bucket.names), bucket.num_bytes]
            where = [at[what].get(number, "") for what in events]
            rows.append([str(cell) for cell in (number, *about, *where)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines]) + "\n"

    def _positions(self, what: str) -> dict[int, int]:
        return {event.bucket: event.position for event in self.schedule if event.what == what}

    def to_json(self) -> str:
        """The whole plan as JSON; `Plan.from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Inverse of `to_json`."""
        data: dict[str, Any] = json.loads(text)
        buckets = tuple(
            Bucket(**{**bucket, "names": tuple(bucket["names"]), "params": tuple(bucket["params"])})
            for bucket in data.pop("buckets")
        )
        schedule = tuple(Event(**event) for event in data.pop("schedule"))
        return Plan(**data, buckets=buckets, schedule=schedule)

    @property
    def digest(self) -> str:
        """SHA-256 of what ranks must agree on: which collectives are launched, in which order.

        Positions between compute nodes are not part of it: they move no launch past another.
        """
        launches = [
            (b.kind, b.axis, b.names, b.members)
            for b in (self.buckets[e.bucket] for e in self.schedule if e.what == "launch")
        ]
        return hashlib.sha256(json.dumps([self.graph, launches]).encode()).hexdigest()
