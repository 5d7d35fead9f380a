"""Exchange of texts between ranks, over the store.

Not by a collective: a rank that does something else, or failed, would leave the others in it. Each
exchange has a topic, and each topic rounds: in a round every rank of a mesh sets a key of its own,
and reads those of the others once all are there.

    autoshard/<own number of the first rank>     the session: these processes, none before them
        /<topic>/<mesh>/<round>/<rank>           what a rank says
        /<topic>/<mesh>/<round>/leaves/<rank>    it has read all, and is about to raise
        /waits/<rank>, /collective/<rank>        what it waits for, if for long (`notices.py`)

A rank that runs something else than the others waits in vain, and raises after a timeout. Two ranks
that wait for each other at different places see that in the store, and raise within seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard import _torch
from autoshard.runtime.ranks.notices import (
    PATIENCE_S,
    collective_key,
    collective_notice,
    wait_and_look,
)
from autoshard.runtime.ranks.store import LONGEST_PAUSE_S, MANY, Arrivals, Store

LEAVING_S = 3.0  # for the others to have read what a rank that is about to raise has said


def exchange(
    topic: str,
    answer: str,
    mesh: DeviceMesh,
    timeout: timedelta,
    *,
    failed: str,
    hint: str,
    may_differ: bool = False,
) -> dict[int, str]:
    """Exchange answers with all ranks of `mesh`; return those of all, by global rank.

    All ranks call this with one `topic`, and wait for each other. After an error that was caught,
    this rank's answer is withdrawn, and its next call on `topic` is for the same round.
    failed, hint: what the message of an error begins and ends with.
    may_differ: whether the caller goes on if answers differ. Otherwise it is about to raise then,
        so this returns only once all ranks have read the answers (after LEAVING_S at most), as this
        rank may be the one with the store.
    Raises RuntimeError if some ranks don't answer within `timeout`, if one of them waits elsewhere
    for this one, or if the store is gone.
    """
    with _store_may_end(failed, hint):
        answers, place = _answers(topic, answer, mesh, timeout, failed=failed, hint=hint)
        if not may_differ and len(set(answers.values())) > 1:
            _leave_together(_local.sessions_of(mesh).store, place, answers)
    return answers


def read_from(other: int, topic: str, text: str, mesh: DeviceMesh) -> str | None:
    """Return the text of rank `other`; all ranks of `mesh` call this, each with its own `text`.

    There must have been an `exchange` over `mesh` before. None if `other` does not call this within
    the group's timeout; otherwise returns once all have read, or after LEAVING_S.
    Raises DistError if the store is gone.
    """
    sessions, rank = _local.sessions_of(mesh), dist.get_rank()
    store, session = sessions.store, sessions.by_mesh[mesh_name(mesh)]
    topic = f"{session}/{topic}/{mesh_name(mesh)}"
    number = _local.next_round(topic)
    store.set(f"{topic}/{number}/{rank}", text)
    key = f"{topic}/{number}/{other}"
    if not Arrivals(store, {other: key}).wait(group_timeout(mesh).total_seconds()):
        return None
    found = store.get(key)
    _leave_together(store, f"{topic}/{number}", mesh.mesh.flatten().tolist())
    return found


def is_alone(mesh: DeviceMesh) -> bool:
    """Tell whether there is no other rank in `mesh` to exchange anything with.

    There is none in a mesh of one rank, or if the default group's backend is one to skip.
    """
    return mesh.size() == 1 or dist.get_backend() in _skipped


_skipped = {"fake"}  # backends


def skip_backend(backend: str) -> None:
    """Have ranks exchange nothing if `backend` is the default group's: only this rank exists."""
    _skipped.add(backend)


def mesh_name(mesh: DeviceMesh) -> str:
    """Name that tells `mesh` from others, the same on all its ranks.

    That of the process group if it is 1-D; else made of its shape and its ranks.
    """
    if mesh.ndim == 1:
        return str(mesh.get_group().group_name)
    if mesh not in _names:  # each forward asks, and there may be many ranks
        ranks = hashlib.sha256(str(mesh.mesh.flatten().tolist()).encode()).hexdigest()
        _names[mesh] = f"{tuple(mesh.shape)} of {ranks[:16]}"
    return _names[mesh]


