"""Communication of a unit's own: the user's, or torch's in memory that a backend gives.

The protocol is that of FSDP2's `AllGather` and `ReduceScatter`, of `torch/distributed/fsdp/
_fully_shard/_fsdp_api.py`: `allocate(size, dtype=, device=)` gives a buffer, and a call sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard import _torch
from autoshard.runtime.comm.transport import Work


class Comm(Protocol):
    """Protocol of FSDP2's `AllGather` and `ReduceScatter`."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Begin it: takes output_tensor, input_tensor, group, a reduce-scatter op, and async_op."""


class Done:
    """Work that was over when it was begun."""

    def wait(self) -> None:
        return


def check_comm(comm: object, what: str) -> None:
    """Raise TypeError if `comm`, a unit's own `what`, doesn't follow the protocol."""
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"a custom {what} should be callable and have allocate(size, dtype=, device=), as "
            f"those of torch.distributed.fsdp, which {type(comm).__name__} is not or has not"
        )


def buffer(comm: Comm | None, numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a 1D tensor to send from or receive into, by `comm` if there is one."""
    if comm is None:
        return like.new_empty(numel, dtype=dtype)
    return comm.allocate((numel,), dtype=dtype, device=like.device)


def gather(comm: Comm, receive: Sequence[Tensor], send: Sequence[Tensor], group: Any) -> list[Work]:
    """Begin to gather one tensor by `comm`, as `transport.gather` does."""
    begun: Work | None = comm(
        output_tensor=receive[0], input_tensor=send[0], group=group, async_op=True
    )
    return [Done() if begun is None else begun]


def reduce(comm: Comm, receive: Tensor, send: Tensor, group: Any) -> Work:
    """Begin a reduce-scatter by `comm`, as `transport.reduce` does."""
    begun: Work | None = comm(
        output_tensor=receive,
        input_tensor=send,
        group=group,
        op=dist.ReduceOp.SUM,
        async_op=True,
    )
    return Done() if begun is None else begun


class FromAllocator:
    """Base of torch's collectives in buffers that `allocate(numel, dtype, device)` gives.

    prepare: called with each buffer, and the group, before it is used.
    """

    def __init__(
        self,
        allocate: Callable[[int, torch.dtype, torch.device], Tensor],
        prepare: Callable[[Tensor, Any], object] = lambda tensor, group: None,
    ) -> None:
        self._allocate, self._prepare = allocate, prepare

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a buffer of `size`, 1D."""
        (numel,) = size
        return self._allocate(numel, dtype, device)


class AllGatherIn(FromAllocator):
    """All-gather of torch's in buffers of an allocator's."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Begin it; what is sent is a part of `output_tensor`."""
        self._prepare(output_tensor, group)
        return _torch.dist.all_gather_flat(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class ReduceScatterIn(FromAllocator):
    """Reduce-scatter of torch's in buffers of an allocator's."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Begin it."""
        self._prepare(input_tensor, group)
        self._prepare(output_tensor, group)
        return _torch.dist.reduce_scatter_flat(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
