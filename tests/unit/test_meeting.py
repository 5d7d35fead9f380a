"""Ranks that meet in a store, as threads of this process."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from autoshard import _torch
from autoshard.runtime.comm import flights
from autoshard.runtime.comm.mesh import NAMED, name_ranks
from autoshard.runtime.ranks import meeting, notices
from autoshard.runtime.ranks.meeting import Answers, meet
from autoshard.runtime.ranks.notices import wait_and_look
from autoshard.runtime.ranks.party import Missing, Party, find_each_other
from autoshard.runtime.ranks.store import Store

LIMIT_S = 60.0


class Ranks:
    """Ranks of one life of a job, as one thread each."""

    def __init__(self, size: int, store: Any = None, *, name: str = "mesh") -> None:
        self.real = store if store is not None else dist.HashStore()
        self.alone = [Party(Store(self.real), name, rank, range(size)) for rank in range(size)]
        self.parties: list[Party] = []
        self.size = size

    def each(self, call: Callable[[int], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """What `call(rank)` returns, or the exception that it raises, for all ranks at once."""
        ranks = ranks if ranks is not None else range(self.size)
        with ThreadPoolExecutor(len(ranks)) as pool:
            futures = [pool.submit(call, rank) for rank in ranks]
            return [each.exception(LIMIT_S) or each.result() for each in futures]

    def find(self, timeout_s: float = LIMIT_S, ranks: Sequence[int] | None = None) -> list[Any]:
        found = self.each(
            lambda rank: find_each_other(self.alone[rank], uuid.uuid4().hex, timeout_s), ranks
        )
        self.parties = found
        return found

    def say(
        self,
        rank: int,
        text: str,
        number: int = 0,
        topic: str = "topic",
        timeout_s: float = LIMIT_S,
    ) -> Answers:
        party = self.parties[rank]
        place = f"{party.prefix}/{topic}/{number}"
        before = f"{party.prefix}/{topic}/{number - 1}" if number else None

        def wait(key: str, withdraw: Callable[[], Any]) -> None:
            limit = timedelta(seconds=timeout_s)
            what = f"rank {rank} came to {topic}"
            wait_and_look(party, place, key, limit, withdraw, what, "A hint.")

        return meet(party, place, before, text, wait, may_differ=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience and pauses of a tenth."""
    monkeypatch.setattr(notices, "PATIENCE_S", 0.3)
    monkeypatch.setattr(notices, "LOOK_S", 0.1)
    monkeypatch.setattr(notices, "GATHERING_S", 0.05)
    monkeypatch.setattr(meeting, "LEAVING_S", 0.5)


def test_all_say_the_same() -> None:
    """And the store has as many keys after many rounds as after two."""
    ranks = Ranks(5)
    assert len({party.session for party in ranks.find()}) == 1
    num_keys = []
    for number in range(5):
        for answers in ranks.each(lambda rank, number=number: ranks.say(rank, "a", number)):
            assert answers.own.text == "a"
            assert answers.own.count == 5
            assert not answers.others
        num_keys.append(ranks.real.num_keys())
    assert num_keys[1:] == [num_keys[1]] * 4


def test_some_say_something_else() -> None:
    ranks = Ranks(6)
    ranks.find()
    texts = ["a", "b", "a", "c", "a", "b"]
    for rank, answers in enumerate(ranks.each(lambda rank: ranks.say(rank, texts[rank]))):
        assert answers.own.text == texts[rank]
        said = {answer.text: answer.ranks for answer in answers.all}
        assert said == {"a": [0, 2, 4], "b": [1, 5], "c": [3]}
        assert [answer.text for answer in answers.all] == ["a", "b", "c"]
        assert [answer.by_whom() for answer in answers.all] == [
            "ranks [0, 2, 4]",
            "ranks [1, 5]",
            "rank 3",
        ]
    before = ranks.real.num_keys()
    ranks.each(lambda rank: ranks.say(rank, "a", 1))
    assert ranks.real.num_keys() < before


def test_each_says_something_else() -> None:
    """No more than NAMED answers are told; all ranks learn of the same ones."""
    ranks = Ranks(NAMED + 5)
    ranks.find()
    found = ranks.each(lambda rank: ranks.say(rank, f"text {rank}"))
    told = [{other.text for other in answers.others} | {answers.own.text} for answers in found]
    assert {len(each) for each in told} <= {NAMED, NAMED + 1}
    assert len(set.intersection(*told)) == NAMED
    assert [answers.own.ranks for answers in found] == [[rank] for rank in range(NAMED + 5)]


def test_long_texts() -> None:
    """They are read by the first NAMED of those that say each, and not by all."""
    ranks = Ranks(NAMED + 3)
    ranks.find()
    long = "x" * (meeting.LONG + 1)
    found = ranks.each(lambda rank: ranks.say(rank, long if rank else "short"))
    assert found[0].others[0].text == long
    assert all(answers.others[0].text == "short" for answers in found[1:])
    found = ranks.each(lambda rank: ranks.say(rank, "short" if rank else long, 1))
    assert (
        sorted(answers.others[0].text is None for answers in found[1:])
        == [False] * NAMED + [True] * 2
    )


