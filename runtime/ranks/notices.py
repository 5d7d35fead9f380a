"""Notices in the store of what each rank waits for, and a wait that reads those of the others.

Two ranks that wait for each other at different places, in the store or for a collective, would do
so for ever: they see it here, and raise.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from autoshard.runtime.comm import flights
from autoshard.runtime.ranks.store import LONGEST_PAUSE_S, Arrivals, Store

PATIENCE_S = 3.0  # until a rank that waits looks for what the others do
LOOK_S = 1.0  # between two looks


def wait_and_look(
    store: Store,
    session: str,
    arrivals: Arrivals,
    place: str,
    timeout: timedelta,
    what: str,
    hint: str,
) -> None:
    """Wait for `arrivals`, and look at what the ranks that are missing wait for themselves.

    arrivals: of this exchange, already waited for for PATIENCE_S, which counts for `timeout`.
    place: prefix of the exchange's keys. While this rank waits, a notice in the store says where.
    what, hint: what the message of an error begins and ends with.
    Raises RuntimeError after `timeout`, or if a missing rank waits, at another place or in a
    collective, for this one: the two would wait for ever. At another place, that rank raises, too:
    this one takes its answer back and waits some seconds for that, before it raises.
    """
    rank = dist.get_rank()
    notice = {"what": what, "place": place, "gives_up": False}
    deadline = time.monotonic() + timeout.total_seconds() - PATIENCE_S
    try:
        store.set(_notice_key(session, rank), json.dumps(notice))
        while not arrivals.wait(LOOK_S):
            missing = arrivals.missing()
            stuck = [each for each in missing if _waits_for(store, session, each, rank)]
            if stuck:
                others = "; ".join(_describe(store, session, each) for each in stuck)
                store.delete(f"{place}/{rank}")  # before others go on, and find it here
                store.set(_notice_key(session, rank), json.dumps({**notice, "gives_up": True}))
                _let_see(store, session, stuck)
                raise RuntimeError(f"{what}, while others wait elsewhere: {others}. {hint}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{what}, and ranks {missing} did not within {timeout}: they ended, or went "
                    f"another way. {hint}"
                )
    finally:
        with contextlib.suppress(dist.DistError):
            store.set(_notice_key(session, rank), "{}")  # not deleted: a get would wait for it


def collective_notice(rank: int, thread: int) -> dict[str, Any]:
    """Notice of the collective that a thread of `rank` has waited for, if for long; else {}.

    Its keys: "what", in words, "group", and "number" of the collective there.
    thread: its `threading.get_ident()`. Long is more than PATIENCE_S.
    """
    waiting = flights.waiting.get(thread)
    if waiting is None or time.monotonic() - waiting.since <= PATIENCE_S:
        return {}
    what = f"rank {rank} waits for {waiting.issued}"
    return {"what": what, "group": waiting.issued.group, "number": waiting.number}


def collective_key(session: str, rank: int) -> str:
    """Key in the store of the notice of the collective that `rank` waits for."""
    return f"{session}/collective/{rank}"


def _waits_for(store: Store, session: str, other: int, rank: int) -> bool:
    """Tell whether rank `other` waits for this one, `rank`, which waits elsewhere.

    It does at a place in the store to which `rank` has not come, or for a collective that `rank`
    has not launched.
    """
    place = _notice(store, session, other).get("place")
    if place is not None:
        return not store.check([f"{place}/{rank}"])
    collective = _read(store, collective_key(session, other))
    return bool(collective) and flights.num_launched(collective["group"]) < collective["number"]


def _describe(store: Store, session: str, other: int) -> str:
    """Describe where rank `other` waits, by its notices in the store; "rank 1" if it has none."""
    notice = _notice(store, session, other) or _read(store, collective_key(session, other))
    return str(notice.get("what", f"rank {other}"))


def _let_see(store: Store, session: str, stuck: Sequence[int]) -> None:
    """Wait until the ranks `stuck` have given up, too, so that they see this one's notice.

    It waits for 3 * LOOK_S at most, and not for ranks without a notice, as in a collective.
    """
    deadline = time.monotonic() + 3 * LOOK_S
    while time.monotonic() < deadline:
        if all(_notice(store, session, rank).get("gives_up", True) for rank in stuck):
            return
        time.sleep(LONGEST_PAUSE_S)


def _notice(store: Store, session: str, rank: int) -> dict[str, Any]:
    """Notice of `rank` in the store: what it waits for, and where; {} if it waits nowhere there."""
    return _read(store, _notice_key(session, rank))


def _read(store: Store, key: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.get(key)) if store.check([key]) else {}
    return found


def _notice_key(session: str, rank: int) -> str:
    return f"{session}/waits/{rank}"
