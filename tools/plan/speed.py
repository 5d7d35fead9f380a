"""Speed of training as the field states it: tokens per second and GPU, and MFU.

MFU, the utilization of a model's FLOPs, is the share of a device's peak that goes into operations
of the model itself: those of forward, and twice as many in backward. Nothing that is computed again
counts, and attention counts without what a causal mask leaves out. For a transformer that is, for
each token,

    6 * N + 12 * L * H * Q * T

with N parameters that tokens are multiplied with (of an embedding they only read a row), L layers
of H heads of size Q, and sequences of T tokens. The operations are counted in the forward graph, so
that experts count only where a token goes to them, and pictures need no formula of their own.

Source: Chowdhery et al., "PaLM: scaling language modeling with pathways", 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autoshard.passes.planner.kernels import Kernel
from autoshard.tools.plan.graphs import Graph


@dataclass(frozen=True)
class Work:
    """Work that one sample, a sequence for instance, is for a model that is trained on it.

    tokens: of a sample; None if it is not made of tokens.
    flops: operations of forward and backward, without any that are computed again.
    """

    tokens: int | None
    flops: float

    @property
    def unit(self) -> str:
        """Unit of `per_second`: "tokens" or "samples"."""
        return "samples" if self.tokens is None else "tokens"

    def per_second(self, sample_us: float) -> float:
        """Tokens a second and GPU; samples, if they are not made of tokens.

        sample_us: microseconds of a GPU for a sample.
        """
        return (self.tokens or 1) * 1e6 / sample_us

    def mfu(self, sample_us: float, peak_flops_per_us: float) -> float | None:
        """Share of the peak that the model's operations reach; None if there are none to count.

        sample_us: microseconds of a GPU for a sample.
        peak_flops_per_us: of a GPU, by its data sheet.
        """
        return self.flops / sample_us / peak_flops_per_us if self.flops else None


def forward_flops(graph: Graph) -> float:
    """Operations of products, attention and convolutions in a forward `graph`, masks ignored."""
    flops = [0.0 if each is None else _flops_of(each) for each in graph.kernels]
    return sum(flops[int(number)] for number in graph.problem.op_us)


def _flops_of(kernel: Kernel) -> float:
    if kernel.product is not None:
        batch, rows, columns, depth = kernel.product
        return 2.0 * batch * rows * columns * depth
    if kernel.attention is not None:
        found = kernel.attention
        return 4.0 * found.heads * found.queries * found.keys * found.width
    return kernel.flops


def tokens_of(batch: Any, micro_batch: int, seq: int) -> int | None:
    """Return `seq` if the batch has token ids, integers of [micro_batch, seq]; else None.

    batch: a tensor, or a tuple or dict of values.
    """
    has_ids = any(
        tuple(each.shape) == (micro_batch, seq) and not each.dtype.is_floating_point
        for each in tensors_in(batch)
    )
    return seq if has_ids else None


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, but for those that are nested deeper."""
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    values = batch if isinstance(batch, tuple) else (batch,)
    yield from (each for each in values if isinstance(each, Tensor))
