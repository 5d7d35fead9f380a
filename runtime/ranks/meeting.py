"""A meeting: ranks of a party come to a place in the store, and learn whether all say the same.

Each says a digest of its answer, and counts itself; the last to come says whether all are the same.
So a rank sends and reads some hundred bytes, however many ranks there are. Only if answers differ
are texts told: of each answer by the first rank that has it, with the ranks that gave it.

    <place>/first      the digest of the first to come
    <place>/differs    somebody's is another one
    <place>/come       how many have come
    <place>/done       all have; "same" or "differ"

and, if they differ,

    <place>/digests    all, NAMED at most
    <place>/of/...     ranks that gave one, NAMED at most
    <place>/count/...  how many gave it
    <place>/text/...   the answer
    <place>/told       how many ranks have told theirs; all_told
    <place>/left       how many have read all; all_left
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from autoshard.runtime.comm.mesh import NAMED, name_ranks
from autoshard.runtime.ranks import notices
from autoshard.runtime.ranks.party import LEAVING_S, Party

Wait = Callable[[str, Callable[[], bool]], None]
"""Waits until a key is there; otherwise it calls the function, which undoes this rank's coming, and
raises, but if the function returns False: then it is too late, as all have come."""

LONG = 20_000  # characters of a text, of which not every rank need have a copy


@dataclass(frozen=True)
class Answer:
    """An answer that ranks of a party gave.

    text:  what they said; None if it is longer than LONG, and this rank none of those that read it,
           the first NAMED to say each answer.
    ranks: the first NAMED of those that said it, in order.
    count: how many said it.
    """

    text: str | None
    ranks: Sequence[int]
    count: int

    def by_whom(self) -> str:
        """Name the ranks, as "ranks [1, 2] and 5 more"."""
        return f"rank {self.ranks[0]}" if self.count == 1 else name_ranks(self.ranks, self.count)


@dataclass(frozen=True)
class Answers:
    """Answers of all ranks of a party: `own`, and `others` that differ from it."""

    own: Answer
    others: Sequence[Answer] = ()

    @property
    def all(self) -> list[Answer]:
        return sorted([self.own, *self.others], key=lambda answer: answer.ranks[0])


def meet(
    party: Party,
    place: str,
    before: str | None,
    answer: str,
    wait: Wait,
    *,
    may_differ: bool,
) -> Answers:
    """Say `answer` at `place`, wait for all of `party`, and return what they said.

    Each rank of the party calls this once at a place. After an exception from `wait` this rank has
    not come, and may come again.
    place, before: prefixes of keys; of the place before, which nobody reads any more, they go.
    may_differ: whether the caller goes on if answers differ. Otherwise it is about to raise then,
        so this returns only once all have read the answers (after LEAVING_S at most), as this rank
        may be the one with the store.
    Raises DistError if the store is gone.
    """
    store, digest = party.store, _digest(answer)
    if store.set_first(f"{place}/first", digest) != digest:
        store.set(f"{place}/differs", "1")
    if store.add(f"{place}/come", 1) == party.size:
        differs = store.check([f"{place}/differs"])
        store.set(f"{place}/done", "differ" if differs else "same")
        if before is not None:
            _clear(party, before)
        same = not differs
    else:
        wait(f"{place}/done", lambda: _withdraw(party, place))
        same = store.get(f"{place}/done") == "same"
    if same:
        return Answers(Answer(answer, party.ranks[:NAMED], party.size))
    answers = _tell_apart(party, place, digest, answer, wait)
    if answers.others and not may_differ:
        _leave_together(party, place)
    return answers


def _withdraw(party: Party, place: str) -> bool:
    """Have this rank not come to `place`; return False, and leave it, if all have come."""
    if party.store.add(f"{place}/come", -1) < party.size - 1:
        return True
    party.store.add(f"{place}/come", 1)
    return False


def _digest(answer: str) -> str:
    return hashlib.sha256(answer.encode()).hexdigest()[:32]


def _tell_apart(party: Party, place: str, digest: str, answer: str, wait: Wait) -> Answers:
    """Tell this rank's answer, and read those of the others once all have told."""
    store = party.store
    number = store.add(f"{place}/count/{digest}", 1)
    if number == 1 and store.add(f"{place}/kinds", 1) <= NAMED:
        store.set(f"{place}/text/{digest}", answer)
        store.append(f"{place}/digests", f"{digest}:{len(answer)} ")
    if number <= NAMED:
        store.append(f"{place}/of/{digest}", f"{party.rank} ")
    if store.add(f"{place}/told", 1) == party.size:
        store.set(f"{place}/all_told", "1")
    wait(f"{place}/all_told", lambda: True)
    others = []
    for each, length in _digests(party, place).items():
        if each != digest:
            ranks = sorted(map(int, store.get(f"{place}/of/{each}").split()))
            text = store.get(f"{place}/text/{each}") if number <= NAMED or length <= LONG else None
            others.append(Answer(text, ranks, store.add(f"{place}/count/{each}", 0)))
    ranks = sorted(map(int, store.get(f"{place}/of/{digest}").split()))
    return Answers(Answer(answer, ranks, store.add(f"{place}/count/{digest}", 0)), others)


def _digests(party: Party, place: str) -> dict[str, int]:
    """Digests of the answers that ranks gave, with the lengths of these."""
    entries = (entry.partition(":") for entry in party.store.get(f"{place}/digests").split())
    return {digest: int(length) for digest, _, length in entries}


def _leave_together(party: Party, place: str) -> None:
    """Say that this rank has read all, and wait for the others, for at most LEAVING_S.

    It doesn't wait, and raises nothing, if the store is gone.
    """
    with contextlib.suppress(dist.DistError):
        if party.store.add(f"{place}/left", 1) == party.size:
            party.store.set(f"{place}/all_left", "1")
        else:
            party.wait_for(f"{place}/all_left", LEAVING_S)


_KEYS = ("first", "differs", "come", "done", *notices.KEYS)
_IF_THEY_DIFFERED = ("kinds", "digests", "told", "all_told", "left", "all_left")


def _clear(party: Party, place: str) -> None:
    """Delete the keys of `place`, which all ranks have left."""
    store = party.store
    keys = list(_KEYS)
    if store.check([f"{place}/digests"]):
        digests = _digests(party, place)
        keys += [f"{kind}/{each}" for kind in ("of", "count", "text") for each in digests]
        keys += _IF_THEY_DIFFERED
    store.delete(*(f"{place}/{key}" for key in keys))
