"""Agreement of ranks on what they compiled, and on the model that they shard.

    agree          the collectives of a frame, when it is compiled
    share          what the first rank planned for a frame
    compare_lines  the model, before it is sent to other ranks

Graphs that ranks have agreed on before are not compared again: a batch shape that only one rank
has seen does not stop the others.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.ranks.exchange import exchange, group_timeout, is_alone, read_from

COMPILE_TIMEOUT = timedelta(minutes=10)  # ranks may differ by a compilation, cold against cached


@dataclass(frozen=True)
class CompileOutcome:
    """Outcome of a compilation on one rank.

    error:    why the result can't be used; None if it can.
    digests:  of its plans, which say what collectives it launches.
    options:  those that it was compiled with, as text.
    """

    error: str | None
    digests: tuple[str, ...]
    options: str


class PlansDiffer(RuntimeError):
    """Error on all ranks when they compiled different collectives for one frame.

    ranks: those whose collectives differ from this rank's.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


Agreed = set[tuple[str, tuple[str, ...]]]
"""Set of (frame, digests), of one model, that all ranks were found to have."""


def agree(frame: str, outcome: CompileOutcome, mesh: DeviceMesh, agreed: Agreed) -> str | None:
    """Exchange outcomes with all ranks of `mesh`; return the error of the first rank that has one.

    None if no rank has one. Ranks wait for each other, up to the group's timeout; if the frame is
    not in `agreed`, up to 10 minutes, if that is more. Nothing is exchanged if this rank is alone
    (its own error is returned), or if its outcome has no error and is in `agreed`.
    frame: a name for what was compiled, the same on every rank.
    agreed: outcomes that need not be compared any more; this one is added if all ranks have it.
    Raises RuntimeError if a rank has other options, whatever its error, or as `exchange`, and
    PlansDiffer, naming the ranks, if no rank has an error and they compiled different collectives.
    """
    if is_alone(mesh):
        return outcome.error
    if outcome.error is None and (frame, outcome.digests) in agreed:
        return None
    known = any(name == frame for name, _ in agreed)
    timeout = group_timeout(mesh)
    answers = exchange(
        f"compiled/{frame}",
        json.dumps([outcome.error, outcome.digests, outcome.options]),
        mesh,
        timeout if known else max(timeout, COMPILE_TIMEOUT),
        failed=f"rank {dist.get_rank()} compiled {frame}",
        hint=_SAME_OPTIONS,
    )
    outcomes = {
        rank: CompileOutcome(error, tuple(digests), options)
        for rank, (error, digests, options) in (
            (rank, json.loads(answer)) for rank, answer in answers.items()
        )
    }
    for rank, other in outcomes.items():
        if other.options != outcome.options:
            raise RuntimeError(
                f"rank {dist.get_rank()} compiled {frame} with the options {outcome.options}, and "
                f"rank {rank} with {other.options}: give every rank the same"
            )
    for rank, other in outcomes.items():
        if other.error is not None:
            return other.error if rank == dist.get_rank() else f"rank {rank}: {other.error}"
    differing = [rank for rank, other in outcomes.items() if other.digests != outcome.digests]
    if differing:
        raise PlansDiffer(
            f"rank {dist.get_rank()} compiled other collectives for {frame} than ranks "
            f"{differing}: build the same model, of the same dtypes, with the same parameters "
            "frozen, and take the same branches, on every rank, or pass strict_order=False",
            differing,
        )
    agreed.add((frame, outcome.digests))
    return None


def compare_lines(topic: str, what: str, lines: Sequence[str], mesh: DeviceMesh) -> None:
    """Raise RuntimeError, with the first difference, unless all of `mesh` have the same `lines`.

    All ranks of `mesh` call this, and wait for each other; it also raises RuntimeError if some
    don't come in time. Does nothing where this rank is alone.
    topic: tells the comparison from others, the same on every rank.
    what: what is compared, in words, "the model to shard".
    """
    if is_alone(mesh):
        return
    failed = f"rank {dist.get_rank()} came to {what}"
    digest = hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest()
    timeout = max(group_timeout(mesh), COMPILE_TIMEOUT)  # some may still be loading
    answers = exchange(f"lines/{topic}", digest, mesh, timeout, failed=failed, hint=_SAME_MODEL)
    others = [rank for rank, other in answers.items() if other != digest]
    if others:
        difference = first_difference(topic, lines, others[0], mesh)
        raise RuntimeError(f"{what} differs on ranks {others}: {difference}. {_SAME_MODEL}")


def first_difference(topic: str, lines: Sequence[str], other: int, mesh: DeviceMesh) -> str:
    """Describe the first difference between `lines` here and on rank `other`, where they differ.

    All ranks of `mesh` call this, after an exchange that showed that lines differ, and wait for
    `other`, then some seconds for the rest. If `other` does not send its lines in time, the text
    says that. Raises DistError if the store is gone.
    """
    text = read_from(other, f"differing/{topic}", json.dumps(list(lines)), mesh)
    if text is None:
        return f"rank {other} does not say in what"
    pairs = enumerate(itertools.zip_longest(lines, json.loads(text), fillvalue="nothing more"), 1)
    number, (here, there) = next(pair for pair in pairs if len(set(pair[1])) > 1)
    return f"number {number} is {here} on rank {dist.get_rank()}, and {there} on rank {other}"


def share(frame: str, text: str, mesh: DeviceMesh, *, is_first: bool = False) -> str:
    """Return the `text` that the first rank of `mesh` has given; all of its ranks call this.

    They wait for each other. Where this rank is alone, it gets its own `text`.
    frame: what the text is about, the same on every rank.
    is_first: whether nothing of `frame` was compared before: ranks may be a compilation apart, and
        wait for longer.
    Raises RuntimeError if some ranks don't call this in time.
    """
    if is_alone(mesh):
        return text
    first = int(mesh.mesh.flatten()[0])
    answers = exchange(
        f"shared/{frame}",
        text if dist.get_rank() == first else "",
        mesh,
        max(group_timeout(mesh), COMPILE_TIMEOUT) if is_first else group_timeout(mesh),
        failed=f"rank {dist.get_rank()} waited for what the first rank planned for {frame}",
        hint=_SAME_OPTIONS,
        may_differ=True,
    )
    return answers[first]


_SAME_MODEL = "Build the same model on every rank, or raise the process group's timeout"
_SAME_OPTIONS = (
    "Give every rank the same model and options, and take the same branches, or pass "
    "strict_order=False"
)
