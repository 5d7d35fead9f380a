"""Watchdog: says where each rank is when a collective does not end.

It runs by itself, and speaks after DEFAULT_S; earlier if it is told to:

    AUTOSHARD_WATCHDOG=30 torchrun ...     or     autoshard.watchdog(30)

A thread of each rank looks at what its rank waits for. If a collective has not ended within so many
seconds, one of the ranks that wait for it asks all others, over the store, where they are; those
that live answer:

    rank 0 has waited 30 s for the gather of layers.3.up.weight and 3 more (bucket 3 of its graph),
      in backward: collective 41 of group 1, of ranks [0, 1, 2]
      rank 1 waits for it, too
      rank 2 is behind: it has launched 40 there, the last one the gather of layers.2.up.weight and
        3 more; it is at train.py:17 in load_batch

Ranks that are at the same place share a line. It stops nothing: that is left to `judge.py`, where
ranks are found to wait in vain, and to the timeout of the group.

On an accelerator the host does not wait where the device does: there, what is launched is observed,
with an event after each wait, and only if the watchdog was asked for.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.runtime.comm import flights
from autoshard.runtime.comm.at_exit import at_exit
from autoshard.runtime.comm.flights import Issued
from autoshard.runtime.comm.mesh import name_ranks
from autoshard.runtime.comm.streams import is_captured
from autoshard.runtime.ranks import farewells, waits
from autoshard.runtime.ranks.code import code_of
from autoshard.runtime.ranks.exchange import client, there_are_others
from autoshard.runtime.ranks.explanations import Explainer
from autoshard.runtime.ranks.judge import Judge
from autoshard.runtime.ranks.positions import PREFIX, Positions
from autoshard.runtime.ranks.store import Store

log = logging.getLogger(__name__)

VARIABLE = "AUTOSHARD_WATCHDOG"
DEFAULT_S = 60.0
LOOK_S = 1.0  # between two looks of 500 ranks or fewer; more look more rarely
ANSWER_S = 4.0  # for others to answer in; of more ranks, longer
SHOWN = 12  # lines of a report


@dataclass(frozen=True)
class _Late:
    """Collective that this rank waits for: which one of its group's, and since when."""

    what: Issued
    number: int
    since: float
    where: str


class _OnDevice:
    """Collectives that this rank has launched on a device, until that has passed them."""

    def __init__(self) -> None:
        """Begin to observe collectives."""
        self._open: dict[int, tuple[_Late, Any]] = {}  # with an event, once it was waited for
        self._lock = threading.RLock()
        self._observing = flights.observe(self._launched, self._waited)
        self._observing.__enter__()

    def end(self) -> None:
        """Stop observing."""
        self._observing.__exit__(None, None, None)

    def _launched(self, issued: Issued) -> None:
        """Note `issued`, right before its launch, until nobody can wait for it any more."""
        where = "backward" if _torch.autograd.in_backward() else "forward"
        number = flights.num_launched(issued.group) + 1
        # A copy: the end of the original says that nobody waits for it any more.
        late = _Late(dataclasses.replace(issued), number, time.monotonic(), where)
        with self._lock:
            self._open[id(issued)] = late, None
        weakref.finalize(issued, self._forget, id(issued), late).atexit = False

    def _forget(self, key: int, late: _Late) -> None:
        """Drop `late`, if nobody has waited for it."""
        with self._lock:
            known, event = self._open.get(key, (None, None))
            if known is late and event is None:
                del self._open[key]

    def _waited(self, issued: Issued) -> None:
        """Record an event on the current stream; `issued` is over when the device has passed it.

        While a CUDA graph is captured, it counts as over at once.
        """
        with self._lock:
            if id(issued) not in self._open:
                return
            if is_captured():
                del self._open[id(issued)]
                return
            event = torch.Event()
            event.record()
            self._open[id(issued)] = self._open[id(issued)][0], event

    def oldest(self) -> _Late | None:
        """Return the oldest collective that has not ended."""
        with self._lock:
            for key, (_, event) in list(self._open.items()):
                if event is not None and event.query():
                    del self._open[key]
            # A copy: a collection in the middle of it may `_forget` some.
            late = [each for each, _ in list(self._open.values())]
        return min(late, key=lambda each: each.since, default=None)


