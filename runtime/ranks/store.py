"""Client of the store over which ranks talk, with a limit for each question.

torch's client waits for an answer for as long as the kernel sends again: if a cable is cut, a
quarter of an hour. So a thread asks, over a connection of its own, and callers that wait for it in
vain raise.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

LONGEST_PAUSE_S = 0.1  # between two questions
MANY = 64  # ranks: with more of them, the store is asked more rarely
IDLE_S = 1.0
LOOKED_AT = 16  # ranks at a time that have not come


_Question = tuple[Callable[[], Any], queue.SimpleQueue[Any]]
"""Question to a store, and the queue for its answer or error."""


class Store:
    """Client of a `torch.distributed.Store` that waits for an answer no longer than `limit_s`.

    Then it raises DistNetworkError, and so does every later question, at once. A thread asks, over
    a connection of its own (a clone of `store`), from when this is made until it is freed.
    idle: called with the store itself by the thread that asks, whenever there was nothing to ask
        for IDLE_S.
    """

    def __init__(self, store: Any, idle: Callable[[Any], None] = lambda store: None) -> None:
        """Clone `store`, and start a daemon thread that asks the clone until this object is freed.

        `limit_s` is 60 until it is set. The thread calls `idle` with the clone about once IDLE_S if
        there is nothing to ask; what that raises is passed over.
        """
        self.limit_s = 60.0
        self._store = store.clone()
        self._asked: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._is_silent = False
        weakref.finalize(self, self._asked.put, None).atexit = False
        threading.Thread(
            target=_answer,
            args=(self._asked, functools.partial(idle, self._store)),
            name="autoshard store",
            daemon=True,
        ).start()

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        """Return the value of `key`, which has to be there: torch waits for one that is not."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """Return the values of `keys`, all of which have to be there."""
        found = self._ask(lambda: self._store.multi_get(list(keys)))
        return [value.decode() for value in found]

    def delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Have the thread call `question`; return what that returns, or raise what it raises.

        Raises DistNetworkError after `limit_s` without an answer, and at once in all later calls.
        """
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            if self._is_silent:
                raise queue.Empty
            self._asked.put((question, answer))
            found, error = answer.get(timeout=self.limit_s)
        except queue.Empty:
            self._is_silent = True
            raise dist.DistNetworkError(
                f"the store has not answered for {self.limit_s:.0f} s"
            ) from None
        if error is not None:
            raise error
        return found


def _answer(asked: queue.SimpleQueue[_Question | None], idle: Callable[[], None]) -> None:
    """Answer questions in turn until a None comes, as the thread of a `Store` does.

    What a question returns, or the exception that it raises, is put into its queue. When none came
    for IDLE_S, `idle` is called, and its exceptions are passed over.
    """
    while True:
        try:
            each = asked.get(timeout=IDLE_S)
        except queue.Empty:
            with contextlib.suppress(Exception):  # a store that is gone: who asks is told
                idle()
            continue
        if each is None:
            return
        question, answer = each
        try:
            answer.put((question(), None))
        except Exception as error:
            answer.put((None, error))


class Arrivals:
    """Keys, by rank, that are waited for in the store.

    They are asked for more and more rarely. (A store that is told to wait says so on stderr when it
    has waited in vain.)
    """

    def __init__(self, store: Store, keys: dict[int, str]) -> None:
        self._store = store
        self._keys = dict(keys)
        self._longest_pause_s = LONGEST_PAUSE_S * max(1.0, len(keys) / MANY)

    def wait(self, seconds: float) -> bool:
        """Wait until all keys are there; return whether they are within `seconds`.

        Looks at least once, whatever `seconds`. Raises as `Store` does, if that can't be reached.
        """
        deadline, pause_s = time.monotonic() + seconds, 0.001
        while not self._store.check(list(self._keys.values())):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, self._longest_pause_s)
        return True

    def missing(self) -> list[int]:
        """List ranks whose keys are not there now, LOOKED_AT of them at most.

        Keys that it finds there are dropped, all but the last: `wait` asks for them no more.
        """
        found: list[int] = []
        for rank, key in list(self._keys.items()):
            if len(found) == LOOKED_AT:
                break
            if not self._store.check([key]):
                found.append(rank)
            elif len(self._keys) > 1:
                del self._keys[rank]
        return found