_names: weakref.WeakKeyDictionary[DeviceMesh, str] = weakref.WeakKeyDictionary()


def group_timeout(mesh: DeviceMesh) -> timedelta:
    """Timeout of collectives over the first axis of `mesh`, as the user set it."""
    return _torch.dist.group_timeout(mesh.get_group(0))


class _Sessions:
    """Sessions over one store: prefixes of the keys that ranks use in it.

    store:   the client to ask it by.
    own:     a number of this process, which no other one has, or had before a restart.
    by_mesh: the session of each mesh, by name.
    """

    def __init__(self, store: Any) -> None:
        """Start a client of `store`, with a thread that notes what the caller's thread waits for.

        Takes this process's rank, and the thread that makes this, as those to note. No session is
        agreed on yet.
        """
        noting = weakref.WeakMethod(self._note_collective)  # the client's thread ends with these

        def note_collective(store: Any) -> None:
            note = noting()
            if note is not None:
                note(store)

        self.store = Store(store, idle=note_collective)
        self.own = uuid.uuid4().hex
        self.by_mesh: dict[str, str] = {}
        self._rank, self._thread = dist.get_rank(), threading.get_ident()
        self._has_noted = False

    def _note_collective(self, store: Any) -> None:
        """Note in `store` which collective this rank's thread has waited for, if for long.

        Other ranks that wait in the store for this rank, in vain, read it. There is a note in each
        session; it is cleared when the wait is over. Without any to make or clear, does nothing.
        """
        notice = collective_notice(self._rank, self._thread)
        if not notice and not self._has_noted:
            return
        for session in set(self.by_mesh.values()):
            store.set(collective_key(session, self._rank), json.dumps(notice))
        self._has_noted = bool(notice)


class _Local(threading.local):
    """State of one rank, by thread, as ranks may be threads of one process."""

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}  # topic -> how often ranks compared notes on it
        self.sessions: weakref.WeakKeyDictionary[Any, _Sessions] = weakref.WeakKeyDictionary()

    def next_round(self, topic: str) -> int:
        """Return the number of the next round of `topic`, from 0 on, and count it as begun."""
        number = self.rounds.get(topic, 0)
        self.rounds[topic] = number + 1
        return number

    def sessions_of(self, mesh: DeviceMesh) -> _Sessions:
        """Return the sessions over the default store; made, with a thread, if there are none.

        Also sets the time for the store to answer in to the timeout of collectives over `mesh`.
        """
        store = _torch.dist.default_store()
        if store not in self.sessions:
            self.sessions[store] = _Sessions(store)
        found = self.sessions[store]
        found.store.limit_s = group_timeout(mesh).total_seconds()
        return found


_local = _Local()


@contextlib.contextmanager
def _store_may_end(failed: str, hint: str) -> Iterator[None]:
    """Turn an error of the store in this context into a RuntimeError that explains it.

    failed, hint: what its message begins and ends with.
    """
    try:
        yield
    except dist.DistError as error:
        raise RuntimeError(
            f"{failed}, and nothing can be heard of the others any more: the process that has the "
            f"store, mostly rank 0, ended before, or can't be reached ({error}). Look at what it "
            f"says. {hint}"
        ) from error


def _leave_together(store: Store, place: str, ranks: Iterable[int]) -> None:
    """Say that this rank is here, and wait for all other `ranks`, for at most LEAVING_S.

    It doesn't wait, and raises nothing, if the store is gone.
    place: prefix of the keys by which ranks say so.
    """
    keys = {rank: f"{place}/leaves/{rank}" for rank in ranks}
    with contextlib.suppress(dist.DistError):
        store.set(keys[dist.get_rank()], "1")
        Arrivals(store, keys).wait(LEAVING_S)


