"""Chrome trace events of a plan's predicted timeline: lanes for compute and each kind and axis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.passes.ir.plan import Figures, Plan

PREDICTED, MEASURED = 0, 1  # processes, as a trace viewer names groups of lanes
COMPUTE = 0  # a lane

Event = dict[str, Any]
"""See "Trace Event Format", Google, 2016: times in microseconds."""


def trace_events(plan: Plan, figures: Figures) -> list[Event]:
    """Make events for compute, waits, collectives and memory of `plan`, as predicted by `figures`.

    Compute and waits are in one lane; each kind of collective has a lane for each mesh axis. Events
    that name the process and the lanes are among them. A bucket for which compute does not wait has
    no wait.
    """
    events = [
        _name("process_name", PREDICTED, COMPUTE, f"{plan.graph}, predicted"),
        _name("thread_name", PREDICTED, COMPUTE, "compute"),
    ]
    for begin, end, first, after in figures.compute:
        events.append(_span(f"ops {first} to {after - 1}", COMPUTE, begin, end))
    lanes: dict[str, int] = {}
    for number, (bucket, times) in enumerate(zip(plan.buckets, figures.buckets, strict=True)):
        lane = f"{bucket.kind} {bucket.axis}"
        if lane not in lanes:
            lanes[lane] = len(lanes) + 1
            events.append(_name("thread_name", PREDICTED, lanes[lane], lane))
        about = {"members": bucket.names, "bytes": bucket.num_bytes, "bucket": number}
        name = f"{bucket.kind} {bucket.unit}"
        events.append(_span(name, lanes[lane], times.launch_us, times.finish_us, about))
        if times.exposed_us:
            begin = times.finish_us - times.exposed_us
            events.append(_span(f"wait for {name}", COMPUTE, begin, times.finish_us))
    events += [
        {"name": "memory", "ph": "C", "pid": PREDICTED, "ts": time, "args": {"bytes": num_bytes}}
        for time, num_bytes in figures.memory
    ]
    return events


def measured_events(profile: Path) -> list[Event]:
    """Read the spans of a trace as events of process MEASURED, after one that names the process.

    They are moved so that the earliest begins at 0, and their "tid" becomes a string. Other events
    of the trace, names of threads among them, are left out.

    profile: uncompressed JSON, as `torch.profiler` exports it.
    Raises ValueError, with the file's path, if it is anything else; OSError if it can't be read.
    """
    try:
        events = json.loads(profile.read_text())["traceEvents"]
        spans = [event for event in events if event.get("ph") == "X"]
        start = min((event["ts"] for event in spans), default=0.0)
        moved = [
            {**event, "pid": MEASURED, "ts": event["ts"] - start, "tid": str(event["tid"])}
            for event in spans
        ]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{profile} is no trace as torch.profiler exports it") from None
    return [_name("process_name", MEASURED, 0, "measured"), *moved]


def _span(
    name: str, lane: int, begin: float, end: float, about: dict[str, Any] | None = None
) -> Event:
    """Make the event of a span in the predicted process, from `begin` to `end`, in microseconds.

    about: what a viewer shows beside it.
    """
    return {
        "name": name,
        "ph": "X",
        "pid": PREDICTED,
        "tid": lane,
        "ts": begin,
        "dur": end - begin,
        "args": about or {},
    }


def _name(what: str, process: int, lane: int, name: str) -> Event:
    """Make the event that names a process ("process_name") or a lane ("thread_name")."""
    return {"name": what, "ph": "M", "pid": process, "tid": lane, "args": {"name": name}}
