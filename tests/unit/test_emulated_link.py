"""The emulated link of benchmarks/, on the CPU: what its collectives give, and when."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import emulated_link
import pytest
import torch
import torch.distributed as dist
from support.link import COLLECTIVES, RANK, WORLD
from torch import Tensor

from autoshard import _torch

pytestmark = [
    pytest.mark.skipif(emulated_link.missing() is not None, reason=f"no {emulated_link.missing()}")
]


@pytest.fixture(scope="module", autouse=True)
def link() -> Iterator[None]:
    emulated_link.start(WORLD, rank=RANK, latency_us=0, gb_per_s=100)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fast() -> None:
    emulated_link.set_link(latency_us=0, gb_per_s=100)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_values(name: str) -> None:
    run, expected = COLLECTIVES[name]
    torch.testing.assert_close(run(torch.device("cpu")), expected, rtol=0, atol=0)


def test_objects() -> None:
    found: list[object] = [None] * WORLD
    dist.all_gather_object(found, {"rank": RANK})
    assert found == [{"rank": RANK}] * WORLD


def test_functional() -> None:
    """What compilers trace."""
    ops, group = torch.ops._c10d_functional, _torch.dist.default_group().group_name
    x = torch.arange(3.0)
    gathered = ops.all_gather_into_tensor(x, WORLD, group)
    assert torch.equal(ops.wait_tensor(gathered), x.repeat(WORLD))
    (summed,) = ops.reduce_scatter_tensor_coalesced([x.repeat(WORLD)], "sum", WORLD, group)
    assert torch.equal(ops.wait_tensor(summed), WORLD * x)


def test_reductions_that_are_not_there() -> None:
    with pytest.raises(RuntimeError, match="SUM, AVG, MIN or MAX"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.PRODUCT)


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(RuntimeError, match="expected a whole of 4 times"):
        dist.group.WORLD._allgather_base(torch.ones(7), torch.ones(2))


@pytest.mark.parametrize(
    ("run", "num_sent"),
    [
        (lambda whole, part: _torch.dist.all_gather_flat(whole, part, async_op=True), 3 / 4),
        (lambda whole, part: _torch.dist.reduce_scatter_flat(part, whole, async_op=True), 3 / 4),
        (lambda whole, part: dist.all_reduce(whole, async_op=True), 6 / 4),
    ],
    ids=["gather", "reduce", "all_reduce"],
)
def test_time(run: Callable[[Tensor, Tensor], dist.Work], num_sent: float) -> None:
    """Of three collectives on a link, one after another: a start-up each, and their bytes."""
    emulated_link.set_link(latency_us=3e3, gb_per_s=0.1)
    buffers = [(torch.ones(2**18), torch.ones(2**16)) for _ in range(3)]  # 1 MiB of the whole
    started = time.perf_counter()
    works = [run(*pair) for pair in buffers]
    for number, work in enumerate(works, 1):
        work.wait()
        took_us = 1e6 * (time.perf_counter() - started)
        assert took_us >= number * (3e3 + num_sent * 2**20 / 100)


def test_one_start_up_for_all_of_a_call() -> None:
    emulated_link.set_link(latency_us=2e4, gb_per_s=100)
    wholes, parts = [torch.zeros(WORLD) for _ in range(50)], [torch.ones(1) for _ in range(50)]
    started = time.perf_counter()
    for work in _torch.dist.all_gather_grouped(wholes, parts, dist.group.WORLD):
        work.wait()
    assert time.perf_counter() - started >= 0.02
    assert all(torch.equal(whole, torch.ones(WORLD)) for whole in wholes)


def test_late() -> None:
    """A result is there when its time is over, and no sooner: a wait that is missing is seen."""
    emulated_link.set_link(latency_us=3e5, gb_per_s=100)
    whole = torch.zeros(WORLD)
    started = time.perf_counter()
    work = _torch.dist.all_gather_flat(whole, torch.ones(1), async_op=True)
    seen, is_completed = whole.clone(), work.is_completed()
    if time.perf_counter() - started < 0.3:  # else this process has slept as long as the link
        assert not seen.any()
        assert not is_completed
    work.wait()
    assert work.is_completed()
    assert torch.equal(whole, torch.ones(WORLD))


def test_what_is_held() -> None:
    """Tensors, until a collective has been waited for, or, if nobody does, has ended."""
    emulated_link.set_link(latency_us=1e4, gb_per_s=100)
    held, work = _begin()
    assert held() is not None
    work.wait()
    assert held() is None
    held, work = _begin()
    del work
    dist.barrier()  # behind it on the link
    dist.barrier()  # lets go of what has ended
    gc.collect()
    assert held() is None


def _begin() -> tuple[weakref.ref[Tensor], dist.Work]:
    part = torch.ones(1)
    work = _torch.dist.all_gather_flat(torch.zeros(WORLD), part, async_op=True)
    return weakref.ref(part), work


def test_wrong_links() -> None:
    for latency_us, gb_per_s in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="GB/s"):
            emulated_link.set_link(latency_us=latency_us, gb_per_s=gb_per_s)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert emulated_link.missing() == "a C++ compiler: there is no no-such-compiler"
    with pytest.raises(RuntimeError, match="needs a C\\+\\+ compiler"):
        emulated_link._built.__wrapped__()


def test_a_killed_build() -> None:
    """Leaves a lock of torch's, for which later processes would wait for ever."""
    lock = Path(emulated_link._built().__file__).parent / "lock"
    lock.touch()
    assert emulated_link._built.__wrapped__().make_link
    assert not lock.exists()
