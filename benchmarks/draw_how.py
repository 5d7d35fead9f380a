"""Draw what docs/how.md tells of: units over a step, and a forward before and after planning.

    python benchmarks/draw_how.py docs/how_units.svg docs/how_buckets.svg

Simulated, with layer shapes of Llama-3 8B in the balanced regime of `planner.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from planner import MODELS, REGIMES, make_problem
from plot import Bar, Lane, timeline

from autoshard.passes.planner.costs import PACKED
from autoshard.passes.planner.per_unit import per_unit
from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.search import search
from autoshard.passes.planner.simulate import Timeline, make_bucket, replay

LAYERS = 4
COLORS = {"compute": "#b8b8b8", "gather": "#7aa6d8", "unsharded": "#e6c36a", "reduce": "#8fc28b"}
KINDS = ("compute", "gather")  # of a forward


def problem_of(graph: str) -> Problem:
    """Make the problem of a forward or a backward."""
    return make_problem(MODELS["8b"], REGIMES["balanced"], graph, layers=LAYERS)


def lanes_of_units() -> list[Lane]:
    """Make a lane of compute and one a unit, in ms, of a forward and the backward after it.

    There is one bucket a unit. A unit is unsharded from the end of its gather to its last op.
    """
    computed: list[Bar] = []
    units: dict[str, list[Bar]] = {}
    start_us = 0.0
    for graph in ("forward", "backward"):
        problem = problem_of(graph)
        found = per_unit(problem)
        computed += compute_of(found, start_us)
        for run in found.runs:
            (unit,) = {item.unit for item in run.bucket.items}
            bars = units.setdefault(unit, [])
            begin, end = start_us + run.launch_us, start_us + run.finish_us
            bars.append(bar(begin, end, run.bucket.kind))
            if run.bucket.kind == "gather":
                freed = max(item.freed for item in run.bucket.items)
                bars.append(bar(end, start_us + time_of(found, problem, freed), "unsharded"))
        start_us += found.time_us
    return [Lane("compute", computed), *(Lane(unit, units[unit]) for unit in sorted(units))]


def lanes_of_forwards() -> list[Lane]:
    """Make two lanes, compute and link, in ms, for each of three ways to gather in a forward."""
    problem = problem_of("forward")
    unit = per_unit(problem)
    found = {
        "one a parameter, when read": when_read(problem),
        "one a unit, a unit ahead": unit,
        "auto": search(problem, budget_bytes=unit.peak_bytes).timeline,
    }
    lanes = []
    for name, each in found.items():
        sent = [bar(begin, end, "gather") for run in each.runs for _, begin, end in run.turns]
        lanes += [Lane(f"{name}: compute", compute_of(each)), Lane("link", sent)]
    return lanes


def when_read(problem: Problem) -> Timeline:
    """Simulate one gather a parameter, which is launched where its parameter is read first."""
    buckets = [make_bucket(problem, "gather", [item], PACKED) for item in problem.gathers]
    order = [
        (what, number, bucket.used)
        for number, bucket in enumerate(buckets)
        for what in ("launch", "wait")
    ]
    return replay(problem, buckets, [], tuple(order))


def compute_of(found: Timeline, start_us: float = 0.0) -> list[Bar]:
    """List bars of ops, moved by `start_us`."""
    spans = [(begin, end) for begin, end, *_ in found.compute]
    return [bar(start_us + begin, start_us + end, "compute") for begin, end in spans]


def bar(begin_us: float, end_us: float, what: str) -> Bar:
    return Bar(begin_us / 1e3, end_us / 1e3, COLORS[what])


def time_of(found: Timeline, problem: Problem, position: int) -> float:
    """Return the time in us at which the op before `position` ends."""
    for begin_us, _, first, last in found.compute:
        if first < position <= last:
            return begin_us + sum(problem.op_us[first:position])
    raise ValueError(f"no op ends at position {position}")


def main() -> None:
    """Draw both, and write the pictures that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("units", type=Path)
    parser.add_argument("buckets", type=Path)
    options = parser.parse_args()
    timeline(lanes_of_units(), COLORS, options.units, unit="ms of forward and backward")
    legend = {kind: COLORS[kind] for kind in KINDS}
    timeline(lanes_of_forwards(), legend, options.buckets, unit="ms of forward")


if __name__ == "__main__":
    main()
