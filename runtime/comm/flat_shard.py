"""Flat placements: DTensors that are cut into equal runs of elements, not of rows.

To everybody else a `FlatDTensor` is a DTensor of its true size: to optimizers, to
`clip_grad_norm_`, to torch's checkpoints and state dicts. What lies where is in `flat_layout`, how
torch's operators run on it in `flat_calls`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from autoshard import _torch
from autoshard.runtime.comm.flat_calls import Call
from autoshard.runtime.comm.flat_layout import FlatShard as FlatShard
from autoshard.runtime.comm.flat_layout import boxes, cut_box, gather, gathered, place


class FlatDTensor(DTensor):
    """DTensor one of whose placements is a `FlatShard`; `flat_calls` runs operators."""

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], rest: Any, size: torch.Size, stride: tuple[int, ...]
    ) -> FlatDTensor:
        """Make the tensor anew from what `__tensor_flatten__` gave."""
        made = DTensor.__tensor_unflatten__(inner, rest, size, stride)
        spec, local = _torch.dtensor.spec_of(made), _torch.dtensor.local_tensor(made)
        return _torch.dtensor.make(FlatDTensor, local, spec, requires_grad=made.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run operator `func` on lines or on gathered tensors.

        Raises NotImplementedError if it would write to a flat tensor, and not element by element.
        """
        return Call(func, args, kwargs or {}).run()

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **keywords: Any,
    ) -> DTensor:
        """Redistribute as a DTensor does; to what is not flat, by gathering all of it."""
        if placements is not None and tuple(placements) == self.placements:
            return self
        whole: DTensor = _Gather.apply(self)  # type: ignore[no-untyped-call]  # torch's is untyped
        return whole.redistribute(device_mesh, placements, **keywords)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's run of elements, 1-D, to which gradients flow back.

        Raises ValueError for `grad_placements` other than its own placements.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise ValueError(
                f"to_local(grad_placements={tuple(grad_placements)}) of a tensor that is placed as "
                f"{self.placements}: its gradient can only be placed alike"
            )
        if not torch.is_grad_enabled():
            return _torch.dtensor.local_tensor(self)
        local: Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]  # likewise
        return local

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """List the write items of this rank's shard, for torch's planner of checkpoints.

        There is one for each of `__create_chunk_list__`.
        """
        properties = TensorProperties.create_from_tensor(_torch.dtensor.local_tensor(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List the rectangular blocks of the tensor that this rank's shard is made of."""
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes, _ in boxes(self)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the part of the local tensor that is the box at `index.offset`, as a view."""
        local = _torch.dtensor.local_tensor(self)
        for offsets, sizes, start in boxes(self):
            if index.offset is None or tuple(index.offset) == offsets:
                return local[start : start + math.prod(sizes)].view(sizes)
        raise ValueError(f"{index} is no part of the tensor that rank {place(self)[1]} has")


def cut(
    whole: Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = None,
) -> DTensor:
    """Distribute `whole` as `distribute_tensor` does, to placements with a `FlatShard` or without.

    The result may share memory with `whole`.
    src_data_rank: None, and nothing is sent: every rank has all of `whole`.
    Raises ValueError for a `FlatShard` over one of several axes that have no names.
    """
    placements = tuple(placements)
    if FlatShard() not in placements:
        return distribute_tensor(whole, mesh, placements, src_data_rank=src_data_rank)
    if isinstance(whole, DTensor) and whole.placements == placements:
        return whole
    around = distribute_tensor(whole, mesh, gathered(placements), src_data_rank=src_data_rank)
    box = _torch.dtensor.local_tensor(around).detach()
    flat = cut_box(FlatDTensor, box, around.device_mesh, placements, tuple(whole.shape))
    flat.requires_grad_(whole.requires_grad)
    return flat


class _Gather(torch.autograd.Function):
    """Gathers a flat tensor; its gradient is cut as it is."""

    @staticmethod
    def forward(ctx: Any, flat: FlatDTensor) -> DTensor:
        ctx.spec = _torch.dtensor.spec_of(flat)
        return gather(flat)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        around = grad.redistribute(ctx.spec.mesh, gathered(ctx.spec.placements))
        return _Cut.apply(around, ctx.spec)  # type: ignore[no-untyped-call]  # torch's is untyped


class _Cut(torch.autograd.Function):
    """Cuts a gathered tensor; its gradient is gathered. The backward of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, whole: DTensor, spec: Any) -> FlatDTensor:
        box = _torch.dtensor.local_tensor(whole)
        return cut_box(FlatDTensor, box, spec.mesh, spec.placements, tuple(whole.shape))

    @staticmethod
    def backward(ctx: Any, grad: FlatDTensor) -> Any:
        return _Gather.apply(grad), None  # type: ignore[no-untyped-call]  # torch's is untyped


class _ToLocal(torch.autograd.Function):
    """Gives the local tensor of a flat tensor; its gradient becomes such a tensor again."""

    @staticmethod
    def forward(ctx: Any, flat: FlatDTensor) -> Tensor:
        ctx.spec = _torch.dtensor.spec_of(flat)
        local = _torch.dtensor.local_tensor(flat)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _FromLocal.apply(grad, ctx.spec)  # type: ignore[no-untyped-call]  # likewise


class _FromLocal(torch.autograd.Function):
    """Makes a flat tensor of a local one. The backward of `_ToLocal`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: Any) -> FlatDTensor:
        return _torch.dtensor.make(FlatDTensor, local.contiguous(), spec)

    @staticmethod
    def backward(ctx: Any, grad: FlatDTensor) -> Any:
        return grad.to_local(), None


torch.serialization.add_safe_globals([FlatDTensor, FlatShard])
_torch.dtensor.distribute_also(FlatShard, cut)
