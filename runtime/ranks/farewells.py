"""Farewells: what a rank that ends says in the store, for those that go on to wait for it.

autoshard/left/<rank>     how and where it has ended
autoshard/num_left        how many ranks have
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from types import TracebackType

import torch.distributed as dist

from autoshard.runtime.comm.at_exit import at_exit
from autoshard.runtime.ranks import verdicts
from autoshard.runtime.ranks.code import is_users, line_of
from autoshard.runtime.ranks.party import LEAVING_S, STORE_S
from autoshard.runtime.ranks.store import Store

_PREFIX = "autoshard/left"
_LONGEST = 300  # characters of an error
_SAME = "run as many steps on every rank, and have all end together"
GONE = (
    "has ended without a word (killed, or by os._exit()), left its process group, or can't be "
    "reached any more"
)
"""Words for a rank that has said nothing."""


_speakers: list[tuple[Store, int, int]] = []  # store, rank and world of the latest group, if any


def say_at_exit(store: Store, rank: int, world: int) -> None:
    """Have this process say that it has ended, and how, when Python exits.

    What an earlier process of this rank has said is forgotten. Where this one has the store it
    waits for the others to end, or to have read that, for some seconds.
    """
    if not _speakers or _speakers[0][0] is not store:
        store.set(f"{_PREFIX}/{rank}", "")
        _speakers[:] = [(store, rank, world)]
    at_exit(_say_at_exit)  # which is before the end of the process groups, which exist by now


def _say_at_exit() -> None:
    """Say how this process ends; but not if it has left its groups, and nothing has failed.

    The store has mostly gone with them, and torch prints a stack for each question to one that has.
    """
    how, has_failed = how_this_ends()
    if has_failed or dist.is_initialized():
        for store, rank, world in _speakers:
            _say(store, rank, world, how, has_failed=has_failed)


def _say(store: Store, rank: int, world: int, how: str, *, has_failed: bool) -> None:
    store.limit_s = min(store.limit_s, STORE_S)
    store.rest()
    with contextlib.suppress(dist.DistError, RuntimeError):
        store.set(f"{_PREFIX}/{rank}", how)
        if has_failed and dist.is_initialized():
            verdicts.break_groups()  # those that wait for this rank need not wait for its end
        num_left = store.add(f"{_PREFIX}/num", 1)
        has_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        deadline = time.monotonic() + LEAVING_S
        while has_store and num_left < world and time.monotonic() < deadline:
            time.sleep(0.05)
            num_left = store.add(f"{_PREFIX}/num", 0)


def how_this_ends() -> tuple[str, bool]:
    """Describe how this process ends, and tell whether with an error that nobody caught."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return f"has ended: its script came to its end, or left by sys.exit(): {_SAME}", False
    text = " ".join(str(error).split())[:_LONGEST]
    return f"has raised {type(error).__name__}, at {_line_in(error.__traceback__)}: {text}", True


def _line_in(traceback: TracebackType | None) -> str:
    """Describe the innermost line of the user's code in `traceback`."""
    innermost, found = traceback, None
    while traceback is not None:
        innermost = traceback
        if is_users(traceback.tb_frame):
            found = traceback
        traceback = traceback.tb_next
    found = found or innermost
    return "its end" if found is None else line_of(found.tb_frame, found.tb_lineno)


def read(store: Store, rank: int) -> str:
    """Return how `rank` has ended, as "has raised ..."; "" if it has not said so."""
    key = f"{_PREFIX}/{rank}"
    return store.get(key) if store.check([key]) else ""
