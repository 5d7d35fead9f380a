"""Collectives in flight: what is kept of one until its wait, and who is told of it.

Observers are told of each launch, and of each wait that ends well; `waiting` says what each thread
waits for now; torch's Flight Recorder gets the names of the parameters. An error says which
collective it was, of which parameters, over which ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard import _torch
from autoshard.passes.ir.layout import Member, show_members
from autoshard.runtime.comm import threads
from autoshard.runtime.comm.mesh import name_ranks
from autoshard.runtime.comm.packing import BucketLayout
from autoshard.runtime.comm.shard_names import names_at
from autoshard.runtime.comm.transport import Work

Begun = TypeVar("Begun")  # the work of a collective, or a list of them

SHOWN = 4  # names of parameters in a message


@dataclass(frozen=True)
class Issued:
    """Description of one collective for observers: its kind, its members, and its group's name.

    bucket: number of its bucket in a compiled graph, None in an eager step.
    params: the members' parameters: names for a reduce, addresses of shards for a gather; may be
        empty or incomplete.
    """

    kind: str  # "gather", "reduce" or "all_reduce"
    members: tuple[Member, ...]
    group: str
    bucket: int | None = field(default=None, compare=False)
    params: tuple[str | int, ...] = field(default=(), compare=False, repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole, unsharded members."""
        return sum(member.num_bytes for member in self.members)

    def __str__(self) -> str:
        """Describe the collective: "the gather of layers.1.up.weight (bucket 3 of its graph)".

        Names SHOWN parameters at most; where no name is known, shows dtypes and sizes of members.
        """
        names = [each for each in self.params if isinstance(each, str)] or names_at(self.params)
        shown = ", ".join(names[:SHOWN]) or show_members(self.members[:SHOWN])
        more = len(names or self.members) - SHOWN  # members include flags
        number = "" if self.bucket is None else f" (bucket {self.bucket} of its graph)"
        kind = self.kind.replace("_", "-")
        return f"the {kind} of {shown}{f' and {more} more' if more > 0 else ''}{number}"


@dataclass(frozen=True)
class InFlight:
    """Collective that was launched, or is packed for launch, with the tensors that must outlive it.

    The collective reads `send` until it is waited for: dropping `send` sooner
    would let the allocator hand its memory to the next layer.
    """

    issued: Issued
    work: Work | None  # None: not launched yet, waited for already, or one rank alone
    # Both 1D. Of a gather, one rank's pieces, which are its part of `receive` or a shard, and those
    # of all. Of a reduce, the other way about. Once it has been waited for, `send` is `receive`.
    send: Tensor
    receive: Tensor
    layout: BucketLayout  # how members lie in them
    # Of a swap, where there is no more in `send` than the other rank's part: the gradients of this
    # one's, a tensor a member, to which what it receives is added.
    own: list[Tensor] | None = None
    averages: bool = False  # whether the collectives of a reduce divide the sums
    after: float = 1.0  # what the sums of a reduce are still to be divided by afterwards
    flags: Any = None  # what a reduce's last member says of the others, for who waits for it
    number: int = 0  # of those that this rank has launched over the group, from 1 on
    is_lent: bool = False  # `receive` is somebody's who may use it again

    def wait(self) -> InFlight:
        """Wait for the collective: on a CPU the host waits, elsewhere the device's current stream.

        Returns a copy with no `work`, in which `receive` replaces `send`. Use only the copy from
        then on: gloo copies results out at every wait, so that a second wait for the original would
        undo what was written to `receive` since the first. Without `work` it does not wait. With
        it, it tells observers, and raises, as `wait_for`.
        """
        if self.work is not None:
            wait_for([self.work], self.issued, self.number)
        return self.but(work=None, send=self.receive)

    def but(self, **changes: Any) -> InFlight:
        """Copy this, but for the fields that are given; sooner than `dataclasses.replace` does."""
        copy = object.__new__(InFlight)
        copy.__dict__.update(self.__dict__, **changes)
        return copy


