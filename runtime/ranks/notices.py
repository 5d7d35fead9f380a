"""Notices in the store of what each rank waits for, and a wait that reads those of the others.

Two ranks that wait for each other at different places, in the store or for a collective, would do
so for ever: they see it here, and raise. Of the ranks that wait at a place, one looks for all:

    <session>/waits/<rank>         what a rank waits for, if for long, and at which place
    <session>/collective/<rank>    which collective it waits for, if for long
    <place>/late                   a log of ranks that wait there for long
    <place>/looks                  which of them looks for those that are missing
    <place>/missing                the ones that it found missing
    <place>/verdict                what it found them waiting for, elsewhere, and who they are
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from autoshard import _torch
from autoshard.runtime.comm import flights, threads
from autoshard.runtime.comm.mesh import NAMED, name_ranks
from autoshard.runtime.ranks import verdicts, waits
from autoshard.runtime.ranks.party import LEAVING_S, Party
from autoshard.runtime.ranks.store import LONGEST_PAUSE_S, Store

PATIENCE_S = 3.0  # until a rank that waits looks for what the others do
LOOK_S = 1.0  # between two looks of 1,000 ranks or fewer; more look more rarely
GATHERING_S = 0.2  # for the others that wait at a place to say so
KEYS = ("late", "missing", "looks")  # of a place, that stay when all go on


def wait_and_look(
    party: Party,
    place: str,
    key: str,
    timeout: timedelta,
    withdraw: Callable[[], bool],
    what: str,
    hint: str,
) -> None:
    """Wait for `key`, which the last rank to come to `place` sets; after PATIENCE_S, look around.

    While this rank waits for longer, a notice in the store says where.
    withdraw: called before this raises: has this rank not come to `place`. Returns False if it is
        too late, as all have come meanwhile: this does not raise then.
    what, hint: what the message of an error begins and ends with.
    Raises RuntimeError after `timeout`, or if a missing rank waits, at another place or in a
    collective, for this one: the two would wait for ever. At another place, that rank raises, too:
    this one waits some seconds for that, before it raises. UsageError if another thread waits to
    compile meanwhile, and this one compiles.
    """
    patience_s = min(timeout.total_seconds(), PATIENCE_S)
    deadline = time.monotonic() + timeout.total_seconds()
    looker = _Looker(party, place, what)
    waiting = waits.at_place(place, party.ranks, what)
    waiting.__enter__()
    try:
        if party.wait_for(key, patience_s, threads.check_compiling):
            return
        looker.begin()
        pause_s = GATHERING_S * looker.scale
        while not party.wait_for(key, pause_s, threads.check_compiling):
            verdicts.raise_if_found(what, hint)
            others = looker.look()
            if others or time.monotonic() > deadline:
                if not withdraw():  # before others go on, and find it here
                    party.wait_for(key, LEAVING_S)
                    return
                withdraw = _nothing
            if others:
                looker.give_up()
                raise RuntimeError(f"{what}, while others wait elsewhere: {others}. {hint}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{what}, and {looker.missing(timeout)}: they ended, or went another way. "
                    f"{hint}"
                )
            pause_s = LOOK_S * looker.scale
    except BaseException:
        with contextlib.suppress(dist.DistError):
            withdraw()
        raise
    finally:
        waiting.__exit__(None, None, None)
        with contextlib.suppress(dist.DistError):
            looker.end()


_followed: dict[tuple[str, int], str] = {}  # the last verdict that a rank at a place has raised for


def _nothing() -> bool:
    """Do nothing: what was to be done has been."""
    return True


class _Looker:
    """A rank that has waited at a place for long, and looks for those that are missing.

    Of all that wait there one looks, and tells the others; if it ends, another one does.
    scale: by how much its pauses are longer than those of few ranks.
    """

    def __init__(self, party: Party, place: str, what: str) -> None:
        self.scale = max(1.0, party.size / 1000)
        self._party, self._place = party, place
        self._notice = {"what": what, "place": place, "of": party.name, "gives_up": False}
        self._has_begun, self._looks_for_all = False, False
        self._stuck: list[int] = []

    def begin(self) -> None:
        """Say in the store that this rank waits here for long."""
        store, rank = self._party.store, self._party.rank
        self._has_begun = True
        store.set(_notice_key(self._party.session, rank), json.dumps(self._notice))
        store.append(f"{self._place}/late", f"+{rank} ")

    def look(self) -> str:
        """Describe what missing ranks wait for, if they wait for this one elsewhere; else ""."""
        store, rank = self._party.store, str(self._party.rank)
        verdict = f"{self._place}/verdict"
        if store.set_first(f"{self._place}/looks", rank) != rank:
            return self._read_verdict(_read(store, verdict))
        self._looks_for_all = True
        here, gone = _present(store.get(f"{self._place}/late"))
        missing = [each for each in self._party.ranks if each not in here]
        never = [each for each in missing if each not in gone]
        store.set(f"{self._place}/missing", json.dumps([_named(never), _named(sorted(gone))]))
        self._stuck = [each for each in missing[:NAMED] if self._waits_elsewhere(each)]
        others = "; ".join(_describe(store, self._party.session, each) for each in self._stuck)
        if others:
            at = f"{rank} {time.monotonic()}"
            store.set(verdict, json.dumps({"others": others, "stuck": self._stuck, "at": at}))
        return others

    def _read_verdict(self, verdict: Any) -> str:
        """Return what `verdict`, if there is any, says of others; "" if it is from before.

        A rank that has given up may come back, or come here from where it was stuck, while the one
        that looked is still about to leave.
        """
        if not verdict or self._party.rank in verdict["stuck"]:
            return ""
        here = (self._place, self._party.rank)
        if _followed.get(here) == verdict["at"]:
            return ""
        _followed[here] = verdict["at"]
        return str(verdict["others"])

    def _waits_elsewhere(self, other: int) -> bool:
        """Tell whether rank `other` waits for this one, which is here.

        It does at another place of ranks of which this is one, or for a collective that this one
        has not launched.
        """
        store, session = self._party.store, self._party.session
        notice = _read(store, _notice_key(session, other))
        if "place" in notice:
            ranks = _read(store, f"{session}/{notice['of']}/ranks")
            is_over = store.check([f"{notice['place']}/done"])
            return notice["place"] != self._place and self._party.rank in ranks and not is_over
        collective = _read(store, collective_key(session, other))
        if not collective or not _torch.dist.is_member(collective["group"]):
            return False
        return flights.num_launched(collective["group"]) < int(collective["number"])

    def missing(self, timeout: timedelta) -> str:
        """Say which ranks have not come within `timeout`, as whoever looked last has found."""
        key = f"{self._place}/missing"
        never, gone = _read(self._party.store, key) or ("others", "")
        said = [f"{never} did not within {timeout}"] if never else []
        return " and ".join([*said, *([f"{gone} came and gave up"] if gone else [])])

    def give_up(self) -> None:
        """Say that this rank is about to raise, and let others see what it has waited for.

        The one that looks waits for those that are stuck elsewhere to give up, too, and for those
        that wait here to have read what it found, for 3 looks at most. Ranks in a collective, which
        have no notice, are not waited for.
        """
        store, session = self._party.store, self._party.session
        notice = {**self._notice, "gives_up": True}
        store.set(_notice_key(session, self._party.rank), json.dumps(notice))
        deadline = time.monotonic() + 3 * LOOK_S * self.scale
        while self._looks_for_all and time.monotonic() < deadline:
            notices = (_read(store, _notice_key(session, each)) for each in self._stuck)
            have_given_up = all(notice.get("gives_up", True) for notice in notices)
            if have_given_up and store.add(f"{self._place}/come", 0) == 0:
                return
            time.sleep(LONGEST_PAUSE_S)

    def end(self) -> None:
        """Take back what this rank has said in the store."""
        if self._has_begun:
            store, rank = self._party.store, self._party.rank
            store.append(f"{self._place}/late", f"-{rank} ")
            # Not deleted: a get would wait for it.
            store.set(_notice_key(self._party.session, rank), "{}")
            if self._looks_for_all:
                store.delete(f"{self._place}/verdict", f"{self._place}/looks")


def _present(log: str) -> tuple[set[int], set[int]]:
    """Ranks that came, as "+3", and are there; and those that came and went, as "-3"."""
    here: set[int] = set()
    came: set[int] = set()
    for entry in log.split():
        rank = int(entry[1:])
        (here.add if entry[0] == "+" else here.discard)(rank)
        came.add(rank)
    return here, came - here


def _named(ranks: Sequence[int]) -> str:
    return name_ranks(ranks, len(ranks)) if ranks else ""


def collective_notice(rank: int, thread: int) -> dict[str, Any]:
    """Notice of the collective that a thread of `rank` has waited for, if for long; else {}.

    Its keys: "what", in words, "group", and "number" of the collective there.
    thread: its `threading.get_ident()`. Long is more than PATIENCE_S.
    """
    waiting = flights.waiting.get(thread)
    if waiting is None or time.monotonic() - waiting.since <= PATIENCE_S:
        return {}
    what = f"rank {rank} waits for {waiting.issued}"
    return {"what": what, "group": waiting.issued.group, "number": waiting.number}


def collective_key(session: str, rank: int) -> str:
    """Key in the store of the notice of the collective that `rank` waits for."""
    return f"{session}/collective/{rank}"


def _describe(store: Store, session: str, other: int) -> str:
    """Describe where rank `other` waits, by its notices in the store; "rank 1" if it has none."""
    notice = _read(store, _notice_key(session, other))
    notice = notice or _read(store, collective_key(session, other))
    return str(notice.get("what", f"rank {other}"))


def _read(store: Store, key: str) -> Any:
    """Return what the JSON at `key` says; {} if there is none."""
    return json.loads(store.get(key)) if store.check([key]) else {}


def _notice_key(session: str, rank: int) -> str:
    return f"{session}/waits/{rank}"
