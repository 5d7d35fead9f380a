"""Plan of one graph: its buckets, and when each is launched and waited for.

A plan is a value: frozen, the same on every rank and in every process, made from
the graph before any collective is in it. Positions count the graph's compute nodes
(`is_compute`): an event at position p stands before compute node p.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from autoshard.passes.ir.chrome_trace import measured_events, trace_events
from autoshard.passes.ir.layout import read_members
from autoshard.passes.planner.costs import GROUPED, LAYOUTS, PACKED
from autoshard.passes.planner.schema import read_as

SHOWN = ("load", "launch", "all_reduce", "wait", "stored")  # loaded: at launch; store: at wait


def show_bytes(num_bytes: int) -> str:
    """Format a number of bytes in KiB, MiB or GiB.

    >>> show_bytes(1536), show_bytes(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


@dataclass(frozen=True)
class Bucket:
    """Parameters that share one collective.

    kind:    "gather" or "reduce".
    axis:    mesh axis that it runs over, such as "shard"; for a reduce over replicas, too, both,
             "shard+replicate"; for a gather over fewer ranks, "inner".
    unit:    name of its unit, or names of the given modules or of several units, for people.
    names:   its parameters' names, in the order in which they are packed.
    params:  their numbers in the compilation's table.
    members: their dtypes and unsharded sizes, "f32[64,32] f32[64]".
    layout:  "packed": members are copied into one buffer to be sent, and out of it after the wait;
             or "grouped": each is sent from where it is to where it is read, in one call.
    """

    kind: str
    axis: str
    unit: str
    names: tuple[str, ...]
    params: tuple[int, ...]
    members: str
    layout: str = PACKED

    @property
    def num_bytes(self) -> int:
        """Bytes of the unsharded members."""
        return sum(member.num_bytes for member in read_members(self.members))


@dataclass(frozen=True)
class Event:
    """Launch of, or wait for, bucket number `bucket`, right before compute node `position`.

    A reduce over replicas, "shard+replicate", has an all-reduce between the two. Where shards live
    on the host, copies of a bucket's shards to the device are launched (load) and waited for
    (loaded) before the gather; after a reduce's wait, copies to the host are launched (store) and
    waited for (stored).
    """

    what: str  # "load", "loaded", "launch", "all_reduce", "wait", "store" or "stored"
    bucket: int
    position: int


@dataclass(frozen=True)
class BucketFigures:
    """Predicted times of a bucket's collective, in microseconds.

    launch_us: when it begins on its link, from the graph's start.
    finish_us: when it ends, from the graph's start.
    exposed_us: for how long compute waits for it.
    """

    launch_us: float
    finish_us: float
    exposed_us: float


@dataclass(frozen=True)
class Figures:
    """Predicted times and memory of a plan.

    makespan_us:    from the graph's first op to its last wait.
    lower_bound_us: time that no plan of the graph can beat; see `planner/bound.py`.
    binding:        origin of that bound, "compute", "link" or "start-up".
    exposed_us:     part of the makespan for which compute waits for collectives.
    peak_bytes:     of all memory that the graph uses, its inputs included.
    buckets:        one entry for each of the plan's buckets.
    compute:        (begin us, end us, first op, one after the last) of ops between two events.
    memory:         (us, bytes): the most in use from that time to the next entry's.
    """

    makespan_us: float
    lower_bound_us: float
    binding: str
    exposed_us: float
    peak_bytes: int
    buckets: tuple[BucketFigures, ...]
    compute: tuple[tuple[float, float, int, int], ...]
    memory: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class SavedBlock:
    """Bytes that forward saves of a block of the model, where a memory budget has decided it.

    name: the path of the block's module, numbered where it runs again after others: "root 2".
    num_bytes: saved on the device.
    given_up_bytes: that would be saved there without a budget, and are not.
    again_us: predicted microseconds of what backward computes again in their place.
    host_bytes: of what is saved, on the host meanwhile; it is given up, too.
    """

    name: str
    num_bytes: int
    given_up_bytes: int
    again_us: float
    host_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """Buckets of one graph, and the order of their launches and waits.

    graph:    "forward", "backward" or "inference".
    bucketing: "per_unit", "none" or "auto", as asked for; "given" for a list of modules.
    num_ops:  compute nodes in the graph.
    schedule: in program order; every bucket is launched once and waited for once, and all-reduced
        once in between if it is reduced over replicas.
    figures:  predicted times and memory; None where costs are unknown, and then the properties that
        read them raise ValueError. No part of what ranks agree on.
    saved:    of a forward, what a memory budget has it save, by block; empty if it has not decided
        that, as where the step fits. A backward's plan has it if there is none of the forward.
    host_state_bytes: of an optimizer's states, two for each parameter that is trained, that live on
        the host between steps; in the plan that has `saved`.
    """

    graph: str
    bucketing: str
    num_ops: int
    buckets: tuple[Bucket, ...]
    schedule: tuple[Event, ...]
    figures: Figures | None = None
    saved: tuple[SavedBlock, ...] = ()
    host_state_bytes: int = 0

    @property
    def makespan_us(self) -> float:
        """Predicted microseconds from the graph's first op to its last wait."""
        return self._known().makespan_us

    @property
    def lower_bound_us(self) -> float:
        """Microseconds that no plan of the graph can beat."""
        return self._known().lower_bound_us

    @property
    def gap(self) -> float:
        """Ratio of predicted time to lower bound; 1 is the best possible. 1 if the bound is 0."""
        known = self._known()
        return known.makespan_us / known.lower_bound_us if known.lower_bound_us else 1.0

    @property
    def binding(self) -> str:
        """Origin of the lower bound: "compute", "link" or "start-up"."""
        return self._known().binding

    @property
    def exposed_us(self) -> float:
        """Predicted microseconds for which compute waits for collectives."""
        return self._known().exposed_us

    @property
    def peak_bytes(self) -> int:
        """Predicted bytes of the graph at its peak, its inputs included."""
        return self._known().peak_bytes

    def _known(self) -> Figures:
        """Return the plan's figures. Raises ValueError if it has none."""
        if self.figures is None:
            raise ValueError(f"the {self.graph} plan was made without prices and has no figures")
        return self.figures

    def text(self) -> str:
        """Format the plan as a table, one line a bucket; on all ranks alike, except for figures.

        A line above the table counts gathers, reduces and ops; with figures, another one has the
        time, its ratio to the bound, the time exposed and the peak. A row has the bucket's number,
        kind, axis, unit, count of parameters, unsharded bytes, positions of its launch, wait and
        other events that occur in the plan (not of "loaded" and "store"), and, with figures,
        microseconds hidden and exposed. A column "layout" is there if a bucket is grouped. If a
        memory budget has decided what is saved, another table has a line for each block, or for
        several in turn that are alike; a last line says what an optimizer has on the host. Ends
        with a newline.
        """
        gathers = sum(bucket.kind == "gather" for bucket in self.buckets)
        head = (
            f"{self.graph}: {gathers} gathers, {len(self.buckets) - gathers} reduces, "
            f"{self.num_ops} ops, bucketing {self.bucketing}"
        )
        if self.figures is not None:
            known = self.figures
            head += (
                f"\n{known.makespan_us:.0f} us predicted, {self.gap:.3f} of the lower bound "
                f"({known.binding}); {known.exposed_us:.0f} us exposed; "
                f"{show_bytes(known.peak_bytes)} at the peak"
            )
        at = {what: self._positions(what) for what in SHOWN}
        events = [what for what, positions in at.items() if positions]
        columns = ["hidden us", "exposed us"] if self.figures is not None else []
        has_grouped = any(bucket.layout == GROUPED for bucket in self.buckets)
        layout = ["layout"] if has_grouped else []
        rows = [["bucket", "kind", "axis", "unit", "params", "bytes", *layout, *events, *columns]]
        for number, bucket in enumerate(self.buckets):
            about = [bucket.kind, bucket.axis, bucket.unit, len(bucket.names), bucket.num_bytes]
            about += [bucket.layout] if has_grouped else []
            where = [at[what].get(number, "") for what in events]
            times = self._times(number) if self.figures is not None else []
            rows.append([str(cell) for cell in (number, *about, *where, *times)])
        saved = _table(self._saved_rows()) if self.saved else []
        if self.host_state_bytes:
            saved.append(f"optimizer states: {show_bytes(self.host_state_bytes)} on the host")
        return "\n".join([head, *_table(rows), *saved]) + "\n"

    def _saved_rows(self) -> list[list[str]]:
        """Rows of the table of what is saved; blocks in turn with the same numbers have one."""
        on_host = ["on host"] if any(block.host_bytes for block in self.saved) else []
        rows = [["block", "saved", "given up", "again us", *on_host]]
        for _, alike in itertools.groupby(self.saved, key=_numbers):
            blocks = list(alike)
            name = blocks[0].name
            if len(blocks) > 1:
                name += f"..{blocks[-1].name}, each of {len(blocks)}"
            rows.append([name, *_numbers(blocks[0])][: len(rows[0])])
        return rows

    def __str__(self) -> str:
        """Return `text()`."""
        return self.text()

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the predicted timeline, if there is one, and the text."""
        from autoshard.passes.ir.picture import show_plan  # which reads plans

        return show_plan(self)

    def _times(self, number: int) -> list[str]:
        """Format how many microseconds of bucket `number` compute hides, and for how many it waits.

        Raises ValueError if the plan has no figures.
        """
        figures = self._known().buckets[number]
        hidden_us = max(0.0, figures.finish_us - figures.launch_us - figures.exposed_us)
        return [f"{hidden_us:.0f}", f"{figures.exposed_us:.0f}"]

    def _positions(self, what: str) -> dict[int, int]:
        """Map bucket numbers to positions of the event `what`; buckets without it are missing."""
        return {event.bucket: event.position for event in self.schedule if event.what == what}

    def to_json(self) -> str:
        """Serialize the whole plan as JSON; `Plan.from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def to_chrome_trace(self, path: str | Path, *, profile: str | Path | None = None) -> None:
        """Write the predicted timeline for Perfetto or chrome://tracing: compute, links, memory.

        profile: a trace of the same graph, exported by `torch.profiler`, to be shown beside the
            prediction.
        Raises ValueError if the plan has no figures or `profile` is no trace; OSError where a file
        can't be read or written.
        """
        events = trace_events(self, self._known())
        if profile is not None:
            events += measured_events(Path(profile))
        Path(path).write_text(json.dumps({"traceEvents": events}))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan that `to_json` has written.

        Raises ValueError for what is no plan: no JSON, a field that is missing, unknown or of
        another type, a kind or a layout that a bucket can't have, members that can't be read,
        members or params that are not as many as names, an event of no bucket or outside of the
        graph, figures of another number of buckets. Whether each bucket is launched and waited for
        is not checked.
        """
        plan = read_as(Plan, json.loads(text), "plan")
        for bucket in plan.buckets:
            if bucket.kind not in LAYOUTS or bucket.layout not in LAYOUTS[bucket.kind]:
                raise ValueError(f"a {bucket.kind} can't be {bucket.layout!r} in a plan")
            if len(read_members(bucket.members)) != len(bucket.names):
                raise ValueError(f"a {bucket.kind} of {bucket.names} has members {bucket.members}")
            if len(bucket.params) != len(bucket.names):
                raise ValueError(f"a {bucket.kind} of {bucket.names} has params {bucket.params}")
        for event in plan.schedule:
            if not 0 <= event.bucket < len(plan.buckets) or not 0 <= event.position <= plan.num_ops:
                raise ValueError(f"plan.schedule has {event}, of {len(plan.buckets)} buckets")
        if plan.figures is not None and len(plan.figures.buckets) != len(plan.buckets):
            raise ValueError(
                f"plan.figures is of {len(plan.figures.buckets)} buckets, of {len(plan.buckets)}"
            )
        return plan

    @property
    def digest(self) -> str:
        """SHA-256 of what ranks must agree on: gathers and reduces, in order of launch.

        It covers the graph's kind and, of each launch, kind, axis, names, members and layout.
        Positions, waits, all-reduces and copies are not part of it.
        """
        launches = [(b.kind, b.axis, b.names, b.members, b.layout) for b in self._launched()]
        return hashlib.sha256(json.dumps([self.graph, launches]).encode()).hexdigest()

    def launches(self) -> tuple[str, ...]:
        """Describe the collectives that `digest` covers, one text each, in order of launch."""
        return tuple(
            f"the {self.graph}'s {bucket.layout} {bucket.kind} of {bucket.unit} over {bucket.axis}"
            f" ({', '.join(bucket.names)}: {bucket.members})"
            for bucket in self._launched()
        )

    def _launched(self) -> list[Bucket]:
        """Buckets in the order in which they are launched."""
        return [self.buckets[event.bucket] for event in self.schedule if event.what == "launch"]


def _numbers(block: SavedBlock) -> tuple[str, ...]:
    """Format the numbers of a block's row, the last of which is that of the host."""
    sizes = show_bytes(block.num_bytes), show_bytes(block.given_up_bytes)
    return (*sizes, f"{block.again_us:.0f}", show_bytes(block.host_bytes))


def _table(rows: list[list[str]]) -> list[str]:
    """Align cells in columns: a line for each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
