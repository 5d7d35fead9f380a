"""What ranks tell each other over the store: seconds, messages and bytes, from 8 to 16,384 ranks.

    python benchmarks/control_plane.py [--ranks 8 64 512 2048] [--virtual 8 64 512 2048 16384]

Up to some thousands, ranks are threads, A_PROCESS of them in each process, each with a connection
of its own to one TCPStore, made before; beyond that, threads that take turns by a virtual clock, at
a store that answers one question after the other, each in ANSWER_S. All run what `exchange` runs.
Start-up is the session that ranks agree on, and the first agreement; then one agreement alone.
Bytes are those of keys and values, both ways, with FRAME_BYTES for each of them and each message.

The last lines are of two real ranks: how often a model of 32 units has them agree, eagerly, when it
is sharded, in its first step, and in later ones.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import heapq
import itertools
import multiprocessing
import os
import threading
import time
import unittest.mock
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.runtime.ranks import exchange, notices, party, store
from autoshard.runtime.ranks.meeting import meet
from autoshard.runtime.ranks.notices import wait_and_look
from autoshard.runtime.ranks.party import Party, find_each_other
from autoshard.runtime.ranks.store import Store

A_PROCESS = 128  # ranks that share one, as threads; the first has one of its own
FRAME_BYTES = 8  # of a length, or of a kind of question
ANSWER_S, TRIP_S = 25e-6, 200e-6  # of a TCPStore, from one question to the next; there and back
TIMEOUT = timedelta(minutes=10)
UNITS = 32


class Counting:
    """A store of torch's, with what this rank has asked of it counted."""

    def __init__(self, real: Any) -> None:
        """Count from 0 on what is asked of `real`, by clones of this, too."""
        self._real = real
        self.messages, self.num_bytes = 0, 0

    def clone(self) -> Counting:
        """Return this, with a connection of its own."""
        self._real = self._real.clone()
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the method of the store, which is counted when it is called."""
        method = getattr(self._real, name)

        def call(*args: Any) -> Any:
            found = method(*args)
            self.messages += 1
            self.num_bytes += FRAME_BYTES + _bytes_of(args) + _bytes_of(found)
            return found

        return call


def _bytes_of(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value) + FRAME_BYTES
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes_of, value))
    return FRAME_BYTES


@dataclass
class Cost:
    """What start-up, or an agreement, takes.

    seconds:     until the last rank is through.
    messages:    of a rank, in the mean.
    num_bytes:   likewise.
    first_bytes: of the first rank, which answers all others.
    """

    seconds: float
    messages: float
    num_bytes: float
    first_bytes: float


def talk(asked: Store, rank: int, size: int, number: int, found: Party | None) -> Party:
    """Agree once with all other ranks; before the first time, on a session."""
    if found is None:
        alone = Party(asked, f"of {size}", rank, range(size))
        found = find_each_other(alone, uuid.uuid4().hex, TIMEOUT.total_seconds())
    prefix = f"{found.prefix}/order/program"
    place, before = f"{prefix}/{number}", f"{prefix}/{number - 1}" if number else None

    def wait(key: str, withdraw: Callable[[], bool]) -> None:
        wait_and_look(found, place, key, TIMEOUT, withdraw, f"rank {rank} came", "")

    answers = meet(found, place, before, "an eager forward of root", wait, may_differ=False)
    assert not answers.others
    return found


# ---- with a real store


def serve(pipe: Connection) -> None:
    """Have a store in this process until `pipe` says that it is over."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(server.port)
    pipe.recv()


def be_ranks(ranks: Sequence[int], size: int, port: int, pipe: Connection) -> None:
    """Be some `ranks` of `size`, each a thread; send their ends and counts, phase by phase."""
    connect = functools.partial(
        dist.TCPStore, "127.0.0.1", port, is_master=False, wait_for_workers=False
    )
    with ThreadPoolExecutor(8) as few:
        counting = [Counting(each) for each in few.map(lambda _: connect(), ranks)]
        stores = list(few.map(Store, counting))
    with ThreadPoolExecutor(len(ranks)) as pool:
        parties: list[Party | None] = [None] * len(ranks)
        for number in range(2):
            pipe.send("here")
            pipe.recv()
            before = [(each.messages, each.num_bytes) for each in counting]

            def be(at: int, number: int = number) -> float:
                parties[at] = talk(stores[at], ranks[at], size, number, parties[at])
                return time.monotonic()

            ends = list(pool.map(be, range(len(ranks))))
            spent = [
                (each.messages - messages, each.num_bytes - num_bytes)
                for each, (messages, num_bytes) in zip(counting, before, strict=True)
            ]
            pipe.send((max(ends), spent))


