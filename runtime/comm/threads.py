"""Threads that launch collectives over one group: two at a time are refused.

Ranks match collectives by their order, and two threads would launch theirs in another order on each
rank: models would be mixed up, or gloo end the process. That two threads are at it is seen where
the second of them launches, and asked only where another thread launched before. That one is at it
if the forward in which it last launched over the group, or a backward since, has not ended, and if
it does not wait for another thread.

Over groups of their own, too, threads compile one after the other: Dynamo has a lock for it. Ranks
whose threads took it in another order would wait for each other for ever, where they compare plans.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist

from autoshard import _torch
from autoshard.errors import UsageError


@dataclass
class _Work:
    """Work that a thread is at.

    number: of forwards that it has begun.
    frame: id of the frame that has called the module whose eager forward runs, if one does.
    """

    number: int = 0
    frame: int | None = None


_works: dict[int, _Work] = {}  # by thread

_latest: dict[tuple[int, str], tuple[int, int]] = {}
"""Thread that launched last, and its number of forwards, by (rank, group): ranks may be threads."""


def _work_of(thread: int) -> _Work:
    work = _works.get(thread)
    if work is None:
        work = _works[thread] = _Work()
    return work


def begin_forward(frame: FrameType | None = None) -> None:
    """Note that this thread begins a forward, maybe within another one.

    frame: what has called the module, in eager, which tells of `end_forward`.
    """
    work = _work_of(threading.get_ident())
    work.number += 1
    if frame is not None:
        work.frame = id(frame)


def end_forward() -> None:
    """Note that this thread ends its eager forward."""
    _work_of(threading.get_ident()).frame = None


def is_foreign(thread: threading.Thread) -> bool:
    """Tell whether `thread` was not started by Python, as those of autograd are not."""
    return type(thread).__name__ == "_DummyThread"


def check(group: str, what: object) -> None:
    """Raise UsageError if another thread is about to launch collectives over `group`, too.

    To be called at each launch, and where ranks compare what comes next. Threads of autograd, which
    run a backward for one that waits, are not looked at.
    what: this thread is at, in words.
    """
    thread = threading.get_ident()
    key = dist.get_rank(), group
    before = _latest.get(key)
    if before is None or before[0] != thread:
        name = threading.current_thread()
        if is_foreign(name):
            return
        if before is not None and _is_at(*before):
            raise UsageError(
                f"rank {key[0]}: two threads train over process group {group} at a time: "
                f"{name.name} is at {what}, and another one is in a forward or a backward. Ranks "
                "could not tell whose collectives are whose: shard each thread's model over a mesh "
                "with a process group of its own, as by mesh=DeviceMesh.from_group("
                "dist.new_group(), device), or let one thread wait for the other"
            )
    _latest[key] = thread, _work_of(thread).number


_refused: set[int] = set()  # threads that wait to compile, to be refused in their turn


def check_compiling() -> None:
    """Raise UsageError if this thread compiles, and another one waits to compile a model of ours.

    To be called while this thread waits for other ranks. The other thread is refused as well, once
    it waits for other ranks.
    """
    if not _torch.dynamo.is_compiling():
        return
    thread = threading.get_ident()
    others = [
        other
        for other, frame in sys._current_frames().items()
        if other != thread and _torch.dynamo.waits_to_compile(frame) and _is_in_call(frame)
    ]
    _refused.update(others)
    if others or thread in _refused:
        _refused.discard(thread)
        raise UsageError(
            f"rank {dist.get_rank()}: two threads compile models at a time, and ranks may come to "
            "them in another order, and wait for each other for ever: call each model once, "
            "forward and backward, in one thread, before threads train them"
        )


def _is_in_call(innermost: FrameType) -> bool:
    """Tell whether a thread is in the call of a model that was compiled for us."""
    return any(frame.f_globals.get("__name__") == _CALLS for frame in _frames(innermost))


_CALLS = "autoshard.runtime.sharding.first_call"

_WORKING = ("torch.autograd.graph", "autoshard.runtime.compiled.calls")
"""Modules whose functions are on the stack in a backward, and in a compiled forward."""

_WAITING = ("threading", "queue", "concurrent.futures._base", "concurrent.futures.thread")
"""Modules whose functions a thread is in that waits for another one."""


def _is_at(thread: int, number: int) -> bool:
    """Tell whether `thread` is in its forward `number`, or a backward since, and doesn't wait."""
    work, innermost = _work_of(thread), sys._current_frames().get(thread)
    if work.number != number or _waits_for_users(innermost):
        return False
    return any(
        id(frame) == work.frame or frame.f_globals.get("__name__") in _WORKING
        for frame in _frames(innermost)
    )


def _waits_for_users(innermost: FrameType | None) -> bool:
    """Tell whether a thread waits for another one, and not by this package or torch."""
    names = [frame.f_globals.get("__name__", "") for frame in _frames(innermost)]
    waits = [name in _WAITING for name in names]
    outside = names[waits.index(False)] if False in waits else ""
    return waits[:1] == [True] and outside.split(".")[0] not in ("autoshard", "torch")


def _frames(innermost: FrameType | None) -> Iterator[FrameType]:
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back
