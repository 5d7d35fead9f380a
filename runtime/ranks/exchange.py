"""Exchange of texts between ranks, over the store.

Not by a collective: a rank that does something else, or failed, would leave the others in it. Each
exchange has a topic, and each topic rounds: in a round every rank of a mesh comes to a place in the
store, and learns whether all have the same to say (`meeting.py`).

    autoshard/<own number of the first rank>     the session: these processes, none before them
        /<mesh>/<topic>/<round>                  a place

A rank that runs something else than the others waits in vain, and raises after a timeout. Two ranks
that wait for each other at different places see that in the store, and raise within seconds
(`notices.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard import _torch
from autoshard.runtime.comm import threads
from autoshard.runtime.ranks import verdicts, waits
from autoshard.runtime.ranks.meeting import Answers, meet
from autoshard.runtime.ranks.notices import collective_key, collective_notice, wait_and_look
from autoshard.runtime.ranks.party import Missing, Party, find_each_other
from autoshard.runtime.ranks.store import Store


def exchange(
    topic: str,
    answer: str,
    mesh: DeviceMesh,
    timeout: timedelta,
    *,
    failed: str,
    hint: str,
    may_differ: bool = False,
) -> Answers:
    """Exchange answers with all ranks of `mesh`, and return them.

    All ranks call this with one `topic`, and wait for each other. What a rank sends does not grow
    with their number. After an error that was caught, this rank's answer is withdrawn, and its next
    call on `topic` is for the same round.
    failed, hint: what the message of an error begins and ends with.
    may_differ: whether the caller goes on if answers differ. Otherwise it is about to raise then,
        so this returns only once all ranks have read the answers, or after some seconds, as this
        rank may be the one with the store.
    Raises RuntimeError if some ranks don't answer within `timeout`, if one of them waits elsewhere
    for this one, or if the store is gone; as `threads.check` if another thread is at it, too.
    """
    threads.check(str(mesh.get_group(0).group_name), f"what ranks compare as {topic!r}")
    with _store_may_end(failed, hint):
        party = _party(mesh, timeout, failed=failed, hint=hint)
        prefix = f"{party.prefix}/{topic}"
        number = _local.rounds.get(prefix, 0)
        place = f"{prefix}/{number}"
        before = f"{prefix}/{number - 1}" if number else None

        def wait(key: str, withdraw: Callable[[], bool]) -> None:
            wait_and_look(party, place, key, timeout, withdraw, failed, hint)

        answers = meet(party, place, before, answer, wait, may_differ=may_differ)
        _local.rounds[prefix] = number + 1
        return answers


def tell(
    topic: str, text: str, mesh: DeviceMesh, timeout: timedelta, *, failed: str, hint: str
) -> str:
    """Return the `text` that the first rank of `mesh` has given; all of its ranks call this.

    They wait for each other. Arguments and errors are those of `exchange`.
    """
    with _store_may_end(failed, hint):
        party = _party(mesh, timeout, failed=failed, hint=hint)
        number = _local.rounds.get(f"{party.prefix}/{topic}", 0)
        key = f"{party.prefix}/{topic}/given"
        if party.rank == party.ranks[0]:
            party.store.set(f"{key}/{number}", text)
        exchange(topic, "", mesh, timeout, failed=failed, hint=hint)
        if number and party.rank == party.ranks[0]:  # all have read the one before
            party.store.delete(f"{key}/{number - 1}")
        return party.store.get(f"{key}/{number}")


def client() -> Store:
    """Return this rank's client of the default store, its only connection to it."""
    return _local.own_sessions().store


def party_of_world() -> Party:
    """Return the party of all ranks; they wait for each other at the first call.

    Raises RuntimeError if some do not come within the timeout of the default group.
    """
    sessions, timeout = (
        _local.own_sessions(),
        _torch.dist.group_timeout(_torch.dist.default_group()),
    )
    if _WORLD not in sessions.by_mesh:
        alone = Party(sessions.store, _WORLD, dist.get_rank(), range(dist.get_world_size()))
        here = f"rank {dist.get_rank()} looked for the others"
        sessions.by_mesh[_WORLD] = _found(sessions, alone, timeout, failed=here, hint="")
    return sessions.by_mesh[_WORLD]


