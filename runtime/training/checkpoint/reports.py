"""Reports of ranks, in the store, of what they have written of a checkpoint.

    autoshard/<own>/world/checkpoint/<number>/reports   of each rank: it has written, or could not
                                             /reported  how many have
                                             /answer    rank 0's: what came of it
                                             /heard     how many know

What a rank sends does not grow with their number; rank 0 reads all reports, as one text.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import time
from dataclasses import asdict, dataclass

import torch.distributed as dist

from autoshard import _torch
from autoshard.runtime.ranks.exchange import new_place, party_of_world, there_are_others
from autoshard.runtime.ranks.party import LEAVING_S, STORE_S, Party
from autoshard.runtime.training.checkpoint.writing import Written

PAUSE_S = 0.05  # of rank 0, between two questions whether all have reported

Report = Written | str
"""Report of a rank: its part of the checkpoint, or why it could not be written."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a save: the name of the checkpoint, why there is none, or why nobody knows."""

    name: str = ""
    error: str = ""
    doubt: str = ""


class Reports:
    """Reports of all ranks on one save, seen from one of them.

    limit_s: for how long ranks wait for others.
    until:   when rank 0 gives up, on the clock `time.monotonic`; never, while nobody waits.
    """

    def __init__(self, party: Party, limit_s: float) -> None:
        """Find a place of `party` in its store; all of its ranks call this in the same order."""
        self.limit_s = limit_s
        self.until = float("inf")
        self._party, self._place = party, new_place(party, "checkpoint")

    def add(self, report: Report) -> None:
        """Add this rank's `report`."""
        is_error = isinstance(report, str)
        said = report if is_error else base64.b64encode(pickle.dumps(report)).decode()
        line = json.dumps([self._party.rank, is_error, said])
        self._party.store.append(f"{self._place}/reports", f"{line}\n")
        self._party.store.add(f"{self._place}/reported", 1)

    def all(self) -> list[Report]:
        """Wait for those of all ranks until `until`, and return them, by rank.

        One that is missing then is an error in its place.
        """
        store, size = self._party.store, self._party.size
        while store.add(f"{self._place}/reported", 0) < size and time.monotonic() < self.until:
            time.sleep(PAUSE_S)
        key = f"{self._place}/reports"
        text = store.get(key) if store.check([key]) else ""
        found = {rank: (bad, said) for rank, bad, said in map(json.loads, text.splitlines())}
        missing = True, "nothing was heard in time: it ended, or its disk is slow"
        of_all = (found.get(rank, missing) for rank in self._party.ranks)
        return [said if bad else pickle.loads(base64.b64decode(said)) for bad, said in of_all]

    def answer(self, outcome: Outcome) -> None:
        """Tell all ranks the `outcome`, as rank 0."""
        self._party.store.set(f"{self._place}/answer", json.dumps(asdict(outcome)))
        self._party.store.delete(f"{self._place}/reports")

    def is_answered(self) -> bool:
        """Tell whether rank 0 has answered."""
        return self._party.store.check([f"{self._place}/answer"])

    def heard(self) -> Outcome:
        """Wait for rank 0's answer, a little longer than it waits for others, and return it."""
        key, store = f"{self._place}/answer", self._party.store
        if not self._party.wait_for(key, max(self.until - time.monotonic(), 0.0) + LEAVING_S):
            return Outcome(doubt="rank 0 did not say what came of it: it ended, or is stuck")
        found = Outcome(**json.loads(store.get(key)))
        store.add(f"{self._place}/heard", 1)
        return found

    def hurry(self) -> None:
        """Wait less for a store that does not answer, from now on: this process ends."""
        self._party.store.limit_s = min(self._party.store.limit_s, STORE_S)

    def linger(self) -> None:
        """Wait a little, as rank 0, until others have heard: they do by a store that may end."""
        self.hurry()
        deadline = time.monotonic() + LEAVING_S
        others = self._party.size - 1
        with contextlib.suppress(dist.DistError):
            while self._party.store.add(f"{self._place}/heard", 0) < others:
                if time.monotonic() > deadline:
                    return
                time.sleep(PAUSE_S)

    def forget(self) -> None:
        """Delete all of it from the store, as rank 0, once all ranks have heard."""
        keys = (f"{self._place}/{each}" for each in ("reported", "answer", "heard"))
        self._party.store.delete(*keys)


def new_reports() -> Reports | None:
    """Return a place for reports of all ranks, who call this together; None if there is one rank.

    The first call waits for all of them.
    """
    if not there_are_others():
        return None
    timeout = _torch.dist.group_timeout(_torch.dist.default_group())
    return Reports(party_of_world(), timeout.total_seconds())
