"""Pure shape arithmetic: what a member of a bucket looks like on each rank.

A parameter of R rows over W ranks is cut along a dim, mostly 0, into chunks of ceil(R / W)
rows. Rank r holds rows [r * chunk, min((r + 1) * chunk, R)), which may be fewer
than a chunk, or none. On the wire every rank's piece is a whole chunk, the rows
past the end being padding, so that the gathered chunks lie one after another and
the parameter is the first R rows of them.

    7 rows over 4 ranks:  | 0 1 | 2 3 | 4 5 | 6 . |

A flat parameter is cut through its rows: all its elements, in row-major order, are its rows, of one
element each.

A scalar is one row that every rank holds. In a gather each rank sends its own, and all use the
first rank's, so that all compute with one value, in whatever order each rank has summed.

No torch.distributed here: a bucket's arithmetic is the same on every rank.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e4m3fnuz: "f8e4m3fnuz",
    torch.float8_e5m2fnuz: "f8e5m2fnuz",
    torch.float8_e8m0fnu: "f8e8m0",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "b8",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

FLAT = -1
"""The `dim` of a member that is cut through its rows, into runs of elements."""


@dataclass(frozen=True)
class Member:
    """Parameter in a bucket: its dtype on the wire, its unsharded size, and the dim that is cut.

    Rows are its slices along `dim`. Along a dim other than the first they divide evenly. If `dim`
    is FLAT, they are its elements. A scalar, of size (), is not cut.
    shard_dtype: dtype of a reduce's result, if it is not `dtype`, in which gradients are summed.
    on_host: whether the result of a reduce is to lie in host memory, as the parameter's shard does.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    dim: int = 0
    shard_dtype: torch.dtype | None = None
    on_host: bool = False

    def __str__(self) -> str:
        """Format as text that `read_members` reads: "bf16[7,15]@1->f32^host" has all parts.

        A flat one has "@flat" for its dim.
        """
        text = f"{DTYPE_NAMES[self.dtype]}[{','.join(map(str, self.size))}]"
        text += f"@{'flat' if self.is_flat else self.dim}" if self.dim else ""
        text += f"->{DTYPE_NAMES[self.shard_dtype]}" if self.shard_dtype else ""
        return text + ("^host" if self.on_host else "")

    @property
    def is_scalar(self) -> bool:
        return not self.size

    @property
    def is_flat(self) -> bool:
        return self.dim == FLAT

    @property
    def lies_in_turn(self) -> bool:
        """Whether the ranks' pieces, one after another, are the parameter in its memory's order."""
        return self.dim in (0, FLAT)

    @functools.cached_property
    def rows(self) -> int:
        """Number of rows in the unsharded parameter; 1 for a scalar."""
        if self.is_flat:
            return math.prod(self.size)
        return 1 if self.is_scalar else self.size[self.dim]

    @functools.cached_property
    def row_numel(self) -> int:
        """Elements in one row."""
        if self.is_flat:
            return 1
        return math.prod(self.size[: self.dim] + self.size[self.dim + 1 :])

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of the unsharded parameter."""
        return math.prod(self.size) * self.dtype.itemsize

    def chunk_rows(self, world: int) -> int:
        """Rows in one rank's piece on the wire, padding included."""
        return chunk_rows(self.rows, world)

    def chunk_numel(self, world: int) -> int:
        """Elements in one rank's piece on the wire, padding included."""
        return self.chunk_rows(world) * self.row_numel

    def local_rows(self, world: int, rank: int) -> int:
        """Rows that `rank` holds, without padding."""
        return 1 if self.is_scalar else local_rows(self.rows, world, rank)

    def local_size(self, world: int, rank: int) -> tuple[int, ...]:
        """Size of the shard on `rank`, without padding; () for a scalar, 1-D for a flat one."""
        if self.is_scalar:
            return ()
        rows = self.local_rows(world, rank)
        if self.is_flat:
            return (rows,)
        return (*self.size[: self.dim], rows, *self.size[self.dim + 1 :])


LEAST_PART, LEAST_ELEMENTS = 100, 64
"""Padding a rank that rows are put up with for: a hundredth part of the shard, so that all of a
model stays within two, or so few elements."""


