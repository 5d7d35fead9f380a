"""Pages that Python touches anew, by how deep the caller is."""

from __future__ import annotations

import resource
from collections.abc import Callable

CALLS = 50
DEPTHS = range(250)  # of which some are at the end of a piece of frames: they are 120 apart


def faults(function: Callable[[], object], depth: int) -> int:
    """Count the pages that are touched anew while `function` runs, called at some depth."""
    if depth:
        return faults(function, depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def run_calls() -> None:
    """Call something `CALLS` times, which calls 20 frames deep."""
    for _ in range(CALLS):
        _down(20)


def _down(depth: int) -> None:
    if depth:
        _down(depth - 1)
