"""Ledger of what a rank has done with a model: backwards, optimizer steps, hyper-parameters.

A rank that runs a micro-batch more and then one fewer, leaves an optimizer step out, or has another
learning rate, sends and receives as ever: nothing fails, and shards of one model are trained in
different ways. So each rank keeps a digest of all that it has done, and ranks compare them as a
backward begins, with every second one at first, later every INTERVAL. That costs a question to the
store, which a thread asks meanwhile:

    <place of a model>/<backward>    what the first to come had done by then
    <place of a model>/apart         two ranks that have not done the same

What was asked at one backward is looked at as the next begins. Backwards go in step, as they have
collectives; on a device, where the host runs ahead, it waits before it asks for what the device was
given before the backward before. So whoever asks SEEN backwards after two were found to be apart
finds that, and all ranks raise in the same backward.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.comm.streams import EventBefore, is_captured
from autoshard.runtime.ranks.exchange import is_alone, new_place, party_of
from autoshard.runtime.ranks.party import Party

EARLY, INTERVAL = 16, 8  # backwards: up to the first of them, every second is compared
A_RANK = 1 / 32  # backwards between two comparisons, for each rank: the store serves all
SEEN = 4  # backwards
TOLD = 10  # backwards that a message may tell of
LONGEST = 400  # characters for what was done after one of them


class Ledger:
    """Record of what this rank has done with a model.

    backwards: how many have begun.
    latest:    what was done after each of the latest, in words, with its number.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was done; all ranks do so together, as where they load a checkpoint."""
        self.backwards = 0
        self.latest: deque[tuple[int, str]] = deque(maxlen=TOLD)
        self._digest = hashlib.sha256()
        self._done: deque[str] = deque(maxlen=TOLD)  # since the latest backward
        self._tasks: deque[int] = deque(maxlen=64)
        self._party: Party | None = None
        self._place = ""
        self._asked: Callable[[], str | None] | None = None
        self._numbers: deque[int] = deque([0, 0], maxlen=3)  # of the latest comparisons
        self._event = EventBefore()  # of the backward before

    def note_step(self, optimizer: torch.optim.Optimizer, model: str, mesh: DeviceMesh) -> None:
        """Note that `optimizer` is about to take a step; nothing where this rank is alone.

        Comparisons begin with the first step, if ranks of `mesh` have exchanged anything before.
        model: a name of what is trained, the same on every rank.
        """
        if is_alone(mesh):
            return
        if self._party is None:  # here, as a backward may run in a thread of autograd's
            self._party = party_of(mesh)
            if self._party is not None:
                self._place = new_place(self._party, f"ledger/{model}")
        done = f"a step of {describe(optimizer)}"
        self._digest.update(done.encode())
        self._done.append(done)

    def note_backward(self, task: int) -> None:
        """Note that a backward runs, and compare with other ranks if that is due.

        task: tells the backward from others; it may be noted again.
        Raises RuntimeError if ranks were found to have done different things.
        """
        if task in self._tasks:
            return
        self._tasks.append(task)
        done = ", then ".join(self._done) or "nothing"
        self._done.clear()
        self._digest.update(b"a backward")
        self.latest.append((self.backwards, done[:LONGEST]))
        self.backwards += 1
        if self._party is None or is_captured():
            return
        self._look()
        before = self._event.record()
        interval = 2 if self.backwards <= EARLY else max(INTERVAL, int(self._party.size * A_RANK))
        if self.backwards % interval == 0:
            if before is not None:
                before.synchronize()
            self._numbers.append(self.backwards)
            did = [*self.latest]
            said = {"rank": self._party.rank, "digest": self._digest.hexdigest(), "did": did}
            question = _Comparison(self._party, self._place, [*self._numbers], said)
            self._asked = self._party.store.begin(question)

    @property
    def said(self) -> str:
        """Text about all that was done, the same on ranks that have done the same."""
        done = ", then ".join(self._done)[:LONGEST] or "nothing"
        number, digest = self.backwards, self._digest.hexdigest()[:12]
        return f"{number} backwards, and {done} after the last (digest of all: {digest})"

    def _look(self) -> None:
        """Raise RuntimeError if what was asked before has shown that ranks are apart."""
        if self._asked is not None:
            asked, self._asked, apart = self._asked, None, None
            with contextlib.suppress(dist.DistError):  # collectives will say so
                apart = asked()
            if apart is not None:
                raise RuntimeError(_describe(*json.loads(apart)))


class _Comparison:
    """Question to the store whether the first rank to come to a backward had done the same.

    numbers: of this backward, the last, and of those compared before.
    """

    def __init__(
        self, party: Party, place: str, numbers: Sequence[int], said: dict[str, Any]
    ) -> None:
        self._place, self._numbers = place, numbers
        self._said, self._is_first = said, party.rank == party.ranks[0]

    def __call__(self, store: Any) -> str | None:
        """Ask, and tell all if it has not; return what two ranks have said that are apart.

        None if that was found too late for all to find it now.
        """
        apart, (old, *_, number) = f"{self._place}/apart", self._numbers
        mine = json.dumps(self._said)
        first = bytes(store.compare_set(f"{self._place}/{number}", "", mine)).decode()
        if json.loads(first)["digest"] != self._said["digest"]:
            store.compare_set(apart, "", json.dumps([number, json.loads(first), self._said]))
        if self._is_first and old:  # all have come to the one after it
            store.delete_key(f"{self._place}/{old}")
        if not store.check([apart]):
            return None
        since, *two = json.loads(store.get(apart))
        return json.dumps(two) if since <= number - SEEN else None


def _describe(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say in what two ranks differ first, of the backwards that both tell of."""
    here, there = (dict(each["did"]) for each in (one, other))
    differing = [number for number in here if here[number] != there.get(number)]
    if differing:
        number = min(differing)
        what = (
            f": after backward {number}, rank {one['rank']} did {here[number]}, and rank "
            f"{other['rank']} {there.get(number, 'nothing')}"
        )
    else:
        what = f", before backward {min(here)}"
    return (
        f"rank {one['rank']} and rank {other['rank']} have not done the same{what}. Run as many "
        "backwards and optimizer steps on each rank, with the same hyper-parameters. Shards of the "
        "model have been trained in different ways since: load a checkpoint from before that"
    )


def describe(optimizer: torch.optim.Optimizer) -> str:
    """Describe `optimizer` by its hyper-parameters, as "SGD(lr=0.1, ...)"."""
    groups = [
        ", ".join(f"{key}={_plain(group[key])!r}" for key in optimizer.defaults if key in group)
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(dict.fromkeys(groups))})"


def _plain(value: Any) -> Any:
    """Return what is the same on all ranks if they say the same, without waiting for a device."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else type(value).__name__