_WORLD = "world"  # no mesh is called so


def party_of(mesh: DeviceMesh) -> Party | None:
    """Return the party of the ranks of `mesh`, if they have exchanged anything; else None."""
    sessions = _local.sessions.get(_torch.dist.default_store())
    return sessions.by_mesh.get(mesh_name(mesh)) if sessions is not None else None


def new_place(party: Party, topic: str) -> str:
    """Return a prefix of keys of `party`, another one at each call with `topic`.

    All of its ranks call this in the same order, and get the same ones.
    """
    prefix = f"{party.prefix}/{topic}"
    number = _local.rounds[prefix] = _local.rounds.get(prefix, -1) + 1
    return f"{prefix}/{number}"


def there_are_others() -> bool:
    """Tell whether there are other ranks than this one in the default group."""
    others = dist.is_initialized() and dist.get_world_size() > 1
    return others and dist.get_backend() not in _skipped


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
    """Parties over one store, of which this rank is one.

    store:   the client to ask it by.
    own:     a number of this process, which no other one has, or had before a restart.
    by_mesh: the party of each mesh, by name, with the session that it has agreed on.
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
        self.by_mesh: dict[str, Party] = {}
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
        for session in {party.session for party in self.by_mesh.values()}:
            store.set(collective_key(session, self._rank), json.dumps(notice))
        self._has_noted = bool(notice)


class _Local(threading.local):
    """State of one rank, by thread, as ranks may be threads of one process."""

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}  # prefix of places -> how often ranks have met there
        self.sessions: weakref.WeakKeyDictionary[Any, _Sessions] = weakref.WeakKeyDictionary()

    def own_sessions(self) -> _Sessions:
        """Return the sessions over the default store; made, with a thread, if there are none."""
        store = _torch.dist.default_store()
        if store not in self.sessions:
            self.sessions[store] = _Sessions(store)
        return self.sessions[store]

    def sessions_of(self, mesh: DeviceMesh) -> _Sessions:
        """Return `own_sessions`, with the timeout of collectives over `mesh` for an answer."""
        found = self.own_sessions()
        found.store.limit_s = group_timeout(mesh).total_seconds()
        return found


_local = _Local()


def _party(mesh: DeviceMesh, timeout: timedelta, *, failed: str, hint: str) -> Party:
    """Return the party of the ranks of `mesh`.

    At its first call for a mesh, ranks wait for each other, and agree on a session. Raises
    RuntimeError, with `failed` and `hint`, if some ranks do not come within `timeout`.
    """
    sessions, name = _local.sessions_of(mesh), mesh_name(mesh)
    if name not in sessions.by_mesh:
        party = Party(sessions.store, name, dist.get_rank(), mesh.mesh.flatten().tolist())
        sessions.by_mesh[name] = _found(sessions, party, timeout, failed=failed, hint=hint)
    return sessions.by_mesh[name]


def _found(
    sessions: _Sessions, alone: Party, timeout: timedelta, *, failed: str, hint: str
) -> Party:
    """Return the party of `alone` with its session; its ranks wait for each other."""

    def check() -> None:
        """Raise what has been found meanwhile."""
        verdicts.raise_if_found(failed, hint)
        threads.check_compiling()

    try:
        with waits.at_place(waits.SESSION + alone.name, alone.ranks, failed):
            found = find_each_other(alone, sessions.own, timeout.total_seconds(), check)
        waits.parties().add(alone.name)
        return found
    except Missing as missing:
        raise RuntimeError(
            f"{failed}, and {missing} did not within {timeout}: they ended, or went another "
            f"way. {hint}"
        ) from None


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