def _answers(
    topic: str, answer: str, mesh: DeviceMesh, timeout: timedelta, *, failed: str, hint: str
) -> tuple[dict[int, str], str]:
    """Exchange answers with all ranks of `mesh`.

    Returns them by rank, and the prefix of their keys in the store, where they stay until the next
    round of `topic`. At the first call for a mesh its session is agreed on. After an exception this
    rank's answer is gone from the store, and its next call on `topic` is in the same round.
    Raises RuntimeError if some ranks don't answer in time, or wait elsewhere for this one, and
    DistError if the store is gone.
    """
    sessions, rank = _local.sessions_of(mesh), dist.get_rank()
    store = sessions.store
    ranks: list[int] = mesh.mesh.flatten().tolist()
    session = _session(sessions, rank, ranks, mesh_name(mesh), timeout, failed=failed, hint=hint)
    topic = f"{session}/{topic}/{mesh_name(mesh)}"
    number = _local.next_round(topic)
    place = f"{topic}/{number}"
    keys = {other: f"{place}/{other}" for other in ranks}
    store.set(keys[rank], answer)
    try:
        arrivals = Arrivals(store, keys)
        if not arrivals.wait(min(timeout.total_seconds(), PATIENCE_S)):
            wait_and_look(store, session, arrivals, place, timeout, failed, hint)
    except BaseException:
        # Who catches it, and comes here again, is to meet the others in this round.
        with contextlib.suppress(dist.DistError):
            store.delete(keys[rank])
        _local.rounds[topic] = number
        raise
    answers = store.get_all(list(keys.values()))
    if number:  # everybody has read the round before, or would not be in this one
        store.delete(f"{topic}/{number - 1}/{rank}")
    return dict(zip(ranks, answers, strict=True)), place


def _session(
    sessions: _Sessions,
    rank: int,
    ranks: Sequence[int],
    mesh: str,
    timeout: timedelta,
    *,
    failed: str,
    hint: str,
) -> str:
    """Return the prefix of all keys of `ranks`, agreed on by their processes that live now.

    mesh: its `mesh_name`. At its first call for a mesh, ranks wait for each other.
    torchrun's store outlives a restart (torch 2.11 to 2.15), and answers that ranks put there
    before would be taken for new ones. So every rank puts up a number of its own; the first one
    answers each with the session, under a key with that number, until all have confirmed it. Raises
    RuntimeError if some ranks do not within `timeout`.
    """
    if mesh in sessions.by_mesh:
        return sessions.by_mesh[mesh]
    store = sessions.store
    deadline = time.monotonic() + timeout.total_seconds()
    here = f"autoshard/session/{mesh}"
    if rank == ranks[0]:
        session = f"autoshard/{sessions.own}"
        missing = _answer_all(store, mesh, session, ranks[1:], deadline)
    else:
        store.set(f"{here}/{rank}", sessions.own)
        answer = f"{here}/to/{sessions.own}"
        missing = [] if Arrivals(store, {ranks[0]: answer}).wait(_left(deadline)) else [ranks[0]]
        if not missing:
            session = store.get(answer)
            store.set(f"{session}/{mesh}/has/{rank}", "1")
    if missing:
        raise RuntimeError(
            f"{failed}, and ranks {missing} did not within {timeout}: they ended, or went another "
            f"way. {hint}"
        )
    sessions.by_mesh[mesh] = session
    return session


def _answer_all(
    store: Store, mesh: str, session: str, others: Sequence[int], deadline: float
) -> list[int]:
    """Answer requests of `others` for the session; return those that don't confirm it in time.

    A rank is answered once it has asked, and again if it asks anew: the first request may be of a
    process that is gone.
    mesh: its `mesh_name`.
    deadline: in the time of `time.monotonic()`.
    """
    here = f"autoshard/session/{mesh}"
    keys = {other: f"{session}/{mesh}/has/{other}" for other in others}
    answered: dict[int, str] = {}
    arrivals = Arrivals(store, keys)
    pause_s = 0.0
    while not arrivals.wait(min(pause_s, _left(deadline))):
        missing = arrivals.missing()
        if _left(deadline) == 0:
            return missing
        for other in missing:
            if store.check([f"{here}/{other}"]):
                number = store.get(f"{here}/{other}")
                if answered.get(other) != number:  # the first may be of a process that is gone
                    answered[other] = number
                    store.set(f"{here}/to/{number}", session)
        pause_s = min(2 * pause_s + 0.001, LONGEST_PAUSE_S * max(1.0, len(others) / MANY))
    return []


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
