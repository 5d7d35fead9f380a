"""Waits of this process's threads: for a collective, other ranks at a place, or one of torch's.

`flights.waiting` has the first; here the others are noted, and all are told to other ranks as a
`Wait`. Where ranks are found to wait for each other in vain (`verdicts.py`), waits in the store
raise here, and those for collectives as these are broken.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from autoshard import _torch
from autoshard.passes.ir.layout import show_members
from autoshard.runtime.comm import flights
from autoshard.runtime.comm.flights import Issued
from autoshard.runtime.comm.shard_names import names_at
from autoshard.runtime.comm.threads import is_foreign


@dataclass(frozen=True)
class Wait:
    """Wait of a thread for a collective of ours, for ranks at a place, or for other code's.

    kind:   COLLECTIVE, PLACE or TORCHS.
    what:   in words.
    since:  in this process's `time.monotonic()`; no other wait of the thread has the same.
    group, number: of a collective: its group, and which one of that it is.
    place, ranks: the place in the store, and who is to come there.
    count:  of one of torch's: how many waits for such this rank has begun.
    """

    kind: str
    what: str
    since: float
    group: str = ""
    number: int = 0
    place: str = ""
    ranks: Sequence[int] = ()
    count: int = 0


COLLECTIVE, PLACE, TORCHS = "collective", "place", "torch's"
SESSION = "session/"  # begins a place where the ranks of a mesh find each other; its name follows

_waits: dict[int, Wait] = {}  # by thread, but for those of `flights.waiting`
_count, _lock = 0, threading.Lock()
_parties: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def parties() -> set[str]:
    """Return the names of the meshes whose ranks have found each other, as this one knows.

    Since the default process group was made: meshes of another one have the same names.
    """
    return _parties.setdefault(_torch.dist.default_group(), set())


@contextlib.contextmanager
def at_place(place: str, ranks: Sequence[int], what: str) -> Iterator[None]:
    """Note that this thread waits for `ranks` to come to `place` while this context is open."""
    thread = threading.get_ident()
    _waits[thread] = Wait(PLACE, what, time.monotonic(), place=place, ranks=ranks)
    try:
        yield
    finally:
        del _waits[thread]


def in_torch(what: str, wait: Callable[[], Any], *, is_message: bool = False) -> Any:
    """Call `wait`, which waits for a collective that other code has launched; return its result.

    what: the collective in words. An error of it is explained as one of ours (`flights.explained`).
    is_message: whether it is a message from or to one rank, which no others need come to.
    """
    global _count
    thread = threading.get_ident()
    if not dist.is_initialized() or thread in _waits:
        return wait()
    if is_message:
        with flights.explained(what):
            return wait()
    with _lock:
        _count += 1
        count = _count
    _waits[thread] = Wait(TORCHS, what, time.monotonic(), count=count)
    try:
        with flights.explained(what):
            return wait()
    finally:
        del _waits[thread]


def since() -> float | None:
    """Return the `since` of what this thread waits for; None if for nothing."""
    wait = _of(threading.get_ident())
    return None if wait is None else wait.since


def num_in_torch() -> int:
    """Count the waits for collectives of other code that this process has begun."""
    return _count


def current(main: int) -> Wait | None:
    """Return what this rank waits for; None if it goes on.

    main: the thread that runs the user's code. Where it is in a backward, which autograd may run in
    threads of its own, what these wait for counts; those that Python has started go their own way.
    """
    found = _of(main)
    if found is not None:
        return found
    frame = sys._current_frames().get(main)
    if frame is None or frame.f_globals.get("__name__") != "torch.autograd.graph":
        return None
    started = {each.ident for each in threading.enumerate() if not is_foreign(each)}
    others = [
        wait
        for thread in {*flights.waiting, *_waits} - started
        if (wait := _of(thread)) is not None
    ]
    return min(others, key=lambda wait: wait.since, default=None)


def _of(thread: int) -> Wait | None:
    """Return what `thread` waits for, if anything."""
    waiting = flights.waiting.get(thread)
    if waiting is None:
        return _waits.get(thread)
    issued = waiting.issued
    return Wait(COLLECTIVE, str(issued), waiting.since, issued.group, waiting.number)


def to_json(wait: Wait | None) -> dict[str, Any] | None:
    """Return `wait` as what JSON can say."""
    if wait is None:
        return None
    ranks = wait.ranks if isinstance(wait.ranks, range) else sorted(wait.ranks)
    return {**vars(wait), "ranks": spans(ranks)}


def from_json(said: dict[str, Any] | None) -> Wait | None:
    """Return the wait of which `to_json` has said `said`."""
    return None if said is None else Wait(**{**said, "ranks": sorted(in_spans(said["ranks"]))})


def label(issued: Issued) -> list[str]:
    """Return what tells `issued` from other collectives, the same on all ranks that launch it.

    The first text is always there; the second, of the parameters, if all of their names are known.
    """
    names = [each for each in issued.params if isinstance(each, str)] or names_at(issued.params)
    members = f"{issued.kind} of {show_members(issued.members)}"
    is_named = bool(names) and len(names) == len(issued.params)
    return [_digest(members), _digest(",".join(names)) if is_named else ""]


def are_apart(one: Sequence[str], other: Sequence[str]) -> bool:
    """Tell whether two labels are of different collectives."""
    return one[0] != other[0] or (bool(one[1] and other[1]) and one[1] != other[1])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def spans(ranks: Sequence[int]) -> tuple[int, ...]:
    """Write sorted `ranks` in short, as (first, end, step, first, end, step, ...)."""
    if isinstance(ranks, range):
        return ranks.start, ranks.stop, ranks.step
    found: list[int] = []
    begin = 0
    for at in range(1, len(ranks) + 1):
        step = ranks[begin + 1] - ranks[begin] if begin + 1 < len(ranks) else 1
        if at == len(ranks) or ranks[at] - ranks[at - 1] != step:
            found += [ranks[begin], ranks[at - 1] + 1, step]
            begin = at
    return tuple(found)


def in_spans(written: Sequence[int]) -> set[int]:
    """Return the ranks that `spans` has written."""
    triples = zip(written[::3], written[1::3], written[2::3], strict=True)
    return {rank for triple in triples for rank in range(*triple)}
