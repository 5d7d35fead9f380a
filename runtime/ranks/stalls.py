"""Proof that ranks wait for each other in vain, from what each of them says.

A rank that waits needs others: for its collective those that have not launched it, or have launched
another one in its place; at a place in the store those that are not there; for a collective of
other code, which may be over any of its groups, those of the group that wait for something else and
have begun fewer such collectives over it, if none of them runs. If one of these
waits in vain itself, so does the rank; or if it has left, but then collectives fail by themselves.
Whoever runs is taken to come: only ranks that can't go on any more are found, however slow the
others are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.runtime.comm.mesh import name_ranks
from autoshard.runtime.ranks import waits
from autoshard.runtime.ranks.waits import COLLECTIVE, PLACE, Wait

SHOWN = 4  # groups of ranks in a description
LONGEST = 500  # characters for each


@dataclass(frozen=True)
class State:
    """Account that a rank gives of itself: what it waits for, and how far it has come.

    wait:     what it waits for; None if it goes on.
    code:     the line of the user's code that it is at.
    launched: how many of our collectives it has launched over each group, if any.
    others:   how many of other code's it has begun over each group that it is in.
    in_torch: how many waits for such it has begun.
    parties:  names of the meshes whose ranks have found each other, as it knows.
    labels:   of the latest of ours, by group and number (`waits.label`).
    """

    wait: Wait | None
    code: str
    launched: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)
    in_torch: int = 0
    parties: Collection[str] = ()
    labels: Mapping[str, Mapping[int, list[str]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return this as what JSON can say."""
        return {**vars(self), "wait": waits.to_json(self.wait), "parties": sorted(self.parties)}


def from_json(said: Mapping[str, Any]) -> State:
    """Return the state of which `State.to_json` has said `said`."""
    labels = {
        group: {int(number): each for number, each in of_group.items()}
        for group, of_group in said["labels"].items()
    }
    return State(**{**said, "wait": waits.from_json(said["wait"]), "labels": labels})


States = Mapping[int, State]


def in_vain(states: States, left: Collection[int], *, are_all: bool = True) -> set[int]:
    """Return the ranks that wait, and can't go on any more.

    states: of ranks, by number, all of one moment; those that did not answer are not there.
    left: ranks that have ended.
    are_all: whether all others are in `states`.
    """
    needs = _needs(states, left, are_all=are_all)
    stuck = {rank for ranks, _ in needs for rank in ranks}
    while True:
        lost = stuck | {*left}
        free = [
            ranks
            for ranks, needed in needs
            if ranks & stuck and not all(each & lost for each in needed)
        ]
        if not free:
            return stuck
        stuck.difference_update(*free)


def _needs(
    states: States, left: Collection[int], *, are_all: bool
) -> list[tuple[set[int], list[set[int]]]]:
    """List ranks that wait for the same, each with the ranks that they need.

    Those are several sets where it is one of several things that they may wait for.
    """
    together: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for rank, state in states.items():
        if state.wait is not None:
            together[_key(state, state.wait)].add(rank)
    found = []
    for ranks in together.values():
        state = states[next(iter(ranks))]
        wait = state.wait
        assert wait is not None
        if wait.kind == PLACE:
            needed = [{*wait.ranks} - ranks - _have_come(states, wait.place)]
        elif wait.kind == COLLECTIVE:
            needed = [_behind(states, state, wait) - {*left}]
        else:
            needed = _elsewhere(states, state, wait) if are_all else []
            needed = [each - {*left} for each in needed] or [set()]
        found.append((ranks, needed))
    return found


def _have_come(states: States, place: str) -> set[int]:
    """Return the ranks that have come to `place` and gone on, while others wait there.

    None do, but where ranks find each other: there each goes on once it was answered.
    """
    name = place.removeprefix(waits.SESSION)
    if name == place:
        return set()
    return {rank for rank, state in states.items() if name in state.parties}


def _key(state: State, wait: Wait) -> tuple[Any, ...]:
    """Key of what a rank waits for, the same for ranks that need the same others."""
    if wait.kind == COLLECTIVE:
        return wait.kind, wait.group, wait.number, *_label(state, wait)
    if wait.kind == PLACE:
        return wait.kind, wait.place
    return wait.kind, wait.count, *sorted(state.others.items())


def _label(state: State, wait: Wait) -> list[str]:
    """Return the label of what a rank has launched in place of a collective; [] if unknown."""
    return state.labels.get(wait.group, {}).get(wait.number, [])


def _behind(states: States, state: State, wait: Wait) -> set[int]:
    """Return the ranks that have not launched a collective of ours, or another in its place."""
    own, found = _label(state, wait), set()
    for rank, other in states.items():
        there = _label(other, wait)
        is_behind = wait.group in other.others and other.launched.get(wait.group, 0) < wait.number
        if is_behind or (own and there and waits.are_apart(own, there)):
            found.add(rank)
    return found


def _elsewhere(states: States, state: State, wait: Wait) -> list[set[int]]:
    """List the ranks that a collective of other code lacks, for each group that it may be over.

    They have begun fewer such collectives over it, and have waited for fewer: one that waits for
    one, too, may wait for the same. None, if one of them runs.
    """
    found = []
    for group, count in state.others.items():
        behind = {
            rank
            for rank, other in states.items()
            if other.in_torch < wait.count and other.others.get(group, count) < count
        }
        runs = any(states[rank].wait is None for rank in behind)
        if count:
            found.append(set() if runs else behind)
    return found


def describe(states: States, stuck: Collection[int], left: Mapping[int, str]) -> str:
    """Describe where ranks wait in vain, and who has left, in a few sentences.

    left: what is known of each rank that has left, "has ended".
    """
    together: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(stuck):
        wait = states[rank].wait
        assert wait is not None
        what = "others" if wait.kind == PLACE else wait.what[:LONGEST]
        if wait.kind == COLLECTIVE:
            what += f", number {wait.number} of group {wait.group}"
        came = f" ({wait.what[:LONGEST]})" if wait.kind == PLACE else ""
        together[f"for {what}, at {states[rank].code}{came}"].append(rank)
    said = [
        f"{name_ranks(ranks)} wait {where}" if len(ranks) > 1 else f"rank {ranks[0]} waits {where}"
        for where, ranks in list(together.items())[:SHOWN]
    ]
    said += [f"rank {rank} {how[:LONGEST]}" for rank, how in list(left.items())[:SHOWN]]
    return "; ".join(said)
