"""Order in which ranks run forwards and launch collectives, compared before each that is new.

    ForwardOrder     which compiled graph, or eager forward, runs next, and how its units are
                     configured
    CollectiveOrder  the next collective of an eager step
    compare_event    what is rare and gathers, as saving a checkpoint

A rank for which nothing is new does not wait, so steps that repeat cost nothing. A rank that runs
something else than the others raises before it launches a collective that would meet another one
of its peers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard import _torch
from autoshard.runtime.ranks.agreement import compare_lines
from autoshard.runtime.ranks.exchange import exchange, group_timeout, is_alone, mesh_name


@dataclass
class CollectiveOrder:
    """Order of the collectives of one phase of a unit's steps, the same on every rank.

    A collective that came next in each of the latest steps that began like this one is not
    compared; any other is, with what the other ranks are about to launch. Before the first step
    there is none to remember: what is expected of it stands for one, and is compared in one piece.
    So all ranks start with the same, remember the same steps, and a rank that leaves these is
    noticed.

    key:    tells it from other orders, the same on every rank.
    topic:  the phase in words, "the forward of layers.3".
    expect: lists the collectives that the first step is expected to launch, in order. Those that
            it does not launch, or in another order, cost a comparison each.
    """

    key: str
    topic: str
    mesh: DeviceMesh
    expect: Callable[[], list[str]] = list
    _known: list[list[str]] = field(default_factory=list)  # steps before, latest last
    _taken: list[str] = field(default_factory=list)
    _ahead: list[tuple[list[str], int]] = field(default_factory=list)
    """Steps of `_known` that may be running again, each with the place that it has come to."""
    _has_ended: bool = False  # a step has

    def take(self, event: str) -> None:
        """Note that `event` is about to be launched; compare with other ranks if it is new here.

        They wait for each other then. What is new here: see the class.
        event: the collective in words, the same on every rank.
        Raises RuntimeError if other ranks launch another one, or don't come in time; at the first
        call, if something else is expected of their first steps.
        """
        if not self._known:
            what, expected = f"what to launch in {self.topic}", self.expect()
            timeout = group_timeout(self.mesh)
            compare_lines(f"order/{self.key}", what, expected, self.mesh, timeout)
            self._known = [expected]
            self._start()
        self._check(event)
        self._taken.append(event)

    def end(self) -> None:
        """Note that the phase is over, and remember its collectives for later steps.

        Those of the latest _KINDS different steps are remembered. If it had none, nothing is
        compared or remembered. Compares with other ranks if the end is new here, and raises
        RuntimeError if the phase goes on for them, or if they don't come in time.
        """
        if self._taken:
            self._check(_END)
            others = [known for known in self._known if known and known != self._taken]
            self._known = [*others[1 - _KINDS :], self._taken] if self._has_ended else [self._taken]
            self._has_ended = True  # what was expected of the first step is forgotten
        self._start()

    def forget(self) -> None:
        """Note that an exception broke the phase off.

        The steps before are forgotten: the next one may expect only what was launched until then,
        and compares the rest. Other ranks are not told.
        """
        self._known = [self._taken] if self._known else []
        self._start()

    def _start(self) -> None:
        self._taken, self._ahead = [], [(known, 0) for known in self._known]

    def _check(self, event: str) -> None:
        """Compare `event` with other ranks unless all steps of `_ahead` go on with it.

        Then go on in those that do; if none does, in the latest step, behind `event`. Raises
        RuntimeError as `take`.
        """
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


class ForwardOrder(threading.local):
    """Order of the forwards of this rank: the compiled graphs and the eager ones that it runs.

    They issue different collectives, and Dynamo may choose between them (past its recompile
    limit it runs a frame without its graph), on one rank and not on another. The order is that
    since the default process group was made: the next one may give meshes the same names.
    """

    def __init__(self) -> None:
        self._of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, _Forwards]
        self._of_group = weakref.WeakKeyDictionary()

    def take(self, event: str, mesh: DeviceMesh) -> None:
        """Note that the forward `event` begins; compare with other ranks if it is new.

        It is new unless it also came next when the forward before it on `mesh` last ran. Ranks that
        compare wait for each other.
        event: the forward in words, the same on every rank.
        Raises RuntimeError if other ranks of `mesh` begin another one, or don't come in time.
        """
        name, forwards = mesh_name(mesh), self._since_group_was_made()
        before = name, forwards.last.get(name, "")
        if forwards.after.get(before) != event:
            compare_event(event, mesh, hint=_RECOMPILE_HINT)
            forwards.after[before] = event
        forwards.last[name] = event

    def _since_group_was_made(self) -> _Forwards:
        group = _torch.dist.default_group()
        if group not in self._of_group:
            self._of_group[group] = _Forwards()
        return self._of_group[group]


@dataclass
class _Forwards:
    """Forwards since the default process group was made.

    last:  the latest of each mesh, by `mesh_name`.
    after: what came next when the forward of that mesh last ran, by both.
    """

    last: dict[str, str] = field(default_factory=dict)
    after: dict[tuple[str, str], str] = field(default_factory=dict)


forward_order = ForwardOrder()


def compare_event(event: str, mesh: DeviceMesh, *, hint: str) -> None:
    """Raise RuntimeError unless all ranks of `mesh` come to the same `event`; wait for them.

    Also raises it if some don't come within the group's timeout. For what is rare, as each call is
    an exchange over the store. Does nothing where this rank is alone.
    hint: what to do about it, the end of the message.
    """
    _compare("program", "the program", event, mesh, hint=hint)


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
    """Raise RuntimeError unless all ranks of `mesh` come to `event` in time; wait for them.

    Does nothing where this rank is alone.
    key, topic: as of a `CollectiveOrder`. hint: the end of the message.
    """
    if is_alone(mesh):
        return
    here = f"in {topic}, rank {dist.get_rank()} came to {event}"
    answers = exchange(f"order/{key}", event, mesh, group_timeout(mesh), failed=here, hint=hint)
    others = [f"{other.by_whom()} to {other.text}" for other in answers.others]
    if others:
        raise RuntimeError(f"{here}, but {', '.join(others)}: {hint}")