@dataclass(frozen=True)
class GroupedFlight:
    """Gather that was launched for several members, each in tensors of its own.

    It is like an `InFlight`, but `send` and `receive` have one tensor for each member.
    together: positions of the members that are too small for that: they share the last tensor, and
        the others' tensors come before it.
    """

    issued: Issued
    works: list[Work]
    send: list[Tensor]
    receive: list[Tensor]
    layout: BucketLayout
    together: tuple[int, ...] = ()
    number: int = 0  # as of an `InFlight`

    def wait(self) -> None:
        """Wait for all works, as `InFlight.wait` does, and empty `send`. Raises as `wait_for`."""
        wait_for(self.works, self.issued, self.number)
        self.send.clear()


@dataclass(frozen=True)
class Waiting:
    """Collective that a thread waits for: its number in its group, and since when.

    since: in the time of `time.monotonic()`.
    """

    issued: Issued
    number: int
    since: float


waiting: dict[int, Waiting] = {}
"""Collective that each thread waits for now, by the thread's `threading.get_ident()`."""

REMEMBERED = 16  # of the latest collectives, for each group


class _History:
    """History of the collectives that a rank has launched over a process group.

    launched: how many collectives. issued: how many they are as torch counts them.
    recent: fields of the latest `Issued`, which may go.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.launched = self.issued = 0
        self.recent: deque[tuple[Any, ...]] = deque(maxlen=REMEMBERED)

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Tell whether it is of `group`, and not of an earlier one of the same name."""
        return self._group() is group


_histories: dict[tuple[int, str], _History] = {}  # by rank and the group's name


def num_launched(group: str) -> int:
    """Number of collectives that this rank has launched over the latest group of that name."""
    history = _histories.get((dist.get_rank(), group))
    return 0 if history is None else history.launched


def latest_launched(rank: int) -> dict[str, tuple[int, Issued]]:
    """Return the latest collective that `rank`, of this process, has launched over each group.

    With its number, from 1 on.
    """
    return {
        name: (history.launched, Issued(*history.recent[-1]))
        for name in _torch.dist.groups_by_name()
        if (history := _history(rank, name)) is not None
    }


def recent_launched(rank: int, group: str) -> dict[int, Issued]:
    """Return the latest collectives, REMEMBERED at most, that `rank` has launched over `group`.

    By number.
    """
    history = _history(rank, group)
    if history is None:
        return {}
    recent, last = list(history.recent), history.launched
    return {last - len(recent) + at: Issued(*each) for at, each in enumerate(recent, 1)}


def num_of_others(rank: int) -> dict[str, int]:
    """Count what other code than ours has begun, on `rank` of this process, over each group.

    By the group's name. 0 where the backend does not count.
    """
    found = {}
    for name, group in _torch.dist.groups_by_name().items():
        history = _history(rank, name)
        ours = 0 if history is None else history.issued
        found[name] = _torch.dist.num_issued(group) - ours
    return found


def _history(rank: int, name: str) -> _History | None:
    """Return the history of the group that is called `name` now, if anything was launched."""
    history, group = _histories.get((rank, name)), _torch.dist.groups_by_name().get(name)
    if history is None or group is None or not history.is_of(group) or not history.recent:
        return None
    return history


def wait_for(works: list[Work], issued: Issued, number: int) -> None:
    """Wait for all of `works`, which make up the collective `issued`, then tell observers.

    On a CPU the host waits, elsewhere the device's current stream. Meanwhile `waiting` has an entry
    for this thread.
    number: of the collective, among those that this rank has launched over its group.
    Raises RuntimeError, naming the collective and its ranks, if a work fails, as it does where
    another rank is gone or late, but an OutOfMemoryError as it is; observers are told nothing then.
    """
    thread = threading.get_ident()
    waiting[thread] = Waiting(issued, number, time.monotonic())
    try:
        with explained(issued, issued.group):
            for work in works:
                _wait(work)
    finally:
        del waiting[thread]
    for _, waited in _observers:
        waited(issued)


def _wait(work: Work) -> None:
    """Wait for `work`, which nobody needs to be told of, if it is torch's."""
    if isinstance(work, dist.Work):
        _torch.dist.wait_for_work(work)
    else:
        work.wait()


