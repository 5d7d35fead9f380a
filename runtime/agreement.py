"""Ranks agree on what they compiled before its first collective, over the store.

Never by a collective: a rank that compiled something else, or failed to, would leave
the others in it. The first time a frame is compiled, all ranks wait for each other.
When a frame is compiled again, a rank that got the same collectives as before waits
for nobody: a batch shape that only it has seen need not stop the others. A frame that
Dynamo runs without asking the backend (past its recompile limit) is not seen here.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from autoshard import _torch

TIMEOUT = timedelta(minutes=10)  # ranks may differ by a whole compilation, cold against cached


@dataclass(frozen=True)
class Outcome:
    """What one rank has to say: an error, or the digests of its plans."""

    error: str | None
    digests: tuple[str, ...]


class _Local(threading.local):
    """By thread, as ranks may be threads of one process."""

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}  # frame -> how often ranks compared notes on it
        self.agreed: set[tuple[str, tuple[str, ...]]] = set()  # frame, digests


_local = _Local()


def agree(frame: str, outcome: Outcome) -> str | None:
    """Exchange outcomes with all ranks; returns an error if any rank has one.

    frame: a name for what was compiled, the same on every rank.
    Raises RuntimeError, naming the ranks, if they compiled different collectives, and
    if a rank does not answer within TIMEOUT.
    """
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return outcome.error
    if outcome.error is None and (frame, outcome.digests) in _local.agreed:
        return None
    answers = _exchange(frame, json.dumps([outcome.error, outcome.digests]))
    outcomes = [Outcome(error, tuple(digests)) for error, digests in map(json.loads, answers)]
    for rank, other in enumerate(outcomes):
        if other.error is not None:
            return other.error if rank == dist.get_rank() else f"rank {rank}: {other.error}"
    differing = [rank for rank, other in enumerate(outcomes) if other.digests != outcome.digests]
    if differing:
        raise RuntimeError(
            f"rank {dist.get_rank()} compiled other collectives for {frame} than ranks "
            f"{differing}: build the same model with the same options, and take the same "
            "branches, on every rank"
        )
    _local.agreed.add((frame, outcome.digests))
    return None


def _exchange(frame: str, answer: str) -> list[str]:
    store, rank = _torch.default_store(), dist.get_rank()
    number = _local.rounds.get(frame, 0)
    _local.rounds[frame] = number + 1
    store.set(_key(frame, number, rank), answer)
    answers = []
    for other in range(dist.get_world_size()):
        try:
            store.wait([_key(frame, number, other)], TIMEOUT)
        except dist.DistStoreError as error:
            raise RuntimeError(
                f"rank {other} did not compile {frame} within {TIMEOUT}: it ended, or took "
                "another branch"
            ) from error
        answers.append(store.get(_key(frame, number, other)).decode())
    return answers


def _key(frame: str, number: int, rank: int) -> str:
    return f"autoshard/compiled/{frame}/{number}/{rank}"
