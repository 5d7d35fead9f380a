"""Schedules of others: of FSDP2, one bucket a unit; and of DDP, gradients by their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoshard.passes.planner.costs import PACKED
from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.simulate import Order, SimulatedBucket, Timeline, make_bucket, replay


def per_unit(problem: Problem) -> Timeline:
    """Simulate one bucket a unit, gathered one bucket ahead, with one reduce in flight.

    A gather is launched at the first use of the bucket before (the first one, at the start), or as
    soon after as its shards are there, and waited for at its own first use. A reduce is launched as
    soon as its gradients are there, and waited for right before the next reduce is launched, where
    its result is read first, or at the end. A unit of several bucket classes or segments has a
    bucket for each. No budget is kept to.
    """
    gathers, reduces = unit_buckets(problem)
    return replay(problem, gathers, reduces, _ordered(problem, gathers, reduces, late=False))


def _ordered(
    problem: Problem,
    gathers: Sequence[SimulatedBucket],
    reduces: Sequence[SimulatedBucket],
    *,
    late: bool,
) -> Order:
    """Order launches and waits: gathers a bucket ahead; reduces as they are ready.

    late: whether reduces are waited for where their results are read, not at the next launch.
    """
    placed: list[tuple[tuple[int, int, int], tuple[str, int, int]]] = []
    for number, bucket in enumerate(gathers):
        ahead = max(bucket.ready, gathers[number - 1].used if number else 0)
        placed.append(((ahead, 1, 2 * number), ("launch", number, ahead)))
        placed.append(((bucket.used, 1, 2 * number + 3), ("wait", number, bucket.used)))
    for number, bucket in enumerate(reduces):
        at = len(gathers) + number
        following = reduces[number + 1].ready if number + 1 < len(reduces) else problem.num_ops
        following = bucket.used if late else min(following, bucket.used)
        placed.append(((bucket.ready, 0, 2 * number), ("launch", at, bucket.ready)))
        placed.append(((following, 0, 2 * number + 1), ("wait", at, following)))
    return tuple(event for _, event in sorted(placed))


DDP_BYTES = 25 << 20
"""Bytes of gradients with which DDP begins a reduce; `bucket_cap_mb`."""


def by_bytes(problem: Problem, least_bytes: int = DDP_BYTES) -> Timeline:
    """Simulate reduces of `least_bytes` gradients each, in order of readiness, waited for at last.

    The last bucket may have less. Gathers are those of `per_unit`. No budget is kept to.
    """
    gathers, _ = unit_buckets(problem)
    groups = filled(problem.reduces, least_bytes)
    reduces = [make_bucket(problem, "reduce", group, PACKED) for group in groups]
    return replay(problem, gathers, reduces, _ordered(problem, gathers, reduces, late=True))


def filled(items: Iterable[Item], least_bytes: int = DDP_BYTES) -> list[list[Item]]:
    """Group items of one bucket class that follow each other, until a group has `least_bytes`."""
    groups: list[list[Item]] = []
    for item in items:
        is_open = (
            bool(groups)
            and groups[-1][0].bucket_class == item.bucket_class
            and sum(each.num_bytes for each in groups[-1]) < least_bytes
        )
        if not is_open:
            groups.append([])
        groups[-1].append(item)
    return groups


def unit_buckets(problem: Problem) -> tuple[list[SimulatedBucket], list[SimulatedBucket]]:
    """Make the packed buckets of gathers and of reduces: one a unit, bucket class and segment.

    Gathers are in order of first use, reduces in order of readiness.
    """
    return (
        _by_unit(problem, "gather", problem.gathers),
        _by_unit(problem, "reduce", problem.reduces),
    )


def _by_unit(problem: Problem, kind: str, items: Iterable[Item]) -> list[SimulatedBucket]:
    """Make the packed buckets of `items`, one for each unit, bucket class and segment.

    Of kind "gather", they are in order of first use; of kind "reduce", in order of readiness.
    """
    units: dict[tuple[str, str, int], list[Item]] = {}
    for item in items:
        units.setdefault((item.unit, item.bucket_class, item.segment), []).append(item)
    buckets = [make_bucket(problem, kind, each, PACKED) for each in units.values()]
    return sorted(buckets, key=lambda each: each.used if kind == "gather" else each.ready)
