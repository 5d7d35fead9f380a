"""Which ranks wait in vain, by what each says of itself."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.runtime.ranks import judge, stalls, waits
from autoshard.runtime.ranks.stalls import State, in_vain
from autoshard.runtime.ranks.waits import COLLECTIVE, PLACE, TORCHS, Wait, in_spans, spans


def at_collective(number: int, *, launched: int | None = None, label: str = "a") -> State:
    wait = Wait(COLLECTIVE, "the gather", 1.0, "0", number)
    labels = {"0": {number: [label, ""]}}
    return State(wait, "x.py:1 in f", {"0": launched or number}, {"0": 0}, labels=labels)


def at_place(place: str, ranks: Sequence[int], launched: int = 0) -> State:
    wait = Wait(PLACE, "rank 1 came to a save", 1.0, place=place, ranks=ranks)
    return State(wait, "x.py:2 in g", {"0": launched}, {"0": 0})


def in_torch(count: int, begun: int, launched: int = 0) -> State:
    wait = Wait(TORCHS, "a barrier of torch's", 1.0, count=count)
    return State(wait, "x.py:3 in h", {"0": launched}, {"0": begun}, count)


def running(launched: int = 0) -> State:
    return State(None, "x.py:4 in i", {"0": launched}, {"0": 0})


CASES: dict[str, tuple[dict[int, State], list[int], set[int]]] = {
    "all wait for one that runs": ({0: at_collective(3), 1: running(2)}, [], set()),
    "all wait for one that does not answer": ({0: at_place("p", [0, 1])}, [], set()),
    "a transfer that is slow": ({0: at_collective(3), 1: at_collective(3)}, [], set()),
    "one is ahead, and the other's collective is on its way": (
        {0: at_collective(3), 1: at_collective(3, launched=5)},
        [],
        set(),
    ),
    "a place and a collective": (
        {0: at_collective(3), 1: at_place("p", [0, 1], launched=2)},
        [],
        {0, 1},
    ),
    "two places": ({0: at_place("p", [0, 1]), 1: at_place("q", [0, 1])}, [], {0, 1}),
    "one place": ({0: at_place("p", [0, 1, 2]), 1: at_place("p", [0, 1, 2])}, [], set()),
    "one that has left": ({0: at_place("p", [0, 1])}, [1], {0}),
    "one that has left, and is not needed": ({0: at_place("p", [0, 1])}, [2], set()),
    "two collectives under one number": (
        {0: at_collective(3), 1: at_collective(3, label="b")},
        [],
        {0, 1},
    ),
    "torch's barrier and a collective": (
        {0: at_collective(3), 1: in_torch(1, 1, launched=2)},
        [],
        {0, 1},
    ),
    "torch's barrier, which the other has begun": (
        {
            0: State(Wait(COLLECTIVE, "a", 1.0, "0", 3), "", {"0": 3}, {"0": 1}),
            1: in_torch(1, 1, 2),
        },
        [],
        set(),
    ),
    "torch's barrier in a small group, and others who wait for one of it": (
        {
            0: State(Wait(TORCHS, "a", 1.0, count=3), "", {"0": 2}, {"0": 9, "of 0, 1": 1}, 3),
            1: State(None, "", {"0": 2}, {"0": 9, "of 0, 1": 0}, 2),
            2: at_collective(3),
        },
        [],
        set(),
    ),
    "torch's barrier, to which another one is still to come": (
        {0: in_torch(1, 1, launched=2), 1: running(2), 2: at_collective(3)},
        [],
        set(),
    ),
    "two barriers of torch's": ({0: in_torch(1, 1), 1: in_torch(1, 1)}, [], set()),
    "a third waits for two that wait in vain": (
        {
            0: at_collective(3),
            1: at_place("p", [0, 1], launched=2),
            2: at_place("q", [0, 1, 2]),
        },
        [],
        {0, 1, 2},
    ),
    "two that wait for each other, and one that runs": (
        {0: at_place("p", [0, 1]), 1: at_place("q", [0, 1]), 2: running()},
        [],
        {0, 1},
    ),
    "ranks that find each other: one has gone on, and one is slow": (
        {
            0: at_place(waits.SESSION + "m", [0, 1, 2]),
            1: State(Wait(PLACE, "", 1.0, place="p", ranks=[0, 1, 2]), "", parties={"m"}),
            2: running(),
        },
        [],
        set(),
    ),
    "ranks that find each other, but one that waits elsewhere": (
        {0: at_place(waits.SESSION + "m", [0, 1]), 1: at_place("p", [0, 1])},
        [],
        {0, 1},
    ),
    "a chain to one that runs": (
        {0: at_place("p", [0, 1]), 1: at_place("q", [1, 2]), 2: running()},
        [],
        set(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_waits_in_vain(case: str) -> None:
    states, left, expected = CASES[case]
    sent = {
        rank: stalls.from_json(json.loads(json.dumps(state.to_json())))
        for rank, state in states.items()
    }
    assert in_vain(states, left) == in_vain(sent, left) == expected


def test_a_rank_that_says_nothing_may_be_on_its_way() -> None:
    states, left, stuck = CASES["torch's barrier and a collective"]
    assert in_vain(states, left, are_all=False) == set()
    assert in_vain(states, left) == stuck


@pytest.mark.parametrize("second", [0.0, 1.0])
def test_the_judge_asks_twice(second: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that are other ones the second time were never of one moment: `since` tells."""
    told: list[Any] = []
    states = CASES["two places"][0]
    asked: list[dict[int, Any]] = []

    def ask(*_: Any) -> dict[int, Any]:
        later = second * len(asked)
        moved = {
            rank: replace(state, wait=replace(state.wait, since=1.0 + later))
            for rank, state in states.items()
            if state.wait is not None
        }
        asked.append(
            {
                rank: {"state": json.loads(json.dumps(state.to_json())), "age": 9.0}
                for rank, state in moved.items()
            }
        )
        return asked[-1]

    positions: Any = SimpleNamespace(
        ask=ask,
        store=SimpleNamespace(check=lambda keys: False),
        tell_verdict=lambda *given, **named: told.append(given),
    )
    monkeypatch.setattr(judge.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(judge.time, "sleep", lambda seconds: None)
    judge.Judge(positions, 1.0)._judge()
    assert len(asked) == 2
    assert bool(told) == (second == 0.0)


def test_ranks_in_short() -> None:
    generator = random.Random(0)
    for _ in range(200):
        ranks = sorted(generator.sample(range(40), generator.randrange(20)))
        assert in_spans(spans(ranks)) == set(ranks)
    assert spans(range(10_000)) == (0, 10_000, 1)
    assert spans([0, 2, 4, 7]) == (0, 5, 2, 7, 8, 1)


def test_a_description_is_short() -> None:
    """However many ranks wait at places of their own."""
    states = {rank: at_place(f"p{rank}" * 100, range(1000)) for rank in range(1000)}
    left = dict.fromkeys(range(1000, 2000), "has ended" * 1000)
    text = stalls.describe(states, set(states), left)
    assert len(text) < 2 * stalls.SHOWN * (stalls.LONGEST + 100)
    assert "ranks [0, 1, 2" in text


def test_labels() -> None:
    assert waits.are_apart(["a", "x"], ["b", "x"])
    assert waits.are_apart(["a", "x"], ["a", "y"])
    assert not waits.are_apart(["a", "x"], ["a", ""])
