"""Choose parameters to keep unsharded from forward to backward: more memory for fewer gathers.

The parameters that forward gathers last are the first that backward reads: they are kept for the
shortest time. So more and more units are tried, from the end of forward on. Each time, forward and
backward are simulated with one bucket a unit, for their time and memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator

from autoshard.passes.planner.per_unit import per_unit, unit_buckets
from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.simulate import Timeline, simulate

GROWTH = 1.25  # from one number of units that is tried to the next


def worth_keeping(
    forward: Problem,
    backward: Problem,
    candidates: Collection[str],
    budget_bytes: float,
    beside: float = 0.0,
) -> tuple[str, ...]:
    """Return the names of the parameters that are best kept unsharded from forward to backward.

    They are in order of first use in forward. Considered are candidates that backward gathers
    again, by whole units: the last unit in forward, the last two, and so on, with larger steps as
    numbers grow. Each choice is simulated with one bucket a unit. The best one has the fewest bytes
    beyond the budget, then the least time of forward and backward together. It is empty if no
    choice is better than to keep nothing, so that keeping never adds bytes beyond the budget.

    candidates: names of parameters that may be kept.
    budget_bytes: for all memory of a graph: of forward, and of backward.
    beside: bytes that other frames of the model keep for each byte that is kept here.
    """
    again = {item.name for item in backward.gathers} & set(candidates)
    units = dict.fromkeys(item.unit for item in reversed(forward.gathers) if item.name in again)
    best: tuple[str, ...] = ()
    least = _cost(forward, backward, best, budget_bytes, beside)
    for count in _counts(len(units)):
        taken = set(itertools.islice(units, count))
        of_taken = (item.name for item in forward.gathers if item.unit in taken)
        names = tuple(name for name in of_taken if name in again)
        cost = _cost(forward, backward, names, budget_bytes, beside)
        if cost < least:
            best, least = names, cost
    return best


def with_kept(
    forward: Problem, backward: Problem, names: Collection[str]
) -> tuple[Problem, Problem]:
    """Return both problems with the parameters `names` unsharded from one to the other."""
    return _kept_after(forward, names), _kept_before(backward, names)


def unit_by_unit(problem: Problem, budget_bytes: float) -> Timeline:
    """Simulate one bucket a unit, gathered ahead as far as a budget for all memory allows.

    Or each one ahead (`per_unit`), where that is better, as it is for a search of buckets.
    """
    gathers, reduces = unit_buckets(problem)
    found = simulate(problem, gathers, reduces, budget_bytes=budget_bytes)
    return min(found, per_unit(problem), key=lambda each: each.needs(budget_bytes))


def _counts(most: int) -> Iterator[int]:
    """Yield the numbers of units to try: from 1 on, larger by `GROWTH` each, and at last `most`.

    Each is larger by 1 at least. Yields nothing if `most` is 0.
    """
    count = 1
    while count < most:
        yield count
        count = max(count + 1, int(count * GROWTH))
    if most:
        yield most


def _cost(
    forward: Problem,
    backward: Problem,
    names: Collection[str],
    budget_bytes: float,
    beside: float,
) -> tuple[float, float]:
    """Bytes beyond the budget, and microseconds, of forward and backward with `names` kept.

    Both are simulated with one bucket a unit, and added up. What other frames keep as well is left
    out of the budget.
    """
    over, time_us = 0.0, 0.0
    budget_bytes -= beside * sum(item.num_bytes for item in forward.gathers if item.name in names)
    for problem in with_kept(forward, backward, names):
        timeline = unit_by_unit(problem, budget_bytes)
        over += max(0.0, timeline.peak_bytes - budget_bytes)
        time_us += timeline.time_us
    return over, time_us


def _kept_after(problem: Problem, names: Collection[str]) -> Problem:
    """Return `problem`, of a forward that never frees the unsharded parameters `names`."""
    gathers = tuple(
        dataclasses.replace(item, freed=problem.num_ops + 1) if item.name in names else item
        for item in problem.gathers
    )
    return dataclasses.replace(problem, gathers=gathers)


def _kept_before(problem: Problem, names: Collection[str]) -> Problem:
    """Return `problem`, of a backward that is given the unsharded parameters `names`.

    It gathers none of them. They are in memory from its start for as long as they are needed.
    """
    freed = [0] * (problem.num_ops + 2)
    kept = [item for item in problem.gathers if item.name in names]
    for item in kept:
        freed[item.freed] += item.num_bytes
    gone, total = itertools.accumulate(freed), sum(freed)
    return dataclasses.replace(
        problem,
        live_bytes=tuple(
            live + total - by_now for live, by_now in zip(problem.live_bytes, gone, strict=False)
        ),
        gathers=tuple(item for item in problem.gathers if item.name not in names),
    )
