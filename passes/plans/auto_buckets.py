"""Decide buckets, launches and waits of one graph by simulated time, under a memory budget.

The graph becomes a `planner.Problem`, which is numbers alone; `planner.search` finds a decision,
which becomes a plan. The decision is compared with one bucket a unit, gathered one unit ahead: in
simulation it is slower than that only where a smaller memory budget asks for it, also where times
err as much as those of published runs do. Without a budget it needs no more memory either, for the
batch that it was found with.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from autoshard.passes.ir import groups
from autoshard.passes.ir.layout import read_members
from autoshard.passes.ir.match import (
    group_of,
    is_compute,
    is_made_here,
    is_marker,
    is_reduce_grad,
    is_unshard,
    kind_of,
    members_of,
    param_of,
)
from autoshard.passes.ir.meta import Key
from autoshard.passes.ir.ops import Unshard
from autoshard.passes.ir.plan import BucketFigures, Event, Figures, Plan
from autoshard.passes.planner.bound import lower_bound
from autoshard.passes.planner.costs import Costs
from autoshard.passes.planner.keep import unit_by_unit
from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.search import search_beside
from autoshard.passes.planner.simulate import Order, SimulatedBucket, Timeline, make_bucket, replay
from autoshard.passes.plans.drafts import (
    Draft,
    Span,
    bucket_class_of,
    first_use,
    info_of,
    markers_of,
    spans,
)
from autoshard.passes.plans.fusion import fuse
from autoshard.passes.plans.liveness import last_uses, live_bytes
from autoshard.passes.plans.prices import Prices


class PricedGraph:
    """Graph with markers, as a planner sees it: times and bytes in place of nodes.

    `graph` is only read; a compute node counts as an op.
    kind: "forward", "backward" or "inference".
    problem: the planner's input, with gathers in order of first use and reduces in order of
        readiness. `items` and `marker` map markers to its items, and back by id.
    live: bytes of the graph's other values. spans: the `Span` of each marker.
    position: of each compute node. fusion: of the graph, if Inductor lowers it.
    budget_bytes: that of `prices`. errors: of its topology's times. None if there are none.
    is_reduced_read: whether the graph itself reads a reduced gradient.
    Raises ValueError if `name_params` has not run.
    """

    def __init__(self, graph: fx.Graph, kind: str, prices: Prices) -> None:
        """Estimate the ops, markers and memory of `graph`, which is only read, at `prices`.

        Fills all attributes: among them `problem`, `items`, `spans` and `live`. Nothing is run,
        decided or simulated yet. Asks c10d for the sizes and ranks of the markers' groups.

        kind: "forward", "backward" or "inference".
        Raises ValueError if `name_params` has not run.
        """
        self.graph = graph
        ops = [node for node in graph.nodes if is_compute(node)]
        self.position = position = {node: number for number, node in enumerate(ops)}
        self.fusion = fusion = fuse(graph) if prices.is_fused else None
        last = last_uses(graph, position, end=len(ops), fusion=fusion)
        markers = [node for node in graph.nodes if is_marker(node)]
        self.budget_bytes = prices.budget_bytes
        self.errors = prices.topology.residuals
        self.live = live_bytes(graph, kind, fusion)
        self.spans = spans(graph, position)
        self.items = {
            marker: _item(marker, self.spans[marker], position, last) for marker in markers
        }
        self.is_reduced_read = any(
            is_reduce_grad(marker) and first_use(marker, position, len(ops)) < len(ops)
            for marker in markers
        )
        self.marker = {id(item): marker for marker, item in self.items.items()}
        gathers = [self.items[marker] for marker in markers if is_unshard(marker)]
        reduces = [self.items[marker] for marker in markers if is_reduce_grad(marker)]
        self.problem = Problem(
            graph=kind,
            op_us=tuple(prices.op_us(node, fusion) for node in ops),
            live_bytes=self.live.total,
            gathers=tuple(sorted(gathers, key=lambda item: item.used)),
            reduces=tuple(sorted(reduces, key=lambda item: item.ready)),
            costs=_costs(markers, prices),
        )

    @property
    def candidates(self) -> frozenset[str]:
        """Names of parameters that this graph gathers, and that a forward could keep for backward.

        Left out are those that are kept already, that the runtime keeps unsharded, and that are
        gathered over fewer ranks in backward, by an extension, or from the host.
        """
        return frozenset(
            item.name
            for marker, item in self.items.items()
            if is_unshard(marker) and Unshard.of(marker).can_be_kept
        )

    def most_at_peak(self, budget_bytes: float) -> tuple[str, int]:
        """Name the kind of memory that is most at the peak, with its bytes, one bucket a unit."""
        peak = unit_by_unit(self.problem, budget_bytes).peak
        at = min(peak.position, self.problem.num_ops - 1)
        kinds = {
            "shards": self.live.parameters,
            "inputs": self.live.inputs,
            "saved activations": self.live.activations[at],
            "temporary values": self.live.temporaries[at],
            "gathered parameters": peak.gathered,
            "unreduced gradients": peak.unreduced,
            "reduced gradients": peak.reduced,
        }
        return max(kinds.items(), key=lambda kind: kind[1])

    def decide(
        self, drafts: Sequence[Draft], events: Sequence[Event]
    ) -> tuple[list[Draft], list[Event]]:
        """Search for better buckets and events than `drafts` and `events`; return the better ones.

        `search_beside` says which are better. Without a budget, it is the peak of `drafts`. In a
        graph that copies from or to the host, or reads reduced gradients, nothing is searched for,
        and `drafts` and `events` are returned.

        drafts: gathers first; the result's, too. An event's bucket is an index into them.
        """
        if self.is_reduced_read or any(draft.is_loaded or draft.is_stored for draft in drafts):
            return list(drafts), list(events)
        known = self.replay(drafts, events)
        budget = known.peak_bytes if self.budget_bytes is None else self.budget_bytes
        found = search_beside(self.problem, known, budget_bytes=budget, errors=self.errors).timeline
        if found is known:
            return list(drafts), list(events)
        decided = [self._draft(run.bucket) for run in found.runs]
        return decided, [Event(what, number, at) for what, number, at in found.order]

    def follow(self, plan: Plan) -> tuple[list[Draft], list[Event]] | None:
        """Apply `plan` to this graph: return its buckets, and its events in the same order.

        Positions of events are scaled to the number of ops here, and moved to where inputs and
        first uses in this graph allow. Returns None if the plan is for another kind of graph or for
        other parameters (by number, dtype, unsharded size and axis), if the markers of one of its
        buckets have several groups here, or if this graph does not allow its order.

        plan: made for other shapes, or by another rank.
        """
        found = markers_of(plan.buckets, self.items)
        if plan.graph != self.problem.graph or found is None:
            return None
        drafts = []
        for bucket, markers in zip(plan.buckets, found, strict=True):
            draft = Draft(bucket.unit, ready=0, used=self.problem.num_ops, layout=bucket.layout)
            for marker in markers:
                draft.add(marker, self.spans[marker])
            drafts.append(draft)
        events = self._placed(plan, drafts)
        return None if events is None else (drafts, events)

    def _placed(self, plan: Plan, drafts: Sequence[Draft]) -> list[Event] | None:
        """Return the events of `plan`, in its order, with positions scaled to this graph.

        This graph may have some more ops than the plan's, where sizes are symbolic. A position is
        moved where it has to be: a launch behind its bucket's inputs, any event to the first use or
        before.
        Returns None if no positions allow that order: a gradient that is launched early in the plan
        comes late here, for instance.

        drafts: the plan's buckets, with spans of this graph.
        """
        scale = self.problem.num_ops / max(1, plan.num_ops)
        earliest: list[int] = []
        latest: list[int] = []
        for event in plan.schedule:
            ready = drafts[event.bucket].ready if event.what == "launch" else 0
            earliest.append(max([ready, *earliest[-1:]]))
        for event in reversed(plan.schedule):
            latest.append(min([drafts[event.bucket].used, *latest[-1:]]))
        if any(map(operator.gt, earliest, reversed(latest))):
            return None
        bounds = zip(earliest, reversed(latest), strict=True)
        return [
            Event(event.what, event.bucket, min(max(round(scale * event.position), low), high))
            for event, (low, high) in zip(plan.schedule, bounds, strict=True)
        ]

    def figures(self, drafts: Sequence[Draft], events: Sequence[Event]) -> Figures:
        """Predict the figures of `drafts`, gathers first, launched and waited for by `events`.

        Copies from and to the host are not counted.
        """
        timeline, bound = self.replay(drafts, events), lower_bound(self.problem)
        return Figures(
            makespan_us=timeline.time_us,
            lower_bound_us=bound.time_us,
            binding=bound.binding,
            exposed_us=timeline.exposed_us,
            peak_bytes=timeline.peak_bytes,
            buckets=tuple(
                BucketFigures(run.launch_us, run.finish_us, run.exposed_us) for run in timeline.runs
            ),
            compute=timeline.compute,
            memory=timeline.memory,
        )

    def replay(self, drafts: Sequence[Draft], events: Sequence[Event]) -> Timeline:
        """Simulate `drafts`, gathers first, with launches and waits at the positions of `events`.

        Copies from and to the host are left out.
        """
        buckets = [self._bucket(draft) for draft in drafts]
        gathers = [bucket for bucket in buckets if bucket.kind == "gather"]
        reduces = [bucket for bucket in buckets if bucket.kind == "reduce"]
        order: Order = tuple(
            (event.what, event.bucket, event.position)
            for event in events
            if event.what in ("launch", "all_reduce", "wait")
        )
        return replay(self.problem, gathers, reduces, order)

    def _bucket(self, draft: Draft) -> SimulatedBucket:
        items = [self.items[marker] for marker in draft.markers]
        return make_bucket(self.problem, kind_of(draft.markers[0]), items, draft.layout)

    def _draft(self, bucket: SimulatedBucket) -> Draft:
        """Turn `bucket` into a draft of its markers, in order of parameter number.

        One of several units is called "<first>..<last>".
        """
        markers = sorted((self.marker[id(item)] for item in bucket.items), key=param_of)
        units = list(dict.fromkeys(item.unit for item in bucket.items))
        unit = units[0] if len(units) == 1 else f"{units[0]}..{units[-1]}"
        segment = bucket.items[0].segment
        return Draft(unit, bucket.ready, bucket.used, segment, markers, bucket.layout)


def _costs(markers: Sequence[fx.Node], prices: Prices) -> Costs:
    """Costs of collectives and copies, at `prices`, for each bucket class of `markers`."""
    first = {_bucket_class(marker): marker for marker in markers}
    return prices.topology.costs(
        {c: prices.links(kind_of(marker), group_of(marker)) for c, marker in first.items()},
        {c: groups.shards(group_of(marker)) for c, marker in first.items()},
    )


def _item(
    marker: fx.Node, span: Span, position: Mapping[fx.Node, int], last: Mapping[fx.Node, int]
) -> Item:
    """Make the planner's item for `marker`: its parameter, bytes, positions, and copies it needs.

    An unsharded parameter is freed after its last read, a gradient at its first use. Raises
    ValueError if `name_params` has not run.

    last: the last position at which each node is read; see `last_uses`.
    """
    (member,) = read_members(members_of(marker))
    info = info_of(marker)
    is_gather = is_unshard(marker)
    source = marker.all_input_nodes[0].meta["val"].dtype
    is_made = is_gather and is_made_here(marker)
    return Item(
        name=info.name,
        unit=info.unit,
        bucket_class=_bucket_class(marker),
        num_bytes=member.num_bytes,
        ready=span.ready,
        used=span.used,
        freed=1 + last.get(marker, span.used) if is_gather else span.used,
        segment=span.segment,
        is_copied_in=source != member.dtype or is_made,
        is_copied_out=is_gather and not member.lies_in_turn,
        source_bytes=member.num_bytes // member.dtype.itemsize * source.itemsize,
    )


def _bucket_class(marker: fx.Node) -> str:
    """Name of a marker's bucket class (see `Item`): kind, group, dtype, place (host or device)."""
    return " ".join(map(str, (kind_of(marker), *bucket_class_of("", marker)[1:])))


PRICED: Key[PricedGraph] = Key("autoshard.priced")  # on a graph module: what it was planned from
