"""Gathers and reduces by sends and receives, beside torch's own over the same group."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from torch import Tensor

from autoshard import _torch
from autoshard.passes.ir.layout import Member
from autoshard.runtime.comm import collectives, transport
from autoshard.runtime.comm.copies import Copies
from autoshard.runtime.comm.packing import bucket_layout
from autoshard.runtime.compiled import kernels

SIZES = (((4, 3), 0), ((5, 2), 0), ((1, 3), 0), ((), 0), ((3, 4), 1), ((6,), 0))  # and the dim
LATER = 50_000  # numbers that take a while to arrive
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def drawn(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(numel, generator=source).to(dtype)


def gathered(parts: list[Tensor]) -> list[Tensor]:
    wholes = [part.new_empty(dist.get_world_size() * part.numel()) for part in parts]
    for work in transport.gather(wholes, parts, _torch.dist.default_group()):
        work.wait()
    return wholes


def reduced(whole: Tensor) -> Tensor:
    part = whole.new_empty(whole.numel() // dist.get_world_size())
    work = transport.reduce(part, whole, _torch.dist.default_group())
    work.wait()
    work.wait()  # once more: nothing is added twice
    return part


def opened(group: dist.ProcessGroup) -> set[transport._Messages]:
    """What is on its way, or was left there."""
    channel = transport._channels.get(group)
    return set(channel._open) if channel else set()


def check_gathers() -> None:
    parts = [drawn(numel, torch.float32, seed) for seed, numel in enumerate((5, 1, 0, 70_000))]
    for got, part in zip(gathered(parts), parts, strict=True):
        want = torch.empty_like(got)
        if part.numel():
            _torch.dist.all_gather_flat(want, part)
        assert torch.equal(got, want)


@on_ranks(2)
def test_gathers_between_two(rank: int) -> None:
    check_gathers()


@on_ranks(4)
def test_gathers_among_four(rank: int) -> None:
    check_gathers()


@on_ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_those_of_gloo(rank: int, dtype: torch.dtype) -> None:
    """Bit for bit, also of numbers that overflow, or are none."""
    whole = drawn(20_000, dtype) * torch.finfo(dtype).max / 8
    whole[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    want = whole.new_empty(10_000)
    _torch.dist.reduce_scatter_flat(want, whole.clone())
    assert torch.equal(reduced(whole).nan_to_num(7.0), want.nan_to_num(7.0))


MEMBERS = (Member(torch.float32, (5, 3)), Member(torch.float32, (7,)), Member(torch.float32, (1,)))
MORE = (*MEMBERS, Member(torch.float32, (4, 6), dim=1))


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("divisor", [2.0, 3.0])
def test_a_swap_is_a_reduce(rank: int, divisor: float, dtype: torch.dtype) -> None:
    """Bit for bit, of even and uneven members, one of which a rank has no row of, and of some that
    come out in another dtype."""
    group = str(_torch.dist.default_group().group_name)
    members = [replace(member, dtype=dtype) for member in MORE]
    members += [replace(member, shard_dtype=torch.float64) for member in members]
    found = []
    for is_last in (False, True):
        sizes = [member.size for member in members]
        grads = [drawn(math.prod(size), dtype, seed).view(size) for seed, size in enumerate(sizes)]
        packed = collectives.pack_grads(
            grads, bucket_layout(tuple(members), 2, rank), group, divisor=divisor, is_last=is_last
        )
        assert (packed.own is not None) == is_last
        flight = collectives.launch_reduce(packed).wait()
        found.append(collectives.split_reduced(flight))
    for want, got in zip(*found, strict=True):
        assert torch.equal(got, want)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)


@on_ranks(2)
def test_what_was_sent_may_be_written_to_after_the_wait(rank: int) -> None:
    """And what was received is there, however late the other rank comes."""
    group = _torch.dist.default_group()
    part, whole = torch.full((LATER,), float(rank)), torch.empty(2 * LATER)
    if rank == 1:
        time.sleep(0.3)
    for work in transport.gather([whole], [part], group):
        work.wait()
    part.fill_(-1.0)
    assert whole[:LATER].eq(0.0).all()
    assert whole[LATER:].eq(1.0).all()


@on_ranks(2)
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_grouped_gather_by_collectives(rank: int, dtype: torch.dtype, copies: bool) -> None:
    """Gives what one buffer gives: of even and uneven members, of a scalar, of one that is cut
    along another dim, of shards of the dtype that is sent, and of those that are cast."""
    members = tuple(Member(dtype, size, dim) for size, dim in SIZES)
    layout = bucket_layout(members, 2, rank)
    shards = [
        drawn(math.prod(size), torch.float32, seed).view(size)
        for seed, size in enumerate(layout.sizes)
    ]
    group = str(_torch.dist.default_group().group_name)
    with mock.patch.object(transport, "may_send", return_value=False):
        grouped = collectives.launch_grouped_gather(shards, layout, group, copies=copies)
        assert not grouped.together
        places = [
            (part.data_ptr() - room.data_ptr()) / part.nbytes
            for part, room in zip(grouped.send, grouped.receive, strict=True)
        ]
        found = collectives.wait_gather(grouped)
        packed = collectives.launch_gather(shards, layout, group, copies=True)
        want = collectives.wait_gather(packed)
    for got, whole, member, place in zip(found, want, members, places, strict=True):
        assert got.shape == member.size
        assert torch.equal(got, whole)
        # A copy lies where it is received, as NCCL wants what overlaps; a shard somewhere else.
        assert place == rank or not (copies or dtype != torch.float32 or 0 <= place < 2)


@on_ranks(2)
@pytest.mark.parametrize("least", [0, 1 << 10, 1 << 30])
def test_small_members_share_a_message(rank: int, least: int) -> None:
    """None, some, and all of them."""
    sizes = (40, 3, 300, 7, 0)
    members = tuple(Member(torch.float32, (2 * size, 2)) for size in sizes)
    shards = [drawn(2 * size, torch.float32, size).view(size, 2) for size in sizes]
    group = str(_torch.dist.default_group().group_name)
    layout = bucket_layout(members, 2, rank)
    with mock.patch.object(transport, "LEAST", least):
        grouped = collectives.launch_grouped_gather(shards, layout, group)
    assert len(grouped.together) == {0: 0, 1 << 10: 4, 1 << 30: 5}[least]
    want = collectives.wait_gather(collectives.launch_gather(shards, layout, group))
    for got, whole in zip(collectives.wait_gather(grouped), want, strict=True):
        assert torch.equal(got, whole)


@on_ranks(2)
def test_a_part_that_lies_where_it_is_received(rank: int) -> None:
    whole = torch.full((6,), -1.0)
    part = whole.narrow(0, 3 * rank, 3)
    part.fill_(rank)
    for work in transport.gather([whole], [part], _torch.dist.default_group()):
        work.wait()
    assert whole.tolist() == [0.0] * 3 + [1.0] * 3


@on_ranks(2)
def test_several_at_a_time(rank: int) -> None:
    """Waited for in another order than they were launched in."""
    group = _torch.dist.default_group()
    parts = [drawn(1 + 1000 * number, torch.float32, number) for number in range(4)]
    wholes = [part.new_empty(2 * part.numel()) for part in parts]
    send, sums = drawn(500, torch.float32, 9), torch.empty(250)
    works = [transport.gather(wholes[:2], parts[:2], group)]
    works.append([transport.reduce(sums, send, group)])
    works.append(transport.gather(wholes[2:], parts[2:], group))
    for begun in reversed(works):
        for work in begun:
            work.wait()
    for got, want in zip(wholes, gathered(parts), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(sums, reduced(send))


@on_ranks(2)
def test_many_ranks_are_left_to_gloo(rank: int) -> None:
    """Here, more than one."""
    transport.FEW, few = 1, transport.FEW
    try:
        check_gathers()
        work = transport.reduce(torch.empty(1), torch.ones(2), _torch.dist.default_group())
        work.wait()
        assert not isinstance(work, transport.Exchange)
    finally:
        transport.FEW = few


@on_ranks(2)
def test_what_nobody_waits_for(rank: int) -> None:
    """An exception dropped it, on both ranks: what comes after is right, and nothing is kept."""
    group = _torch.dist.default_group()
    part = torch.full((100_000,), float(rank))
    before = opened(group)  # by graphs of other tests, that raised
    for _ in range(3):
        transport.gather([part.new_empty(200_000)], [part.clone()], group)
        transport.swap(part.new_empty(100_000), part.clone(), group)
        transport.reduce(part.new_empty(50_000), part.clone(), group)
    (whole,) = gathered([part + 2])
    assert whole[:100_000].unique().tolist() == [2.0]
    assert whole[100_000:].unique().tolist() == [3.0]
    assert opened(group) <= before


@on_ranks(2)
def test_a_launch_that_fails(rank: int) -> None:
    """The error is the one of the launch, and nothing is kept once others have gone through."""
    group = _torch.dist.default_group()
    part = torch.ones(10)
    before = opened(group)
    fails = mock.patch.object(type(group), "recv", side_effect=RuntimeError("no connection"))
    with fails, pytest.raises(RuntimeError, match="no connection"):
        transport.gather([part.new_empty(20)], [part], group)
    (failed,) = opened(group) - before
    assert failed.is_abandoned
    gathered([part])
    assert opened(group) <= before


@on_ranks(2)
def test_a_graph_that_an_exception_leaves(rank: int) -> None:
    """What it launched goes with its ticket, and its bytes once others have gone through."""
    group = _torch.dist.default_group()
    before, kept = opened(group), len(kernels._in_flight)
    part = torch.ones(40_000)
    launch, wait = torch.ops.autoshard.launch_gather, torch.ops.autoshard.wait_gather
    arguments = "f32[80000]", group.group_name, 0

    def graph() -> None:
        ticket = launch([part], *arguments)
        assert len(kernels._in_flight) == kept + 1
        raise ArithmeticError(ticket.numel())

    with pytest.raises(ArithmeticError):
        graph()
    assert len(kernels._in_flight) == kept
    gathered([part])
    assert opened(group) <= before
    ticket = launch([part], *arguments)
    (whole,) = wait(ticket, *arguments)
    assert whole.sum().item() == 80_000
    with pytest.raises(RuntimeError, match="waits twice"):
        wait(ticket, *arguments)


def test_copies_that_an_exception_leaves() -> None:
    """Compute waits for them: their memory is free from then on."""
    done = mock.Mock()
    ticket = kernels._copy_ticket(Copies([], [], done))
    done.wait.assert_not_called()
    del ticket
    done.wait.assert_called_once()
