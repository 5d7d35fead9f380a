"""Communication of one unit that is not ours: the user's, or ours in memory that a backend gives.

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
from autoshard.runtime.transport import Work


class Comm(Protocol):
    """What FSDP2 calls an `AllGather`, or a `ReduceScatter`."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes output_tensor, input_tensor, group, a reduce-scatter op, and async_op."""


class Done:
    """Work that was done when it was begun."""

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
    """A 1D tensor to send from or receive into, of `comm` if there is one."""
    if comm is None:
        return like.new_empty(numel, dtype=dtype)
    return comm.allocate((numel,), dtype=dtype, device=like.device)


def gather(comm: Comm, receive: Sequence[Tensor], send: Sequence[Tensor], group: Any) -> list[Work]:
    """As `transport.gather`, of one tensor."""
    begun: Work | None = comm(
        output_tensor=receive[0], input_tensor=send[0], group=group, async_op=True
    )
    return [Done() if begun is None else begun]


def reduce(comm: Comm, receive: Tensor, send: Tensor, group: Any) -> Work:
    """As `transport.reduce`."""
    begun: Work | None = comm(
        output_tensor=receive,
        input_tensor=send,
        group=group,
        op=dist.ReduceOp.SUM,
        async_op=True,
    )
    return Done() if begun is None else begun


class FromAllocator:
    """torch's collectives, in buffers that `allocate` gives: numel, dtype, device."""

    def __init__(
        self,
        allocate: Callable[[int, torch.dtype, torch.device], Tensor],
        prepare: Callable[[Tensor, Any], object] = lambda tensor, group: None,
    ) -> None:
        self._allocate, self._prepare = allocate, prepare

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of `size`, 1D."""
        (numel,) = size
        return self._allocate(numel, dtype, device)


class AllGatherIn(FromAllocator):
    """An all-gather in such buffers."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Begin it; what is sent is a part of `output_tensor`."""
        self._prepare(output_tensor, group)
        return _torch.all_gather_flat(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatterIn(FromAllocator):
    """A reduce-scatter in such buffers."""

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
        return _torch.reduce_scatter_flat(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
