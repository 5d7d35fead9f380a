"""Sets of times: sorted lists of pairs (begin, end) that do not touch, in microseconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merge(spans: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Unite spans, in any order, into a set; those no further apart than `gap` become one.

    Empty spans are left out.
    """
    merged: list[Interval] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and begin - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def total(spans: Iterable[Interval]) -> float:
    """Sum up the lengths of a set."""
    return sum(end - begin for begin, end in spans)


def clip(spans: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    """Cut a set to the part from `begin` to `end`, in the time that its result's size takes."""
    if begin >= end:
        return []
    first = bisect_right(spans, begin, key=lambda span: span[1])
    last = bisect_left(spans, end, key=lambda span: span[0])
    return [(max(low, begin), min(high, end)) for low, high in spans[first:last]]


def subtract(spans: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Remove the times of the set `taken` from the set `spans`."""
    left, position = [], 0
    for begin, end in spans:
        while position < len(taken) and taken[position][1] <= begin:
            position += 1
        number = position
        while number < len(taken) and taken[number][0] < end:
            if taken[number][0] > begin:
                left.append((begin, taken[number][0]))
            begin = max(begin, taken[number][1])
            number += 1
        if begin < end:
            left.append((begin, end))
    return left


def gaps(spans: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    """List the times from `begin` to `end` that are not in the set."""
    return subtract([(begin, end)], clip(spans, begin, end)) if begin < end else []
