"""Ranks agree on what they compiled before its first collective, over the store.

Never by a collective: a rank that compiled something else, or failed to, would leave
the others in it. What was agreed on once is not asked for again, so a rank that
compiles one more variant of a graph by itself (for a batch shape only it has seen)
waits for nobody, as long as the variant launches the same collectives.
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
        self.round = 0
        self.agreed: set[tuple[str, ...]] = set()


_local = _Local()


def agree(outcome: Outcome) -> str | None:
    """Exchange outcomes with all ranks; returns an error if any rank has one.

    Raises RuntimeError, naming the ranks, if they compiled different collectives, and
    if a rank does not answer within TIMEOUT.
    """
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return outcome.error
    if outcome.error is None and outcome.digests in _local.agreed:
        return None
    answers = _exchange(json.dumps([outcome.error, outcome.digests]))
    outcomes = [Outcome(error, tuple(digests)) for error, digests in map(json.loads, answers)]
    for rank, other in enumerate(outcomes):
        if other.error is not None:
            return other.error if rank == dist.get_rank() else f"rank {rank}: {other.error}"
    differing = [rank for rank, other in enumerate(outcomes) if other.digests != outcome.digests]
    if differing:
        raise RuntimeError(
            f"rank {dist.get_rank()} compiled other collectives than ranks {differing}: build the "
            "same model with the same options, and take the same branches, on every rank"
        )
    _local.agreed.add(outcome.digests)
    return None


def _exchange(answer: str) -> list[str]:
    store, rank = _torch.default_store(), dist.get_rank()
    number, _local.round = _local.round, _local.round + 1
    store.set(_key(number, rank), answer)
    answers = []
    for other in range(dist.get_world_size()):
        try:
            store.wait([_key(number, other)], TIMEOUT)
        except dist.DistStoreError as error:
            raise RuntimeError(
                f"rank {other} did not compile its graph number {number} within {TIMEOUT}: "
                "it ended, or took another branch"
            ) from error
        answers.append(store.get(_key(number, other)).decode())
    return answers


def _key(number: int, rank: int) -> str:
    return f"autoshard/compiled/{number}/{rank}"
