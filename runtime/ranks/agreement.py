"""Agreement of ranks on what they compiled, and on the model that they shard.

    agree          the collectives of a frame, when it is compiled
    share          what the first rank planned for a frame
    compare_lines  the model, before it is sent to other ranks

Graphs that ranks have agreed on before are not compared again: a batch shape that only one rank
has seen does not stop the others.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.comm.mesh import NAMED, name_ranks
from autoshard.runtime.ranks.exchange import exchange, group_timeout, is_alone, tell
from autoshard.runtime.ranks.meeting import Answer

LONGEST_ERROR = 5_000  # characters that other ranks are told of
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
    """Error on all ranks when they compiled different collectives for one frame."""


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
        json.dumps(
            [(outcome.error or "")[:LONGEST_ERROR] or None, outcome.digests, outcome.options]
        ),
        mesh,
        timeout if known else max(timeout, COMPILE_TIMEOUT),
        failed=f"rank {dist.get_rank()} compiled {frame}",
        hint=_SAME_OPTIONS,
    )
    for other in answers.others:
        options = _outcome(other).options
        if options != outcome.options:
            raise RuntimeError(
                f"rank {dist.get_rank()} compiled {frame} with the options {outcome.options}, and "
                f"{other.by_whom()} with {options}: give every rank the same"
            )
    for each in answers.all:
        error = _outcome(each).error
        if error is not None:
            return error if each is answers.own else f"{each.by_whom()}: {error}"
    if answers.others:
        ranks = [rank for other in answers.others for rank in other.ranks]
        count = sum(other.count for other in answers.others)
        raise PlansDiffer(
            f"rank {dist.get_rank()} compiled other collectives for {frame} than "
            f"{name_ranks(sorted(ranks), count)}: build the same model, of the same dtypes, with "
            "the same parameters frozen, and take the same branches, on every rank, or pass "
            "strict_order=False"
        )
    agreed.add((frame, outcome.digests))
    return None


def compare_lines(
    topic: str,
    what: str,
    lines: Sequence[str],
    mesh: DeviceMesh,
    timeout: timedelta | None = None,
) -> None:
    """Raise RuntimeError, with the first difference, unless all of `mesh` have the same `lines`.

    All ranks of `mesh` call this, and wait for each other; it also raises RuntimeError if some
    don't come in time. Does nothing where this rank is alone.
    topic: tells the comparison from others, the same on every rank.
    what: what is compared, in words, "the model to shard".
    timeout: the group's if it is None, or 10 minutes, if that is more: some may still be loading.
    """
    if is_alone(mesh):
        return
    failed = f"rank {dist.get_rank()} came to {what}"
    timeout = timeout or max(group_timeout(mesh), COMPILE_TIMEOUT)
    text = json.dumps(list(lines))
    answers = exchange(f"lines/{topic}", text, mesh, timeout, failed=failed, hint=_SAME_MODEL)
    if answers.others:
        ranks = sorted(rank for other in answers.others for rank in other.ranks)
        count = sum(other.count for other in answers.others)
        raise RuntimeError(
            f"{what} differs on {name_ranks(ranks, count)}: "
            f"{_difference(lines, answers.others[0])}. {_SAME_MODEL}"
        )


def first_difference(topic: str, lines: Sequence[str], mesh: DeviceMesh) -> str:
    """Describe the first difference between `lines` here and on other ranks, where they differ.

    All ranks of `mesh` call this, and wait for each other. If some do not send their lines in time,
    or all have the same, the text says that.
    """
    text, here = json.dumps(list(lines)), f"rank {dist.get_rank()} looks for the difference"
    try:
        answers = exchange(
            f"differing/{topic}", text, mesh, group_timeout(mesh), failed=here, hint=_SAME_MODEL
        )
    except RuntimeError as error:
        return f"lists are not to be had: {error}"
    return _difference(lines, answers.others[0]) if answers.others else "lists are the same"


def _difference(lines: Sequence[str], other: Answer) -> str:
    """Describe the first difference between `lines` and those of `other`, as JSON."""
    if other.text is None:
        return f"the first {NAMED} ranks with either say in what"
    pairs = enumerate(
        itertools.zip_longest(lines, json.loads(other.text), fillvalue="nothing more"), 1
    )
    number, (here, there) = next(pair for pair in pairs if len(set(pair[1])) > 1)
    return (
        f"number {number} is {here} on rank {dist.get_rank()}, and {there} on rank {other.ranks[0]}"
    )


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
    return tell(
        f"shared/{frame}",
        text,
        mesh,
        max(group_timeout(mesh), COMPILE_TIMEOUT) if is_first else group_timeout(mesh),
        failed=f"rank {dist.get_rank()} waited for what the first rank planned for {frame}",
        hint=_SAME_OPTIONS,
    )


def _outcome(answer: Answer) -> CompileOutcome:
    error, digests, options = json.loads(answer.text or "null")
    return CompileOutcome(error, tuple(digests), options)


_SAME_MODEL = "Build the same model on every rank, or raise the process group's timeout"
_SAME_OPTIONS = (
    "Give every rank the same model and options, and take the same branches, or pass "
    "strict_order=False"
)
