"""Do a thing on each rank, or on the first, and raise on all of them if it fails on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from autoshard import _torch


class CheckpointError(RuntimeError):
    """Error of a checkpoint that could not be written or read; every rank raises it."""


def on_first_rank(work: Callable[[], Any], what: str) -> Any:
    """Call `work` on rank 0, and return its result on all ranks, which call this together.

    The others wait, and get the result pickled. Without a process group just `work` is called.

    what: what is done, for the error. Raises CheckpointError on all ranks if `work` raises.
    """
    said: list[Any] = [_attempt(work) if this_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(said, src=0)
    result, error = said[0]
    if error is not None:
        raise CheckpointError(f"rank {this_rank()}: {what}: on rank 0, {error}")
    return result


def on_each_rank(work: Callable[[], Any], what: str) -> Any:
    """Call `work` on every rank, wait for all, and return the result of this rank.

    Without a process group just `work` is called.

    what: what is done, for the error. Raises CheckpointError on all ranks if `work` raises on one;
        it tells of the lowest such rank.
    """
    return on_each_rank_with(lambda: (work(), ()), what, 0)[0]


def on_each_rank_with(
    work: Callable[[], tuple[Any, Sequence[int]]], what: str, num_facts: int
) -> tuple[Any, list[int]]:
    """Call `work`, as `on_each_rank`; it returns a result, and `num_facts` numbers below 2**63.

    Returns the result of this rank, and the lowest of all ranks for each of the numbers.
    """
    found, wait = begin_on_each_rank(work, what, num_facts)
    return found, wait()


def begin_on_each_rank(
    work: Callable[[], tuple[Any, Sequence[int]]], what: str, num_facts: int
) -> tuple[Any, Callable[[], list[int]]]:
    """Call `work` as `on_each_rank_with`, and don't wait for other ranks yet.

    Returns the result of this rank, None if `work` raised, and what to call, on every rank, to wait
    for the others: it returns the lowest numbers, or raises CheckpointError.
    """
    result, error = _attempt(work)
    found, facts = (None, [0] * num_facts) if error is not None else result
    end = _begin_lowest(this_rank() if error is not None else num_ranks(), *facts)

    def lowest_of_all() -> list[int]:
        """Wait for all ranks; raise if one has failed."""
        first, *lowest = end()
        if first < num_ranks():
            said = [error]
            if dist.is_initialized():
                dist.broadcast_object_list(said, src=first)
            raise CheckpointError(f"rank {this_rank()}: {what}: on rank {first}, {said[0]}")
        return lowest

    return found, lowest_of_all


def _begin_lowest(*numbers: int) -> Callable[[], list[int]]:
    """Begin to look for the lowest of all ranks for each of `numbers`; call the result for them."""
    if not dist.is_initialized():
        return lambda: list(numbers)
    lowest = torch.tensor(numbers, device=_torch.dist.object_device())
    work = dist.all_reduce(lowest, dist.ReduceOp.MIN, async_op=True)

    def wait() -> list[int]:
        """Wait for all ranks."""
        assert work is not None
        work.wait()
        return [int(each) for each in lowest.tolist()]

    return wait


def gathered(value: Any) -> list[Any] | None:
    """Return the `value` of each rank, on rank 0; None on others. They are pickled."""
    if not dist.is_initialized():
        return [value]
    values = [None] * num_ranks() if this_rank() == 0 else None
    dist.gather_object(value, values)
    return values


def scattered(values: list[Any]) -> Any:
    """Return this rank's of `values`, one for each rank, that rank 0 gives. They are pickled."""
    if not dist.is_initialized():
        return values[0]
    found: list[Any] = [None]
    dist.scatter_object_list(found, values if this_rank() == 0 else None, src=0)
    return found[0]


def reasons(error: CheckpointException) -> str:
    """Describe the error of the lowest rank among those that `error` says have failed."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    return f"on rank {rank}, {type(cause).__name__}: {cause}"


def this_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _attempt(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """Call `work`; returns its result and None, or None and its exception in words."""
    try:
        return work(), None
    except Exception as error:  # whatever it is, the others wait for an answer
        return None, f"{type(error).__name__}: {error}"
