"""Buckets before they are planned: which markers, where their inputs exist, where they are read."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autoshard.passes.ir.layout import read_members
from autoshard.passes.ir.match import (
    before_gather_of,
    group_of,
    is_barrier,
    is_marker,
    is_preparation,
    is_reduce_grad,
    is_to_device,
    is_to_host,
    is_unshard,
    kind_of,
    members_of,
    param_of,
)
from autoshard.passes.ir.meta import PARAM, ParamInfo
from autoshard.passes.ir.ops import Unshard
from autoshard.passes.ir.plan import Bucket
from autoshard.passes.planner.costs import GROUPED, PACKED

INNER = "inner"  # the axis of groups of neighbours, along the one that shards

BucketNamer = Callable[[ParamInfo], str]
"""Function that maps a parameter to the name of the bucket that it goes to."""

Positions = Mapping[fx.Node, int]
"""Index of each compute node of a graph among its compute nodes, in program order."""


@dataclass(frozen=True)
class Span:
    """Positions between which a collective may be in flight, all in one segment of the graph.

    ready: the first position at which it may be launched.
    used: the last position at which it may be waited for.
    segment: number of barriers before these positions.
    """

    ready: int
    used: int
    segment: int


def spans(graph: fx.Graph, position: Positions) -> dict[fx.Node, Span]:
    """Map each marker of `graph` to its span: from where its input is there to its first use.

    Without a use, to the end of the graph. A span is cut off at barriers, so that it lies in one
    segment, which is that of a gather's first use, or that in which a reduce's gradient is made.
    """
    barriers = [at for node, at in position.items() if is_barrier(node)]
    found = {}
    for marker in filter(is_marker, graph.nodes):
        ready, used = ready_of(marker, position), first_use(marker, position, len(position))
        segment = bisect.bisect_left(barriers, used if is_unshard(marker) else ready)
        if segment:
            ready = max(ready, 1 + barriers[segment - 1])
        if segment < len(barriers):
            used = min(used, barriers[segment])
        found[marker] = Span(ready, used, segment)
    return found


@dataclass
class Draft:
    """Bucket that is being filled.

    unit: name of the bucket, mostly its unit's.
    ready, used, segment: the span that its markers have in common; see `Span`.
    layout: "packed" or "grouped".
    """

    unit: str
    ready: int
    used: int
    segment: int = 0
    markers: list[fx.Node] = field(default_factory=list)
    layout: str = PACKED

    def add(self, marker: fx.Node, span: Span) -> None:
        """Add `marker`, whose span is `span`, and narrow the bucket's span to it.

        The segment becomes that of `span`. Nothing is checked: the caller sees to it that spans
        overlap, and that groups and dtypes are alike.
        """
        self.markers.append(marker)
        self.ready, self.used = max(self.ready, span.ready), min(self.used, span.used)
        self.segment = span.segment

    def bucket(self) -> Bucket:
        """Make the plan's bucket of the markers, with the kind and the axis of the first.

        Raises ValueError if `name_params` has not run.
        """
        infos = [info_of(marker) for marker in self.markers]
        first = self.markers[0]
        return Bucket(
            kind=kind_of(first),
            axis=_axis_of(first),
            unit=self.unit,
            names=tuple(info.name for info in infos),
            params=tuple(map(param_of, self.markers)),
            members=" ".join(map(members_of, self.markers)),
            layout=self.layout,
        )

    @property
    def is_loaded(self) -> bool:
        """Tell whether the bucket's shards are copied from the host; the first marker decides."""
        return is_to_device(self.markers[0].all_input_nodes[0])

    @property
    def is_stored(self) -> bool:
        """Tell whether the bucket's gradients are copied to the host; the first marker decides."""
        return _is_stored(self.markers[0])


def gather_drafts(graph: fx.Graph, position: Positions, key: BucketNamer) -> list[Draft]:
    """Draft the buckets of `graph`'s `unshard` markers, in order of first use.

    Markers share a bucket if they have the same name by `key`, group, dtype, place of their shards
    (host or device) and segment; in it they are in order of parameter number. It is grouped if the
    layout of any of its parameters is. Raises ValueError if `name_params` has not run.
    """
    where = spans(graph, position)
    drafts: dict[tuple[object, ...], Draft] = {}
    for marker in sorted(filter(is_unshard, graph.nodes), key=param_of):
        span = where[marker]
        name = key(info_of(marker))
        bucket_class = (*bucket_class_of(name, marker), span.segment)
        draft = drafts.setdefault(bucket_class, Draft(name, ready=0, used=span.used))
        draft.add(marker, span)
        if info_of(marker).layout == GROUPED:
            draft.layout = GROUPED
    return sorted(drafts.values(), key=lambda draft: draft.used)