def test_a_restart_on_the_same_store() -> None:
    """What ranks of an earlier life left there, some of them half way, is not taken for new."""
    store = dist.HashStore()
    first = Ranks(4, store)
    (late,) = first.find(0.2, ranks=[2])
    assert isinstance(late, Missing)
    late = first.find(0.5, ranks=[0, 1, 3])[0]
    assert isinstance(late, Missing)
    second = Ranks(4, store)
    sessions = {party.session for party in second.find()}
    third = Ranks(4, store)
    sessions |= {party.session for party in third.find()}
    assert len(sessions) == 2
    answers = third.each(lambda rank: third.say(rank, "a"))
    assert all(each.own.count == 4 for each in answers)


def test_who_is_missing_at_first() -> None:
    ranks = Ranks(4)
    first, second, third = ranks.find(0.5, ranks=[0, 1, 3])
    assert str(first) == "ranks [2]"
    assert isinstance(second, Party)
    assert isinstance(third, Party)
    others = Ranks(3)
    assert [str(each) for each in others.find(0.2, ranks=[1, 2])] == ["ranks [0]"] * 2


@pytest.mark.usefixtures("quick")
def test_who_is_missing_later() -> None:
    """Whoever came is not counted any more, and may come again."""
    ranks = Ranks(4)
    ranks.find()
    errors = ranks.each(lambda rank: ranks.say(rank, "a", timeout_s=0.8), [0, 2, 3])
    for rank, error in zip([0, 2, 3], errors, strict=True):
        assert f"rank {rank} came to topic, and ranks [1] did not within 0:00:00.8" in str(error)
    assert " came and gave up" not in str(min(errors, key=lambda error: len(str(error))))
    answers = ranks.each(lambda rank: ranks.say(rank, "a"))
    assert all(each.own.count == 4 for each in answers)


@pytest.mark.usefixtures("quick")
def test_ranks_that_wait_elsewhere() -> None:
    """All of both places say so, and where the others are, long before their time is over."""
    ranks = Ranks(5)
    ranks.find()
    topics = ["here", "here", "there", "here", "there"]
    errors = ranks.each(lambda rank: ranks.say(rank, "a", topic=topics[rank]))
    for rank, error in enumerate(errors):
        assert isinstance(error, RuntimeError)
        other = "there" if topics[rank] == "here" else "here"
        assert f"rank {rank} came to {topics[rank]}, while others wait elsewhere: " in str(error)
        assert f" came to {other}" in str(error)
    answers = ranks.each(lambda rank: ranks.say(rank, "a", topic="here"))
    assert all(each.own.count == 5 for each in answers)


@pytest.mark.usefixtures("quick")
def test_another_one_looks_if_the_first_is_gone() -> None:
    ranks = Ranks(3)
    ranks.find()
    begun = threading.Event()

    def say(rank: int) -> Any:
        if rank == 1:
            begun.wait()
        return ranks.say(rank, "a", timeout_s=0.6 if rank == 0 else 2.0)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(say, 0), pool.submit(say, 1)
        assert "ranks [1, 2]" in str(first.exception(LIMIT_S))
        begun.set()
        says = "and ranks [2] did not within 0:00:02 and ranks [0] came and gave up: they ended"
        assert says in str(second.exception(LIMIT_S))


def test_too_late_to_withdraw() -> None:
    """A rank that gives up as the last one comes is through with the others."""
    ranks = Ranks(2)
    first, second = ranks.find()
    withdrawn = []

    def give_up(key: str, withdraw: Callable[[], bool]) -> None:
        withdrawn.append(withdraw())
        if not withdrawn[-1]:
            return
        second.store.add(f"{first.prefix}/late/0/come", 1)  # it comes after all
        raise RuntimeError

    with pytest.raises(RuntimeError):
        meet(first, f"{first.prefix}/late/0", None, "a", give_up, may_differ=False)
    place = f"{first.prefix}/late/1"
    second.store.set(f"{place}/done", "same")
    second.store.add(f"{place}/come", 1)
    second.store.add(f"{place}/come", -1)

    def come(key: str, withdraw: Callable[[], bool]) -> None:
        second.store.add(f"{place}/come", 1)
        give_up(key, withdraw)

    meet(first, place, None, "a", come, may_differ=False)
    assert withdrawn == [True, False]
    assert second.store.add(f"{place}/come", 0) == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("is_member", [False, True])
def test_a_collective_of_others(is_member: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing rank that waits in one which this rank is not to launch does not wait for it."""
    monkeypatch.setattr(_torch.dist, "is_member", lambda group: is_member)
    monkeypatch.setattr(flights, "num_launched", lambda group: 0)
    ranks = Ranks(2)
    first, _ = ranks.find()
    notice = {"what": "rank 1 waits for the gather of a", "group": "7", "number": 3}
    first.store.set(notices.collective_key(first.session, 1), json.dumps(notice))
    says = "wait elsewhere: rank 1 waits for the gather of a" if is_member else "did not within"
    with pytest.raises(RuntimeError, match=says):
        ranks.say(0, "a", timeout_s=0.8)


def test_names() -> None:
    assert name_ranks([1, 2], 2) == "ranks [1, 2]"
    assert name_ranks(range(100), 100) == f"ranks {list(range(NAMED))} and {100 - NAMED} more"
