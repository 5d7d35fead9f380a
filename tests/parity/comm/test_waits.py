"""Who waits for a collective, and where: collectives that run late, a stream beside compute."""

from __future__ import annotations

import functools
import math
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import Net, net_loss
from support.ranks import on_ranks
from support.training import adamw, assert_same, compiled, replicated, sgd, sharded, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.runtime.comm import flights, streams, transport
from autoshard.runtime.unit import reduce


class Late:
    """A collective as late as it may be: it runs when it is waited for, once, and not before.

    What it reads and writes, others have to keep alive until then.
    """

    def __init__(self, run: Callable[..., object], *buffers: Tensor) -> None:
        self._run = run
        self._buffers = [weakref.ref(buffer) for buffer in buffers]
        self.is_over = False

    def wait(self) -> None:
        assert not self.is_over, "waited for twice"
        buffers = [buffer() for buffer in self._buffers]
        assert all(buffer is not None for buffer in buffers), "let go of before it was waited for"
        self.is_over = True
        self._run(*buffers)


@contextmanager
def late_collectives() -> Iterator[list[Late]]:
    """All collectives launched inside, with NaN for results until they are waited for."""
    launched: list[Late] = []
    gather, reduce, all_reduce = transport.gather, transport.reduce, dist.all_reduce
    swap = transport.swap

    def late(run: Callable[..., object], *buffers: Tensor) -> Late:
        launched.append(Late(run, *buffers))
        return launched[-1]

    def late_gather(receive: list[Tensor], send: list[Tensor], group: Any) -> list[Late]:
        def run(*buffers: Tensor) -> None:
            for work in gather(buffers[: len(receive)], buffers[len(receive) :], group):
                work.wait()

        sent = [part.clone() for part in send]
        for whole in receive:
            whole.fill_(math.nan)
        for part, its in zip(send, sent, strict=True):
            if any(_is_part_of(part, whole) for whole in receive):
                part.copy_(its)
        return [late(run, *receive, *send)]

    def late_reduce(receive: Tensor, send: Tensor, group: Any, *, is_mean: bool) -> Late:
        receive.fill_(math.nan)
        return late(lambda into, of: reduce(into, of, group).wait(), receive, send)

    def late_swap(receive: Tensor, send: Tensor, group: Any) -> Late:
        receive.fill_(math.nan)
        return late(lambda into, of: swap(into, of, group).wait(), receive, send)

    def late_all_reduce(tensor: Tensor, *, op: Any, group: Any, async_op: bool) -> Late:
        return late(functools.partial(all_reduce, op=op, group=group), tensor)

    transport.gather, transport.reduce, transport.swap = late_gather, late_reduce, late_swap
    dist.all_reduce = late_all_reduce
    try:
        yield launched
    finally:
        transport.gather, transport.reduce, transport.swap = gather, reduce, swap
        dist.all_reduce = all_reduce


