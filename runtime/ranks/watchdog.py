"""Watchdog: says where each rank is when a collective does not end.

    AUTOSHARD_WATCHDOG=30 torchrun ...     or     autoshard.watchdog(30)

A thread of each rank looks at what its rank has launched. If a collective has not ended within so
many seconds, it asks all ranks, over the store, where they are; those that live answer:

    rank 0 has waited 30 s for the gather of layers.3.up.weight and 3 more (bucket 3 of its graph),
      in backward: collective 41 of group 1, of ranks [0, 1, 2]
      rank 1 waits for it, too
      rank 2 has launched 40 there, the last one the gather of layers.2.up.weight and 3 more; it
        is at train.py:17 in load_batch

It stops nothing: the timeout of the group does.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.runtime.comm import flights
from autoshard.runtime.comm.flights import Issued
from autoshard.runtime.comm.streams import is_captured

log = logging.getLogger(__name__)

VARIABLE = "AUTOSHARD_WATCHDOG"
DEBUG_AFTER_S = 60.0  # where TORCH_DISTRIBUTED_DEBUG is set
LOOK_S = 1.0  # between two looks
ANSWER_S = 4.0  # for others to answer in
_ASKED, _ANSWER = "autoshard/watchdog/asked", "autoshard/watchdog/answer"


@dataclass
class _Open:
    """Collective that was launched and may not have ended.

    number: among those of its group since the watchdog started.
    event: recorded on the device after the wait; None before that. The collective has ended when
        the device has passed it.
    """

    what: Issued
    number: int  # of its group's
    in_backward: bool
    since: float
    event: Any = None


class Watchdog:
    """Watchdog of this process, from when it is made to `stop`: logs which collective ranks are at.

    Making one starts a daemon thread, and has collectives observed.
    after_s: seconds that a collective may take.
    store: a client of the store for the watchdog alone.
    """

    def __init__(self, after_s: float, store: Any, rank: int) -> None:
        """Begin to observe collectives, and start a daemon thread that looks for late ones.

        Those launched before are not seen, and what other ranks asked before is not answered. The
        thread that makes this is the one whose line of code is reported. Asks `store`.
        """
        self._after_s = after_s
        self._store, self._rank = store, rank
        self._main = threading.get_ident()
        self._counts: dict[str, int] = {}
        self._latest: dict[str, _Open] = {}  # by group
        self._open: dict[int, _Open] = {}
        self._told: dict[tuple[str, int], float] = {}  # what was reported, and of which age
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._seen = self._store.add(_ASKED, 0)  # of an earlier life
        self._observing = flights.observe(self._launched, self._waited)
        self._observing.__enter__()
        self._thread = threading.Thread(target=self._run, name="autoshard watchdog", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Tell whether it still watches: it was not stopped, and has not lost its store."""
        return not self._stop.is_set()

    def stop(self) -> None:
        """Stop observing; the thread ends by itself. A second call does nothing."""
        if not self._stop.is_set():
            self._stop.set()
            self._observing.__exit__(None, None, None)

    def _launched(self, issued: Issued) -> None:
        """Open an entry for `issued`, right before its launch, and count it in its group.

        The entry is dropped if `issued` is freed without a wait.
        """
        key = id(issued)
        with self._lock:
            number = self._counts[issued.group] = self._counts.get(issued.group, 0) + 1
            is_backward = _torch.autograd.in_backward()
            # A copy: the end of the original says that nobody waits for it any more.
            entry = _Open(replace(issued), number, is_backward, time.monotonic())
            self._latest[issued.group] = self._open[key] = entry
        weakref.finalize(issued, self._forget, key, entry).atexit = False

    def _forget(self, key: int, entry: _Open) -> None:
        """Drop `entry`, whose collective nobody can wait for any more, if nobody has."""
        with self._lock:
            if self._open.get(key) is entry and entry.event is None:
                del self._open[key]

    def _waited(self, issued: Issued) -> None:
        """Close the entry of `issued`, which was waited for, if it has one.

        Where there is an accelerator it stays open until that has passed an event, recorded now on
        the current stream; while a CUDA graph is captured, it is closed at once.
        """
        with self._lock:
            entry = self._open.get(id(issued))
            if entry is None:
                return
            if torch.accelerator.is_available() and not is_captured():
                entry.event = torch.Event()
                entry.event.record()
            else:
                del self._open[id(issued)]

    def _run(self) -> None:
        """Answer other ranks, and log reports as errors, until stopped; the watchdog's thread.

        A RuntimeError, as when the store is gone, stops the watchdog, and is logged for debugging.
        """
        try:
            while not self._stop.wait(min(LOOK_S, self._after_s / 2)):
                self._answer()
                stuck = self._stuck()
                if stuck is not None:
                    log.error("%s", self._report(stuck))
        except RuntimeError as error:  # the store is gone, or the group: this run is over
            log.debug("the watchdog ends: %s", error)
            self.stop()

    def _stuck(self) -> _Open | None:
        """Return the oldest collective that has not ended, if it is late and due for a report.

        It is due once it is `after_s` old, and then each time that its age has doubled; what is
        returned counts as reported. Entries that the device has passed are dropped first.
        """
        with self._lock:
            for key, entry in list(self._open.items()):
                if entry.event is not None and entry.event.query():
                    del self._open[key]
            if not self._open:
                return None
            # A copy, as in `_position`: a collection in the middle of it may `_forget` some.
            first = min(list(self._open.values()), key=lambda entry: entry.since)
            age = time.monotonic() - first.since
            place = first.what.group, first.number
            if age < max(self._after_s, 2 * self._told.get(place, 0.0)):
                return None
            self._told = {place: age}
            return first

    def _answer(self) -> None:
        """Tell the store where this rank is, if another one has asked."""
        asked = self._store.add(_ASKED, 0)
        if asked > self._seen:
            self._seen = asked
            self._store.set(f"{_ANSWER}/{asked}/{self._rank}", json.dumps(self._position()))

    def _position(self) -> dict[str, Any]:
        """Where this rank is: {"code": its line, "groups": {name: [number, collective, waits]}}.

        number, collective: the latest launched over the group, the latter in words.
        waits: whether one of the group has not ended.
        """
        with self._lock:
            waits = {entry.what.group for entry in list(self._open.values())}
            return {
                "code": _code_of(sys._current_frames().get(self._main)),
                "groups": {
                    group: [entry.number, str(entry.what), group in waits]
                    for group, entry in self._latest.items()
                },
            }

    def _report(self, stuck: _Open) -> str:
        """Ask the ranks of the group of `stuck` where they are; describe each in a line.

        Waits ANSWER_S at most, and answers others meanwhile. The first line is of this rank.
        """
        asked = self._store.add(_ASKED, 1)
        group = stuck.what.group
        ranks = dist.get_process_group_ranks(_torch.dist.resolve_group(group))
        positions: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + ANSWER_S
        while len(positions) < len(ranks) and time.monotonic() < deadline:
            self._answer()
            for rank in ranks:
                # An answer to whoever asked later is as good.
                for number in range(asked, self._seen + 1):
                    key = f"{_ANSWER}/{number}/{rank}"
                    if rank not in positions and self._store.check([key]):
                        positions[rank] = json.loads(self._store.get(key))
            time.sleep(LOOK_S / 10)
        where = "backward" if stuck.in_backward else "forward"
        lines = [
            f"rank {self._rank} has waited {time.monotonic() - stuck.since:.0f} s for "
            f"{stuck.what}, in {where}: collective {stuck.number} of group {group}, of ranks "
            f"{ranks}; it is at {_code_of(sys._current_frames().get(self._main))}"
        ]
        lines += [
            _line(rank, positions.get(rank), group, stuck.number)
            for rank in ranks
            if rank != self._rank
        ]
        return "\n  ".join(lines)


