"""Buckets before they are planned: which markers, where their inputs exist, where they are read."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autoshard.passes.layout import read_members
from autoshard.passes.match import (
    asked_of,
    device_of_host_shard,
    group_of,
    is_again,
    is_preparation,
    is_reduce_grad,
    is_to_device,
    is_to_host,
    is_unshard,
    kind_of,
    members_of,
    param_of,
)
from autoshard.passes.meta import PARAM, ParamInfo
from autoshard.passes.plan import Bucket
from autoshard.passes.planner.costs import GROUPED, PACKED

INNER = "inner"  # the axis of groups of neighbours, along the one that shards

Key = Callable[[ParamInfo], str]
"""The name of the bucket that a parameter goes to."""

Positions = Mapping[fx.Node, int]
"""Of a graph's compute nodes."""


@dataclass
class Draft:
    """A bucket being filled. `ready`: where its inputs exist; `used`: where it is first read."""

    unit: str
    ready: int
    used: int
    markers: list[fx.Node] = field(default_factory=list)
    layout: str = PACKED

    def add(self, marker: fx.Node, ready: int, used: int) -> None:
        """Take in `marker`, whose input is there at `ready`, and which is read first at `used`."""
        self.markers.append(marker)
        self.ready, self.used = max(self.ready, ready), min(self.used, used)

    def bucket(self) -> Bucket:
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
        """Whether its shards are sent for from the host."""
        return is_to_device(self.markers[0].all_input_nodes[0])

    @property
    def is_stored(self) -> bool:
        """Whether its gradients are sent back there."""
        return _is_stored(self.markers[0])


def gather_drafts(graph: fx.Graph, position: Positions, key: Key) -> list[Draft]:
    """Buckets of `graph`'s `unshard` markers, by first use."""
    end = len(position)
    drafts: dict[tuple[object, ...], Draft] = {}
    for marker in sorted(filter(is_unshard, graph.nodes), key=param_of):
        used = first_use(marker, position, end)
        name = key(info_of(marker))
        draft = drafts.setdefault(carrier_of(name, marker), Draft(name, ready=0, used=used))
        draft.add(marker, ready_of(marker, position), used)
        if info_of(marker).layout == GROUPED:
            draft.layout = GROUPED
    return sorted(drafts.values(), key=lambda draft: draft.used)


def reduce_drafts(graph: fx.Graph, position: Positions, key: Key) -> list[Draft]:
    """Buckets of `graph`'s `reduce_grad` markers, by readiness."""
    end = len(position)
    closed: list[Draft] = []
    drafts: dict[tuple[object, ...], Draft] = {}
    for marker in sorted(
        filter(is_reduce_grad, graph.nodes), key=lambda marker: ready_of(marker, position)
    ):
        name = key(info_of(marker))
        carrier = carrier_of(name, marker)
        draft = drafts.get(carrier)
        if draft is not None and draft.used < ready_of(marker, position):
            closed.append(drafts.pop(carrier))  # somebody reads it before this one is there
            draft = None
        if draft is None:
            draft = drafts[carrier] = Draft(name, ready=0, used=end)
        draft.add(marker, ready_of(marker, position), first_use(marker, position, end))
    made = [*closed, *drafts.values()]
    for draft in made:
        draft.markers.sort(key=param_of)
    return sorted(made, key=lambda draft: (draft.ready, param_of(draft.markers[0])))


def markers_of(buckets: Sequence[Bucket], markers: Iterable[fx.Node]) -> list[list[fx.Node]] | None:
    """The markers of each bucket: of several that are alike, buckets take them in order. None if
    they don't come out even, or go over other axes: the backward that reduces over replicas is not
    the one whose sums wait for that.
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
    return [[waiting[key].popleft() for key in each] for each in keys]


def _axis_of(marker: fx.Node) -> str:
    """As plans name it."""
    info = info_of(marker)
    if is_unshard(marker):
        return INNER if is_again(marker) else info.axis
    return info.reduce_axis


def carrier_of(name: str, marker: fx.Node) -> tuple[object, ...]:
    """What one collective can carry together: a bucket name, a group, a dtype, a place to be."""
    (member,) = read_members(members_of(marker))
    place = device_of_host_shard(marker) if is_unshard(marker) else _is_stored(marker)
    return name, group_of(marker), member.dtype, place


def ready_of(marker: fx.Node, position: Positions) -> int:
    """The first position at which what `marker` takes is there."""
    ready = 0
    for node in marker.all_input_nodes:
        prepared = ready_of(node, position) if is_preparation(node) else 0
        ready = max(ready, prepared, 1 + position.get(node, -1))
    return ready


def first_use(marker: fx.Node, position: Positions, end: int) -> int:
    """Where the first compute node reads `marker`, what was asked of a shard for it, or its copy
    on the host."""
    asked = asked_of(marker.all_input_nodes[0])
    read = [marker, *(asked.users if asked is not None else filter(is_to_host, marker.users))]
    return min((position.get(user, end) for node in read for user in node.users), default=end)


def info_of(marker: fx.Node) -> ParamInfo:
    """Whose `marker` is."""
    info = PARAM.get(marker)
    if info is None:
        raise ValueError(f"%{marker.name} has no PARAM: run name_params first")
    return info


def _is_stored(marker: fx.Node) -> bool:
    return any(map(is_to_host, marker.users))
