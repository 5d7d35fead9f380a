"""Agreement of ranks: they compare over the store what each is about to launch.

Not by a collective: a rank that does something else, or failed, would leave the
others in it. Compared are:

    agree          the collectives of a frame, when it is compiled
    compare_lines  the model, before it is sent to other ranks
    Course         which compiled graph, or eager forward, runs next, and how its units are
                   configured
    Order          the next collective of an eager step

A rank for which nothing is new does not wait. So steps that repeat cost nothing, and a batch
shape that only one rank has seen does not stop the others. A rank that runs something else than
the others waits in vain: it raises, after the group's timeout, before it launches a collective
that would meet another one of its peers. Two ranks that wait for each other at different places
see that in the store, and raise within seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard import _torch
from autoshard.runtime.comm import collectives
from autoshard.runtime.ranks.store import LONGEST_PAUSE_S, MANY, Arrivals, Store

COMPILE_TIMEOUT = timedelta(minutes=10)  # ranks may differ by a compilation, cold against cached
PATIENCE_S = 3.0  # until a rank that waits looks for what the others do
LOOK_S = 1.0  # between two looks
LEAVING_S = 3.0  # for the others to have read what a rank that is about to raise has said


@dataclass(frozen=True)
class Outcome:
    """Outcome of a compilation on one rank.

    error:    why it can't be used; None if it can.
    digests:  of its plans.
    options:  those that it was compiled with, as text.
    """

    error: str | None
    digests: tuple[str, ...]
    options: str


class _Sessions:
    """Sessions over one store: prefixes of the keys that ranks use in it.

    store:   the client to ask it by.
    own:     a number of this process, that no other has, nor one that lived before it.
    by_mesh: the session of each mesh, by name.
    """

    def __init__(self, store: Any) -> None:
        self.store = Store(store, idle=self._tell_of_collective)
        self.own = uuid.uuid4().hex
        self.by_mesh: dict[str, str] = {}
        self._rank, self._thread = dist.get_rank(), threading.get_ident()
        self._told = False

    def _tell_of_collective(self, store: Any) -> None:
        """Note in `store` which collective this rank's thread has waited for, if for long.

        Other ranks may wait here, in vain, for a rank that waits there.
        """
        waiting = collectives.waiting.get(self._thread)
        is_long = waiting is not None and time.monotonic() - waiting.since > PATIENCE_S
        if not is_long and not self._told:
            return
        notice: dict[str, Any] = {}
        if is_long and waiting is not None:
            what = f"rank {self._rank} waits for {waiting.issued}"
            notice = {"what": what, "group": waiting.issued.group, "number": waiting.number}
        for session in set(self.by_mesh.values()):
            store.set(_collective_key(session, self._rank), json.dumps(notice))
        self._told = is_long


class _Local(threading.local):
    """State of one rank, by thread, as ranks may be threads of one process."""

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}  # topic -> how often ranks compared notes on it
        self.sessions: weakref.WeakKeyDictionary[Any, _Sessions] = weakref.WeakKeyDictionary()

    def next_round(self, topic: str) -> int:
        number = self.rounds.get(topic, 0)
        self.rounds[topic] = number + 1
        return number

    def sessions_of(self, mesh: DeviceMesh) -> _Sessions:
        """Return the sessions over the default store.

        The store is to answer within the timeout of the group of `mesh`.
        """
        store = _torch.dist.default_store()
        if store not in self.sessions:
            self.sessions[store] = _Sessions(store)
        found = self.sessions[store]
        found.store.limit_s = group_timeout(mesh).total_seconds()
        return found


_local = _Local()


class PlansDiffer(RuntimeError):
    """Error on all ranks when they compiled different collectives for one frame.

    ranks: those that have others than this one.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


Agreed = set[tuple[str, tuple[str, ...]]]
"""(frame, digests) that all ranks have, of one model."""


