"""Graphs of several microbatches from those that are traced for one.

A step is traced with as many samples as a large prime says. A size that this prime divides counts
samples, and is what it is for any other microbatch, in proportion:

    traced with 61    [61 * 128, 4096] x [4096, 1024]
    for 2              [2 * 128, 4096] x [4096, 1024]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, fx, nn

from autoshard import _torch
from autoshard.passes.ir.match import is_marker
from autoshard.passes.pipeline import copied
from autoshard.passes.plans.values import hint_of, num_bytes_of, tensors_of

SMALLEST = 61  # above sums of a few numbers of heads, or of experts
NEGLIGIBLE = 1 << 16  # bytes


def prime_for(model: nn.Module, batch: Iterable[Tensor]) -> int:
    """Choose a number of samples that is prime, and divides no size of `model` and no other one.

    batch: of few samples.
    """
    tensors = [*model.parameters(), *model.buffers(), *batch]
    sizes = {size for each in tensors for size in each.shape}
    config = getattr(model, "config", None)
    sizes |= {each for each in vars(config).values() if type(each) is int} if config else set()
    sizes -= {0}
    return next(each for each in _primes() if all(size % each for size in sizes))


def _primes() -> Iterator[int]:
    """Yield primes from `SMALLEST` on."""
    for number in itertools.count(SMALLEST, 2):
        if all(number % each for each in range(3, math.isqrt(number) + 1, 2)):
            yield number


def of_microbatch(gm: fx.GraphModule, prime: int, micro_batch: int) -> fx.GraphModule:
    """Copy `gm`, whose nodes have tensors of `prime` samples, with tensors of `micro_batch`.

    Only tensors among the nodes' metadata change, which is all that costs are read from: they are
    on the meta device, and contiguous.
    """
    gm = copied(gm)
    for node in gm.graph.nodes:
        if tensors_of(node):
            node.meta["val"] = _torch.tensors.tree_map_only(
                Tensor, lambda each: _resized(each, prime, micro_batch), node.meta["val"]
            )
    return gm


def _resized(tensor: Tensor, prime: int, micro_batch: int) -> Tensor:
    if not _counts(tensor, prime):
        return tensor
    sizes = list(map(hint_of, tensor.shape))
    sizes = [size if size % prime else size // prime * micro_batch for size in sizes]
    return torch.empty(sizes, dtype=tensor.dtype, device="meta")


def _counts(tensor: Tensor, prime: int) -> bool:
    """Tell whether a size of `tensor` counts samples; a symbolic one is as large as its hint."""
    return any(size and size % prime == 0 for size in map(hint_of, tensor.shape))


def follows_batch(forward: fx.GraphModule, prime: int) -> bool:
    """Tell whether all large values of a forward graph are in proportion to the microbatch.

    They are not where a size is rounded, the capacity of experts for instance: a value is made of
    one that counts samples, and doesn't count them itself. Small ones, such as sums, may do so.
    """
    counted: set[fx.Node] = set()
    for node in forward.graph.nodes:
        tensors = tensors_of(node)
        if any(_counts(each, prime) for each in tensors):
            counted.add(node)
        elif not is_marker(node) and any(each in counted for each in node.all_input_nodes):
            if any(num_bytes_of(each) > NEGLIGIBLE for each in tensors):
                return False
            counted.add(node)  # what is made of it depends on the samples, too
    return True
