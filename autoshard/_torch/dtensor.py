"""DTensors and their meshes: made without moving data, taken apart without autograd.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], size: Sequence[int], dtype: torch.dtype
) -> Any:
    """Make the spec of a contiguous DTensor of global `size`."""
    whole = torch.empty(size, dtype=dtype, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def from_spec(local: torch.Tensor, spec: Any) -> DTensor:
    """Return the DTensor of `spec` whose part on this rank is `local`, which is not moved.

    `DTensor.from_local` would move `local` to the mesh's device.
    """
    # Not by calling the class: its `__init__` does nothing, and keeping Dynamo from that takes
    # longer than the rest.
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def spec_of(tensor: DTensor) -> Any:
    """Spec of `tensor`, as `from_spec` takes it."""
    return tensor._spec


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, without autograd."""
    local: torch.Tensor = param._local_tensor  # type: ignore[attr-defined]  # a DTensor has it
    return local


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Placement that cuts along `dim` after `split_factor` ranks of later mesh axes have cut it.

    With a `split_factor` of 1 it is `Shard(dim)`.
    """
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def join_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Join `meshes`, slices of one mesh, into one mesh of all their axes.

    Raises RuntimeError if they are no slices of one mesh.
    """
    joined: DeviceMesh = DeviceMesh._concatenate(meshes)
    return joined


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of one axis over all ranks of the axes `names` of `mesh`.

    Several axes are flattened into one, whose name is theirs joined by "_". That may make a process
    group, so that all ranks of `mesh` call this together.
    """
    if len(names) == 1:
        return mesh[names[0]]
    flat: DeviceMesh = mesh[names]._flatten("_".join(names))
    return flat