def agree(frame: str, outcome: Outcome, mesh: DeviceMesh, agreed: Agreed) -> str | None:
    """Exchange outcomes with all ranks of `mesh`; returns an error if any of them has one.

    frame: a name for what was compiled, the same on every rank.
    agreed: what need not be compared any more; this outcome is added to it.
    Raises PlansDiffer, naming the ranks, if they compiled different collectives, and RuntimeError
    if a rank has other options, or does not answer in time.
    """
    if _is_alone(mesh):
        return outcome.error
    if outcome.error is None and (frame, outcome.digests) in agreed:
        return None
    known = any(name == frame for name, _ in agreed)
    timeout = group_timeout(mesh)
    answers = _exchange(
        f"compiled/{frame}",
        json.dumps([outcome.error, outcome.digests, outcome.options]),
        mesh,
        timeout if known else max(timeout, COMPILE_TIMEOUT),
        failed=f"rank {dist.get_rank()} compiled {frame}",
        hint=_SAME_OPTIONS,
    )
    outcomes = {
        rank: Outcome(error, tuple(digests), options)
        for rank, (error, digests, options) in (
            (rank, json.loads(answer)) for rank, answer in answers.items()
        )
    }
    for rank, other in outcomes.items():
        if other.options != outcome.options:
            raise RuntimeError(
                f"rank {dist.get_rank()} compiled {frame} with the options {outcome.options}, and "
                f"rank {rank} with {other.options}: give every rank the same"
            )
    for rank, other in outcomes.items():
        if other.error is not None:
            return other.error if rank == dist.get_rank() else f"rank {rank}: {other.error}"
    differing = [rank for rank, other in outcomes.items() if other.digests != outcome.digests]
    if differing:
        raise PlansDiffer(
            f"rank {dist.get_rank()} compiled other collectives for {frame} than ranks "
            f"{differing}: build the same model, of the same dtypes, with the same parameters "
            "frozen, and take the same branches, on every rank, or pass strict_order=False",
            differing,
        )
    agreed.add((frame, outcome.digests))
    return None


def compare_lines(topic: str, what: str, lines: Sequence[str], mesh: DeviceMesh) -> None:
    """Raise RuntimeError, with the first difference, unless all of `mesh` have the same `lines`.

    topic: tells the comparison from others, the same on every rank.
    what: the same in words, "the model to shard".
    """
    if _is_alone(mesh):
        return
    failed = f"rank {dist.get_rank()} came to {what}"
    digest = hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest()
    timeout = max(group_timeout(mesh), COMPILE_TIMEOUT)  # some may still be loading
    answers = _exchange(f"lines/{topic}", digest, mesh, timeout, failed=failed, hint=_SAME_MODEL)
    others = [rank for rank, other in answers.items() if other != digest]
    if others:
        difference = first_difference(topic, lines, others[0], mesh)
        raise RuntimeError(f"{what} differs on ranks {others}: {difference}. {_SAME_MODEL}")


_SAME_MODEL = "Build the same model on every rank, or raise the process group's timeout"
_SAME_OPTIONS = (
    "Give every rank the same model and options, and take the same branches, or pass "
    "strict_order=False"
)


def first_difference(topic: str, lines: Sequence[str], other: int, mesh: DeviceMesh) -> str:
    """Describe the first difference between `lines` here and on rank `other`.

    All ranks of `mesh` call this.
    """
    sessions, rank = _local.sessions_of(mesh), dist.get_rank()
    store, session = sessions.store, sessions.by_mesh[_name(mesh)]  # they have compared notes
    topic = f"{session}/differing/{topic}/{_name(mesh)}"
    number = _local.next_round(topic)
    store.set(f"{topic}/{number}/{rank}", json.dumps(list(lines)))
    key = f"{topic}/{number}/{other}"
    if not Arrivals(store, {other: key}).wait(group_timeout(mesh).total_seconds()):
        return f"rank {other} does not say in what"
    theirs = json.loads(store.get(key))
    _leave_together(store, f"{topic}/{number}", mesh.mesh.flatten().tolist())
    pairs = enumerate(itertools.zip_longest(lines, theirs, fillvalue="nothing more"), 1)
    number, (here, there) = next(pair for pair in pairs if len(set(pair[1])) > 1)
    return f"number {number} is {here} on rank {rank}, and {there} on rank {other}"


def share(frame: str, text: str, mesh: DeviceMesh, *, is_first: bool = False) -> str:
    """Return the `text` of the first rank of `mesh` about `frame`; all of its ranks call this.

    is_first: whether nothing of `frame` was compared before: ranks may be a compilation apart.
    """
    if _is_alone(mesh):
        return text
    first = int(mesh.mesh.flatten()[0])
    answers = _exchange(
        f"shared/{frame}",
        text if dist.get_rank() == first else "",
        mesh,
        max(group_timeout(mesh), COMPILE_TIMEOUT) if is_first else group_timeout(mesh),
        failed=f"rank {dist.get_rank()} waited for what the first rank planned for {frame}",
        hint=_SAME_OPTIONS,
        may_differ=True,
    )
    return answers[first]