def _is_part_of(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("form", ["eager", "compiled"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_collectives_that_run_late(rank: int, form: str, strategy: str) -> None:
    """D-18, D-47: nothing is read before it is there, and nothing in use let go of."""
    want, want_losses = replicated(Net, net_loss)
    with late_collectives() as launched:
        got, losses = (sharded if form == "eager" else compiled)(Net, net_loss, strategy=strategy)
        assert launched
        assert all(each.is_over for each in launched)
    assert losses == want_losses
    assert_same(got, want)


@on_ranks(2)
def test_collectives_that_run_late_lowered_by_inductor(rank: int) -> None:
    """D-18, D-47: its generated code uses memory again, but not what is in flight."""
    one = functools.partial(Net, layers=1)
    want, _ = replicated(one, net_loss, steps=2, make=sgd)
    with late_collectives() as launched:
        got, _ = compiled(one, net_loss, steps=2, make=sgd, lowering="inductor")
        assert all(each.is_over for each in launched)
    assert_same(got, want, rtol=1e-5)


def hybrid(replicas: int, shards: int) -> Any:
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)


def build() -> Net:
    torch.manual_seed(0)
    return Net(tied=False)


@on_ranks(4)
def test_collectives_over_two_axes_that_run_late(rank: int) -> None:
    """D-18, D-47, A52: an all-reduce outlives the next unit's reduce-scatter, with its buffer."""
    want, _ = replicated(build, net_loss)
    for mesh in ((2, 2), (4, 1)):
        model = autoshard.shard(build(), strategy="hybrid_shard", mesh=hybrid(*mesh))
        with late_collectives() as launched:
            train(model, net_loss, adamw(model))
            assert all(each.is_over for each in launched)
        assert_same(model, want, rtol=1e-5)  # four ranks sum in an order of gloo's choosing


@on_ranks(2)
def test_only_a_backward_that_is_not_the_last_ends_before_its_reduces(rank: int) -> None:
    """D-47."""
    model = autoshard.shard(build())
    for is_last in (False, True):
        model.set_is_last_backward(is_last)
        with late_collectives() as launched:
            net_loss(model, rank, 0).backward()
            assert all(each.is_over for each in launched) == is_last
            model.set_is_last_backward(True)
            net_loss(model, rank, 1).backward()
            assert all(each.is_over for each in launched)
        assert not any(param.grad.to_local().isnan().any() for param in model.parameters())


class Stream:
    """Stands for a device's; what waits for what is noted in `log`.

    current: those that are entered, the innermost last.
    """

    def __init__(self, name: str, log: list[str], current: list[Stream]) -> None:
        self.name, self._log, self._current = name, log, current

    def __enter__(self) -> None:
        self._current.append(self)

    def __exit__(self, *error: object) -> None:
        self._current.pop()

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@contextmanager
def device_with_streams(log: list[str]) -> Iterator[None]:
    """Streams as on a device that has some: `log` has those made, and where all-reduces go."""
    current: list[Stream] = []
    current.append(Stream("compute", log, current))

    def make(device: torch.device) -> Stream:
        log.append(f"one made for {device}")
        return Stream("beside", log, current)

    device = torch.device("cuda", 0)
    module = types.SimpleNamespace(
        Stream=make,
        cuda=torch.cuda,
        accelerator=types.SimpleNamespace(current_stream=lambda device: current[-1]),
    )
    on_stream, real = reduce.on_all_reduce_stream, streams.torch
    reduce.on_all_reduce_stream = lambda _, after_compute: on_stream(
        device, after_compute=after_compute
    )
    streams.torch = module
    streams.all_reduce_stream.cache_clear()
    try:
        with flights.observe(lambda i: log.append(f"{i.kind} on {current[-1].name}")):
            yield
    finally:
        reduce.on_all_reduce_stream, streams.torch = on_stream, real
        streams.all_reduce_stream.cache_clear()


@on_ranks(4)
def test_one_stream_for_the_all_reduces_of_all_units(rank: int) -> None:
    """A19, A60: and of all models. Compute waits for nothing on it, until the end. The streams
    are stand-ins: this shows who asks for which, not that a device obeys."""
    log: list[str] = []
    with device_with_streams(log):
        for mesh in ((2, 2), (4, 1)):
            model = autoshard.shard(build(), strategy="hybrid_shard", mesh=hybrid(*mesh))
            net_loss(model, rank, 0).backward()
            seen, log[:] = list(log), [line for line in log if line.startswith("one")]
            assert seen.count("all_reduce on beside") == 4
            assert {line for line in seen if " on " in line} <= {
                "gather on compute",
                "reduce on compute",
                "all_reduce on beside",
            }
            # Only where no reduce-scatter was waited for is there something of compute's to wait
            # for: gradients that were packed there.
            assert seen.count("beside waits for compute") == (4 if mesh == (4, 1) else 0)
            assert "compute waits for beside" not in seen
    assert log == ["one made for cuda:0"]
