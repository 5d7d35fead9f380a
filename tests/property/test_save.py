"""Random blocks: what to save, by minimum cuts, beside all choices that there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from autoshard.passes.planner.costs import HostLink
from autoshard.passes.planner.save import (
    Block,
    Choice,
    Need,
    Value,
    allotted,
    at_price,
    choices,
    freed_bytes,
    least_us,
    with_host,
)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Draw up to six values, some of which backward reads."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        sources = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        found.append(
            Value(
                draw(st.integers(1, 8)),
                draw(st.sampled_from([0.0, 0.25, 1.0, 7.0])),
                tuple(sorted(sources)),
                is_read=draw(st.booleans()),
                is_fixed=draw(st.integers(0, 5)) == 0,
                can_move=draw(st.booleans()),
            )
        )
    return tuple(found)


def every_choice(block: Block) -> list[Choice]:
    """All ways to have what backward reads: each value is saved, computed again, or not there."""
    found = []
    for states in itertools.product(("saved", "again", ""), repeat=len(block)):
        saved = {number for number, state in enumerate(states) if state == "saved"}
        again = {number for number, state in enumerate(states) if state == "again"}
        there = saved | again
        sources = {source for number in again for source in block[number].sources}
        read = {number for number, value in enumerate(block) if value.is_read}
        if not read | sources <= there or any(block[number].is_fixed for number in again):
            continue
        num_bytes = sum(block[number].num_bytes for number in saved)
        time_us = sum(block[number].op_us for number in again)
        found.append(Choice(frozenset(saved), frozenset(again), num_bytes, time_us))
    return found


@given(blocks())
def test_no_choice_is_below_the_curve(block: Block) -> None:
    curve, every = choices(block), every_choice(block)
    known = {(each.saved, each.again) for each in every}
    assert all((each.saved, each.again) in known for each in curve)
    assert curve[0].again_us == min(each.again_us for each in every)
    assert curve[-1].num_bytes == min(each.num_bytes for each in every)
    slopes = []
    for now, then in itertools.pairwise(curve):
        freed, more = now.num_bytes - then.num_bytes, then.again_us - now.again_us
        slopes.append(more / freed)
        for each in every:  # none is on the other side of the line through both
            assert (each.again_us - now.again_us) * freed >= (
                now.num_bytes - each.num_bytes
            ) * more - 1e-6
    assert slopes == sorted(slopes)


@given(st.lists(blocks(), min_size=1, max_size=3), st.data())
def test_needs_are_met_near_the_bound(given_blocks: list[Block], data: st.DataObject) -> None:
    """Within one step of a block of the bound, where one need is asked for."""
    curves = [choices(block) for block in given_blocks]
    last = data.draw(st.integers(1, len(curves)))
    most = sum(curve[0].num_bytes - curve[-1].num_bytes for curve in curves[:last])
    needs = [Need(last, data.draw(st.integers(0, most)))]
    if last < len(curves):
        others = sum(curve[0].num_bytes - curve[-1].num_bytes for curve in curves[last:])
        needs.append(Need(len(curves), data.draw(st.integers(0, most + others))))
    taken = allotted(curves, needs)
    for need in needs:
        freed = sum(
            curve[0].num_bytes - curve[number].num_bytes
            for curve, number in zip(curves[: need.blocks], taken, strict=False)
        )
        assert freed >= need.num_bytes
    time_us = sum(curve[number].again_us for curve, number in zip(curves, taken, strict=True))
    bound = least_us(curves, needs)
    assert time_us >= bound - 1e-6
    steps = [b.again_us - a.again_us for curve in curves for a, b in itertools.pairwise(curve)]
    if len(needs) == 1:
        assert time_us <= bound + max(steps, default=0.0) + 1e-6


@given(blocks(), st.floats(0, 20), st.floats(0, 1))
def test_a_part_lies_on_the_host(block: Block, hidden_us: float, call_us: float) -> None:
    """As much as copies hide, beside choices that are on the device alone; corners of one curve."""
    link = HostLink(alpha_us=0.5, us_per_byte=1.0, call_us=call_us)
    plain, curve = choices(block), with_host(block, choices(block), link, hidden_us)
    assert curve[0].time_us == plain[0].time_us
    for each in curve:
        assert each.moved <= {number for number in each.saved if block[number].can_move}
        assert sum(link.time_us(block[number].num_bytes) for number in each.moved) <= hidden_us
        assert each.host_bytes == sum(block[number].num_bytes for number in each.moved)
        on_device = sum(block[number].num_bytes for number in each.saved - each.moved)
        assert each.num_bytes == on_device
        assert (each.saved, each.again) in {(one.saved, one.again) for one in plain}
    slopes = [
        (then.time_us - now.time_us) / (now.num_bytes - then.num_bytes)
        for now, then in itertools.pairwise(curve)
    ]
    assert slopes == sorted(slopes)
    assert all(slope >= 0 for slope in slopes)
    for each in plain:  # some choice has no more bytes in no more time, or two have it between them
        below = [one for one in curve if one.num_bytes <= each.num_bytes]
        above = [one for one in curve if one.num_bytes >= each.num_bytes]
        assert below
        best = min(one.time_us for one in below)
        if above and best > each.time_us:
            now, then = above[-1], below[0]
            share = (now.num_bytes - each.num_bytes) / max(1, now.num_bytes - then.num_bytes)
            best = now.time_us + share * (then.time_us - now.time_us)
        assert best <= each.time_us + 1e-6


def test_a_step_that_is_not_needed_after_all_is_taken_back() -> None:
    cheap = choices((Value(1, 1.0, is_read=True),))
    large = choices((Value(10, 20.0, is_read=True),))
    assert allotted([cheap, large], [Need(2, 1)]) == (1, 0)
    assert allotted([cheap, large], [Need(2, 5)]) == (0, 1)


def test_what_can_not_be_met_gives_up_all() -> None:
    curve = choices((Value(4, 1.0, is_read=True), Value(2, 1.0, is_read=True, is_fixed=True)))
    assert allotted([curve], [Need(1, 5)]) == (1,)
    assert math.isinf(least_us([curve], [Need(1, 5)]))
    assert allotted([curve, curve], [Need(2, 4)]) == (1, 0)  # the first one is saved for longest


@given(st.lists(blocks(), min_size=1, max_size=4), st.floats(0, 1))
def test_one_price_for_all_blocks(given_blocks: list[Block], share: float) -> None:
    """No byte costs more that is given up than one that is not; blocks that are alike do alike."""
    curves = [choices(block) for block in [*given_blocks, given_blocks[0]]]
    taken = at_price(curves, share)
    assert taken[0] == taken[-1]

    def prices(steps: Iterable[tuple[Choice, Choice]]) -> list[float]:
        return [
            (then.again_us - now.again_us) / (now.num_bytes - then.num_bytes) for now, then in steps
        ]

    pairs = [list(itertools.pairwise(curve)) for curve in curves]
    paid = [price for each, at in zip(pairs, taken, strict=True) for price in prices(each[:at])]
    left = [price for each, at in zip(pairs, taken, strict=True) for price in prices(each[at:])]
    assert max(paid, default=0.0) <= min(left, default=math.inf)
    least, most = (
        [len(curve) - 1 for curve in curves] if share else [0] * len(curves) for share in (0, 1)
    )
    assert at_price(curves, 0.0) == tuple(least)
    assert freed_bytes(curves, at_price(curves, 1.0)) == freed_bytes(curves, most)
