"""Meshes of replicas and shards that many runs share."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.runtime.comm.mesh import device_type

_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], DeviceMesh]]
_meshes = weakref.WeakKeyDictionary()


def mesh_of(*shape: int) -> DeviceMesh:
    """Return the mesh of (replicas, shards), the same one as long as the process group lives.

    The first call for a shape makes the mesh, and its process groups: all ranks make that call
    together. Axes are named "replicate" and "shard". Raises AssertionError without a default
    process group. Each mesh has groups of its own, whose threads wake up a hundred times a second.
    """
    assert dist.group.WORLD is not None
    made = _meshes.setdefault(dist.group.WORLD, {})
    if shape not in made:
        names = ("replicate", "shard")
        made[shape] = init_device_mesh(device_type(), shape, mesh_dim_names=names)
    return made[shape]