def real(size: int) -> list[Cost]:
    """Measure start-up and an agreement of `size` ranks at one TCPStore."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,), daemon=True)
    server.start()
    port = here.recv()
    pipes = []
    for start in (0, *range(1, size, A_PROCESS)):
        pipe, other = context.Pipe()
        ranks = range(start, min(start + A_PROCESS, size) if start else 1)
        context.Process(target=be_ranks, args=(ranks, size, port, other), daemon=True).start()
        pipes.append(pipe)
    costs = []
    for _ in range(2):
        for pipe in pipes:
            pipe.recv()
        begin = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        ends, spent = zip(*(pipe.recv() for pipe in pipes), strict=True)
        costs.append(_cost(max(ends) - begin, list(itertools.chain(*spent)), spent[0][0][1]))
    here.send("over")
    return costs


def _cost(seconds: float, spent: Sequence[tuple[int, int]], first_bytes: int) -> Cost:
    messages, num_bytes = (sum(each) / len(spent) for each in zip(*spent, strict=True))
    return Cost(seconds, messages, num_bytes, first_bytes)


# ---- with a virtual clock


@dataclass
class Clock:
    """A clock that stands still while a thread runs; threads that sleep run in turn.

    It has what the protocol uses of the module `time`.
    """

    now: float = 0.0
    _asleep: list[tuple[float, int, threading.Lock]] = field(default_factory=list)
    _count: Iterator[int] = field(default_factory=itertools.count)
    _is_idle: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def monotonic(self) -> float:
        """Return the time, in seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let others run until `seconds` have passed."""
        self.sleep_until(self.now + seconds)

    def sleep_until(self, when: float) -> None:
        """Let others run until it is `when`."""
        lock = threading.Lock()
        lock.acquire()
        heapq.heappush(self._asleep, (when, next(self._count), lock))
        self._is_idle.release()
        lock.acquire()

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run `tasks` in threads, one at a time, until all have ended; raise what one raises."""
        errors: list[Exception] = []

        def begin(task: Callable[[], None]) -> None:
            self.sleep(0.0)
            try:
                task()
            except Exception as error:
                errors.append(error)
            self._is_idle.release()

        threads = [threading.Thread(target=begin, args=(task,), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
            self._is_idle.acquire()
        while self._asleep:
            self.now, _, lock = heapq.heappop(self._asleep)
            lock.release()
            self._is_idle.acquire()
            if errors:
                raise errors[0]


class VirtualStore(Store):
    """Client of one store of a virtual world, which answers in turn."""

    def __init__(self, counting: Counting, clock: Clock, busy: list[float]) -> None:
        """Ask what is behind `counting`, which is busy until `busy[0]`."""
        self._store, self._clock, self._busy = counting, clock, busy

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        start = max(self._clock.now + TRIP_S / 2, self._busy[0])
        self._busy[0] = start + ANSWER_S
        self._clock.sleep_until(start + ANSWER_S)
        found = question(self._store)
        self._clock.sleep(TRIP_S / 2)
        return found


class Dictionary:
    """What a TCPStore answers, in one process."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.known: dict[str, bytes] = {}

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all `keys` are there."""
        return all(key in self.known for key in keys)

    def set(self, key: str, value: str) -> None:
        """Set `key`."""
        self.known[key] = value.encode()

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Set all `keys`."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of `key`."""
        return self.known[key]

    def add(self, key: str, amount: int) -> int:
        """Add to the number at `key`."""
        number = int(self.known.get(key, b"0")) + amount
        self.known[key] = str(number).encode()
        return number

    def append(self, key: str, text: str) -> None:
        """Append to the text at `key`."""
        self.known[key] = self.known.get(key, b"") + text.encode()

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set `key`, as it is used here, if it is not there."""
        assert not expected
        return self.known.setdefault(key, value.encode())

    def delete_key(self, key: str) -> bool:
        """Delete `key`."""
        return self.known.pop(key, None) is not None


@contextlib.contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """Have the protocol look at `clock`, and sleep by it."""
    with contextlib.ExitStack() as stack:
        for module in (store, party, notices):
            stack.enter_context(unittest.mock.patch.object(module, "time", clock))
        yield


def virtual(size: int) -> list[Cost]:
    """Simulate start-up and an agreement of `size` ranks."""
    clock, busy, known = Clock(), [0.0], Dictionary()
    counting = [Counting(known) for _ in range(size)]
    stores = [VirtualStore(each, clock, busy) for each in counting]
    parties: list[Party | None] = [None] * size
    costs = []

    def be(rank: int, number: int) -> None:
        parties[rank] = talk(stores[rank], rank, size, number, parties[rank])

    with virtual_time(clock):
        for number in range(2):
            start = clock.now
            before = [(each.messages, each.num_bytes) for each in counting]
            clock.run([functools.partial(be, rank, number) for rank in range(size)])
            spent = [
                (each.messages - messages, each.num_bytes - num_bytes)
                for each, (messages, num_bytes) in zip(counting, before, strict=True)
            ]
            costs.append(_cost(clock.now - start, spent, spent[0][1]))
    return costs


# ---- of a model


class Block(nn.Module):
    """A layer, which becomes a unit."""

    def __init__(self) -> None:
        """Make the layer."""
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` plus what the layer makes of it."""
        return x + torch.relu(self.linear(x))


def train(rank: int, port: int, pipe: Connection) -> None:
    """Train a model of UNITS blocks as one of two ranks; send how often they agreed, in parts."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    counts = [0]
    agree = exchange.meet

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return agree(*args, **kwargs)

    with unittest.mock.patch.object(exchange, "meet", counted):
        model = nn.Sequential(*(Block() for _ in range(UNITS)), nn.Linear(8, 3))
        for block in list(model)[:UNITS]:
            autoshard.fully_shard(block)
        autoshard.fully_shard(model)
        for _ in range(5):
            counts.append(0)
            model(torch.randn(2, 8)).sum().backward()
    pipe.send(counts)
    dist.destroy_process_group()


def agreements() -> list[int]:
    """Count agreements of two ranks: of sharding, then of each step."""
    context = multiprocessing.get_context("spawn")
    probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = probe.port
    del probe
    pipes = []
    for rank in range(2):
        here, there = context.Pipe()
        context.Process(target=train, args=(rank, port, there), daemon=True).start()
        pipes.append(here)
    counts: list[list[int]] = [pipe.recv() for pipe in pipes]
    assert counts[0] == counts[1]
    return counts[0]


def row(size: int, kind: str, costs: Sequence[Cost]) -> str:
    """Make a line of a table: `costs` of start-up and of an agreement."""
    cells = [f"{size}", kind]
    for each in costs:
        cells += [
            f"{each.seconds:.2f}",
            f"{each.messages:.1f}",
            f"{each.num_bytes / 1000:.2f}",
            f"{each.first_bytes / 1000:.1f}",
        ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table, and what a model asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512, 2048])
    parser.add_argument("--virtual", type=int, nargs="*", default=[8, 64, 512, 2048, 16384])
    given = parser.parse_args()
    # torch's clients look their own names up: where there is none, for ten seconds, and say so.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    threading.stack_size(128 * 1024)
    print("| ranks | clock | start-up: s | messages a rank | KB a rank | KB of the first "
          "| an agreement: s | messages a rank | KB a rank | KB of the first |")  # fmt: skip
    print("|" + "---|" * 10)
    for size in given.ranks:
        print(row(size, "real", real(size)), flush=True)
    for size in given.virtual:
        print(row(size, "virtual", virtual(size)), flush=True)
    sharding, first, *later = agreements()
    print(f"{UNITS} units, eagerly: {sharding} agreements when sharded, {first} in the first step, "
          f"then {', '.join(map(str, later))}")  # fmt: skip


if __name__ == "__main__":
    main()
