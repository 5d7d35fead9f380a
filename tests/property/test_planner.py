"""The planner's laws, on random problems: no decision beats the bound, the programme is exact,
search is no worse than its seeds and keeps to its budget.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.passes.planner import programme
from autoshard.passes.planner.bound import lower_bound
from autoshard.passes.planner.costs import GROUPED, LAYOUTS, PACKED, Costs, Link
from autoshard.passes.planner.keep import unit_by_unit
from autoshard.passes.planner.per_unit import per_unit, unit_buckets
from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.programme import best_buckets
from autoshard.passes.planner.search import search
from autoshard.passes.planner.simulate import (
    SimulatedBucket,
    Timeline,
    make_bucket,
    replay,
    simulate,
    simulate_unless_worse,
    usage,
)

EITHER = (PACKED, GROUPED)
ROUNDING = 1 + 1e-9  # sums of floats in other orders


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    links = {
        bucket_class: tuple(
            Link(
                name,
                alpha_us=draw(st.sampled_from([0.0, 5.0, 40.0])),
                us_per_byte=draw(st.sampled_from([0.0, 0.01, 0.3])),
                member_us=draw(st.sampled_from([0.0, 3.0])),
            )
            for name in names
        )
        for bucket_class, names in (
            ("gather", ["node"]),
            ("reduce", draw(st.sampled_from([["node"], ["node", "network"], ["other"]]))),
        )
    }
    return Costs(
        links,
        shards=dict.fromkeys(links, draw(st.integers(1, 8))),
        copy_us_per_byte=draw(st.sampled_from([0.0, 0.02])),
        contention=draw(st.sampled_from([1.0, 1.3])),
        divides=draw(st.booleans()),
        call_us=draw(st.sampled_from([0.0, 3.0])),
    )


@st.composite
def problems(draw: st.DrawFn, *, max_items: int = 8, reduces: bool = True) -> Problem:
    num_ops = draw(st.integers(1, 16))
    sizes = st.sampled_from([1, 10, 100, 1000])
    op_us = draw(
        st.lists(st.sampled_from([0.0, 1.0, 7.5, 60.0]), min_size=num_ops, max_size=num_ops)
    )
    live = draw(st.lists(st.integers(0, 2000), min_size=num_ops, max_size=num_ops))
    uses = sorted(draw(st.lists(st.integers(0, num_ops - 1), min_size=1, max_size=max_items)))
    gathers = [
        Item(
            f"w{n}",
            f"u{n // 2}",
            "gather",
            draw(sizes),
            0,
            use,
            draw(st.integers(use + 1, num_ops)),
            is_copied_in=draw(st.booleans()),
            is_copied_out=draw(st.booleans()),
            source_bytes=draw(st.sampled_from([None, 25])),
        )
        for n, use in enumerate(uses)
    ]
    births = sorted(draw(st.lists(st.integers(1, num_ops), max_size=max_items))) if reduces else []
    made = [
        Item(
            f"g{n}",
            f"u{n // 2}",
            "reduce",
            draw(sizes),
            birth,
            num_ops,
            num_ops,
            is_copied_in=draw(st.booleans()),
            source_bytes=draw(st.sampled_from([None, 25])),
        )
        for n, birth in enumerate(births)
    ]
    return Problem("any", tuple(op_us), tuple(live), tuple(gathers), tuple(made), draw(costs()))


@st.composite
def partitions(
    draw: st.DrawFn, problem: Problem, kind: str, items: Sequence[Item]
) -> list[SimulatedBucket]:
    buckets, begin = [], 0
    while begin < len(items):
        end = draw(st.integers(begin + 1, len(items)))
        layout = draw(st.sampled_from(EITHER))
        buckets.append(make_bucket(problem, kind, items[begin:end], layout))
        begin = end
    return buckets


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_nothing_beats_the_bound(data: st.DataObject) -> None:
    problem = data.draw(problems())
    gathers = data.draw(partitions(problem, "gather", problem.gathers))
    reduces = data.draw(partitions(problem, "reduce", problem.reduces))
    budget = data.draw(st.sampled_from([0, 2000, 4000, 10**9]))
    timeline = simulate(problem, gathers, reduces, budget_bytes=budget)
    assert lower_bound(problem).time_us <= timeline.time_us * ROUNDING
    check_timeline(problem, timeline)
    again = replay(problem, gathers, reduces, timeline.order)
    assert again.order == timeline.order
    assert again.time_us == timeline.time_us
    assert again.peak_bytes == timeline.peak_bytes


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_usage_has_the_bytes_of_the_timeline(data: st.DataObject) -> None:
    """Told once for each time, with the peak among it, by category."""
    problem = data.draw(problems())
    gathers = data.draw(partitions(problem, "gather", problem.gathers))
    reduces = data.draw(partitions(problem, "reduce", problem.reduces))
    timeline = simulate(problem, gathers, reduces, budget_bytes=2000)
    found = usage(problem, timeline)
    times = [time_us for time_us, _ in found]
    assert all(itertools.starmap(operator.lt, itertools.pairwise(times)))
    assert times[0] == 0 <= times[-1] <= timeline.time_us * ROUNDING
    assert max(peak.num_bytes for _, peak in found) == timeline.peak_bytes
    assert timeline.peak in [peak for _, peak in found]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_not_worse_is_played_to_the_end(data: st.DataObject) -> None:
    problem = data.draw(problems())
    buckets = (
        data.draw(partitions(problem, "gather", problem.gathers)),
        data.draw(partitions(problem, "reduce", problem.reduces)),
    )
    budget = data.draw(st.sampled_from([0, 2000, 4000, 10**9]))
    whole = simulate(problem, *buckets, budget_bytes=budget)
    beyond = max(0.0, whole.peak_bytes - budget)
    known = (
        beyond + data.draw(st.sampled_from([-1, 0, 1])),
        whole.time_us * data.draw(st.sampled_from([0.0, 0.5, 1.0, 1.1])),
    )
    found = simulate_unless_worse(problem, *buckets, budget_bytes=budget, known=known)
    if found is None:
        assert known < (beyond, whole.time_us)
    else:
        assert (found.order, found.time_us) == (whole.order, whole.time_us)


def check_timeline(problem: Problem, timeline: Timeline) -> None:
    """Each bucket is launched when its inputs are there, and waited for before it is read; and
    memory is told once for each time, the peak among it."""
    assert max(num_bytes for _, num_bytes in timeline.memory) == timeline.peak_bytes
    times = [time_us for time_us, _ in timeline.memory]
    assert all(itertools.starmap(operator.lt, itertools.pairwise(times)))
    for run in timeline.runs:
        assert run.bucket.ready <= run.launch <= run.wait <= problem.num_ops
        assert run.wait <= run.bucket.used
    by_link: dict[str, list[tuple[float, float]]] = {}
    for run in timeline.runs:
        for link, begin, end in run.turns:
            by_link.setdefault(link, []).append((begin, end))
    for turns in by_link.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(turns)):
            assert end <= begin * ROUNDING


@settings(max_examples=80, deadline=None)
@given(problems(max_items=10, reduces=False), st.sampled_from(EITHER))
def test_programme_is_the_best_of_all(problem: Problem, layout: str) -> None:
    found = best_buckets(problem, problem.gathers, layout)
    assert found.is_exact
    table = programme._Table(problem, problem.gathers, layout)
    best = min(map(table.time_us, all_ends(len(problem.gathers))))
    assert found.time_us == pytest.approx(best, rel=1e-12)
    assert table.time_us(found.ends) == found.time_us


def all_ends(count: int) -> Iterator[list[int]]:
    for cuts in itertools.product((False, True), repeat=count - 1):
        yield [*(n for n, is_cut in enumerate(cuts, 1) if is_cut), count]


@settings(max_examples=30, deadline=None)
@given(problems())
def test_search_is_no_worse_than_one_bucket_a_unit_or_an_item(problem: Problem) -> None:
    found = search(problem, budget_bytes=10**9, steps=20)
    assert found.gap >= 1 / ROUNDING
    for size in (1, 2):
        for layout in EITHER:
            gathers, reduces = (
                [
                    make_bucket(
                        problem,
                        kind,
                        items[begin : begin + size],
                        layout if layout in LAYOUTS[kind] else PACKED,
                    )
                    for begin in range(0, len(items), size)
                ]
                for kind, items in (("gather", problem.gathers), ("reduce", problem.reduces))
            )
            other = simulate(problem, gathers, reduces, budget_bytes=10**9)
            assert found.timeline.time_us <= other.time_us


@settings(max_examples=30, deadline=None)
@given(problems(), st.sampled_from([0, 2000, 4000, 10**9]))
def test_one_bucket_a_unit_is_no_worse_than_one_ahead(problem: Problem, budget: int) -> None:
    found, ahead = unit_by_unit(problem, budget), per_unit(problem)
    assert found.needs(budget) <= ahead.needs(budget)
    apart = simulate(problem, *unit_buckets(problem), budget_bytes=budget)
    assert found.needs(budget) <= apart.needs(budget)


@given(problems(), st.integers(0, 5000))
def test_search_keeps_to_its_budget_where_anything_does(problem: Problem, budget: int) -> None:
    found = search(problem, budget_bytes=budget, steps=20)
    alone = [
        [make_bucket(problem, kind, [item], PACKED) for item in items]
        for kind, items in (("gather", problem.gathers), ("reduce", problem.reduces))
    ]
    other = simulate(problem, *alone, budget_bytes=budget)
    if other.peak_bytes <= budget:
        assert found.timeline.peak_bytes <= budget
