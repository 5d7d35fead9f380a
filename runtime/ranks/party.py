"""A party: the ranks of a mesh, as one of them meets the others in the store.

    autoshard/session/<mesh>/...       how its processes found each other
    autoshard/<own>/...                their session: these processes, none before them;
                                       own is a number of the first rank's process
    autoshard/<own>/<mesh>/ranks       which they are

torchrun's store outlives a restart (torch 2.11 to 2.15), and what ranks put there before would be
taken for new. So each rank asks for the session with a number of its own process, in one log, and
the first one answers each number that it finds there, until all have confirmed. That is some ten
questions a rank, and, for all together, as many bytes as there are ranks.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.runtime.comm.mesh import NAMED, name_ranks
from autoshard.runtime.ranks.store import LONGEST_PAUSE_S, Store

FIRST_PAUSE_S = 0.001  # of the first rank, between two looks at who has asked for the session
STORE_S = 5.0  # for the store to answer a rank that ends, or has failed
LEAVING_S = 3.0  # for others to have read what was said before a rank goes on, or ends

Check = Callable[[], None]


def _pass() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Party:
    """Ranks of a mesh that meet in a store, as one of them.

    name:    of the mesh (`exchange.mesh_name`).
    rank:    this one, and `ranks` are all, by their global numbers.
    session: prefix of the keys of processes that live now; empty before it is agreed on.
    """

    store: Store
    name: str
    rank: int
    ranks: Sequence[int]
    session: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def prefix(self) -> str:
        """Prefix of the keys of this party alone."""
        return f"{self.session}/{self.name}"

    def wait_for(self, key: str, seconds: float, check: Check = _pass) -> bool:
        """Ask for `key`, more rarely the more ranks do; return whether it is there in time.

        check: called before each pause; what it raises ends the wait.
        """
        return self.store.wait_for(key, seconds, self.size, check)


class Missing(Exception):
    """Ranks that did not come in time, the first NAMED of them, and how many there are."""

    def __init__(self, ranks: Sequence[int], count: int) -> None:
        super().__init__(name_ranks(ranks, count))


def find_each_other(party: Party, own: str, timeout_s: float, check: Check = _pass) -> Party:
    """Return `party` with the session that its processes agree on; all of them call this.

    own: a number of this process, which no other one has, or had before a restart.
    check: called while this rank waits; what it raises ends that.
    Raises Missing if some ranks do not come within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    ask = _answer_all if party.rank == party.ranks[0] else _ask_first
    return dataclasses.replace(party, session=ask(party, own, deadline, check))


def _ask_first(party: Party, own: str, deadline: float, check: Check) -> str:
    """Ask the first rank for the session, and confirm that it has come."""
    store, here = party.store, f"autoshard/session/{party.name}"
    store.append(f"{here}/log", f"{party.rank}:{own} ")
    store.add(f"{here}/asked", 1)
    answer = f"{here}/to/{own}"
    if not party.wait_for(answer, deadline - time.monotonic(), check):
        raise Missing([party.ranks[0]], 1)
    session = store.get(answer)
    store.delete(answer)
    store.add(f"{session}/{party.name}/has", 1)
    return session


def _answer_all(party: Party, own: str, deadline: float, check: Check) -> str:
    """Answer those that ask for the session, until all have confirmed.

    A rank may have asked in a process that is gone: each number in the log is answered, and only
    those that live confirm.
    """
    store, here = party.store, f"autoshard/session/{party.name}"
    log, asked = f"{here}/log", f"{here}/asked"
    session = f"autoshard/{own}"
    has = f"{session}/{party.name}/has"
    store.set(f"{session}/{party.name}/ranks", json.dumps(list(party.ranks)))
    answered: dict[str, int] = {}
    num_asked, pause_s = 0, FIRST_PAUSE_S
    while store.add(has, 0) < party.size - 1:
        now_asked = store.add(asked, 0)
        if now_asked != num_asked and store.check([log]):
            entries = (entry.partition(":") for entry in store.get(log).split())
            new = {number: int(rank) for rank, _, number in entries if number not in answered}
            if new:
                store.set_all({f"{here}/to/{number}": session for number in new})
            answered |= new
            num_asked, pause_s = now_asked, FIRST_PAUSE_S
        if time.monotonic() > deadline:
            raise _missing(party, here, answered)
        check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    store.delete(log, asked, has)
    return session


def _missing(party: Party, here: str, answered: dict[str, int]) -> Missing:
    """Find who has not confirmed: the latest number of each has its answer still there."""
    latest = {rank: number for number, rank in answered.items()}
    missing = [rank for rank in party.ranks[1:] if rank not in latest]
    count = len(missing)
    for rank, number in latest.items():
        if len(missing) == NAMED:
            break
        if party.store.check([f"{here}/to/{number}"]):
            missing.append(rank)
            count += 1
    return Missing(sorted(missing), count)
