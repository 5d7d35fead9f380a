"""Lanes of one rank: its steps, when it computes, its collectives, and the copies around them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from autoshard.tools.trace.explain import intervals, names
from autoshard.tools.trace.explain.intervals import Interval
from autoshard.tools.trace.explain.reader import Event

ROUNDED_US = 0.01
"""Time by which a span may end after the one around it, as a trace rounds both."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Collective on a link: launched by the host, then run from `begin` to `end`; microseconds.

    lane: stream of a device, or queue of a backend, where collectives run one after another.
    num_bytes: of its larger side; 0 if the trace doesn't say.
    place: the annotation that it was launched in, or "".
    """

    kind: str
    group: str
    lane: Hashable
    num_bytes: int
    launch: float
    begin: float
    end: float
    place: str


class Kernel(NamedTuple):
    """Computation of a device, or operation of the host, with the time the host launched it."""

    begin: float
    end: float
    launch: float
    name: str


class Copy(NamedTuple):
    """Copy around a collective: into its buffer, out of it, or a cast.

    is_in_the_way: whether it is where the model computes, rather than beside that.
    lane: as that of a collective.
    """

    begin: float
    end: float
    name: str
    is_in_the_way: bool
    lane: Hashable


@dataclass
class Lanes:
    """Work of one rank by lanes, each sorted by when it begins.

    on_device: whether `kernels` are those of a device, launched ahead of time.
    busy: times of computation; what is between two kernels and shorter than a launch takes counts.
    """

    title: str
    on_device: bool
    steps: list[Interval]
    kernels: list[Kernel]
    copies: list[Copy]
    collectives: list[Collective]
    busy: list[Interval] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kernels.sort()
        self.copies.sort(key=lambda each: (each.begin, each.end))
        self.collectives.sort(key=lambda each: (each.begin, each.end))
        computed = ((each.begin, each.end) for each in self.kernels)
        self.busy = self.busy or intervals.merge(computed)


class Nested(NamedTuple):
    """Span of a thread, with the annotations around it, from the outermost, that match AROUND."""

    event: Event
    around: tuple[Event, ...]


def nested(events: Iterable[Event]) -> Iterator[Nested]:
    """Yield the spans of a thread in the order they begin, each with the annotations around it.

    Works of c10d end in their own time: they are around nothing.
    """
    stack: list[Nested] = []
    for event in sorted(events, key=lambda each: (each.begin, -each.end)):
        is_work = names.is_work(event.name)
        until = event.begin if is_work else event.end - ROUNDED_US
        while stack and stack[-1].event.end < until:
            stack.pop()
        around: tuple[Event, ...] = ()
        if stack:
            outer, above = stack[-1]
            around = (*above, outer) if names.is_around(outer.name) else above
        yield (found := Nested(event, around))
        if not is_work:
            stack.append(found)


def by_thread(events: Iterable[Event]) -> dict[Hashable, list[Event]]:
    """Group spans by their thread."""
    threads: dict[Hashable, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.thread].append(event)
    return threads


def place_of(around: Iterable[Event]) -> str:
    """Name the innermost annotation that says more than that it is of a collective, or none."""
    named = [each.name for each in around if not names.PLAIN.match(each.name)]
    return named[-1] if named else ""


def host_steps(events: Iterable[Event]) -> list[Interval]:
    """List the steps that the profiler's schedule marks, on the host."""
    marks = ((each.begin, each.end) for each in events if names.STEP.match(each.name))
    return sorted(set(marks))
