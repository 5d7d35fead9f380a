"""Lanes of a rank with a device: kernels by stream, and calls of the host that launched them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
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
from autoshard.tools.trace.explain.reader import DEVICE, HOST, LAUNCHES, Event

APART_US = 10.0
"""Time between two kernels that counts as computation: a device takes some to begin the next."""


class Launch(NamedTuple):
    """Call of the host that launched a kernel, and the annotations around it."""

    begin: float
    around: tuple[Event, ...]


def device_lanes(title: str, events: Sequence[Event]) -> Lanes:
    """Sort the spans of a rank with a device into lanes.

    A kernel whose launch is not in the trace counts as launched when it begins. Kernels that are
    launched inside annotations of sharding are copies.
    """
    launches = _launches(events)
    found = [each for each in events if each.category in DEVICE]
    main = _main_stream(found, launches)
    kernels, copies, collectives = [], [], []
    for event in found:
        launch = launches.get(_correlation(event), Launch(event.begin, ()))
        if names.is_collective_kernel(event.name, event.args):
            collectives.append(_collective(event, launch))
        elif _is_copy(event, launch, main):
            name, lane = _copy_name(event, launch), _stream(event)
            copies.append(Copy(event.begin, event.end, name, lane == main, lane))
        else:
            kernels.append(Kernel(event.begin, event.end, launch.begin, event.name))
    spans = [(each.begin, each.end) for each in found]
    steps = _device_steps(events, found, launches) or [
        (min(begin for begin, _ in spans), max(end for _, end in spans))
    ]
    busy = intervals.merge(((each.begin, each.end) for each in kernels), APART_US)
    return Lanes(title, True, steps, kernels, copies, collectives, busy)


def _launches(events: Sequence[Event]) -> dict[int | None, Launch]:
    """Find the launches of a trace by their correlation."""
    launches: dict[int | None, Launch] = {}
    for thread in by_thread(e for e in events if e.category in LAUNCHES | HOST).values():
        for event, around in nested(thread):
            number = _correlation(event)
            if event.category in LAUNCHES and number is not None:
                launches[number] = Launch(event.begin, around)
    return launches


def _main_stream(found: Sequence[Event], launches: dict[int | None, Launch]) -> Hashable:
    """Find the stream that computes: the one with most time of kernels that are no collectives."""
    times: defaultdict[Hashable, float] = defaultdict(float)
    for event in found:
        launch = launches.get(_correlation(event))
        if event.category == "kernel" and not (launch and launch.around):
            is_collective = names.is_collective_kernel(event.name, event.args)
            times[_stream(event)] += 0 if is_collective else event.end - event.begin
    return max(times, key=lambda stream: times[stream], default=None)


def _stream(event: Event) -> Hashable:
    """Name the stream of a device's span, with the device."""
    stream = event.args.get("stream")
    return event.thread[0], stream if isinstance(stream, int) else event.thread[1]


def _correlation(event: Event) -> int | None:
    """Return the number that a kernel shares with its launch, if it has one."""
    found = event.args.get("correlation")
    return found if isinstance(found, int) else None


def _is_copy(event: Event, launch: Launch, main: Hashable) -> bool:
    """Tell whether a kernel that is no collective copies for one."""
    if launch.around or names.COPY.search(event.name):
        return True
    return _stream(event) != main and names.MAYBE_COPY.search(event.name) is not None


def _copy_name(event: Event, launch: Launch) -> str:
    """Name a copy for people: by the annotation around it, or by its kernel."""
    return place_of(launch.around) or event.name.split("(")[0][:60]


def _collective(event: Event, launch: Launch) -> Collective:
    """Make the collective of a kernel of NCCL."""
    args = event.args
    kind = names.kind_of(str(args.get("Collective name") or event.name))
    return Collective(
        kind="reduce" if kind == "gather" and "ReduceScatter" in event.name else kind,
        group=str(args.get("Process Group Name", "")),
        lane=_stream(event),
        num_bytes=names.kernel_bytes(args),
        launch=launch.begin,
        begin=event.begin,
        end=event.end,
        place=place_of(launch.around),
    )


def _device_steps(
    events: Sequence[Event], found: Sequence[Event], launches: dict[int | None, Launch]
) -> list[Interval]:
    """List the steps as the device runs them: each from the first kernel that it launched on.

    A step ends where the next one begins, and the last one with its last kernel.
    """
    marks = host_steps(events)
    pairs = sorted(
        (launch.begin, each.begin, each.end)
        for each in found
        if (launch := launches.get(_correlation(each)))
    )
    steps, position = [], 0
    for begin, end in marks:
        while position < len(pairs) and pairs[position][0] < begin:
            position += 1
        first = position
        while position < len(pairs) and pairs[position][0] < end:
            position += 1
        if inside := pairs[first:position]:
            steps.append((min(pair[1] for pair in inside), max(pair[2] for pair in inside)))
    ends = [*(begin for begin, _ in steps[1:]), *(end for _, end in steps[-1:])]
    return [(begin, end) for (begin, _), end in zip(steps, ends, strict=True) if begin < end]
