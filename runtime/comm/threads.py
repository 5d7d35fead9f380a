"""Threads that launch collectives over one group: two at a time are refused.

Ranks match collectives by their order, and two threads would launch theirs in another order on each
rank: models would be mixed up, or gloo end the process. That two threads are at it is seen where
the second of them launches, and asked only where another thread launched before: that one is within
a forward or a backward.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType

import torch.distributed as dist

from autoshard.errors import UsageError

_latest: dict[tuple[int, str], int] = {}
"""Thread that launched last, by rank and group: in some tests, ranks are threads."""

_in_forward: Counter[int] = Counter()  # by thread


def begin_forward() -> None:
    """Note that this thread begins a forward; it may be in another one."""
    _in_forward[threading.get_ident()] += 1


def end_forward() -> None:
    """Note that this thread ends the forward that it began last."""
    thread = threading.get_ident()
    _in_forward[thread] -= 1
    if not _in_forward[thread]:
        del _in_forward[thread]


def check(group: str, what: object) -> None:
    """Raise UsageError if another thread is about to launch collectives over `group`, too.

    To be called at each launch, and where ranks compare what comes next. Threads of autograd, which
    run a backward for one that waits, are not looked at.
    what: this thread is at, in words.
    """
    thread = threading.get_ident()
    key = dist.get_rank(), group
    before = _latest.get(key)
    if before == thread:
        return
    _latest[key] = thread
    if before is None or type(threading.current_thread()).__name__ == "_DummyThread":
        return
    if before in _in_forward or _is_working(sys._current_frames().get(before)):
        raise UsageError(
            f"rank {dist.get_rank()}: two threads train over process group {group} at a time: "
            f"{threading.current_thread().name} is at {what}, and another one is in a forward "
            "or a backward. Ranks could not tell whose collectives are whose: shard each thread's "
            "model over a mesh with a process group of its own, as by mesh=DeviceMesh.from_group("
            "dist.new_group(), device), or let one thread wait for the other"
        )


_WORKING = ("torch.autograd.graph", "autoshard.runtime.compiled.calls")
"""Modules whose functions are on the stack in a backward, and in a compiled forward."""


def _is_working(frame: FrameType | None) -> bool:
    """Tell whether a thread is in a backward or a compiled forward; `frame` is its innermost."""
    while frame is not None:
        if frame.f_globals.get("__name__") in _WORKING:
            return True
        frame = frame.f_back
    return False