@dataclass
class Order:
    """Order of the collectives of one phase of a unit's steps, the same on every rank.

    A collective that came next in each of the latest steps that began like this one is not
    compared; any other is, with what the other ranks are about to launch. As all ranks start with
    nothing, they remember the same steps, and none can leave them unnoticed.

    key:   tells it from other orders, the same on every rank.
    topic: the same in words, "the forward of layers.3".
    """

    key: str
    topic: str
    mesh: DeviceMesh
    _known: list[list[str]] = field(default_factory=lambda: [[]])  # of steps before, latest last
    _taken: list[str] = field(default_factory=list)
    _ahead: list[tuple[list[str], int]] = field(default_factory=lambda: [([], 0)])
    """Steps of `_known` that may be running again, each with the place that it has come to."""

    def take(self, event: str) -> None:
        """Note that `event` is about to be launched.

        Raises RuntimeError if other ranks launch another.
        """
        self._check(event)
        self._taken.append(event)

    def end(self) -> None:
        """Note that the phase is over. Raises RuntimeError if it goes on for other ranks."""
        if self._taken:
            self._check(_END)
            others = [known for known in self._known if known and known != self._taken]
            self._known = [*others[1 - _KINDS :], self._taken]
        self._start()

    def forget(self) -> None:
        """Note that the phase broke off: the next may expect only what was launched until then."""
        self._known = [self._taken]
        self._start()

    def _start(self) -> None:
        self._taken, self._ahead = [], [(known, 0) for known in self._known]

    def _check(self, event: str) -> None:
        same = [(known, at) for known, at in self._ahead if _at(known, at) == event]
        if len(same) < len(self._ahead):
            _compare(self.key, self.topic, event, self.mesh)
        if same:
            self._ahead = [(known, at + 1) for known, at in same]
        else:  # what follows should be what followed it in the latest, if it was there
            latest = self._known[-1]
            self._ahead = [(latest, latest.index(event) + 1 if event in latest else len(latest))]


def _at(events: list[str], position: int) -> str:
    return events[position] if position < len(events) else _END


_KINDS = 4  # steps that take turns, as those of a GAN do, with one comparison where they part
_END = "the end"


class Course(threading.local):
    """Course of this rank: the compiled graphs and eager forwards that it runs, one after another.

    They issue different collectives, and Dynamo may choose between them (past its recompile
    limit it runs a frame without its graph), on one rank and not on another.
    """

    def __init__(self) -> None:
        self._last: dict[str, str] = {}  # by _name(mesh)
        self._after: dict[tuple[str, str], str] = {}

    def take(self, event: str, mesh: DeviceMesh) -> None:
        """Note that `event` begins.

        Raises RuntimeError if other ranks of `mesh` begin another one.
        """
        name = _name(mesh)
        before = name, self._last.get(name, "")
        if self._after.get(before) != event:
            _compare("program", "the program", event, mesh, hint=_RECOMPILE_HINT)
            self._after[before] = event
        self._last[name] = event

    def meet(self, event: str, mesh: DeviceMesh, *, hint: str) -> None:
        """Compare `event`, which is rare, with other ranks of `mesh`; later comparisons ignore it.

        hint: what to do if they come to something else, which raises RuntimeError.
        """
        _compare("program", "the program", event, mesh, hint=hint)


course = Course()


_ORDER_HINT = (
    "units must run in the same order on every rank; put modules of which each rank picks its "
    "own, as experts, into one unit with the module around them; or, if ranks are to leave some "
    "out (layerdrop, a branch of their own), pass strict_order=False"
)
_RECOMPILE_HINT = (
    "run the same forwards and backwards on every rank, and tell its units the same; and as Dynamo "
    "runs a frame without its graph past its recompile limit, mark what differs from call to call "
    "as dynamic (torch._dynamo.mark_dynamic), or raise torch._dynamo.config.recompile_limit; if "
    "ranks are to leave parts out (layerdrop, a branch of their own), pass strict_order=False"
)


def _compare(
    key: str, topic: str, event: str, mesh: DeviceMesh, *, hint: str = _ORDER_HINT
) -> None:
    """Raise RuntimeError unless all ranks of `mesh` have come to `event`."""
    if _is_alone(mesh):
        return
    here = f"in {topic}, rank {dist.get_rank()} came to {event}"
    answers = _exchange(f"order/{key}", event, mesh, group_timeout(mesh), failed=here, hint=hint)
    others = [f"rank {other} to {its}" for other, its in answers.items() if its != event]
    if others:
        raise RuntimeError(f"{here}, but {', '.join(others)}: {hint}")


_imagined = {"fake"}  # backends


def imagine(backend: str) -> None:
    """Compare nothing over groups of `backend`, of whose ranks only this one exists."""
    _imagined.add(backend)


def _is_alone(mesh: DeviceMesh) -> bool:
    return mesh.size() == 1 or dist.get_backend() in _imagined


