"""Decide: which markers share a collective, and when each is launched and waited for.

    forward    launch(1) launch(2) wait(1) ops of 1 | launch(3) wait(2) ops of 2 | ...
    backward   the same for gathers;  ... last gradient of 3 | wait(r4) launch(r3) ...

One bucket a unit and dtype. A gather is launched one unit ahead of its first use, so that it
runs while the unit before is computed with, and waited for at its first use. A
reduce is launched as soon as its last gradient is there, and waited for when the
next one is about to be: the send buffer of one more would be held, for the time that it
takes to pack the next. With copies, it is
all-reduced when the next one is launched, beside that one's reduce-scatter, and waited
for when the one after that is about to be.

Shards that live on the host are sent for a unit before their gather is launched. Gradients
are sent back there as soon as they are reduced, and waited for where they are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import fx

from autoshard.passes import groups
from autoshard.passes.layout import read_members
from autoshard.passes.match import (
    asked_of,
    device_of_host_shard,
    group_of,
    is_again,
    is_compute,
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
from autoshard.passes.meta import PARAM, PLAN, ParamInfo
from autoshard.passes.plan import Bucket, Event, Plan

INNER = "inner"  # the axis of groups of neighbours, along the one that shards

Bucketing = str | Sequence[str | Sequence[str]]
"""`"per_unit"`, `"none"`, `"auto"`, or lists of module names."""


def plan_buckets(gm: fx.GraphModule, *, graph: str, bucketing: Bucketing) -> fx.GraphModule:
    """Write the plan of `gm`; nothing is moved or inserted yet. No markers, no plan.

    graph: "forward", "backward" or "inference", for the plan's text.
    bucketing: "per_unit", one bucket a unit, group and dtype; "none", one a parameter;
        lists of module names, one bucket a list, what none names by unit; "auto" means
        "per_unit" for now.
    Metadata: reads PARAM; writes PLAN on the module.
    Numerics: unchanged, bit for bit.
    """
    if not any(map(is_marker, gm.graph.nodes)):
        return gm
    ops = [node for node in gm.graph.nodes if is_compute(node)]
    position = {node: number for number, node in enumerate(ops)}
    key = _bucket_key(bucketing)
    gathers = _gather_drafts(gm.graph, position, key, end=len(ops))
    reduces = _reduce_drafts(gm.graph, position, key, end=len(ops))
    drafts = [*gathers, *reduces]
    events = [*_gather_events(gathers), *_reduce_events(reduces, first=len(gathers))]
    PLAN.set(
        gm,
        Plan(
            graph=graph,
            bucketing=bucketing if isinstance(bucketing, str) else "given",
            num_ops=len(ops),
            buckets=tuple(draft.bucket() for draft in drafts),
            schedule=tuple(event for _, event in sorted(events, key=lambda pair: pair[0])),
        ),
    )
    return gm


@dataclass
class _Draft:
    """A bucket being filled. `ready`: where its inputs exist; `used`: where it is first read."""

    unit: str
    ready: int
    used: int
    markers: list[fx.Node] = field(default_factory=list)

    def bucket(self) -> Bucket:
        infos = [_info(marker) for marker in self.markers]
        first = self.markers[0]
        axis = infos[0].axis if is_unshard(first) else infos[0].reduce_axis
        return Bucket(
            kind=kind_of(first),
            axis=INNER if is_unshard(first) and is_again(first) else axis,
            unit=self.unit,
            names=tuple(info.name for info in infos),
            params=tuple(map(param_of, self.markers)),
            members=" ".join(map(members_of, self.markers)),
        )


_Key = Callable[[ParamInfo], str]


def _bucket_key(bucketing: Bucketing) -> _Key:
    if isinstance(bucketing, str):
        return _by_name if bucketing == "none" else _by_unit
    prefixes: dict[str, str] = {}
    for entry in bucketing:
        modules = [entry] if isinstance(entry, str) else list(entry)
        for module in modules:
            prefixes[module] = "+".join(modules)

    def by_list(info: ParamInfo) -> str:
        fitting = [p for p in prefixes if info.name == p or info.name.startswith(p + ".")]
        return prefixes[max(fitting, key=len)] if fitting else info.unit

    return by_list


def _by_unit(info: ParamInfo) -> str:
    return info.unit


def _by_name(info: ParamInfo) -> str:
    return info.name


def _gather_drafts(
    graph: fx.Graph, position: dict[fx.Node, int], key: _Key, *, end: int
) -> list[_Draft]:
    drafts: dict[tuple[object, ...], _Draft] = {}
    for marker in sorted(filter(is_unshard, graph.nodes), key=param_of):
        used = _first_use(marker, position, end)
        name = key(_info(marker))
        draft = drafts.setdefault(_carrier(name, marker), _Draft(name, ready=0, used=used))
        draft.markers.append(marker)
        draft.ready = max(draft.ready, _ready(marker, position))
        draft.used = min(draft.used, used)
    return sorted(drafts.values(), key=lambda draft: draft.used)


def _reduce_drafts(
    graph: fx.Graph, position: dict[fx.Node, int], key: _Key, *, end: int
) -> list[_Draft]:
    closed: list[_Draft] = []
    drafts: dict[tuple[object, ...], _Draft] = {}
    for marker in sorted(
        filter(is_reduce_grad, graph.nodes), key=lambda marker: _ready(marker, position)
    ):
        name = key(_info(marker))
        carrier = _carrier(name, marker)
        draft = drafts.get(carrier)
        if draft is not None and draft.used < _ready(marker, position):
            closed.append(drafts.pop(carrier))  # somebody reads it before this one is there
            draft = None
        if draft is None:
            draft = drafts[carrier] = _Draft(name, ready=0, used=end)
        draft.markers.append(marker)
        draft.ready = max(draft.ready, _ready(marker, position))
        draft.used = min(draft.used, _first_use(marker, position, end))
    made = [*closed, *drafts.values()]
    for draft in made:
        draft.markers.sort(key=param_of)
    return sorted(made, key=lambda draft: (draft.ready, param_of(draft.markers[0])))


_Placed = tuple[tuple[int, int, int], Event]
"""An event and its place: position, reduces before gathers, then rank among its kind."""


def _gather_events(drafts: list[_Draft]) -> list[_Placed]:
    placed: list[_Placed] = []
    numbers = range(len(drafts))
    runs = [list(run) for _, run in itertools.groupby(numbers, lambda number: drafts[number].unit)]

    def put(what: str, number: int, position: int, rank: int) -> None:
        placed.append(_place(position, 1, rank, Event(what, number, position)))

    starts = [drafts[run[0]].used for run in runs]
    for at, run in enumerate(runs):  # a unit's buckets, of several dtypes maybe
        ready = max(drafts[number].ready for number in run)
        launch = starts[at - 1] if at else ready
        load = starts[at - 2] if at > 1 else ready
        for number in run:
            # Where several stand at one position: launch(k + 1), load(k + 2), wait(k), and then
            # launch(k + 2).
            if _is_loaded(drafts[number]):
                put("load", number, load, 8 * at - 3)
                put("loaded", number, launch, 8 * at + 3)
            put("launch", number, launch, 8 * at + 4)
            put("wait", number, drafts[number].used, 8 * at + 14)
    return placed


def _reduce_events(drafts: list[_Draft], *, first: int) -> list[_Placed]:
    placed: list[_Placed] = []

    def put(what: str, number: int, position: int, rank: int) -> None:
        placed.append(_place(position, 0, rank, Event(what, first + number, position)))

    for number, draft in enumerate(drafts):
        # Where several stand at one position: wait(k - 1), or wait(k - 2) with copies;
        # all_reduce(k - 1), launch(k).
        put("launch", number, draft.ready, 4 * number)
        following = [min(draft.used, each.ready) for each in drafts[number + 1 : number + 3]]
        following += [draft.used] * (2 - len(following))
        group = group_of(draft.markers[0])
        if groups.replicate_part(group):
            is_scattered = groups.shards(group) > 1
            if is_scattered:
                put("all_reduce", number, following[0], 4 * (number + 1) - 1)
            else:  # there is no reduce-scatter to wait for
                put("all_reduce", number, draft.ready, 4 * number + 1)
            wait, rank = following[1], 4 * (number + 2) - 2
        else:
            wait, rank = following[0], 4 * (number + 1) - 2
        put("wait", number, wait, rank)
        if _is_stored(draft.markers[0]):
            put("store", number, wait, rank)
            put("stored", number, draft.used, 4 * (number + 3) + 1)
    return placed


def _is_loaded(draft: _Draft) -> bool:
    return is_to_device(draft.markers[0].all_input_nodes[0])


def _is_stored(marker: fx.Node) -> bool:
    return any(map(is_to_host, marker.users))


def _place(position: int, kind: int, rank: int, event: Event) -> _Placed:
    return (position, kind, rank), event


def _carrier(name: str, marker: fx.Node) -> tuple[object, ...]:
    """What one collective can carry together: a bucket name, a group, a dtype, a place to be."""
    (member,) = read_members(members_of(marker))
    place = device_of_host_shard(marker) if is_unshard(marker) else _is_stored(marker)
    return name, group_of(marker), member.dtype, place


def _ready(marker: fx.Node, position: dict[fx.Node, int]) -> int:
    """The first position at which what `marker` takes is there."""
    ready = 0
    for node in marker.all_input_nodes:
        prepared = _ready(node, position) if is_preparation(node) else 0
        ready = max(ready, prepared, 1 + position.get(node, -1))
    return ready


def _first_use(marker: fx.Node, position: dict[fx.Node, int], end: int) -> int:
    """Where the first compute node reads `marker`, what was asked of a shard for it, or its copy
    on the host."""
    asked = asked_of(marker.all_input_nodes[0])
    read = [marker, *(asked.users if asked is not None else filter(is_to_host, marker.users))]
    return min((position.get(user, end) for node in read for user in node.users), default=end)


def _info(marker: fx.Node) -> ParamInfo:
    info = PARAM.get(marker)
    if info is None:
        raise ValueError(f"%{marker.name} has no PARAM: run name_params first")
    return info
