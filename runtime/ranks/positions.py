"""Positions: ranks ask each other, over the store, where they are; a thread of each answers.

    autoshard/watchdog/asked           how often somebody has asked
    autoshard/watchdog/answers/<n>     what ranks have answered to that
    autoshard/watchdog/verdict         which ranks were found to wait in vain, and where

A rank asks after `asked` every second, and only if that has grown for more.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

from autoshard.runtime.comm import flights
from autoshard.runtime.ranks import verdicts, waits
from autoshard.runtime.ranks.code import code_of
from autoshard.runtime.ranks.stalls import State
from autoshard.runtime.ranks.store import Store

PREFIX = "autoshard/watchdog"
_VERDICT = f"{PREFIX}/verdict"
_KEPT = 20  # answers, for those that look late

Position = dict[str, Any]


class Positions:
    """Position of this rank, which it tells if asked, and those of others, which it asks for.

    What others asked before this was made is not answered.
    """

    def __init__(self, store: Store, rank: int, main: int, waits_on: Callable[[], str]) -> None:
        """Begin to answer.

        main: the thread that runs the user's code.
        waits_on: returns the group of the collective that this rank waits for; "" for none.
        """
        self.store, self.rank, self.main = store, rank, main
        self._waits_on = waits_on
        self._seen = self._began = store.add(f"{PREFIX}/asked", 0)
        self._noted = ""

    def answer(self) -> int:
        """Tell where this rank is, if another one has asked; return how often somebody has.

        Also takes note of a verdict on this rank.
        """
        asked = self.store.add(f"{PREFIX}/asked", 0)
        if asked > self._seen:
            self._seen = asked
            self.store.append(f"{PREFIX}/answers/{asked}", json.dumps(self._position()) + "\n")
            self._take_verdict()
        return asked

    def ask(self, ranks: Collection[int], seconds: float, pause_s: float) -> dict[int, Position]:
        """Return where those of `ranks` are that answer within `seconds`, by rank."""
        asked = self.store.add(f"{PREFIX}/asked", 1)
        self.store.delete(f"{PREFIX}/answers/{asked - _KEPT}")
        found: dict[int, Position] = {}
        deadline = time.monotonic() + seconds
        while len(found) < len(ranks) and time.monotonic() < deadline:
            self.answer()
            for number in range(
                asked, self._seen + 1
            ):  # answers to whoever asked later are as good
                key = f"{PREFIX}/answers/{number}"
                if self.store.check([key]):
                    for line in self.store.get(key).splitlines():
                        position = json.loads(line)
                        if position["rank"] in ranks:
                            found.setdefault(position["rank"], position)
            time.sleep(pause_s)
        return found

    def tell_verdict(self, stuck: dict[int, float], text: str, *, breaks: bool) -> None:
        """Tell ranks that they wait in vain: `stuck` has each, with the `since` of its wait.

        breaks: whether some of them wait for a collective.
        """
        asked = self.store.add(f"{PREFIX}/asked", 0)
        said = {"asked": asked + 1, "stuck": stuck, "text": text, "breaks": breaks}
        self.store.set(_VERDICT, json.dumps(said))
        self.store.add(f"{PREFIX}/asked", 1)
        self.answer()

    def verdict(self) -> dict[str, Any]:
        """Return the latest verdict, if there was one since this was made; else {}."""
        if not self.store.check([_VERDICT]):
            return {}
        said: dict[str, Any] = json.loads(self.store.get(_VERDICT))
        return said if said["asked"] > self._began else {}

    def _take_verdict(self) -> None:
        """End this rank's wait if it was found to be in vain, and goes on."""
        said, wait = self.verdict(), waits.current(self.main)
        if wait is None or said.get("stuck", {}).get(str(self.rank)) != wait.since:
            return
        verdicts.note(said["text"], wait.since, breaks=wait.kind != waits.PLACE)

    def _position(self) -> Position:
        """Where this rank is: {"rank", "code": its line, "groups": {name: [number, what, waits]}}.

        number, what: the latest collective launched over the group, the latter in words.
        waits: whether it waits for one of the group.
        And "state", a `stalls.State`, with "age", the seconds that its wait has taken.
        """
        waits_on = self._waits_on()
        wait = waits.current(self.main)
        launched = flights.latest_launched(self.rank)
        code = code_of(sys._current_frames().get(self.main))
        state = State(
            wait,
            code,
            {group: number for group, (number, _) in launched.items()},
            flights.num_of_others(self.rank),
            waits.num_in_torch(),
            waits.parties(),
            {group: self._labels(group) for group in launched},
        )
        return {
            "rank": self.rank,
            "code": code,
            "groups": {
                group: [number, str(issued), waits_on == group]
                for group, (number, issued) in launched.items()
            },
            "state": state.to_json(),
            "age": 0.0 if wait is None else time.monotonic() - wait.since,
        }

    def _labels(self, group: str) -> dict[int, list[str]]:
        recent = flights.recent_launched(self.rank, group)
        return {number: waits.label(issued) for number, issued in recent.items()}
