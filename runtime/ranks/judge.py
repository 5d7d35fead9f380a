"""Judge: a rank that has waited for some seconds asks where the others are, and ends it if in vain.

It asks twice: ranks that are in the same waits at both times were in them at one moment, and what
`stalls.in_vain` finds of them is true for ever. All of these are told, and raise, each where it
waits, with the same words. A rank that only takes long is never among what others wait for in vain.
"""

from __future__ import annotations

import dataclasses
import time

import torch.distributed as dist

from autoshard import _torch
from autoshard.runtime.comm.mesh import NAMED
from autoshard.runtime.ranks import farewells, stalls, verdicts, waits
from autoshard.runtime.ranks.positions import PREFIX, Position, Positions
from autoshard.runtime.ranks.stalls import State, States

PATIENCE_S = 3.0  # until a rank that waits asks
LONGER_S = 6.0  # that a collective of other code may take
EVERY_S, LATER_S, LATE_S = 4.0, 10.0, 30.0  # between two looks, and once a wait is LATE_S old
ANSWER_S = 2.5  # for others to answer in
_PLACES = 64  # in the store, that are looked at


class Judge:
    """Judge of whether this rank waits in vain; asked by the watchdog's thread now and then."""

    def __init__(self, positions: Positions, scale: float) -> None:
        """Take `scale` times as long for all, as of many ranks."""
        self._positions, self._scale = positions, scale
        self._looked = 0.0
        self._turn = ""  # key in the store of its latest look

    def look(self, asked: int) -> None:
        """Ask the others, if this rank has waited for long, and nobody else asks now.

        asked: how often somebody has.
        """
        wait = waits.current(self._positions.main)
        now = time.monotonic()
        if wait is None or now - wait.since < PATIENCE_S * self._scale:
            return
        every_s = EVERY_S if now - wait.since < LATE_S else LATER_S
        if now - self._looked < every_s * self._scale or verdicts.found():
            return
        self._looked = now
        store, rank = self._positions.store, str(self._positions.rank)
        turn = f"{PREFIX}/judge/{asked}/{int(now / 10)}"
        if store.set_first(turn, rank) == rank:
            if self._turn not in ("", turn):
                store.delete(self._turn)
            self._turn = turn
            self._judge()

    def _judge(self) -> None:
        """Ask twice, and tell all ranks that are found to wait in vain."""
        first = self._states()
        left = self._left(first)
        if not self._in_vain(first, left):
            return
        time.sleep(0.5)  # ranks that were about to go on have done so
        second = self._states()
        states = {rank: _unless_moved(state, first.get(rank)) for rank, state in second.items()}
        stuck = self._in_vain(states, left)
        since = {rank: state.wait.since for rank in stuck if (state := states[rank]).wait}
        if not since:
            return
        told = {
            rank: farewells.read(self._positions.store, rank) or farewells.GONE for rank in left
        }
        breaks = any(wait.kind != waits.PLACE for rank in stuck if (wait := states[rank].wait))
        text = stalls.describe(states, stuck, told)
        self._positions.tell_verdict(since, text, breaks=breaks)

    def _in_vain(self, states: States, left: list[int]) -> set[int]:
        are_all = len(states) + len(left) == dist.get_world_size()
        return stalls.in_vain(states, left, are_all=are_all)

    def _states(self) -> States:
        """Ask all ranks for their states; waits that are short, or over, are taken for none."""
        ranks = range(dist.get_world_size())
        found = self._positions.ask(ranks, ANSWER_S * self._scale, 0.1 * self._scale)
        states = {rank: self._state(position) for rank, position in found.items()}
        places = {state.wait.place for state in states.values() if state.wait and state.wait.place}
        store = self._positions.store
        open_places = {
            place for place in sorted(places)[:_PLACES] if not store.check([f"{place}/done"])
        }
        return {
            rank: _moving(state)
            if state.wait and state.wait.place and state.wait.place not in open_places
            else state
            for rank, state in states.items()
        }

    def _state(self, position: Position) -> State:
        """Return the state of a rank, without a wait if that is short."""
        state = stalls.from_json(position["state"])
        is_torchs = state.wait is not None and state.wait.kind == waits.TORCHS
        shortest_s = (LONGER_S if is_torchs else PATIENCE_S) / 2 * self._scale
        return _moving(state) if position["age"] < shortest_s else state

    def _left(self, states: States) -> list[int]:
        """Return those that have left, of the first NAMED ranks that did not answer."""
        silent = [rank for rank in range(dist.get_world_size()) if rank not in states]
        return [rank for rank in silent[:NAMED] if _torch.dist.has_left(rank)]


def _unless_moved(state: State, before: State | None) -> State:
    """Return `state`, but without a wait unless it was in the same one before."""
    waited = None if before is None else before.wait
    if waited is not None and state.wait is not None and state.wait.since == waited.since:
        return state
    return _moving(state)


def _moving(state: State) -> State:
    """Return `state`, but without a wait."""
    return dataclasses.replace(state, wait=None)
