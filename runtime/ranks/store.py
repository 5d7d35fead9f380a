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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from autoshard.runtime.comm.at_exit import at_exit

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.1  # between two questions
# More ranks ask more rarely, so that all of them together ask no more than 5,000 times a second
# after some time, and 40,000 times at first: about what a TCPStore answers on one core.
LONGEST_A_RANK_S, SHORTEST_A_RANK_S = 200e-6, 25e-6
IDLE_S = 1.0
LONGEST_END_S = 2.0  # to wait for a question that is under way as Python exits

_Question = tuple[Callable[[], Any], queue.SimpleQueue[Any]]
"""Question to a store, and the queue for its answer or error."""


class Store:
    """Client of a `torch.distributed.Store` that waits for an answer no longer than `limit_s`.

    Then it raises DistNetworkError, and so does every later question, at once. A thread asks, over
    a connection of its own (a clone of `store`), from when this is made until it is freed.
    idle: called with the store itself by the thread that asks, every IDLE_S.
    """

    def __init__(self, store: Any, idle: Callable[[Any], None] = lambda store: None) -> None:
        """Clone `store`, and start a daemon thread that asks the clone until this object is freed.

        `limit_s` is 60 until it is set. The thread calls `idle` with the clone about once IDLE_S;
        what that raises is passed over.
        """
        self.limit_s = 60.0
        self._store = store.clone()
        self._asked: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._is_silent = False
        self._rests = threading.Event()
        weakref.finalize(self, self._asked.put, None).atexit = False
        self._thread = threading.Thread(
            target=_answer,
            args=(self._asked, functools.partial(idle, self._store), self._rests),
            name="autoshard store",
            daemon=True,
        )
        self._thread.start()
        _running.add(self)
        at_exit(_end_all)

    def end(self) -> None:
        """Have the thread end, and wait for it; later questions raise DistNetworkError."""
        self._is_silent = True
        self._asked.put(None)
        self._thread.join(timeout=LONGEST_END_S)

    def rest(self) -> None:
        """Have the thread call `idle` no more, as before others may end the store."""
        self._rests.set()

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(lambda store: store.check(list(keys))))

    def set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def get(self, key: str) -> str:
        """Return the value of `key`, which has to be there: torch waits for one that is not."""
        return bytes(self._ask(lambda store: store.get(key))).decode()

    def set_all(self, values: Mapping[str, str]) -> None:
        self._ask(lambda store: store.multi_set(list(values), list(values.values())))

    def delete(self, *keys: str) -> None:
        self._ask(lambda store: [store.delete_key(key) for key in keys])

    def add(self, key: str, amount: int) -> int:
        """Add to the number at `key`, 0 if there is none, and return the sum; in one piece."""
        return int(self._ask(lambda store: store.add(key, amount)))

    def append(self, key: str, text: str) -> None:
        """Append to the text at `key`, empty if there is none, in one piece."""
        self._ask(lambda store: store.append(key, text))

    def set_first(self, key: str, value: str) -> str:
        """Set `key` if it is not there, in one piece; return what is there then."""
        found = self._ask(lambda store: store.compare_set(key, "", value))
        return bytes(found).decode()

    def wait_for(
        self,
        key: str,
        seconds: float,
        num_ranks: int = 1,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Ask for `key`, more and more rarely; return whether it is there within `seconds`.

        Asks at least once, whatever `seconds`. (A store that is told to wait says so on stderr when
        it has waited in vain.)
        num_ranks: how many wait for something at the same time.
        check: called before each pause; what it raises ends the wait.
        """
        deadline = time.monotonic() + seconds
        pause_s = max(SHORTEST_PAUSE_S, SHORTEST_A_RANK_S * num_ranks)
        longest_s = max(LONGEST_PAUSE_S, LONGEST_A_RANK_S * num_ranks)
        while not self.check([key]):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            check()
            time.sleep(min(pause_s, left_s))
            pause_s = min(1.5 * pause_s, longest_s)
        return True

    def begin(self, question: Callable[[Any], Any]) -> Callable[[], Any]:
        """Have the thread call `question` with the store, and return at once.

        Returns a function that waits for what `question` returns, and returns it, or raises what it
        raises; DistNetworkError after `limit_s` without an answer, and at once in all later calls.
        """
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if not self._is_silent:
            self._asked.put((functools.partial(question, self._store), answer))

        def end() -> Any:
            try:
                found, error = answer.get(timeout=0.0 if self._is_silent else self.limit_s)
            except queue.Empty:
                self._is_silent = True
                raise dist.DistNetworkError(
                    f"the store has not answered for {self.limit_s:.0f} s"
                ) from None
            if error is not None:
                raise error
            return found

        return end

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Have the thread call `question` with the store, and wait, as `begin`."""
        return self.begin(question)()


_running: weakref.WeakSet[Store] = weakref.WeakSet()


def _end_all() -> None:
    """End the threads of all stores, as Python exits.

    A thread that comes out of torch's client while Python ends would abort the process: Python ends
    it by unwinding C++ frames that must not be unwound ("terminate called without an active
    exception").
    """
    for store in list(_running):
        store.end()


def _answer(
    asked: queue.SimpleQueue[_Question | None], idle: Callable[[], None], rests: threading.Event
) -> None:
    """Answer questions in turn until a None comes, as the thread of a `Store` does.

    What a question returns, or the exception that it raises, is put into its queue. Every IDLE_S,
    between two questions, `idle` is called until `rests` is set; its exceptions are passed over.
    """
    last = time.monotonic()
    while True:
        with contextlib.suppress(queue.Empty):
            each = asked.get(timeout=IDLE_S)
            if each is None:
                return
            question, answer = each
            try:
                answer.put((question(), None))
            except Exception as error:
                answer.put((None, error))
        if time.monotonic() - last >= IDLE_S and not rests.is_set():
            with contextlib.suppress(Exception):  # a store that is gone: who asks is told
                idle()
            last = time.monotonic()
