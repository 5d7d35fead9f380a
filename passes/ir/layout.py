"""Pure shape arithmetic: what a member of a bucket looks like on each rank.

A parameter of R rows over W ranks is cut along a dim, mostly 0, into chunks of ceil(R / W)
rows. Rank r holds rows [r * chunk, min((r + 1) * chunk, R)), which may be fewer
than a chunk, or none. On the wire every rank's piece is a whole chunk, the rows
past the end being padding, so that the gathered chunks lie one after another and
the parameter is the first R rows of them.

    7 rows over 4 ranks:  | 0 1 | 2 3 | 4 5 | 6 . |

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


@dataclass(frozen=True)
class Member:
    """Parameter in a bucket: its dtype on the wire, its unsharded size, and the dim that is cut.

    Rows are its slices along `dim`. Along a dim other than the first they divide evenly. A scalar,
    of size (), is not cut.
    shard_dtype: dtype of a reduce's result, if it is not `dtype`, in which gradients are summed.
    on_host: whether the result of a reduce is to lie in host memory, as the parameter's shard does.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    dim: int = 0
    shard_dtype: torch.dtype | None = None
    on_host: bool = False

    def __str__(self) -> str:
        """Format as text that `read_members` reads: "bf16[7,15]@1->f32^host" has all parts."""
        text = f"{DTYPE_NAMES[self.dtype]}[{','.join(map(str, self.size))}]"
        text += f"@{self.dim}" if self.dim else ""
        text += f"->{DTYPE_NAMES[self.shard_dtype]}" if self.shard_dtype else ""
        return text + ("^host" if self.on_host else "")

    @property
    def is_scalar(self) -> bool:
        return not self.size

    @property
    def rows(self) -> int:
        """Number of rows in the unsharded parameter; 1 for a scalar."""
        return 1 if self.is_scalar else self.size[self.dim]

    @functools.cached_property
    def row_numel(self) -> int:
        """Elements in one row."""
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
        """Size of the shard on `rank`, without padding; () for a scalar."""
        if self.is_scalar:
            return ()
        rows = self.local_rows(world, rank)
        return (*self.size[: self.dim], rows, *self.size[self.dim + 1 :])


def part_of(whole: Tensor, member: Member, world: int, rank: int) -> Tensor:
    """Copy the rows of `whole` that `rank` of `world` holds, or all of a scalar; contiguous.

    whole: unsharded; `member` describes it.
    """
    return rows_of(whole, member, world, rank).clone(memory_format=torch.contiguous_format)


def rows_of(whole: Tensor, member: Member, world: int, rank: int) -> Tensor:
    """View of the rows of `whole` that `rank` of `world` holds; `whole` itself if it is a scalar.

    whole: unsharded; `member` describes it.
    """
    if member.is_scalar:
        return whole
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
    match = re.fullmatch(r"(\w+)\[((?:\d+(?:,\d+)*)?)\](?:@(\d+))?(?:->(\w+))?(\^host)?", text)
    if match is None or not {match[1], match[4] or match[1]} <= DTYPES.keys():
        raise ValueError(f"{text!r} is no bucket member; one looks like f32[7,15]")
    size = tuple(map(int, match[2].split(","))) if match[2] else ()
    shard_dtype = DTYPES[match[4]] if match[4] else None
    return Member(DTYPES[match[1]], size, int(match[3] or 0), shard_dtype, bool(match[5]))
