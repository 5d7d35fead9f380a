"""Compare two decisions where predicted times err: by how much is one faster, wherever they lie?

Costs are predictions, and err by what a topology's `residuals` say. Where compute is faster than
predicted and links are slower, or the other way around, another decision may be better.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autoshard.passes.planner.costs import Link
from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.simulate import Timeline, make_bucket, replay
from autoshard.passes.planner.topology import Residuals


@dataclass(frozen=True)
class Margin:
    """Shares by which a decision is faster than another one, at least and at most.

    They are of its own time: 0.1 where the other one takes 1.1 times as long.
    """

    low: float
    high: float


def margin(problem: Problem, found: Timeline, other: Timeline, errors: Residuals) -> Margin:
    """Compare two decisions about `problem` at its costs, and where compute and links err most.

    Compute takes `errors.low` times as long as predicted and links `errors.high` times, or the
    other way around. Launches and waits stay where the decisions have them.
    """
    times = [(found.time_us, other.time_us)]
    for compute, links in ((errors.low, errors.high), (errors.high, errors.low)):
        erring = _with_errors(problem, compute, links)
        times.append((_replayed(erring, found), _replayed(erring, other)))
    shares = [plain / mine - 1.0 if mine else 0.0 for mine, plain in times]
    return Margin(min(shares), max(shares))


def _replayed(problem: Problem, timeline: Timeline) -> float:
    """Microseconds of the decision in `timeline` at the costs of `problem`."""
    made = [
        make_bucket(problem, run.bucket.kind, run.bucket.items, run.bucket.layout)
        for run in timeline.runs
    ]
    gathers = [bucket for bucket in made if bucket.kind == "gather"]
    return replay(problem, gathers, made[len(gathers) :], timeline.order).time_us


def _with_errors(problem: Problem, compute: float, links: float) -> Problem:
    """Return `problem` with times of ops and copies, and of links, multiplied."""
    costs = problem.costs
    slower = {
        name: tuple(_slower(link, links) for link in each) for name, each in costs.links.items()
    }
    copy_us = costs.copy_us_per_byte * compute
    changed = dataclasses.replace(costs, links=slower, copy_us_per_byte=copy_us)
    op_us = tuple(each * compute for each in problem.op_us)
    return dataclasses.replace(problem, op_us=op_us, costs=changed)


def _slower(link: Link, factor: float) -> Link:
    return dataclasses.replace(
        link,
        alpha_us=link.alpha_us * factor,
        us_per_byte=link.us_per_byte * factor,
        member_us=link.member_us * factor,
    )