def _line(rank: int, position: dict[str, Any] | None, group: str, number: int) -> str:
    """Describe where `rank` is, for a rank that waits for collective `number` of `group`.

    position: what `rank` has answered; None if it has not.
    """
    if position is None:
        return f"rank {rank} does not answer: it has ended, or is stopped, or watches nothing"
    reached, what, waits = position["groups"].get(group, [0, "none", False])
    if reached == number and waits:
        return f"rank {rank} waits for it, too"
    if reached >= number:
        return f"rank {rank} has gone on to {reached}, {what}; it is at {position['code']}"
    last = f", the last one {what}" if reached else ""
    return f"rank {rank} is behind: it has launched {reached} there{last}; it is at " + str(
        position["code"]
    )


def _code_of(frame: FrameType | None) -> str:
    """Describe where the user's code is: the innermost Python frame outside autoshard and torch.

    As "train.py:17 in load_batch". If there is none, it is the innermost of all; for None "its
    end".
    """
    innermost = frame
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.split(".")[0] not in ("autoshard", "torch"):
            break
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "its end"
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


_running: list[Watchdog] = []  # one, or none


def watchdog(after_s: float | None = 30.0) -> None:
    """Start a thread that logs where every rank is when a collective does not end.

    All ranks call this, after `init_process_group`: a rank without a watchdog does not answer.
    after_s: seconds that a collective may take; None only stops the watchdog. A new one takes the
        place of the one that runs, which is stopped first.
    The environment variable AUTOSHARD_WATCHDOG does the same for all models that are sharded later,
    and TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL does with 60 s.
    The thread asks a GPU for events, which a capture of a CUDA graph forbids to all threads, unless
    it is configured otherwise: `torch.cuda.graph(graph, capture_error_mode="thread_local")`.
    Raises ValueError if `after_s` is not positive, RuntimeError if there is no process group.
    """
    if after_s is not None and not after_s > 0:
        raise ValueError(f"watchdog({after_s}): a number of seconds over 0, or None, is expected")
    while _running:
        _running.pop().stop()
    if after_s is None:
        return
    if not dist.is_initialized():
        raise RuntimeError("watchdog() needs a process group: call init_process_group() before")
    store = _torch.dist.default_store().clone()
    _running.append(Watchdog(after_s, store, dist.get_rank()))


def watch_as_told() -> None:
    """Start a watchdog if the environment asks for one, and none is running.

    AUTOSHARD_WATCHDOG asks by a number of seconds, 0 or less for none; without it
    TORCH_DISTRIBUTED_DEBUG does, as INFO or DETAIL. Nothing starts without a process group, or over
    the fake backend. Raises ValueError if AUTOSHARD_WATCHDOG is no number.
    """
    told = os.environ.get(VARIABLE, "")
    is_debugged = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() in ("INFO", "DETAIL")
    if not (told or is_debugged) or any(each.is_running for each in _running):
        return
    try:
        after_s = float(told) if told else DEBUG_AFTER_S
    except ValueError:
        raise ValueError(f"{VARIABLE}={told!r}: a number of seconds is expected") from None
    if after_s > 0 and dist.is_initialized() and dist.get_backend() != "fake":
        watchdog(after_s)
