"""Random copies of saved values: where they are placed, and for how long compute waits for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from autoshard.passes.planner.copies import Placed, place_offloads, place_reloads

Place = Callable[[Sequence[float], Sequence[int], Sequence[float]], list[Placed]]

OPS = st.lists(st.integers(0, 9), min_size=1, max_size=12)
COPIES = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30)), max_size=6)


def placed(
    place: Place, ops: list[int], copies: list[tuple[int, int]]
) -> tuple[list[Placed], list[int]]:
    """Place copies whose positions, in order, are at most the number of ops; and their times."""
    copies = sorted((min(at, len(ops)), time_us) for at, time_us in copies)
    times = [time_us for _, time_us in copies]
    return place(ops, [at for at, _ in copies], times), times


def exposed(ops: list[int], found: list[Placed], times: list[int]) -> list[float]:
    """Microseconds for which compute waits for each copy, op by op."""
    waited, over = [0.0] * len(found), [0.0] * len(found)
    now = link = 0.0
    for position in range(len(ops) + 1):
        for number, each in enumerate(found):
            if each.launch == position:
                link = over[number] = max(link, now) + times[number]
            if each.wait == position:
                waited[number] = max(0.0, over[number] - now)
                now += waited[number]
        now += ops[position] if position < len(ops) else 0
    return waited


@given(OPS, COPIES)
def test_values_leave_as_soon_as_they_may(ops: list[int], copies: list[tuple[int, int]]) -> None:
    """Compute waits for no copy before the graph ends."""
    found, times = placed(place_offloads, ops, copies)
    assert [each.launch for each in found] == sorted(min(at, len(ops)) for at, _ in copies)
    assert [each.exposed_us for each in found] == exposed(ops, found, times)
    for number, each in enumerate(found):
        assert each.launch <= each.wait
        assert not each.exposed_us or each.wait == len(ops)
        if each.wait > each.launch:  # a position earlier, it would be waited for
            sooner = [
                *found[:number],
                Placed(each.launch, each.wait - 1, 0.0),
                *found[number + 1 :],
            ]
            assert exposed(ops, sooner, times)[number] > 0


@given(OPS, COPIES)
def test_values_come_back_as_late_as_they_can(
    ops: list[int], copies: list[tuple[int, int]]
) -> None:
    found, times = placed(place_reloads, ops, copies)
    assert [each.wait for each in found] == sorted(min(at, len(ops)) for at, _ in copies)
    assert [each.exposed_us for each in found] == exposed(ops, found, times)
    assert all(a.launch <= b.launch for a, b in itertools.pairwise(found))
    at_once = [Placed(0, each.wait, 0.0) for each in found]
    assert sum(exposed(ops, found, times)) == sum(exposed(ops, at_once, times))
    if found and not any(each.exposed_us for each in found):
        last = found[-1]
        begin = sum(ops[: last.wait]) - times[-1]  # at the latest
        assert sum(ops[: last.launch]) <= begin < sum(ops[: last.launch + 1]) or (
            last.launch == last.wait
        )
