"""What ranks say of themselves in the store: positions, verdicts, farewells."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.passes.ir.layout import Member
from autoshard.runtime.comm import flights
from autoshard.runtime.comm.flights import Issued
from autoshard.runtime.ranks import farewells, verdicts, waits
from autoshard.runtime.ranks import judge as judges
from autoshard.runtime.ranks.judge import Judge
from autoshard.runtime.ranks.party import Party
from autoshard.runtime.ranks.positions import Positions
from autoshard.runtime.ranks.store import Store
from autoshard.runtime.ranks.waits import PLACE, Wait
from autoshard.runtime.training.checkpoint import reports


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    _torch.dist.pretend_ranks(2)
    yield
    dist.destroy_process_group()


def positions(store: Store) -> Positions:
    return Positions(store, 0, threading.get_ident(), lambda: "")


def waits_since(since: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = None if since is None else Wait(PLACE, "it", since, place="p", ranks=[0, 1])
    monkeypatch.setattr(waits, "current", lambda main: wait)


def verdict_on(since: float, told: Positions, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What rank 0, which waits since 1.0, notes of a verdict on a wait since `since`."""
    noted: list[str] = []
    waits_since(1.0, monkeypatch)
    monkeypatch.setattr(verdicts, "note", lambda text, since, breaks: noted.append(text))
    told.tell_verdict({0: since}, "in vain", breaks=False)
    return noted


def test_a_verdict_on_this_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict_on(1.0, positions(Store(dist.HashStore())), monkeypatch) == ["in vain"]


def test_a_verdict_on_another_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank has gone on since, and is left alone."""
    assert verdict_on(0.5, positions(Store(dist.HashStore())), monkeypatch) == []


def test_a_verdict_of_an_earlier_process(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(dist.HashStore())
    first = positions(store)
    verdict_on(1.0, first, monkeypatch)
    assert first.verdict()["text"] == "in vain"
    assert positions(store).verdict() == {}


@pytest.mark.parametrize(
    ("age", "is_done", "counts"), [(9, False, True), (1, False, False), (9, True, False)]
)
def test_waits_that_count(
    age: float, is_done: bool, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are short, or at a place where all have come, do not."""
    store = Store(dist.HashStore())
    if is_done:
        store.set("p/done", "1")
    judge = Judge(positions(store), 1.0)
    waits_since(time.monotonic() - age, monkeypatch)
    monkeypatch.setattr(judges, "ANSWER_S", 0.2)  # for rank 1, which is not there
    assert bool(judge._in_vain(judge._states(), [1])) is counts


def test_looks_leave_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the store, however often a rank has looked."""
    inner = dist.HashStore()
    judge = Judge(positions(Store(inner)), 1.0)
    waits_since(time.monotonic() - 9.0, monkeypatch)
    looks: list[int] = []
    monkeypatch.setattr(judge, "_judge", lambda: looks.append(1))
    judge.look(0)
    known = inner.num_keys()
    for asked in (1, 2):
        judge._looked = 0.0
        judge.look(asked)
    assert (len(looks), inner.num_keys()) == (3, known)


def test_waits_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a backward, those of threads that autograd started count; a helper's are its own."""
    main, is_over = threading.get_ident(), threading.Event()
    frame = SimpleNamespace(f_globals={"__name__": "torch.autograd.graph"})
    monkeypatch.setattr("sys._current_frames", lambda: {main: frame})

    def wait() -> None:
        with waits.at_place("p", [0, 1], "it"):
            has_begun.set()
            is_over.wait(10.0)

    def found(start: Any) -> Wait | None:
        has_begun.clear()
        start(wait, ())
        assert has_begun.wait(10.0)
        return waits.current(main)

    has_begun = threading.Event()
    try:
        assert found(lambda target, args: threading.Thread(target=target).start()) is None
        assert found(_thread.start_new_thread) is not None
    finally:
        is_over.set()
    deadline = time.monotonic() + 10.0
    while waits._waits and time.monotonic() < deadline:
        time.sleep(0.01)


def test_another_group_of_one_name() -> None:
    """What was launched over the first, and which meshes had met then, is not the second's."""
    for _ in range(2):
        group = dist.group.WORLD
        assert not flights.latest_launched(0)
        assert not waits.parties()
        issued = Issued("gather", (Member(torch.float32, (2,)),), str(group.group_name))
        flights.launch(issued, lambda group: None, group)
        waits.parties().add("mesh")
        assert flights.latest_launched(0) == {group.group_name: (1, issued)}
        assert list(flights.recent_launched(0, group.group_name)) == [1]
        assert flights.num_launched(group.group_name) == 1
        del group
        dist.destroy_process_group()
        _torch.dist.pretend_ranks(2)


def test_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier process's is forgotten; an error ends the waits of others; a clean end says it."""
    broken: list[int] = []
    monkeypatch.setattr(verdicts, "break_groups", lambda: broken.append(1))
    monkeypatch.setattr(farewells, "at_exit", lambda work: None)
    monkeypatch.setattr(farewells, "_speakers", [])
    inner = dist.HashStore()
    for error, said in ((None, "has ended: its script"), (ValueError("no file"), "ValueError")):
        store = Store(inner)
        monkeypatch.setattr("sys.last_value", error, raising=False)
        farewells.say_at_exit(store, 1, 2)
        assert farewells.read(store, 1) == ""
        farewells._say_at_exit()
        assert said in farewells.read(store, 1)
        assert len(broken) == (error is not None)


def test_the_end_waits_for_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer any more, as its host is gone, holds up nobody's exit."""
    monkeypatch.setattr(farewells, "at_exit", lambda work: None)
    monkeypatch.setattr(farewells, "_speakers", [])
    monkeypatch.setattr(farewells, "STORE_S", 0.2)
    monkeypatch.setattr(reports, "STORE_S", 0.2)
    is_back, begun = threading.Event(), time.monotonic()
    stores = [Store(dist.HashStore()) for _ in range(2)]
    farewells.say_at_exit(stores[0], 1, 2)
    for store in stores:
        store.begin(lambda store: is_back.wait())
    farewells._say_at_exit()
    reports.Reports(Party(stores[1], "end", 0, range(2)), 60.0).linger()
    assert time.monotonic() - begun < 20
    is_back.set()