@contextlib.contextmanager
def explained(what: object, group: str | None = None) -> Iterator[None]:
    """Turn a RuntimeError raised in this context into one that names the collective and its ranks.

    A DistError stays one of its kind.

    It says what other ranks do or did, as far as that can be found out (`explain_by`), and ends
    with the original message. An OutOfMemoryError is left as it is.
    what: the collective; its text names it. group: its name, if that is known.
    """
    try:
        yield
    except torch.OutOfMemoryError:  # of this rank's own
        raise
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        ranks = dist.get_process_group_ranks(
            _torch.dist.default_group() if group is None else _torch.dist.resolve_group(group)
        )
        found = [why for explain in _explaining if (why := explain(ranks))]
        why = found[0] if found else UNEXPLAINED
        kind = type(error) if isinstance(error, dist.DistError) else RuntimeError
        raise kind(
            f"rank {dist.get_rank()}: {what} over {name_ranks(ranks)} failed, {why}. {error}"
        ) from error


UNEXPLAINED = (
    "as one of them ended, is stuck, or went another way: look at what each of them says last, or "
    "at what AUTOSHARD_WATCHDOG=30 makes them say"
)

Explain = Callable[[Sequence[int]], str]

_explaining: list[Explain] = []


def explain_by(explain: Explain) -> None:
    """Have `explain` say why a collective over ranks has failed, as "as rank 1 ended"; or "".

    It is called with their numbers, in the thread that has waited; it takes the place of one that
    was given before.
    """
    _explaining[:] = [explain]


LaunchObserver = Callable[[Issued], None]

_observers: list[tuple[LaunchObserver, LaunchObserver]] = []


@contextlib.contextmanager
def observe(
    launched: LaunchObserver, waited: LaunchObserver = lambda issued: None
) -> Iterator[None]:
    """Tell observers of every gather, reduce and all-reduce while this context is open.

    Eager ones and compiled ones; not what a user's `comm_hook` sends.
    launched: called with each collective right before its launch.
    waited: called with each collective after it has been waited for without an error.
    Both are called by whichever thread does so.
    """
    pair = launched, waited
    _observers.append(pair)
    try:
        yield
    finally:
        _observers.remove(pair)


def launch(issued: Issued, begin: Callable[..., Begun], *arguments: Any) -> Begun:
    """Launch a collective: tell observers, count it, and return `begin(*arguments)`.

    The last of `arguments` is the process group.
    A RuntimeError of `begin` is raised with the collective named, which stays counted. If torch's
    Flight Recorder may be on, the call goes through a function whose name describes the collective.
    """
    threads.check(issued.group, issued)
    key, group = (dist.get_rank(), issued.group), arguments[-1]
    history = _histories.get(key)
    if history is None or not history.is_of(group):  # torch gives names again
        history = _histories[key] = _History(group)
    for launched, _ in _observers:
        launched(issued)
    fields = issued.kind, issued.members, issued.group, issued.bucket, issued.params
    history.recent.append(fields)
    history.launched += 1
    before = _torch.dist.num_issued(group)
    with explained(issued, issued.group):
        if _is_recorded():
            begin = _caller(str(issued), begin)
        begun = begin(*arguments)
    history.issued += _torch.dist.num_issued(group) - before
    return begun


@functools.cache
def _is_recorded() -> bool:
    """Tell whether torch's Flight Recorder may be on: with NCCL it is unless it is switched off.

    A size in the environment decides, NCCL or not. Later calls give the first answer.
    """
    size = os.environ.get("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE"))
    return dist.is_nccl_available() if size is None else size != "0"


def _caller(name: str, begin: Callable[..., Begun]) -> Callable[..., Begun]:
    """Wrap `begin` in a function called `name`, which passes its arguments on to `begin`.

    The Flight Recorder keeps with each collective the names of the functions that called it.
    """
    named = FunctionType(_call.__code__.replace(co_name=name), {})
    return functools.partial(named, begin)


def _call(begin: Callable[..., Begun], *arguments: Any) -> Begun:
    return begin(*arguments)
