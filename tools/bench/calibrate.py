"""Measure a topology on the cluster at hand: `autoshard bench calibrate`.

Collectives are started together, after a barrier, and timed on the rank where they take least: the
time for which a rank waits for its peers to arrive is no part of their cost. On a CPU, compute goes
on beside them, as in a step: on the same cores, each slows the other down. A start-up and a time a
byte are fitted to several sizes by least squares of relative errors. Rank 0 writes what all ranks
then read: plans must not differ.

Times of ops come from a roofline, or ops are timed one by one in a step of the model that is to be
planned.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard import _torch
from autoshard.passes.ir import ops
from autoshard.passes.ir.layout import DTYPE_NAMES
from autoshard.passes.planner.topology import KINDS, Topology, default_topology
from autoshard.passes.plans.roofline import op_key
from autoshard.runtime.comm import transport
from autoshard.tools.device import current_device, synchronize, timed

SIZES = tuple(2**power for power in range(12, 25, 2))  # bytes of the whole: 4 KiB to 16 MiB
ROUNDS = 15
PRODUCT = 768  # rows and columns of a matrix product
CALLS = 8  # collectives beside compute
MEMBERS = 8  # of one
BESIDE = (2**12, 2**20, 2**22)  # bytes of the whole of each
STREAMED = 2**25  # bytes of a copy: more than caches hold


def calibrate(
    path: str | Path,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    steps: Sequence[Callable[[], object]] = (),
) -> Topology:
    """Measure a topology, and have rank 0 write it to `path`; every rank reads and returns it.

    All ranks call this, in a process group of at least two, and wait for each other; `path` is one
    file to all of them. A `path` that this process has loaded as a topology before is not read
    again. What isn't measured here (memory, the network) is taken from the named topology of the
    device.
    sizes: bytes, unsharded, of the collectives that are timed.
    rounds: repetitions of each measurement.
    steps: forward and backward of models, neither sharded nor compiled: their ops are timed. Each
        is called once more than `rounds`.
    Raises ValueError with one rank; OSError, on rank 0, where `path` can't be written.
    """
    world = dist.get_world_size()
    if world < 2:
        raise ValueError("calibrate measures collectives: run it under torchrun with two ranks")
    device = current_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = Topology.load(default_topology(name))
    measured = {}
    for kind in KINDS:
        times = [_collective_us(kind, size, device, rounds) for size in sizes]
        measured[f"{kind} {world}"] = fit(sizes, times)
    taken_us = [_taken_us(device, rounds, "gather", size) for size in BESIDE]
    found = dataclasses.replace(
        known,
        name=Path(path).stem,
        title=f"{world} ranks on {name}, {dist.get_backend()}, torch {torch.__version__}",
        measured=measured,
        efficiency=1.0,
        tflops=_tflops(known, device, rounds),
        op_us=_op_us(device, rounds),
        call_us=statistics.fmean([taken_us[0], _taken_us(device, rounds, "reduce", BESIDE[0])]),
        member_us=_member_us(device, rounds),
        memory_gb_per_s=_memory_gb_per_s(device, rounds),
        copy_gb_per_s=_copy_gb_per_s(device, rounds),
        averages=transport.averages(_torch.dist.default_group(), device),
        contention=_contention(measured[f"gather {world}"][1], taken_us),
        ops=_ops_us(steps, rounds),
        sources={"": "measured by autoshard bench calibrate"},
    )
    if dist.get_rank() == 0:
        Path(path).write_text(found.to_json())
    dist.barrier()
    return Topology.load(str(path))


def fit(sizes: Sequence[int], times_us: Sequence[float]) -> tuple[float, float]:
    """Fit times to start-up + slope * size; return both, in microseconds and microseconds a byte.

    The sum of squared relative errors is the least, unless one of both would be below 0: it is then
    0.
    sizes: in bytes, not all the same.
    """
    weights = [1 / time_us**2 for time_us in times_us]
    total = sum(weights)
    mean_size = sum(w * s for w, s in zip(weights, sizes, strict=True)) / total
    mean_time = sum(w * t for w, t in zip(weights, times_us, strict=True)) / total
    triples = list(zip(weights, sizes, times_us, strict=True))
    spread = sum(w * (s - mean_size) ** 2 for w, s, _ in triples)
    slope = sum(w * (s - mean_size) * (t - mean_time) for w, s, t in triples) / spread
    slope = max(slope, 0.0)
    return max(mean_time - slope * mean_size, 0.0), slope


def _collective_us(kind: str, num_bytes: int, device: torch.device, rounds: int) -> float:
    """Microseconds of a collective: mean over rounds of the least over ranks.

    There are twice as many rounds as `rounds` says; the longest tenth is left out. On a CPU,
    compute goes on meanwhile, and a thread waits for the collective. All ranks call this.
    kind: "gather", "reduce", of which the transfer alone is timed, or "all_reduce".
    num_bytes: of the collective, unsharded.
    """
    a = torch.ones(PRODUCT // 8, PRODUCT // 8, device=device)
    world = dist.get_world_size()
    whole = torch.ones(num_bytes // 4, device=device)
    part = whole.new_ones(whole.numel() // world)
    group = _torch.dist.default_group()

    def once() -> None:
        """Run the collective to its end; on a CPU, multiply matrices until then."""
        if kind == "gather":
            (work,) = transport.gather([whole], [part], group)
        elif kind == "reduce":
            work = transport.bare_reduce(part, whole, group)
        else:
            work = dist.all_reduce(whole, async_op=True)
        if device.type != "cpu":
            work.wait()
            return
        waiting = waiter.submit(work.wait)  # not every work of gloo says when it is over
        while not waiting.done():
            torch.matmul(a, a)
        waiting.result()

    with ThreadPoolExecutor(1) as waiter:
        return _mean(_times_us(once, 2 * rounds))


def _taken_us(device: torch.device, rounds: int, kind: str, num_bytes: int) -> float:
    """Microseconds by which compute takes longer for each collective of a graph beside it.

    Launch and wait take time, and so does moving bytes on the same cores or units. It is not below
    0. All ranks call this.
    kind: "gather" or "reduce".
    num_bytes: of the collective, unsharded.
    """
    world, group = dist.get_world_size(), str(_torch.dist.default_group().group_name)
    part = torch.ones(max(1, num_bytes // 4 // MEMBERS // world), device=device)
    whole = part.new_ones(world * part.numel())
    members = " ".join([f"f32[{whole.numel()}]"] * MEMBERS)
    rows = PRODUCT // 4 if device.type == "cpu" else 8 * PRODUCT  # a GPU's must hide the host
    a = torch.ones(rows, rows, device=device)

    def launch() -> Any:
        """Launch the collective as a graph does; return the ticket that is waited for."""
        if kind == "gather":
            return ops.launch_gather([part] * MEMBERS, members, group, 0, False, True)
        packed = ops.pack_grads([whole] * MEMBERS, members, group, 0)
        return ops.launch_reduce(packed, members, group, 0)

    wait = ops.wait_gather if kind == "gather" else ops.wait_reduce
    once_us = _median_us(lambda: wait(launch(), members, group, 0), rounds)
    count = 1 + math.ceil(2 * once_us / _median_us(lambda: a @ a, rounds))

    def compute(*, beside: bool) -> None:
        """Multiply matrices, `CALLS` times for twice as long as a collective takes.

        beside: whether collectives run beside it, each launched one ahead.
        """
        begun: list[Tensor] = []
        for _ in range(CALLS):
            if beside:  # as plans do: launched a step before it is waited for
                begun.append(launch())
            for _ in range(count):
                torch.matmul(a, a)
            if len(begun) > 1:
                wait(begun.pop(0), members, group, 0)
        for ticket in begun:
            wait(ticket, members, group, 0)

    alone, both = (_median_us(partial(compute, beside=beside), rounds) for beside in (False, True))
    return max(0.0, (both - alone) / CALLS)


def _member_us(device: torch.device, rounds: int) -> float:
    """Microseconds of one more member of a grouped gather; not below 0. All ranks call this.

    This is the time of nine members, less the time of one, divided by eight.
    """
    group = _torch.dist.default_group()
    parts = [torch.ones(16, device=device) for _ in range(9)]
    wholes = [part.new_empty(16 * dist.get_world_size()) for part in parts]

    def gather(count: int) -> None:
        for work in transport.gather(wholes[:count], parts[:count], group):
            work.wait()

    few, many = (_median_us(partial(gather, count), rounds) for count in (1, 9))
    return max(0.0, (many - few) / 8)


def _tflops(known: Topology, device: torch.device, rounds: int) -> dict[str, float]:
    """TFLOP/s of square matrix products, in float32 and the dtypes that `known` names, by name.

    Those of 8-bit floats are taken from `known`, times its efficiency. All ranks call this.
    """
    by_name = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    found = {}
    for name in sorted({*known.tflops, "f32"}):  # the same order on every rank
        dtype = by_name.get(name, torch.float32)
        if name.startswith("f8"):  # torch.matmul takes none
            found[name] = known.tflops[name] * known.efficiency
            continue
        a = torch.ones(PRODUCT, PRODUCT, device=device, dtype=dtype)
        time_us = _median_us(partial(torch.matmul, a, a), rounds)
        found[name] = 2 * PRODUCT**3 / time_us / 1e6
    return found


def _op_us(device: torch.device, rounds: int) -> float:
    """Microseconds of a smallest op, one of many in a row; all ranks call this."""
    x = torch.ones(16, device=device)

    def many() -> None:
        y = x
        for _ in range(100):
            y = y + 1

    return _median_us(many, rounds) / 100


class _Times(_torch.tensors.TorchDispatchMode):
    """Dispatch mode that times each op that runs in it, in microseconds by `op_key`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.found: dict[str, list[float]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, note its time, and return its result; the host waits for the GPU."""
        result, took_us = timed(lambda: func(*args, **(kwargs or {})))
        self.found.setdefault(op_key(func, (args, kwargs)), []).append(took_us)
        return result


def _ops_us(steps: Sequence[Callable[[], object]], rounds: int) -> dict[str, float]:
    """Microseconds of each op in `steps`, by `op_key`: the mean of its calls on this rank.

    The longest tenth is left out of a mean. Each step runs once untimed, then in `rounds` rounds.
    All ranks run the same steps at the same time. Most calls take less than the mean, but the ops
    of a step together take as long as their means say.
    """
    times = _Times()
    for step in steps:
        step()  # what is made at first is not timed
        for _ in range(rounds):
            dist.barrier()
            with times:
                step()
    return {key: _mean(found) for key, found in sorted(times.found.items())}


def _mean(times: Sequence[float]) -> float:
    """Mean without the longest tenth: on busy cores any call may lose a time slice now and then."""
    return statistics.fmean(sorted(times)[: math.ceil(0.9 * len(times))])


def _memory_gb_per_s(device: torch.device, rounds: int) -> float:
    """GB/s, read and written, of copies to the same memory each time; all ranks call this."""
    source = torch.ones(STREAMED // 4, device=device)
    target = torch.empty_like(source)
    return 2 * STREAMED / _median_us(lambda: target.copy_(source), rounds) / 1e3


def _copy_gb_per_s(device: torch.device, rounds: int) -> float:
    """GB/s, read and written, of copies to memory that is new each time, as a bucket's is.

    All ranks call this.
    """
    source = torch.ones(STREAMED // 4, device=device)
    return 2 * source.nbytes / _median_us(source.clone, rounds) / 1e3


def _contention(us_per_byte: float, taken_us: Sequence[float]) -> float:
    """Factor by which compute slows down while gathers run, from 1 to 10.

    It is 1 if gathers take no time a byte.
    us_per_byte: of a gather.
    taken_us: time that a gather of each size in `BESIDE` takes away from compute.
    """
    first, *more = zip(BESIDE, taken_us, strict=True)
    slopes = [(taken - first[1]) / (num_bytes - first[0]) for num_bytes, taken in more]
    share = statistics.fmean(slopes) / us_per_byte if us_per_byte else 0.0
    return 1 / (1 - min(max(share, 0.0), 0.9))


def _median_us(run: Callable[[], object], rounds: int) -> float:
    """Median over rounds of the microseconds of `run`; all ranks call this, see `_times_us`."""
    return float(statistics.median(_times_us(run, rounds)))


def _times_us(run: Callable[[], object], rounds: int) -> list[float]:
    """Microseconds of `run` in each round, on the rank where it took least; alike on every rank.

    All ranks call this. Every round begins with a barrier, and waits for the GPU before and after
    `run`; three more rounds come before, which don't count.
    """
    times = []
    for _ in range(rounds + 3):
        dist.barrier()
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, times[3:])
    return [min(each) for each in zip(*gathered, strict=True)]
