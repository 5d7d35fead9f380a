"""Preemption: a signal that one rank gets ends the loop of all ranks after the same step.

A scheduler sends SIGTERM, or SIGUSR1 if it is told to, some time before it kills a job: to all
ranks, or to some. A rank that got one says in the store in which call of `preempted` it was. Other
ranks ask the store now and then, meanwhile. Between two calls all of them have collectives, so that
none is far ahead, and all know by which call each has heard of it.

On a device the host runs ahead of collectives. Before it asks it waits for what the device was
given before the call before: then others have launched that, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autoshard import _torch
from autoshard.runtime.comm.streams import EventBefore
from autoshard.runtime.ranks.exchange import party_of_world, there_are_others

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
RANKS_A_CALL = 64  # that ask the store in each call; of more ranks, each asks more rarely

_received: list[int] = []  # signals; a lock would not do, as one may come while another is noted
_former: dict[int, Any] = {}  # handlers that signals had before they were noted


class _Calls:
    """Calls of `preempted` by one rank, since a process group was made."""

    def __init__(self) -> None:
        """Have all ranks find each other in the store; they call this together."""
        self._party = party_of_world()
        self._event = EventBefore()  # of the call before
        self._count = 0
        self._has_said = False
        self._stop: int | None = None
        self._asked: Callable[[], Any] | None = None
        self._interval = -(-self._party.size // RANKS_A_CALL)

    def is_last(self) -> bool:
        """Count a call; tell whether all ranks stop at this one."""
        self._count += 1
        if self._asked is not None:
            asked, self._asked, said = self._asked, None, None
            with contextlib.suppress(dist.DistError):  # collectives will say so
                said = asked()
            if said is not None:
                # Who asks two calls later finds it, and looks at what it has found one after.
                self._stop = -(-(int(said) + 2) // self._interval) * self._interval + 1
        if self._stop is not None:
            return self._count >= self._stop
        key = f"{self._party.prefix}/preempted"
        if _received and not self._has_said:
            self._party.store.set_first(key, str(self._count))
            self._has_said = True
        before = self._event.record()
        if before is not None:
            before.synchronize()
        if self._count % self._interval == 0:
            self._asked = self._party.store.begin(lambda store: _value(store, key))
        return False


def _value(store: Any, key: str) -> str | None:
    return bytes(store.get(key)).decode() if store.check([key]) else None


_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, _Calls] = weakref.WeakKeyDictionary()


def preempted() -> bool:
    """Tell whether this run is to save and end, as a rank got SIGTERM or SIGUSR1; once a step.

        for step in range(first, steps):
            train(step)
            if autoshard.preempted():
                autoshard.save_checkpoint(folder, model, optimizer, step=step + 1)
                break

    All ranks call it after each step, and get True at the same one: a few steps after the signal,
    and in all later calls. From the first call on, the signals do not end this process: with
    SIGTERM alone torchrun waits 30 s before it kills. The first call is made in the main thread,
    where all ranks wait for each other; later ones wait for nobody.
    Raises ValueError if the first call is in another thread; RuntimeError if some ranks don't come
    to it.
    """
    _handle_signals()
    if not there_are_others():
        return bool(_received)
    group = _torch.dist.default_group()
    if group not in _calls:
        _calls[group] = _Calls()
    return _calls[group].is_last()


def _handle_signals() -> None:
    """Have signals noted from now on, in all of this process; a second call does nothing."""
    if not _former:
        for each in SIGNALS:
            _former[each] = signal.signal(each, _note)


def _note(number: int, frame: Any) -> None:
    """Note a signal, as its handler."""
    _received.append(number)


def _handle_as_before() -> None:
    """Have signals handled as before `_handle_signals`, in a process that was just forked.

    Workers of a DataLoader, and of a pool, are ended by SIGTERM: who noted it would stay.
    """
    for number, former in _former.items():
        if signal.getsignal(number) is _note:
            signal.signal(number, former if former is not None else signal.SIG_DFL)
    _former.clear()
    _received.clear()


os.register_at_fork(after_in_child=_handle_as_before)