def reduce_drafts(graph: fx.Graph, position: Positions, key: BucketNamer) -> list[Draft]:
    """Draft the buckets of `graph`'s `reduce_grad` markers, in order of readiness.

    Markers share a bucket if they have the same name by `key`, group, dtype and place (host or
    device); in it they are in order of parameter number. Where the bucket would have to be waited
    for before a gradient exists, as a node reads its results or a barrier comes, that gradient
    begins another bucket. All are packed. Raises ValueError if `name_params` has not run.
    """
    where = spans(graph, position)
    closed: list[Draft] = []
    drafts: dict[tuple[object, ...], Draft] = {}
    for marker in sorted(
        filter(is_reduce_grad, graph.nodes), key=lambda marker: where[marker].ready
    ):
        span = where[marker]
        name = key(info_of(marker))
        bucket_class = bucket_class_of(name, marker)
        draft = drafts.get(bucket_class)
        if draft is not None and draft.used < span.ready:
            # somebody reads it, or a barrier comes, before this one is there
            closed.append(drafts.pop(bucket_class))
            draft = None
        if draft is None:
            draft = drafts[bucket_class] = Draft(name, ready=0, used=len(position))
        draft.add(marker, span)
    made = [*closed, *drafts.values()]
    for draft in made:
        draft.markers.sort(key=param_of)
    return sorted(made, key=lambda draft: (draft.ready, param_of(draft.markers[0])))


def markers_of(buckets: Sequence[Bucket], markers: Iterable[fx.Node]) -> list[list[fx.Node]] | None:
    """Find the markers of each bucket, by kind, axis, parameter number and member (dtype and size).

    Returns a list for each bucket, in the order of its `params`; of several equal markers, buckets
    take one each, in order. Returns None if buckets and markers do not match one to one, or if
    those of a bucket have several groups: a plan for a backward that reduces over replicas does not
    fit one whose sums wait for their all-reduce. Raises ValueError if `name_params` has not run.
    """
    waiting: dict[tuple[str, str, int, str], deque[fx.Node]] = defaultdict(deque)
    for marker in markers:
        key = kind_of(marker), _axis_of(marker), param_of(marker), members_of(marker)
        waiting[key].append(marker)
    keys = [
        [
            (bucket.kind, bucket.axis, *each)
            for each in zip(bucket.params, bucket.members.split(), strict=True)
        ]
        for bucket in buckets
    ]
    if Counter(itertools.chain(*keys)) != Counter({k: len(each) for k, each in waiting.items()}):
        return None
    found = [[waiting[key].popleft() for key in each] for each in keys]
    # Of an axis there may be several groups; a bucket has one.
    has_one = all(len(set(map(group_of, each))) == 1 for each in found)
    return found if has_one else None


def _axis_of(marker: fx.Node) -> str:
    """Mesh axis of a marker's collective, as plans name it, such as "shard" or "shard+replicate".

    For backward's gather over fewer ranks than forward's, it is "inner".
    """
    info = info_of(marker)
    if is_unshard(marker):
        return INNER if Unshard.of(marker).options.is_again else info.axis
    return info.reduce_axis


def bucket_class_of(name: str, marker: fx.Node) -> tuple[object, ...]:
    """Return the key that markers in one bucket share: bucket name, group, dtype and place.

    The place of a gather is the device that its shard is copied to, "" if none; that of a reduce,
    whether its result is copied to the host.

    name: of the bucket.
    """
    (member,) = read_members(members_of(marker))
    is_gather = is_unshard(marker)
    place = Unshard.of(marker).options.host_device if is_gather else _is_stored(marker)
    return name, group_of(marker), member.dtype, place


def ready_of(marker: fx.Node, position: Positions) -> int:
    """First position at which all inputs of `marker` exist; 0 for inputs of the graph.

    The inputs of its preparations count, too: see `is_preparation`.
    """
    ready = 0
    for node in marker.all_input_nodes:
        prepared = ready_of(node, position) if is_preparation(node) else 0
        ready = max(ready, prepared, 1 + position.get(node, -1))
    return ready


def first_use(marker: fx.Node, position: Positions, end: int) -> int:
    """Position of the first compute node that reads `marker`, or its copy on the host.

    Where `marker` gathers a result of a `before_gather`, compute nodes that read any of its results
    count, too. Returns `end` if no compute node reads them.
    """
    asked = before_gather_of(marker.all_input_nodes[0])
    read = [marker, *(asked.users if asked is not None else filter(is_to_host, marker.users))]
    return min((position.get(user, end) for node in read for user in node.users), default=end)


def info_of(marker: fx.Node) -> ParamInfo:
    """Look up the parameter of `marker`. Raises ValueError if `name_params` has not run."""
    info = PARAM.get(marker)
    if info is None:
        raise ValueError(f"%{marker.name} has no PARAM: run name_params first")
    return info


def _is_stored(marker: fx.Node) -> bool:
    return any(map(is_to_host, marker.users))
