"""Draw what the planner does: a backward of eight layers, one bucket a unit and as it is found.

    python benchmarks/draw_plans.py docs/plan_timeline.svg docs/plan_memory.svg

Layer shapes of Llama-3 8B in the balanced regime of `planner.py`, with as much memory as one bucket
a unit needs.
"""

from __future__ import annotations

import argparse
import bisect
from pathlib import Path

from planner import MODELS, REGIMES, make_problem
from plot import Bar, Chart, Lane, Line, picture, timeline

from autoshard.passes.planner.per_unit import per_unit
from autoshard.passes.planner.search import search
from autoshard.passes.planner.simulate import Timeline

LAYERS = 8
SAMPLES = 400  # of the memory's curve
COLORS = {"compute": "#b8b8b8", "gather": "#7aa6d8", "reduce": "#8fc28b"}
LINES = {"one bucket a unit": "#999999", "auto": "#1f77b4"}


def timelines() -> dict[str, Timeline]:
    """Simulate the backward with one bucket a unit and with the planner's, by the names of `LINES`.

    The planner has as much memory as one bucket a unit needs.
    """
    problem = make_problem(MODELS["8b"], REGIMES["balanced"], "backward", layers=LAYERS)
    unit = per_unit(problem)
    found = search(problem, budget_bytes=unit.peak_bytes).timeline
    return dict(zip(LINES, (unit, found), strict=True))


def lanes_of(name: str, found: Timeline) -> list[Lane]:
    """Make two lanes of a timeline, in milliseconds: ops, and collectives on the link."""
    computed = [Bar(begin / 1e3, end / 1e3, COLORS["compute"]) for begin, end, *_ in found.compute]
    sent = [
        Bar(begin / 1e3, end / 1e3, COLORS[run.bucket.kind])
        for run in found.runs
        for _, begin, end in run.turns
    ]
    return [Lane(f"{name}: compute", computed), Lane(f"{name}: link", sent)]


def memory_of(found: Timeline, end_us: float) -> list[float]:
    """Sample a timeline's memory in GiB at `SAMPLES` equal distances up to `end_us`.

    A sample is NaN once the timeline is over.
    """
    times = [time_us for time_us, _ in found.memory]
    samples = []
    for number in range(SAMPLES):
        at = end_us * number / SAMPLES
        last = bisect.bisect_right(times, at) - 1
        is_over = at > found.time_us
        samples.append(float("nan") if is_over else found.memory[max(0, last)][1] / 2**30)
    return samples


def main() -> None:
    """Draw timelines and memory of both, and write the pictures that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("timeline", type=Path)
    parser.add_argument("memory", type=Path)
    options = parser.parse_args()
    found = timelines()
    lanes = [lane for name, each in found.items() for lane in lanes_of(name, each)]
    timeline(lanes, COLORS, options.timeline, unit="ms of backward")
    end_us = max(each.time_us for each in found.values())
    lines = [
        Line(name, memory_of(found[name], end_us), color, width=1.2)
        for name, color in LINES.items()
    ]
    title = "GiB gathered, or on the way to be reduced, or reduced"
    chart = Chart(title, lines, from_zero=True)
    picture([chart], options.memory, steps=f"{SAMPLES} parts of {end_us / 1e3:.1f} ms")


if __name__ == "__main__":
    main()
