"""All configurations that were estimated, and which of them no other one beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.tools.plan.estimate import Configuration, Estimate


@dataclass(frozen=True)
class Tried:
    """Configuration that was estimated, in a few numbers.

    sample_us: microseconds for each sequence, or sample, of a rank.
    is_searched: whether buckets were searched for; else there is one a unit.
    """

    configuration: Configuration
    step_time_us: float
    sample_us: float
    peak_bytes: int
    is_searched: bool

    @staticmethod
    def of(found: Estimate) -> Tried:
        return Tried(
            found.configuration,
            found.step_time_us,
            found.sample_us,
            found.memory.peak_bytes,
            is_searched=bool(found.decisions),
        )


def best_that_fit(tried: Sequence[Tried], limit: int) -> list[int]:
    """Numbers of those on the Pareto front of memory and time, those of least memory first.

    The front is of those that fit into `limit` bytes; of all, if none does.
    """
    points = [(each.peak_bytes, each.sample_us) for each in tried]
    fitting = [number for number, each in enumerate(tried) if each.peak_bytes <= limit]
    among = fitting or range(len(tried))
    return [among[number] for number in pareto_front([points[each] for each in among])]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Numbers of the points that none beats, in order of their first coordinate.

    A point beats another if it has no larger coordinate than that, and a smaller one.

    >>> pareto_front([(3, 1), (1, 2), (2, 2), (2, 1)])
    [1, 3]
    """
    found: list[int] = []
    best = math.inf
    for number in sorted(range(len(points)), key=points.__getitem__):
        first, second = points[number]
        if second < best or (found and points[found[-1]] == (first, second)):
            found.append(number)
            best = second
    return found