class Watchdog:
    """Watchdog of this process, from when it is made to `stop`: logs which collective ranks are at.

    after_s: seconds that a collective may take.
    store: a client of the store.
    observes: whether collectives on an accelerator are observed.
    """

    def __init__(self, after_s: float, store: Store, rank: int, *, observes: bool) -> None:
        """Start a daemon thread that looks for late collectives, and answers other ranks.

        What others asked before is not answered. The thread that makes this is the one whose line
        of code is reported.
        """
        self._after_s, self._rank, self.store = after_s, rank, store
        self._scale = max(1.0, dist.get_world_size() / 500)
        self._main = threading.get_ident()
        self._told: dict[tuple[str, int], float] = {}  # what was reported, and of which age
        self._on_device = _OnDevice() if observes else None
        self._stop = threading.Event()
        self._positions = Positions(store, rank, self._main, self._waits_on)
        self._judge = Judge(self._positions, self._scale)
        flights.explain_by(Explainer(self._positions).explain)
        self._thread = threading.Thread(target=self._run, name="autoshard watchdog", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Tell whether it still watches: it was not stopped, and has not lost its store."""
        return not self._stop.is_set()

    def end(self) -> None:
        """Stop, and wait for the thread, as it must not ask the store while Python ends."""
        self.stop()
        self._thread.join(timeout=LOOK_S)

    def stop(self) -> None:
        """Stop observing; the thread ends by itself. A second call does nothing."""
        if not self._stop.is_set():
            self._stop.set()
            if self._on_device is not None:
                self._on_device.end()

    def _run(self) -> None:
        """Answer other ranks, and log reports as errors, until stopped; the watchdog's thread.

        The end of the default process group stops it, too: the store may be gone next. A
        RuntimeError, as when the store is gone, stops the watchdog, and is logged for debugging.
        """
        try:
            while not self._stop.wait(min(LOOK_S * self._scale, self._after_s / 2)):
                if not dist.is_initialized():
                    return
                self._judge.look(self._positions.answer())
                late = self._due()
                if late is not None and self._is_to_report(late):
                    log.error("%s", self._report(late))
        except (RuntimeError, ValueError, LookupError) as error:  # the store is gone, or the group
            log.debug("the watchdog ends: %s", error)
        finally:
            self.stop()

    def _oldest(self) -> _Late | None:
        """Return the oldest collective that this rank waits for: its host, or its device."""
        waiting = [
            _Late(each.issued, each.number, each.since, _phase(thread))
            for thread, each in list(flights.waiting.items())
        ]
        on_device = self._on_device.oldest() if self._on_device is not None else None
        late = waiting + ([on_device] if on_device is not None else [])
        return min(late, key=lambda each: each.since, default=None)

    def _due(self) -> _Late | None:
        """Return the oldest collective that has not ended, if it is late and due for a report.

        It is due once it is `after_s` old, and then each time that its age has doubled; what is
        returned counts as reported.
        """
        first = self._oldest()
        if first is None:
            return None
        age = time.monotonic() - first.since
        place = first.what.group, first.number
        if age < max(self._after_s, 2 * self._told.get(place, 0.0)):
            return None
        self._told = {place: age}
        return first

    def _is_to_report(self, late: _Late) -> bool:
        """Tell whether this rank is the first to report `late`, at about this age."""
        age = time.monotonic() - late.since
        times = int(age / self._after_s).bit_length()
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        key = f"{PREFIX}/reports/{life}/{late.what.group}/{late.number}/{times}"
        return self.store.set_first(key, str(self._rank)) == str(self._rank)

    def _waits_on(self) -> str:
        """Return the group of the collective that this rank waits for; "" for none."""
        late = self._oldest()
        return "" if late is None else late.what.group

    def _report(self, late: _Late) -> str:
        """Ask the ranks of the group of `late` where they are; describe it in a few lines.

        Waits for a while, and answers others meanwhile. The first line is of this rank.
        """
        group = late.what.group
        ranks = dist.get_process_group_ranks(_torch.dist.resolve_group(group))
        pause_s = LOOK_S / 10 * self._scale
        positions = self._positions.ask(ranks, ANSWER_S * self._scale, pause_s)
        together: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank in ranks:
            if rank != self._rank:
                together[_state(positions.get(rank), group, late.number)].append(rank)
        lines = [
            f"rank {self._rank} has waited {time.monotonic() - late.since:.0f} s for {late.what}, "
            f"in {late.where}: collective {late.number} of group {group}, of {name_ranks(ranks)}; "
            f"it is at {code_of(sys._current_frames().get(self._main))}"
        ]
        for (of_one, of_several), which in list(together.items())[:SHOWN]:
            said = f"rank {which[0]} {of_one}" if len(which) == 1 else ""
            lines.append(said or f"{name_ranks(which)} {of_several}")
        left = sum(len(which) for which in list(together.values())[SHOWN:])
        return "\n  ".join([*lines, *([f"{left} more ranks are elsewhere"] if left else [])])


def _phase(thread: int) -> str:
    """Tell whether `thread` runs a backward, by its Python frames: "backward" or "forward"."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.autograd.graph":
            return "backward"
        frame = frame.f_back
    return "forward"


def _state(position: dict[str, Any] | None, group: str, number: int) -> tuple[str, str]:
    """Describe where a rank is, for one that waits for collective `number` of `group`.

    position: what it has answered; None if it has not.
    Returns what is said of one rank, and of several.
    """
    if position is None:
        why = "ended, or stopped, or watching nothing"
        return f"does not answer: it is {why}", f"do not answer: they are {why}"
    reached, what, waits = position["groups"].get(group, [0, "none", False])
    if reached == number and waits:
        return "waits for it, too", "wait for it, too"
    at = position["code"]
    if reached >= number:
        on = f"gone on to {reached}, {what}"
        return f"has {on}; it is at {at}", f"have {on}; they are at {at}"
    last = f", the last one {what}" if reached else ""
    launched = f"launched {reached} there{last}"
    return (
        f"is behind: it has {launched}; it is at {at}",
        f"are behind: they have {launched}; they are at {at}",
    )


_running: list[Watchdog] = []  # one, or none


def watchdog(after_s: float | None = 30.0) -> None:
    """Have a thread log where every rank is when a collective does not end, after `after_s`.

    One runs by itself from when a model is sharded, with DEFAULT_S. All ranks call this, after
    `init_process_group`: a rank without a watchdog does not answer.
    after_s: seconds that a collective may take; None only stops the watchdog, until a model is
        sharded. A new one takes the place of the one that runs, which is stopped first.
    The environment variable AUTOSHARD_WATCHDOG does the same for all models that are sharded later;
    0 is for none.
    The thread asks a GPU for events, which a capture of a CUDA graph forbids to all threads, unless
    it is configured otherwise: `torch.cuda.graph(graph, capture_error_mode="thread_local")`. The
    one that runs by itself does not.
    Raises ValueError if `after_s` is not positive, RuntimeError if there is no process group.
    """
    if after_s is not None and not after_s > 0:
        raise ValueError(f"watchdog({after_s}): a number of seconds over 0, or None, is expected")
    if after_s is not None and not dist.is_initialized():
        raise RuntimeError("watchdog() needs a process group: call init_process_group() before")
    while _running:
        _running.pop().stop()
    if after_s is not None:
        _start(after_s, observes=torch.accelerator.is_available())


def _end_at_exit() -> None:
    while _running:
        _running.pop().end()


def _start(after_s: float, *, observes: bool) -> None:
    """Start a watchdog of the default process group; this rank says so when it ends."""
    store, rank = client(), dist.get_rank()
    _running.append(Watchdog(after_s, store, rank, observes=observes))
    _torch.dist.watch_waits(waits.in_torch)
    farewells.say_at_exit(store, rank, dist.get_world_size())
    at_exit(_end_at_exit)  # before that, after which the store may be gone at any time


def watch_as_told() -> None:
    """Start a watchdog for the default process group, if none is running, as the environment says.

    AUTOSHARD_WATCHDOG says after how many seconds it speaks, 0 or less for none; without it they
    are DEFAULT_S. Nothing starts for one rank, or over the fake backend. Raises ValueError if
    AUTOSHARD_WATCHDOG is no number.
    """
    told = os.environ.get(VARIABLE, "")
    try:
        after_s = float(told or DEFAULT_S)
    except ValueError:
        raise ValueError(f"{VARIABLE}={told!r}: a number of seconds is expected") from None
    if after_s <= 0 or not there_are_others():
        return
    if any(each.is_running and each.store is client() for each in _running):
        return
    while _running:
        _running.pop().stop()  # of a process group that is gone
    _start(after_s, observes=bool(told) and torch.accelerator.is_available())
