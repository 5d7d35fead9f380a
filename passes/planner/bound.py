"""Lower bound on the time of all decisions, whatever their buckets, order, layout or memory.

Ops 0 to N - 1 take c_i, one after another. A(i) is the time on a link of all that must have been
gathered before op i, R(j) the time of all gradients made by op j or later; each comes with at least
one start-up alpha. Then no step takes less than

    compute    C(0..N)
    link       alpha + A(N)  +  alpha + R(0)                           where both use one link
    start-up   max over i <= j of  alpha + A(i)  +  C(i..j)  +  alpha + R(j)

as each byte read by op i crosses its link before it, ops keep their order, and each byte made by op
j crosses after it. Costs of one layout (members of a grouped bucket, copies to a shared buffer) are
left out, as other layouts do without. Copies that all layouts make, such as casts of gradients to
another dtype, are in C: those of gradients made by op j or later come after op j.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.passes.planner.problem import Item, Problem


@dataclass(frozen=True)
class Bound:
    """Lower bound on the time of all decisions.

    binding: its origin, "compute", "link" or "start-up"; see the file's docstring.
    """

    time_us: float
    binding: str


def lower_bound(problem: Problem) -> Bound:
    """Return a time that no decision about `problem` beats, whatever its buckets, order or memory.

    It is the largest of three. "compute": all ops. "link": the busiest link's bytes, with one
    start-up for gathers and one for reduces. "start-up": what must be gathered before an op, all
    ops from there to another one, and what that op and later ones leave to reduce, for the worst
    two ops. If several are equal but for rounding, the result is named after the first of these.
    """
    copied: dict[int, float] = defaultdict(float)  # of what the op before each position makes
    for item in problem.reduces:
        copied[item.ready] += _copies_us(problem, "reduce", item)
    gathered = sum(_copies_us(problem, "gather", item) for item in problem.gathers)
    compute = problem.compute_us[-1] + gathered + sum(copied.values())
    heads = _heads(problem)
    tails = _tails(problem)
    link = max(
        (
            _total(problem, problem.gathers, name) + _total(problem, problem.reduces, name)
            for name in _link_names(problem)
        ),
        default=0.0,
    )
    # Op p does not begin before `reached`: the head of any op up to it, and compute since then.
    # What is made right before position p is made by op p - 1, and waits for no head of p.
    # Copies of what is made from there on come later, too, but some maybe after that is sent.
    reached, path = heads.get(0, 0.0), tails.get(0, 0.0)
    busy = reached
    for position in range(1, problem.num_ops + 1):
        reached += problem.op_us[position - 1]
        busy += problem.op_us[position - 1] + copied.get(position, 0.0)
        path = max(path, reached + tails.get(position, 0.0))
        reached = max(reached, heads.get(position, 0.0))
        busy = max(busy, heads.get(position, 0.0))
    path = max(path, busy)
    bounds = [(compute, "compute"), (link, "link"), (path, "start-up")]
    time_us = max(time for time, _ in bounds)
    # The way through compute alone is one of the path's: rounding must not name it start-up.
    binding = next(name for time, name in bounds if time >= time_us * (1 - 1e-9))
    return Bound(time_us, binding)


def _copies_us(problem: Problem, kind: str, item: Item) -> float:
    """Microseconds of the copies of `item` that every layout makes: casts, and turned shards."""
    costs = problem.costs
    copies = 0.0
    if item.is_copied_in:
        copies += costs.copy_in_us(kind, item.bucket_class, item.moved_bytes)
    if item.is_copied_out:
        copies += costs.copy_out_us(item.num_bytes)
    return copies


def _link_names(problem: Problem) -> list[str]:
    return sorted({link.name for links in problem.costs.links.values() for link in links})


def _total(problem: Problem, items: Iterable[Item], name: str) -> float:
    """Microseconds on link `name` of all `items` that pass it, with one start-up, the smallest.

    0 if none passes it.
    """
    alphas, total = [], 0.0
    for item in items:
        for link in problem.costs.links[item.bucket_class]:
            if link.name == name:
                alphas.append(link.alpha_us)
                total += item.num_bytes * link.us_per_byte
    return total + min(alphas, default=0.0)


def _heads(problem: Problem) -> dict[int, float]:
    """Map each position of a first use to the least time to gather all that is read by then.

    That is the time on the busiest link, with one start-up.
    """
    heads: dict[int, float] = {}
    for name in _link_names(problem):
        alpha, total = float("inf"), 0.0
        for item in problem.gathers:
            for link in problem.costs.links[item.bucket_class]:
                if link.name == name:
                    alpha = min(alpha, link.alpha_us)
                    total += item.num_bytes * link.us_per_byte
                    heads[item.used] = max(heads.get(item.used, 0.0), alpha + total)
    return heads


def _tails(problem: Problem) -> dict[int, float]:
    """Map each position `p` to the least time to reduce all gradients made by op p - 1 or later.

    Positions are those at which a gradient is ready. Counted is the busiest link, with one
    start-up; where that link runs an all-reduce, the start-up of the reduce before it is added.
    """
    tails: dict[int, float] = {}
    for name in _link_names(problem):
        alpha, total = float("inf"), 0.0
        for item in reversed(problem.reduces):
            before = 0.0  # the first link's start-up comes before the second's
            for link in problem.costs.links[item.bucket_class]:
                if link.name == name:
                    alpha = min(alpha, before + link.alpha_us)
                    total += item.num_bytes * link.us_per_byte
                    tails[item.ready] = max(tails.get(item.ready, 0.0), alpha + total)
                before += link.alpha_us
    return tails
