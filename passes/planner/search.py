"""Search for buckets: seeds, then moves that make the simulated time less.

Seeds: one bucket a unit, one an item, buckets filled up to caps (one cap for gathers, one for
reduces), the best buckets of a graph without reduces (`programme.py`); in each layout that a kind
may have. Moves on the best decision so far: merge two neighbors, cut a bucket, shift a boundary,
change a layout; about half of the moves are where compute waits. A decision is better if it needs
fewer bytes beyond the budget, then if it takes less time, then if it has fewer buckets.

All is decided by numbers and by one generator with a fixed seed: every rank finds the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.passes.planner.bound import Bound, lower_bound
from autoshard.passes.planner.costs import LAYOUTS, PACKED
from autoshard.passes.planner.margin import Margin, margin
from autoshard.passes.planner.per_unit import per_unit
from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.programme import best_buckets
from autoshard.passes.planner.simulate import (
    SimulatedBucket,
    Timeline,
    make_bucket,
    simulate_unless_worse,
)
from autoshard.passes.planner.topology import Residuals

EFFORT = 100_000  # moves tried times buckets: less than a second
STEPS = 2000  # moves tried at most
CAPS = 12  # sizes tried for each kind, from all in one bucket down, by halves
NEAR = tuple(2 ** (step / 6) for step in range(-5, 6))  # of the best of those

_Score = tuple[float, float, int]
"""Bytes beyond the budget, microseconds, number of buckets: less is better, compared in turn."""

WORST: _Score = (math.inf, math.inf, 0)

Cut = tuple[tuple[int, str], ...]
"""Buckets of one class and segment: for each, the number of items in it and in all before, and its
layout."""

_Found = tuple[_Score, tuple[Cut, ...]]


@dataclass(frozen=True)
class Decision:
    """Result of a search.

    timeline: of the best buckets found. Its `peak_bytes` is beyond `budget_bytes` if none of the
        buckets that were tried fit the budget.
    bound: time that no buckets can beat.
    margin: by how much it is faster than one bucket a unit; None if nobody compared them.
    """

    timeline: Timeline
    bound: Bound
    budget_bytes: float
    margin: Margin | None = None

    @property
    def gap(self) -> float:
        """Ratio of time to lower bound; 1 where the bound is 0."""
        return self.timeline.time_us / self.bound.time_us if self.bound.time_us else 1.0


def search(
    problem: Problem,
    *,
    budget_bytes: float,
    layouts: Mapping[str, Sequence[str]] = LAYOUTS,
    steps: int = STEPS,
) -> Decision:
    """Return the best decision found for `problem`: the same one at each call.

    The best of some seeds (one bucket a unit, one an item, buckets up to some size) is changed at
    random, again and again; each change is simulated, and kept if it is better. Fewer bytes beyond
    the budget are better, then less time, then fewer buckets. The result is never worse than
    `per_unit`, if buckets may be packed: that launches in an order of its own.

    budget_bytes: for all memory; see `simulate`.
    layouts: layouts that buckets may have, by kind, "gather" and "reduce".
    steps: moves tried at most; fewer where there are many buckets, see `EFFORT`.
    """
    space = _Space(problem, budget_bytes, layouts)
    best, timeline = space.best_seed()
    generator = random.Random(0)
    hot = space.hot(timeline, best[1])
    tried = {best[1]}  # of which none is better than the best
    for _ in range(min(steps, EFFORT // max(1, best[0][2])) if space.groups else 0):
        moved = space.move(best[1], generator, hot)
        if moved is None or moved in tried:
            continue
        tried.add(moved)
        found = space.evaluate(moved, known=best[0])
        if found is not None and found[0] < best:
            best, timeline = found
            hot = space.hot(timeline, moved)
    if all(PACKED in each for each in layouts.values()):
        timeline = min(per_unit(problem), timeline, key=lambda each: each.needs(budget_bytes))
    return Decision(timeline, lower_bound(problem), budget_bytes)


def search_beside(
    problem: Problem, known: Timeline, *, budget_bytes: float, errors: Residuals | None
) -> Decision:
    """Search as `search` does; the result is `known`, unless something better is found.

    Fewer bytes beyond the budget are better, then less time. If `known` keeps to the budget, what
    is found must be as fast also where predicted times err by `errors`.
    known: one bucket a unit, simulated for `problem`. errors: None if they are not known.
    """
    found = search(problem, budget_bytes=budget_bytes)
    none = None if errors is None else Margin(0.0, 0.0)
    of_known = dataclasses.replace(found, timeline=known, margin=none)
    if known.needs(budget_bytes) <= found.timeline.needs(budget_bytes):
        return of_known
    if errors is None:
        return found
    between = margin(problem, found.timeline, known, errors)
    if known.peak_bytes <= budget_bytes and between.low < 0:
        return of_known
    return dataclasses.replace(found, margin=between)


class _Space:
    """Space of all decisions about one problem.

    A decision is a tuple `cuts`, which has a `Cut` for each of `groups`.

    groups: (kind, items) of each segment and bucket class, gathers first.
    made: buckets that were made so far, by group, first item, end and layout.
    """

    def __init__(
        self, problem: Problem, budget_bytes: float, layouts: Mapping[str, Sequence[str]]
    ) -> None:
        """Group the gathers and reduces of `problem` by segment and bucket class.

        No bucket is made, and nothing simulated, yet.

        budget_bytes: memory that decisions should keep to; one beyond it scores worse.
        layouts: layouts that buckets may have, by kind, "gather" and "reduce".
        """
        self.problem = problem
        self.budget = budget_bytes
        self.layouts = layouts
        self.groups: list[tuple[str, list[Item]]] = []
        for kind, items in (("gather", problem.gathers), ("reduce", problem.reduces)):
            bucket_classes: dict[tuple[int, str], list[Item]] = {}
            for item in items:
                bucket_classes.setdefault((item.segment, item.bucket_class), []).append(item)
            self.groups += [(kind, each) for each in bucket_classes.values()]
        self.made: dict[tuple[int, int, int, str], SimulatedBucket] = {}

    def evaluate(
        self, cuts: tuple[Cut, ...], *, known: _Score = WORST
    ) -> tuple[_Found, Timeline] | None:
        """Simulate `cuts`, and return ((score, cuts), timeline).

        A score is (bytes beyond the budget, microseconds, number of buckets). Returns None if the
        simulation finds out on its way that the score will be worse than `known`. It may miss that:
        what it returns can be worse, too.
        """
        timeline = self.simulate(cuts, known)
        if timeline is None:
            return None
        over = max(0.0, timeline.peak_bytes - self.budget)
        return ((over, timeline.time_us, sum(map(len, cuts))), cuts), timeline

    def hot(self, timeline: Timeline, cuts: tuple[Cut, ...]) -> list[tuple[int, int]]:
        """List the buckets that compute waits for in `timeline`, and those before them in a cut.

        Each is (group, number in its cut); one may be listed twice.

        timeline: of `cuts`, simulated by this space: buckets are compared by identity.
        """
        exposed = {id(run.bucket) for run in timeline.runs if run.exposed_us > 0}
        found = []
        for group, cut in enumerate(cuts):
            begin = 0
            for at, (end, layout) in enumerate(cut):
                if id(self._bucket(group, begin, end, layout)) in exposed:
                    found += [(group, at), (group, max(0, at - 1))]
                begin = end
        return found

    def simulate(self, cuts: tuple[Cut, ...], known: _Score) -> Timeline | None:
        """Simulate `cuts`; return None as soon as the timeline is sure to be worse than `known`.

        Bytes beyond the budget are compared, then times. What is returned may be worse, too.
        """
        gathers: list[SimulatedBucket] = []
        reduces: list[SimulatedBucket] = []
        for group, cut in enumerate(cuts):
            into = gathers if self.groups[group][0] == "gather" else reduces
            begin = 0
            for end, layout in cut:
                into.append(self._bucket(group, begin, end, layout))
                begin = end
        gathers.sort(key=lambda bucket: bucket.used)
        reduces.sort(key=lambda bucket: bucket.ready)
        return simulate_unless_worse(
            self.problem, gathers, reduces, budget_bytes=self.budget, known=known[:2]
        )

    def _bucket(self, group: int, begin: int, end: int, layout: str) -> SimulatedBucket:
        """Bucket of items `begin` to `end` - 1 of a group, made once and kept."""
        key = (group, begin, end, layout)
        if key not in self.made:
            kind, items = self.groups[group]
            self.made[key] = make_bucket(self.problem, kind, items[begin:end], layout)
        return self.made[key]

    # ---- seeds

    def best_seed(self) -> tuple[_Found, Timeline]:
        return self._best(self.seeds())

    def _best(self, tried: Iterable[tuple[Cut, ...]]) -> tuple[_Found, Timeline]:
        """Simulate `tried`, one or more, and return the best as ((score, cuts), timeline).

        Of equal scores, the smallest cuts win: those whose buckets end first.
        """
        best: tuple[_Found, Timeline] | None = None
        for cuts in tried:
            found = self.evaluate(cuts, known=best[0][0] if best else WORST)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        assert best is not None, "the first is not worse than the worst"
        return best

    def seeds(self) -> Iterator[tuple[Cut, ...]]:
        """Yield the decisions that the search may start from, some for each layout.

        They are one bucket a unit; one an item; buckets filled up to the best caps found, by
        simulation; and in a problem without reduces, what `best_buckets` finds for each group by
        itself.
        """
        for layout in dict.fromkeys(itertools.chain(*self.layouts.values())):
            yield self._all(layout, [_by_unit(items) for _, items in self.groups])
            yield self._all(layout, [range(1, len(items) + 1) for _, items in self.groups])
            yield from self._capped(layout)
            if not self.problem.reduces:
                yield self._programme(layout)

    def _all(self, layout: str, ends: Sequence[Sequence[int]]) -> tuple[Cut, ...]:
        """Cut each group at its `ends`, into buckets of `layout`.

        A kind that may not have `layout` has the first of its own.
        """
        cuts = []
        for (kind, _), each in zip(self.groups, ends, strict=True):
            allowed = self.layouts[kind]
            chosen = layout if layout in allowed else allowed[0]
            cuts.append(tuple((end, chosen) for end in each))
        return tuple(cuts)

    def _capped(self, layout: str) -> Iterator[tuple[Cut, ...]]:
        """Yield one decision: buckets filled up to the best cap that is found for each kind.

        Each try is simulated. Caps are tried for gathers, for reduces, and for gathers again; then,
        for both, caps near the best.
        """
        caps = {kind: self._caps(kind) for kind in ("gather", "reduce")}
        chosen = {kind: found[len(found) // 2] for kind, found in caps.items()}
        for kind in ("gather", "reduce", "gather"):
            chosen[kind] = self._best_cap(layout, chosen, kind, caps[kind])
        for kind in ("gather", "reduce"):
            near = [chosen[kind] * factor for factor in NEAR]
            chosen[kind] = self._best_cap(layout, chosen, kind, near)
        yield self._filled(layout, chosen)

    def _best_cap(
        self, layout: str, chosen: Mapping[str, float], kind: str, caps: Sequence[float]
    ) -> float:
        """Return the best of `caps` for `kind`, with the other kind's cap as it is in `chosen`.

        Of caps that make the same buckets, the smallest.
        """
        tried = {self._filled(layout, {**chosen, kind: cap}): cap for cap in sorted(caps)[::-1]}
        (_, best), _ = self._best(tried)
        return tried[best]

    def _caps(self, kind: str) -> list[float]:
        of_kind = (items for each, items in self.groups if each == kind)
        total = sum(item.num_bytes for items in of_kind for item in items)
        return [total / 2**step for step in range(CAPS)] if total else [0.0]

    def _filled(self, layout: str, cap: Mapping[str, float]) -> tuple[Cut, ...]:
        return self._all(layout, [_filled(items, cap[kind]) for kind, items in self.groups])

    def _programme(self, layout: str) -> tuple[Cut, ...]:
        ends = [best_buckets(self.problem, items, layout).ends for _, items in self.groups]
        return self._all(layout, ends)

    # ---- moves

    def move(
        self,
        cuts: tuple[Cut, ...],
        generator: random.Random,
        hot: Sequence[tuple[int, int]],
    ) -> tuple[Cut, ...] | None:
        """Return `cuts` with one random change; None where the change that was drawn is impossible.

        A bucket is merged with the next one, in its own layout, cut in two, given another layout if
        it has several items, or up to three items pass between it and the next one.

        hot: buckets at which half of the changes are made; see the method `hot`.
        """
        if hot and generator.random() < 0.5:
            group, at = generator.choice(hot)
        else:
            group = generator.randrange(len(cuts))
            at = generator.randrange(len(cuts[group]))
        cut = list(cuts[group])
        begin = cut[at - 1][0] if at else 0
        end, layout = cut[at]
        allowed = self.layouts[self.groups[group][0]]
        what = generator.randrange(4)
        if what == 0 and at + 1 < len(cut):  # merge
            cut[at : at + 2] = [(cut[at + 1][0], layout)]
        elif what == 1 and end - begin > 1:  # cut
            cut.insert(at, (generator.randrange(begin + 1, end), layout))
        elif what == 2 and at + 1 < len(cut):  # shift
            by = generator.choice((-3, -2, -1, 1, 2, 3))
            if not begin < end + by < cut[at + 1][0]:
                return None
            cut[at] = (end + by, layout)
        elif what == 3 and end - begin > 1 and len(allowed) > 1:
            cut[at] = (end, next(other for other in allowed if other != layout))
        else:
            return None
        return (*cuts[:group], tuple(cut), *cuts[group + 1 :])


def _by_unit(items: Sequence[Item]) -> list[int]:
    """Ends of buckets of neighboring items of one unit."""
    units = [item.unit for item in items]
    ends = [end for end in range(1, len(units)) if units[end] != units[end - 1]]
    return [*ends, len(units)]


def _filled(items: Sequence[Item], cap: float) -> list[int]:
    """Ends of buckets that are filled up to `cap` bytes; an item that is larger stands alone."""
    ends: list[int] = []
    filled = 0
    for number, item in enumerate(items):
        if filled and filled + item.num_bytes > cap:
            ends.append(number)
            filled = 0
        filled += item.num_bytes
    return [*ends, len(items)]
