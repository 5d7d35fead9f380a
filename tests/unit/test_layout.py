"""How rows fall to ranks, and the text form of a bucket's members."""

from __future__ import annotations

import doctest
import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from autoshard.passes.ir import layout
from autoshard.passes.ir.layout import (
    DTYPE_NAMES,
    DTYPES,
    FLAT,
    Member,
    chunk_rows,
    dim_with_little_padding,
    first_row,
    local_rows,
    part_of,
    read_members,
    show_members,
    split_run,
)

ROWS = st.integers(0, 10_000)
WORLDS = st.integers(1, 600)
MEMBERS = st.builds(
    Member,
    dtype=st.sampled_from(list(DTYPE_NAMES)),
    size=st.lists(st.integers(0, 5000), min_size=1, max_size=4).map(tuple),
    dim=st.sampled_from([0, FLAT]),
)


def test_doctests() -> None:
    result = doctest.testmod(layout)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("rows", "world", "chunk", "local"),
    [
        (7, 4, 2, [2, 2, 2, 1]),
        (8, 4, 2, [2, 2, 2, 2]),
        (5, 4, 2, [2, 2, 1, 0]),  # a rank with no rows
        (1, 4, 1, [1, 0, 0, 0]),
        (0, 3, 0, [0, 0, 0]),
        (7, 1, 7, [7]),
    ],
)
def test_rows_of_each_rank(rows: int, world: int, chunk: int, local: list[int]) -> None:
    assert chunk_rows(rows, world) == chunk
    assert [local_rows(rows, world, rank) for rank in range(world)] == local


@given(ROWS, WORLDS)
def test_ranks_hold_every_row_once(rows: int, world: int) -> None:
    chunk = chunk_rows(rows, world)
    local = [local_rows(rows, world, rank) for rank in range(world)]
    assert sum(local) == rows
    assert all(0 <= held <= chunk for held in local)
    assert local == sorted(local, reverse=True)  # padding is only ever at the end
    assert rows <= chunk * world < rows + world


@given(ROWS, WORLDS)
def test_rows_are_cut_as_torch_chunk_cuts_them(rows: int, world: int) -> None:
    pieces = [len(piece) for piece in torch.empty(rows, 0).chunk(world) if len(piece)]
    assert pieces == [n for r in range(world) if (n := local_rows(rows, world, r))]


@given(MEMBERS, WORLDS, st.integers(0, 599))
def test_member_arithmetic(member: Member, world: int, rank: int) -> None:
    rank %= world
    assert member.rows * member.row_numel == math.prod(member.size)
    assert member.num_bytes == math.prod(member.size) * member.dtype.itemsize
    assert member.chunk_rows(world) == chunk_rows(member.rows, world)
    assert member.local_rows(world, rank) == local_rows(member.rows, world, rank)
    assert member.chunk_numel(world) == member.chunk_rows(world) * member.row_numel
    assert member.local_rows(world, rank) * member.row_numel <= member.chunk_numel(world)


SMALL = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SMALL, st.integers(1, 40))
def test_flat_parts_in_turn_are_the_whole(size: tuple[int, ...], world: int) -> None:
    whole = torch.arange(math.prod(size)).view(size)
    member = Member(torch.int64, size, FLAT)
    parts = [part_of(whole, member, world, rank) for rank in range(world)]
    assert torch.equal(torch.cat(parts), whole.view(-1))
    assert [part.shape for part in parts] == [member.local_size(world, r) for r in range(world)]
    assert member.chunk_numel(world) * world < whole.numel() + world


@given(SMALL, st.data())
def test_boxes_of_a_run(size: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(size)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(size)
    boxes = split_run(size, start, end)
    found = []
    for offsets, sizes, first in boxes:
        box = whole[tuple(slice(at, at + of) for at, of in zip(offsets, sizes, strict=True))]
        assert box.shape == sizes
        assert box.flatten().tolist() == list(range(first, first + box.numel()))
        found += box.flatten().tolist()
    assert found == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(size) - 1)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=3).map(tuple), WORLDS)
@example((400, 2999), 101)  # a hundredth, not more
def test_little_padding(size: tuple[int, ...], world: int) -> None:
    """A hundredth of the shard, or a few elements, at any number of ranks."""
    member = Member(torch.bfloat16, size, dim_with_little_padding(size, world))
    share = math.prod(size) / world
    if len(size) > 1:
        assert member.chunk_numel(world) <= max(1.01 * share, share + 64) + 1
    by_rows = Member(torch.bfloat16, size).chunk_numel(world)
    assert member.dim == 0 or 100 * world * by_rows > 101 * math.prod(size)


@pytest.mark.parametrize(("rows", "dim"), [(10_000, 0), (9_901, 0), (9_900, 0), (9_801, FLAT)])
def test_a_hundredth_is_little(rows: int, dim: int) -> None:
    """Of 100 ranks, each has 100 rows, 100, 99, and 99, of which 98.01 are used."""
    assert dim_with_little_padding((rows, 10_000), 100) == dim


def test_a_run_of_many_ranks_is_few_boxes() -> None:
    rows = [first_row(8 * 28672 * 4096, 1000, rank) for rank in range(1001)]
    pieces = [split_run((8, 28672, 4096), *pair) for pair in itertools.pairwise(rows)]
    assert max(map(len, pieces)) <= 5


def test_member_of_a_vector() -> None:
    member = Member(torch.bfloat16, (7,))
    assert (member.rows, member.row_numel, member.num_bytes) == (7, 1, 14)
    assert member.chunk_numel(4) == 2


@given(st.lists(MEMBERS, max_size=6).map(tuple))
def test_text_is_read_back(members: tuple[Member, ...]) -> None:
    assert read_members(show_members(members)) == members


def test_text() -> None:
    members = (Member(torch.float32, (7, 15)), Member(torch.bfloat16, (7,)))
    assert show_members(members) == "f32[7,15] bf16[7]"
    assert show_members((Member(torch.bfloat16, (3, 7), FLAT),)) == "bf16[3,7]@flat"
    assert show_members(()) == ""
    assert read_members("") == ()


def test_every_dtype_has_one_name() -> None:
    assert len(DTYPES) == len(DTYPE_NAMES)


@pytest.mark.parametrize(
    "part",
    ["f32", "f32[", "f32[7", "f32[7,]", "f32[-1]", "f32[a]", "q8[7]", "[7]", "7", "f32[7]]"],
)
def test_unreadable_text_is_quoted(part: str) -> None:
    with pytest.raises(ValueError, match="no bucket member") as raised:
        read_members(f"f32[7,15] {part} bf16[7]")
    assert repr(part) in str(raised.value)
