"""Microseconds of a kernel on a device, by its shape: a matrix product, attention, or the rest.

    product    tiles of the result, one a processor at a time; an unfinished round of processors
               takes as long as a full one; each tile has a start and an end besides its depth
    attention  at a share of the peak that grows with the length of sequences
    rest       bytes at the memory's rate, or operations at that of products

and no kernel takes less than the smallest. Long and narrow products are split along their depth,
for as many parts as pay: their sums are written and read again.

Sources: tiles, rounds and splits are those of Osama et al., "Stream-K: work-centric parallel
decomposition for dense matrix-matrix multiplication on the GPU", 2023; attention's rates by length
and head are in Dao, "FlashAttention-2", 2023, figures 4 to 6.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from autoshard.passes.planner.topology import Topology


@dataclass(frozen=True)
class Kernel:
    """Kernel that a node launches, or what it adds to the one that it is fused into.

    dtype:     of the result, "bf16".
    bytes:     read and written.
    product:   (batch, rows, columns, depth) of a matrix product; None if it is none.
    attention: None if it is none.
    flops:     of others.
    cast_bytes: read and written before by casts of a product's factors to `dtype`.
    launches:  whether it is a kernel of its own.
    key:       by which a topology may have its measured time; "" if it is fused.
    host_bytes: that are copied to the host from there on, beside compute.
    """

    dtype: str = ""
    bytes: int = 0
    product: tuple[int, int, int, int] | None = None
    attention: Attention | None = None
    flops: int = 0
    cast_bytes: int = 0
    launches: bool = True
    key: str = ""
    host_bytes: int = 0


@dataclass(frozen=True)
class Attention:
    """Attention without its matrix of scores in memory.

    heads: of all sequences together. queries, keys: lengths. width: of a head.
    """

    heads: int
    queries: int
    keys: int
    width: int
    is_causal: bool
    is_backward: bool

    @property
    def flops(self) -> float:
        """Operations, without those that a causal mask leaves out: 2 products, or 5 backward."""
        products = 5 if self.is_backward else 2
        whole = 2.0 * products * self.heads * self.queries * self.keys * self.width
        return whole / 2 if self.is_causal else whole


def kernel_us(kernel: Kernel | None, topology: Topology) -> float:
    """Microseconds of `kernel` on a device of `topology`: as measured there, or by its shape.

    kernel: None for a view, which takes no time.
    """
    if kernel is None:
        return 0.0
    measured_us = topology.ops.get(kernel.key)
    if measured_us is not None:
        return measured_us
    took = kernel.bytes / topology.memory_bytes_per_us
    if kernel.product is not None:
        took = max(took, product_us(*kernel.product, chip_of(topology, kernel.dtype)))
        took += kernel.cast_bytes / topology.memory_bytes_per_us
    elif kernel.attention is not None:
        took = max(took, attention_us(kernel.attention, topology, kernel.dtype))
    elif kernel.flops:
        took = max(took, kernel.flops / topology.flops_per_us(kernel.dtype))
    return max(took, topology.op_us) if kernel.launches else took


FLOAT8 = "f8e4m3"


def in_float8(kernel: Kernel | None, widest: int) -> Kernel | None:
    """Return `kernel` as a product in float8, with the casts of both of its factors.

    widest: size of the vocabulary. A product with that size stays as it is, and so does a kernel
        that is no product: recipes leave the last layer in the dtype that it has.
    """
    if kernel is None or kernel.product is None or widest in kernel.product:
        return kernel
    batch, rows, columns, depth = kernel.product
    casts = batch * (rows + columns) * depth * (2 + 1)  # from two bytes to one
    return dataclasses.replace(kernel, dtype=FLOAT8, cast_bytes=casts, key="")


class Chip(NamedTuple):
    """Rates and sizes that the time of a product depends on; see `Topology`."""

    processors: int
    flops_per_us: float
    tile_depth: float
    memory_bytes_per_us: float


def chip_of(topology: Topology, dtype: str) -> Chip:
    """Return what the time of products of `dtype` depends on, on a device of `topology`."""
    return Chip(
        topology.processors,
        topology.flops_per_us(dtype),
        topology.tile_depth,
        topology.memory_bytes_per_us,
    )


TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 64, 0.7))
"""Tiles of a product's result, and the share of the rate of large ones that they reach.

A tile of 128 x 128 reads half as much again from shared memory for each operation.
"""

MOST_PARTS = 16  # along its depth


@functools.lru_cache(maxsize=1 << 16)
def product_us(batch: int, rows: int, columns: int, depth: int, chip: Chip) -> float:
    """Microseconds of `batch` products of [rows, depth] and [depth, columns]."""
    if not chip.processors:
        return 2.0 * batch * rows * columns * depth / chip.flops_per_us
    rate = chip.flops_per_us / chip.processors
    best = math.inf
    for high, wide, share in TILES:
        tiles = batch * math.ceil(rows / high) * math.ceil(columns / wide)
        parts = 1
        while parts <= MOST_PARTS:
            rounds = math.ceil(tiles * parts / chip.processors)
            took = rounds * 2.0 * high * wide * (depth / parts + chip.tile_depth) / (rate * share)
            if parts > 1:  # sums in f32, written and read
                took += 8.0 * batch * rows * columns * parts / chip.memory_bytes_per_us
            best = min(best, took)
            if tiles >= 4 * chip.processors:
                break
            parts *= 2
    return best


def attention_us(attention: Attention, topology: Topology, dtype: str) -> float:
    """Microseconds of `attention`, forward or backward."""
    rate = topology.peak_flops_per_us(dtype) * topology.attention_efficiency
    rate *= attention.keys / (attention.keys + topology.attention_ramp)
    rate *= min(1.0, 0.7 + 0.3 * attention.width / WIDE)
    if attention.is_backward:
        rate *= topology.attention_backward
    return attention.flops / rate


WIDE = 128  # of heads, at which attention reaches its rate