def dim_with_little_padding(size: tuple[int, ...], world: int) -> int:
    """Return the dim along which to cut a parameter of `size`: 0 if its rows will do, or FLAT.

    A gather needs no copy in either case.

    >>> [dim_with_little_padding((8, 28672, 4096), world) for world in (8, 64)]
    [0, -1]
    """
    if len(size) < 2:
        return 0
    numel = math.prod(size)
    padding = world * chunk_rows(size[0], world) * math.prod(size[1:]) - numel  # of all ranks
    return 0 if padding <= max(numel // LEAST_PART, LEAST_ELEMENTS * world) else FLAT


def part_of(whole: Tensor, member: Member, world: int, rank: int) -> Tensor:
    """Copy the rows of `whole` that `rank` of `world` holds, or all of a scalar; contiguous.

    whole: unsharded; `member` describes it.
    """
    return rows_of(whole, member, world, rank).clone(memory_format=torch.contiguous_format)


def rows_of(whole: Tensor, member: Member, world: int, rank: int) -> Tensor:
    """View of the rows of `whole` that `rank` of `world` holds; `whole` itself if it is a scalar.

    whole: unsharded; `member` describes it. Of a flat one that is not contiguous it is a copy.
    """
    if member.is_scalar:
        return whole
    if member.is_flat:
        whole = whole.reshape(-1)
        start = first_row(member.rows, world, rank)
        return whole.narrow(0, start, member.local_rows(world, rank))
    start = first_row(member.rows, world, rank)
    return whole.narrow(member.dim, start, member.local_rows(world, rank))


def chunk_rows(rows: int, world: int) -> int:
    """Rows in one rank's piece of `rows` rows, padding included.

    >>> chunk_rows(7, 4)
    2
    """
    return -(-rows // world)


def local_rows(rows: int, world: int, rank: int) -> int:
    """Rows that `rank` holds, without padding.

    >>> [local_rows(5, 4, rank) for rank in range(4)]
    [2, 2, 1, 0]
    """
    chunk = chunk_rows(rows, world)
    return max(0, min(chunk, rows - rank * chunk))


def first_row(rows: int, world: int, rank: int) -> int:
    """Index of the first row that `rank` holds; `rows` if it holds none.

    >>> [first_row(5, 4, rank) for rank in range(4)]
    [0, 2, 4, 5]
    """
    return min(rank * chunk_rows(rows, world), rows)


def split_run(
    size: tuple[int, ...], start: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split a run of the elements of a tensor of `size` into boxes, in order.

    At most two for each dim, less one: what is left of a row, whole rows, the beginning of one.
    start, end: of the run, in row-major order.
    Returns for each box its offsets, its sizes, and its first element.

    >>> split_run((3, 4), 2, 9)
    [((0, 2), (1, 2), 2), ((1, 0), (1, 4), 4), ((2, 0), (1, 1), 8)]
    """
    if start >= end:
        return []
    if len(size) == 1:
        return [((start,), (end - start,), start)]
    row = math.prod(size[1:])
    first, last = -(-start // row), end // row  # whole rows: first to last
    found: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []

    def add_part(number: int, begin: int, stop: int) -> None:
        inner = split_run(size[1:], begin - number * row, stop - number * row)
        found.extend(((number, *at), (1, *of), element + number * row) for at, of, element in inner)

    if first > last:  # within one row
        add_part(last, start, end)
        return found
    if start < first * row:
        add_part(first - 1, start, first * row)
    if first < last:
        found.append(((first, *[0] * (len(size) - 1)), (last - first, *size[1:]), first * row))
    if last * row < end:
        add_part(last, last * row, end)
    return found


def show_members(members: tuple[Member, ...]) -> str:
    """Format members as the text that the ops carry, such as `"f32[7,15] f32[7]"`."""
    return " ".join(map(str, members))


@functools.lru_cache(maxsize=4096)
def read_members(text: str) -> tuple[Member, ...]:
    """Read members from text that `show_members` has written.

    Raises ValueError, quoting the part that it can't read.

    >>> show_members(read_members("f32[7,15] bf16[7]->f32"))
    'f32[7,15] bf16[7]->f32'
    """
    return tuple(_read_member(part) for part in text.split())


def _read_member(text: str) -> Member:
    """Read one member, such as "bf16[7,15]@1->f32^host". Raises ValueError for what is none."""
    match = re.fullmatch(r"(\w+)\[((?:\d+(?:,\d+)*)?)\](?:@(\d+|flat))?(?:->(\w+))?(\^host)?", text)
    if match is None or not {match[1], match[4] or match[1]} <= DTYPES.keys():
        raise ValueError(f"{text!r} is no bucket member; one looks like f32[7,15]")
    size = tuple(map(int, match[2].split(","))) if match[2] else ()
    shard_dtype = DTYPES[match[4]] if match[4] else None
    dim = FLAT if match[3] == "flat" else int(match[3] or 0)
    return Member(DTYPES[match[1]], size, dim, shard_dtype, bool(match[5]))
