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
        """Launch the collective; return the work to wait for, or None if it is over.

        It is called with output_tensor=, input_tensor=, group=, async_op=True, and a reduce-scatter
        with op=, too.
        """


class Done:
    """Work that was over when it was begun."""

    def wait(self) -> None:
        return


def check_comm(comm: object, what: str) -> None:
    """Raise TypeError if `comm` is not callable, or has no method `allocate`.

    what: what it is to be, "all-gather" or "reduce-scatter", for the message.
    """
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"a custom {what} should be callable and have allocate(size, dtype=, device=), as "
            f"those of torch.distributed.fsdp, which {type(comm).__name__} is not or has not"
        )


def buffer(comm: Comm | None, numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a 1D tensor to send from or receive into: by `comm`, or, if None, an ordinary one.

    It is uninitialized, on the device of `like`.
    """
    if comm is None:
        return like.new_empty(numel, dtype=dtype)
    return comm.allocate((numel,), dtype=dtype, device=like.device)


def gather(comm: Comm, receive: Sequence[Tensor], send: Sequence[Tensor], group: Any) -> list[Work]:
    """Launch the all-gather of one tensor by `comm`; see `transport.gather`.

    receive, send: lists of one tensor. Returns a list of one work, a `Done` if `comm` returns None.
    """
    begun: Work | None = comm(
        output_tensor=receive[0], input_tensor=send[0], group=group, async_op=True
    )
    return [Done() if begun is None else begun]


def reduce(comm: Comm, receive: Tensor, send: Tensor, group: Any) -> Work:
    """Launch a reduce-scatter, always of sums, by `comm`; return its work.

    That is a `Done` if `comm` returns None. Arguments: see `transport.reduce`.
    """
    begun: Work | None = comm(
        output_tensor=receive,
        input_tensor=send,
        group=group,
        op=dist.ReduceOp.SUM,
        async_op=True,
    )
    return Done() if begun is None else begun


class FromAllocator:
    """Base of comms that use torch's collectives, in buffers that `allocate` makes.

    allocate: called with (numel, dtype, device).
    prepare: called with each buffer, and the group, before a collective uses the buffer.
    """

    def __init__(
        self,
        allocate: Callable[[int, torch.dtype, torch.device], Tensor],
        prepare: Callable[[Tensor, Any], object] = lambda tensor, group: None,
    ) -> None:
        self._allocate, self._prepare = allocate, prepare

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a 1D buffer; `size` is (numel,)."""
        (numel,) = size
        return self._allocate(numel, dtype, device)


class AllGatherIn(FromAllocator):
    """All-gather by torch, in buffers of a given allocator; a `Comm`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Prepare `output_tensor`, of which `input_tensor` is a part, and launch the all-gather.

        Returns the work to wait for, or, without `async_op`, None.
        """
        self._prepare(output_tensor, group)
        return _torch.dist.all_gather_flat(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class ReduceScatterIn(FromAllocator):
    """Reduce-scatter by torch, in buffers of a given allocator; a `Comm`."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Prepare both buffers, and launch the reduce-scatter.

        Returns the work to wait for, or, without `async_op`, None.
        """
        self._prepare(input_tensor, group)
        self._prepare(output_tensor, group)
        return _torch.dist.reduce_scatter_flat(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