def _name(mesh: DeviceMesh) -> str:
    """Name that tells `mesh` from others, the same on all its ranks."""
    if mesh.ndim == 1:
        return str(mesh.get_group().group_name)
    return f"{tuple(mesh.shape)} at {mesh.mesh.flatten().tolist()[0]}"


def group_timeout(mesh: DeviceMesh) -> timedelta:
    """Timeout of collectives over `mesh`, as the user set it."""
    return _torch.dist.group_timeout(mesh.get_group(0))


def _exchange(
    topic: str,
    answer: str,
    mesh: DeviceMesh,
    timeout: timedelta,
    *,
    failed: str,
    hint: str,
    may_differ: bool = False,
) -> dict[int, str]:
    """Exchange answers with the ranks of `mesh`; returns those of all, by global rank.

    failed, hint: words for the error if some ranks don't answer.
    may_differ: whether ranks go on if answers differ. Otherwise a rank that reads another answer
        than its own is about to raise, and leaves once all have read them, as it may be the one
        with the store.
    """
    with _store_may_end(failed, hint):
        answers, place = _answers(topic, answer, mesh, timeout, failed=failed, hint=hint)
        if not may_differ and len(set(answers.values())) > 1:
            _leave_together(_local.sessions_of(mesh).store, place, answers)
    return answers


@contextlib.contextmanager
def _store_may_end(failed: str, hint: str) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RuntimeError(
            f"{failed}, and nothing can be heard of the others any more: the process that has the "
            f"store, mostly rank 0, ended before, or can't be reached ({error}). Look at what it "
            f"says. {hint}"
        ) from error


def _leave_together(store: Store, place: str, ranks: Iterable[int]) -> None:
    """Wait until all `ranks` are here, for at most LEAVING_S, or until the store is gone."""
    keys = {rank: f"{place}/leaves/{rank}" for rank in ranks}
    with contextlib.suppress(dist.DistError):
        store.set(keys[dist.get_rank()], "1")
        Arrivals(store, keys).wait(LEAVING_S)


def _answers(
    topic: str, answer: str, mesh: DeviceMesh, timeout: timedelta, *, failed: str, hint: str
) -> tuple[dict[int, str], str]:
    """Exchange answers with all ranks of `mesh`.

    Returns them by rank, and where in the store they are.
    """
    sessions, rank = _local.sessions_of(mesh), dist.get_rank()
    store = sessions.store
    ranks: list[int] = mesh.mesh.flatten().tolist()
    session = _session(sessions, rank, ranks, _name(mesh), timeout, failed=failed, hint=hint)
    topic = f"{session}/{topic}/{_name(mesh)}"
    number = _local.next_round(topic)
    place = f"{topic}/{number}"
    keys = {other: f"{place}/{other}" for other in ranks}
    store.set(keys[rank], answer)
    try:
        arrivals = Arrivals(store, keys)
        if not arrivals.wait(min(timeout.total_seconds(), PATIENCE_S)):
            _wait_and_look(store, session, arrivals, place, timeout, failed, hint)
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
    """Return the prefix of all keys of `ranks`, which only their processes that live now know.

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
    """Send the session to `others` until each has confirmed it.

    Returns those that had not by the deadline.
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


def _wait_and_look(
    store: Store,
    session: str,
    arrivals: Arrivals,
    place: str,
    timeout: timedelta,
    what: str,
    hint: str,
) -> None:
    """Wait for all ranks, and look at what those that are missing wait for themselves.

    A rank that waits at another place, to which this one has not come, would do so for ever: both
    raise RuntimeError. So does a rank that has waited for `timeout`.
    place: where this rank waits. Its notice in the store says so for as long as it does.
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
                others = "; ".join(_what(store, session, each) for each in stuck)
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


def _waits_for(store: Store, session: str, other: int, rank: int) -> bool:
    """Tell whether `other` waits where `rank`, which waits elsewhere, has not come to.

    That may be at another place in the store, or for a collective.
    """
    place = _notice(store, session, other).get("place")
    if place is not None:
        return not store.check([f"{place}/{rank}"])
    collective = _read(store, _collective_key(session, other))
    return bool(collective) and collectives.num_launched(collective["group"]) < collective["number"]


def _what(store: Store, session: str, other: int) -> str:
    """Describe where `other` waits."""
    notice = _notice(store, session, other) or _read(store, _collective_key(session, other))
    return str(notice.get("what", f"rank {other}"))


def _let_see(store: Store, session: str, stuck: Sequence[int]) -> None:
    """Wait until the ranks `stuck` have given up, too, so that they see this one's notice.

    For 3 * LOOK_S at most.
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


def _collective_key(session: str, rank: int) -> str:
    return f"{session}/collective/{rank}"
