"""Questions to a store that answers, fails, or does neither."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from autoshard.runtime.ranks import store as stores
from autoshard.runtime.ranks.store import Store


class Silent:
    """The other side of a cut cable."""

    def __init__(self) -> None:
        self.is_mended = threading.Event()
        self.num_asked = 0

    def clone(self) -> Silent:
        return self

    def check(self, keys: list[str]) -> bool:
        self.num_asked += 1
        return self.is_mended.wait()


class Broken(Silent):
    def check(self, keys: list[str]) -> bool:
        raise dist.DistStoreError("no such key")


def test_answers() -> None:
    store = Store(dist.HashStore())
    assert not store.check(["a"])
    store.set("a", "one")
    store.set("b", "two")
    assert store.check(["a", "b"])
    assert [store.get("b"), store.get("a")] == ["two", "one"]
    store.delete("a")
    assert not store.check(["a"])
    assert store.get("b") == "two"


def test_a_store_that_does_not_answer() -> None:
    silent = Silent()
    store = Store(silent)
    store.limit_s = 0.2
    for _ in range(3):  # the first waits, the others know
        with pytest.raises(dist.DistNetworkError, match="not answered for 0 s"):
            store.check(["a"])
    assert silent.num_asked == 1
    silent.is_mended.set()


def test_errors_come_to_who_asked() -> None:
    store = Store(Broken())
    for _ in range(2):
        with pytest.raises(dist.DistStoreError, match="no such key"):
            store.check(["a"])


def test_no_thread_is_left() -> None:
    """Nor is the store kept by what it was asked last."""
    gc.collect()
    known = set(threading.enumerate())
    store: Any = Store(dist.HashStore())
    (thread,) = set(threading.enumerate()) - known
    store.set("a", "one")
    del store
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_a_store_that_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread asks nothing by itself any more, and answers as before."""
    monkeypatch.setattr(stores, "IDLE_S", 0.01)
    called: list[object] = []
    store = Store(dist.HashStore(), idle=called.append)
    store.set("a", "one")
    while not called:
        store.get("a")
    store.rest()
    store.get("a")
    count = len(called)
    for _ in range(5):
        time.sleep(0.02)
        assert store.get("a") == "one"
    assert len(called) <= count + 1  # one may have been on its way


ENDS = """
import contextlib
import time
from datetime import timedelta
import torch.distributed as dist
from autoshard.runtime.ranks import store as module


def ask(store):
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        with contextlib.suppress(RuntimeError):
            store.wait(["never"], timedelta(milliseconds=20))


module.IDLE_S = 0.01
many = [[] for _ in range(1_000_000)]  # which Python looks through as it ends
store = module.Store(dist.TCPStore("localhost", 0, is_master=True), ask)
time.sleep(0.3)  # its thread is in torch's client now, again and again
"""


def test_a_process_that_ends_meanwhile() -> None:
    """Python ends without an abort while the thread asks: it waits for the thread."""
    command = [sys.executable, "-c", ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
