"""Lanes of a rank without a device: operations of its threads, and works of gloo, say.

An operation that computes runs when it is called; a work runs beside it, in another thread.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autoshard.tools.trace.explain import intervals, names
from autoshard.tools.trace.explain.intervals import Interval
from autoshard.tools.trace.explain.lanes import (
    Collective,
    Copy,
    Kernel,
    Lanes,
    by_thread,
    host_steps,
    nested,
    place_of,
)
from autoshard.tools.trace.explain.reader import HOST, Event

APART_US = 200.0
"""Time between two operations that counts as computation: Python takes some to call the next."""


class Call(NamedTuple):
    """Operation of c10d that launches a work, and the annotations around it."""

    event: Event
    around: tuple[Event, ...]


@dataclass
class Thread:
    """Operations and works of the threads that launch."""

    kernels: list[Kernel] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    works: list[Event] = field(default_factory=list)
    busy: list[Interval] = field(default_factory=list)


def host_lanes(title: str, events: Sequence[Event]) -> Lanes:
    """Sort the spans of a rank without a device into lanes.

    Compiled code computes wherever it isn't at a collective: its kernels are in no trace.
    """
    on_host = [each for each in events if each.category in HOST]
    found = Thread()
    for thread in by_thread(on_host).values():
        _add_thread(found, thread)
    collectives = _in_turn(_together(_matched(found.works, found.calls)))
    begins, ends = [each.begin for each in on_host], [each.end for each in on_host]
    whole = (min(begins, default=0.0), max(ends, default=0.0))
    return Lanes(
        title,
        False,
        host_steps(events) or [whole],
        found.kernels,
        found.copies,
        collectives,
        intervals.merge(found.busy, APART_US),
    )


def _add_thread(found: Thread, events: Sequence[Event]) -> None:
    """Add what a thread did to `found`; of a backend's own threads, only the works."""
    spans = list(nested(events))
    works = [each.event for each in spans if names.is_work(each.event.name)]
    found.works += works
    calls = [Call(*each) for each in spans if each.event.name.startswith(("c10d::", "_c10d"))]
    if works and not calls:
        return
    found.calls += calls
    computing, around, until = [], [], -1.0
    for event, outer in spans:
        if names.is_around(event.name):
            around.append((event.begin, event.end))
        elif event.name.startswith(names.COMPILED):
            computing.append((event.begin, event.end))
        elif _is_operation(event) and event.begin >= until:
            until = event.end
            if outer:
                name = place_of(outer) or event.name
                found.copies.append(Copy(event.begin, event.end, name, True, event.thread))
            else:
                computing.append((event.begin, event.end))
                found.kernels.append(Kernel(event.begin, event.end, event.begin, event.name))
    found.busy += intervals.subtract(intervals.merge(computing), intervals.merge(around))


def _is_operation(event: Event) -> bool:
    """Tell whether a span is an operation that computes, or copies if a collective is around."""
    return event.category == "cpu_op" and names.is_operation(event.name)


class Matched(NamedTuple):
    """Collective of a work, and the annotation that it was launched in, if any."""

    collective: Collective
    annotation: Event | None


def _matched(works: Iterable[Event], calls: Iterable[Call]) -> list[Matched]:
    """Find the call that launched each work: the first one of its kind that has none yet."""
    waiting: dict[str, deque[Call]] = defaultdict(deque)
    for call in sorted(calls, key=lambda each: each.event.begin):
        waiting[_direction(call.event.name)].append(call)
    matched = []
    for work in sorted(works, key=lambda each: each.begin):
        queue = waiting[_direction(work.name)]
        is_there = queue and queue[0].event.begin <= work.begin
        call = queue.popleft() if is_there else Call(work, ())
        matched.append(_match(work, call))
    return matched


def _direction(name: str) -> str:
    """Name the kind of a collective, or the direction of a message."""
    kind = names.kind_of(name)
    return ("send" if "send" in name else "receive") if kind == "message" else kind


def _match(work: Event, call: Call) -> Matched:
    """Make the collective of a work that `call` launched. A message is of its annotation's kind."""
    place = place_of(call.around)
    kind = names.kind_of(work.name)
    num_bytes = names.operation_bytes(call.event.args) or names.operation_bytes(work.args)
    annotation = None
    if kind == "message":
        kind = names.kind_of(place) if place else kind
        annotation = call.around[-1] if call.around and place else None
        num_bytes = num_bytes if "recv" in work.name else 0
    backend = work.name.partition(":")[0]
    launch = call.event.begin
    return Matched(
        Collective(kind, "", backend, num_bytes, launch, work.begin, work.end, place), annotation
    )


def _together(matched: Iterable[Matched]) -> list[Collective]:
    """Make one collective of the messages that one annotation sends and receives."""
    groups: dict[Hashable, list[Collective]] = defaultdict(list)
    for number, (collective, annotation) in enumerate(matched):
        key = (annotation.thread, annotation.begin) if annotation else number
        groups[key].append(collective)
    return [
        replace(
            group[0],
            num_bytes=sum(each.num_bytes for each in group),
            launch=min(each.launch for each in group),
            begin=min(each.begin for each in group),
            end=max(each.end for each in group),
        )
        for group in groups.values()
    ]


def _in_turn(collectives: Iterable[Collective]) -> list[Collective]:
    """Let collectives of a backend begin when the one that ended before has ended.

    Their spans begin when they are launched, or when one of several threads takes them up; they
    share one link.
    """
    free: dict[Hashable, float] = {}
    turns = []
    for each in sorted(collectives, key=lambda each: each.end):
        begin = min(max(each.begin, free.get(each.lane, each.begin)), each.end)
        free[each.lane] = each.end
        turns.append(replace(each, begin=begin))
    return turns
