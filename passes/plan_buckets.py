"""Decide which markers share a collective, and when each is launched and waited for.

before:
    in %a_w: f32[4]
    in %b_w: f32[4]
    in %x: f32[7]
    %a: f32[7] = autoshard.unshard(%a_w, 'f32[7]', 'g', False, 0)  # a.w
    %h: f32[7] = aten.mul.Tensor(%a, %x)
    %b: f32[7] = autoshard.unshard(%b_w, 'f32[7]', 'g', False, 1)  # b.w
    %y: f32[7] = aten.mul.Tensor(%b, %h)
    return [%y]
after:
    # unchanged
    forward: 2 gathers, 0 reduces, 2 ops, bucketing per_unit
    bucket  kind    axis   unit  params  bytes  launch  wait
    0       gather  shard  a     1       28     0       0
    1       gather  shard  b     1       28     0       1

    forward    launch(1) launch(2) wait(1) ops of 1 | launch(3) wait(2) ops of 2 | ...
    backward   the same for gathers;  ... last gradient of 3 | wait(r4) launch(r3) ...

Each unit has one bucket for each group, dtype and segment. A unit's gathers are launched at the
first use of the unit before, so that they run while that unit computes; each is waited for at its
own first use. A reduce is launched as soon as its last gradient is there; if the pointwise ops that
come next free a value, it is launched after them, as they take next to no time. It is waited for
right before the next reduce is launched: any later, one more send buffer would be held while the
next one is packed. With replicas, the all-reduce of a bucket is launched right before the next
reduce, beside whose reduce-scatter it runs, and waited for right before the reduce after that one;
where parameters are not cut, there is no reduce-scatter, and the all-reduce is launched at once.

For shards that live on the host, the copies to the device are launched one unit before their
gather, and waited for right before it is launched. Gradients are copied back as soon as they are
reduced, and these copies are waited for where the gradients are read.

With "auto", `plans/auto_buckets.py` decides all of this by predicted costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from autoshard.passes.ir import groups
from autoshard.passes.ir.match import group_of, is_compute, is_marker
from autoshard.passes.ir.meta import PLAN, ParamInfo
from autoshard.passes.ir.plan import Event, Plan
from autoshard.passes.plans.auto_buckets import PRICED, PricedGraph
from autoshard.passes.plans.drafts import BucketNamer, Draft, gather_drafts, reduce_drafts
from autoshard.passes.plans.fusion import is_pointwise
from autoshard.passes.plans.liveness import count_between
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.values import is_view

Bucketing = str | Sequence[str | Sequence[str]]
"""`"per_unit"`, `"none"`, `"auto"`, or a list whose entries are buckets: module names, or lists of
module names."""


def plan_buckets(
    gm: fx.GraphModule,
    *,
    graph: str,
    bucketing: Bucketing,
    prices: Prices | None = None,
    known: Sequence[Plan] = (),
) -> fx.GraphModule:
    """Write a plan of buckets and their schedule into `gm`'s metadata; move and insert no node.

    A graph without markers gets no plan. A bucket's gather is launched at the first use of the unit
    before, a reduce as soon as its last gradient is there, or after what frees memory right then.
    With "auto", buckets and schedule are searched for together.

    graph: "forward", "backward" or "inference", for the plan's text.
    bucketing: "per_unit", one bucket a unit; "none", one a parameter; a list, one bucket an entry,
        a module name or a list of them (the longest name that fits a parameter counts), and one a
        unit for parameters that fit none; "auto", the buckets with the least simulated time within
        the memory budget of `prices`. Each of these is split by group, dtype, place of the shards
        (host or device) and segment, the part of a graph between two barriers. Without prices, with
        copies from and to the host, or with gradients that the graph itself reads, "auto" is
        "per_unit".
    prices: costs from which the plan's figures are predicted; without them it has none.
    known: earlier plans. "auto" follows the first one that fits this graph, made for other shapes
        or by another rank, and then searches for nothing: ranks must launch alike, whatever batches
        they see. Without prices none is followed.
    Raises ValueError if `name_params` has not run.
    Metadata: reads PARAM; writes PLAN on the module, and PRICED, if there are prices.
    Numerics: unchanged, bit for bit.
    """
    if not any(map(is_marker, gm.graph.nodes)):
        return gm
    ops = [node for node in gm.graph.nodes if is_compute(node)]
    position = {node: number for number, node in enumerate(ops)}
    key = _bucket_class(bucketing)
    gathers = gather_drafts(gm.graph, position, key)
    reduces = reduce_drafts(gm.graph, position, key)
    gathered = _gather_events(gathers)
    launched = _behind_what_frees(gm.graph, ops, reduces, gathered)
    placed = [*gathered, *_reduce_events(reduces, launched, first=len(gathers))]
    drafts = [*gathers, *reduces]
    events = [event for _, event in sorted(placed, key=lambda pair: pair[0])]
    figures = None
    if prices is not None:
        priced = PricedGraph(gm.graph, graph, prices)
        PRICED.set(gm, priced)
        if bucketing == "auto":
            followed = filter(None, map(priced.follow, known))
            drafts, events = next(followed, None) or priced.decide(drafts, events)
        figures = priced.figures(drafts, events)
    plan = Plan(
        graph=graph,
        bucketing=bucketing if isinstance(bucketing, str) else "given",
        num_ops=len(ops),
        buckets=tuple(draft.bucket() for draft in drafts),
        schedule=tuple(events),
        figures=figures,
    )
    PLAN.set(gm, plan)
    return gm


def _bucket_class(bucketing: Bucketing) -> BucketNamer:
    """Return the function that maps a parameter to the name of its bucket.

    That is its own name for "none"; its unit's name for "per_unit" and "auto". For a list it is the
    modules of an entry joined by "+": of the entry with the longest module name that is a parent of
    the parameter, or its own name; the unit's name if none is.
    """
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


_Placed = tuple[tuple[int, int, int], Event]
"""Sort key and event. The key: position; 0 for a reduce, 1 for a gather; order within the kind."""


def _gather_events(drafts: list[Draft]) -> list[_Placed]:
    """Make the events of gathers, and of copies from the host before them, each with its sort key.

    A unit's gathers are launched at the first use of the unit before, or when all their shards are
    there, if later; each is waited for at its own first use. Copies are launched one unit earlier,
    and waited for right before the gather is launched. What would begin before the first unit's
    first use begins as soon as the shards are there.

    drafts: in order of first use; neighbors of one unit and segment are launched together. An
        event's bucket is the draft's index.
    Returns them unsorted.
    """
    placed: list[_Placed] = []
    numbers = range(len(drafts))
    runs = [
        list(run)
        for _, run in itertools.groupby(
            numbers, lambda number: (drafts[number].unit, drafts[number].segment)
        )
    ]

    def put(what: str, number: int, position: int, rank: int) -> None:
        placed.append(_place(position, 1, rank, Event(what, number, position)))

    starts = [drafts[run[0]].used for run in runs]
    for at, run in enumerate(runs):  # a unit's buckets, of several dtypes maybe
        ready = max(drafts[number].ready for number in run)
        launch = max(ready, starts[at - 1]) if at else ready
        load = starts[at - 2] if at > 1 else ready
        for number in run:
            # Where several stand at one position: launch(k + 1), load(k + 2), wait(k), and then
            # launch(k + 2).
            if drafts[number].is_loaded:
                put("load", number, load, 8 * at - 3)
                put("loaded", number, launch, 8 * at + 3)
            put("launch", number, launch, 8 * at + 4)
            put("wait", number, drafts[number].used, 8 * at + 14)
    return placed


def _behind_what_frees(
    graph: fx.Graph, ops: Sequence[fx.Node], drafts: list[Draft], gathered: list[_Placed]
) -> list[int]:
    """Return positions at which to launch the reduces, one for each of `drafts`.

    A launch packs gradients, which are then in memory twice. So it moves from where its last
    gradient is there past the views and pointwise ops that follow, up to the last one that lowers
    the number of live values; one that raises it ends the search, as any other op does. No launch
    moves past another launch, so that ranks launch in the same order, nor past where its result is
    read. One that is ready at position 0 stays there.

    ops: the compute nodes of `graph`.
    gathered: events of the graph's gathers.
    """
    if not drafts:
        return []
    live = count_between(graph)
    others = sorted(event.position for _, event in gathered if event.what == "launch")
    launched: list[int] = []
    limit = len(ops)
    for draft in reversed(drafts):
        limit = min([limit, draft.used, *(at for at in others if at >= draft.ready)])
        found = draft.ready
        for at in range(found, limit) if found else ():
            if not (is_view(ops[at]) or is_pointwise(ops[at])) or live[at] > live[at - 1]:
                break
            if live[at] < live[at - 1]:
                found = at + 1
        launched.append(found)
        limit = found
    return launched[::-1]


def _reduce_events(drafts: list[Draft], launched: list[int], *, first: int) -> list[_Placed]:
    """Make the events of reduces, and of copies to the host after them, each with its sort key.

    A reduce is waited for right before the next one is launched. With replicas, its all-reduce is
    launched there, and waited for right before the launch after that; where parameters are not cut,
    the all-reduce is launched right after the reduce. Where the results are read earlier, or no
    such launch follows, each of these stands at the first reader instead. Copies are launched right
    after the wait, and waited for at the first reader.

    launched: position of each draft's launch.
    first: bucket number of the first draft.
    Returns them unsorted.
    """
    placed: list[_Placed] = []

    def put(what: str, number: int, position: int, rank: int) -> None:
        placed.append(_place(position, 0, rank, Event(what, first + number, position)))

    for number, (draft, launch) in enumerate(zip(drafts, launched, strict=True)):
        # Where several stand at one position: wait(k - 1), or wait(k - 2) with copies;
        # all_reduce(k - 1), launch(k).
        put("launch", number, launch, 4 * number)
        following = [min(draft.used, each) for each in launched[number + 1 : number + 3]]
        following += [draft.used] * (2 - len(following))
        group = group_of(draft.markers[0])
        if groups.replicate_part(group):
            is_scattered = groups.shards(group) > 1
            if is_scattered:
                put("all_reduce", number, following[0], 4 * (number + 1) - 1)
            else:  # there is no reduce-scatter to wait for
                put("all_reduce", number, launch, 4 * number + 1)
            wait, rank = following[1], 4 * (number + 2) - 2
        else:
            wait, rank = following[0], 4 * (number + 1) - 2
        put("wait", number, wait, rank)
        if draft.is_stored:
            put("store", number, wait, rank)
            put("stored", number, draft.used, 4 * (number + 3) + 1)
    return placed


def _place(position: int, kind: int, rank: int, event: Event) -> _Placed:
    return (position, kind, rank), event
