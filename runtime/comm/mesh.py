"""Process groups, meshes, and what their axes are for; made by default as torchrun says."""

from __future__ import annotations

import functools
import gc
import os
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard import _torch
from autoshard.errors import UsageError
from autoshard.passes.ir import groups
from autoshard.passes.ir.layout import Member
from autoshard.runtime.comm.at_exit import at_exit
from autoshard.runtime.comm.flat_layout import FlatShard

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims

HIGH_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"  # torch reads it as it makes a process group

SHARD_AXIS = "shard"
REPLICATE_AXIS = "replicate"


def default_mesh() -> DeviceMesh:
    """Mesh of one axis over all ranks, on the accelerator if there is one, else the CPU.

    Its axis has no name, as in torch's own default, so that the two are equal and DTensors of one
    can be loaded into the other.

    Initializes the default process group first, as `ensure_process_group` does.
    """
    ensure_process_group()
    return init_device_mesh(device_type(), (dist.get_world_size(),))


_known: weakref.WeakValueDictionary[tuple[str, ...], DeviceMesh] = weakref.WeakValueDictionary()
"""Meshes over groups that were made for them, by the names of these."""


def hybrid_mesh(shards: int | None = None) -> DeviceMesh:
    """Return a mesh (replicate, shard) over all ranks, for HSDP; all ranks call this together.

    Each rank makes the two groups that it is in, with the timeout of the default one; the same
    ones are returned again later. `init_device_mesh` makes those of all ranks on every rank.
    shards: how many neighboring ranks share a replica; by default those of a node, as torchrun's
        LOCAL_WORLD_SIZE says, or without it all ranks.
    Initializes the default process group first, as `ensure_process_group` does.
    Raises ValueError if the ranks can't be divided so.
    """
    ensure_process_group()
    world, rank, group = dist.get_world_size(), dist.get_rank(), _torch.dist.default_group()
    shards = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if shards is None else shards
    if shards < 1 or world % shards:
        raise ValueError(
            f"hybrid_mesh(shards={shards}): {world} ranks can't be divided into replicas of so "
            "many: pass a divisor"
        )
    own = {
        REPLICATE_AXIS: range(rank % shards, world, shards),
        SHARD_AXIS: range(rank // shards * shards, (rank // shards + 1) * shards),
    }
    groups = [
        group
        if len(ranks) == world
        else _torch.dist.group_within(group, ranks, f"{axis}-by-{shards}")
        for axis, ranks in own.items()
    ]
    names = tuple(each.group_name for each in groups)
    mesh = _known.get(names)
    if mesh is None:
        grid = torch.arange(world).view(-1, shards)
        mesh = _known[names] = DeviceMesh.from_group(
            groups, device_type(), mesh=grid, mesh_dim_names=tuple(own)
        )
    return mesh


def ensure_process_group() -> None:
    """Initialize the default process group if nobody did.

    From torchrun's environment, after making the GPU of LOCAL_RANK the current device: the ranks
    wait for each other. Or, without RANK and WORLD_SIZE, of this rank alone. With NCCL for GPUs if
    there are any, and gloo. All groups are destroyed when Python exits, whoever initialized them.
    NCCL gets streams of high priority, unless TORCH_NCCL_HIGH_PRIORITY is set: a gather that was
    launched ahead should not queue behind the products that it is to run beside.
    """
    at_exit(_end_process_group)
    if dist.is_initialized():
        return
    cuda = device_type() == "cuda"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if cuda:
        os.environ.setdefault(HIGH_PRIORITY, "1")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        try:
            dist.init_process_group(backend)
        except RuntimeError as error:
            hint = restarts_over_one_store()
            if hint:
                raise RuntimeError(f"{error} {hint}") from error
            raise
    else:
        dist.init_process_group(backend, store=_torch.dist.HashStore(), rank=0, world_size=1)


def restarts_over_one_store() -> str:
    """Say what goes wrong where torchrun starts ranks again, and keeps its store; else ""."""
    num_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if num_restarts <= 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        f"torchrun may start these ranks again {num_restarts} times, over one store, in which they "
        "find addresses of processes that are gone: attempts fail until those are overwritten. "
        "Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and each attempt has a store of "
        "its own"
    )


@functools.cache
def warn_of_restarts() -> None:
    """Warn on rank 0, once, as `restarts_over_one_store` says."""
    hint = restarts_over_one_store()
    if hint and dist.is_initialized() and dist.get_rank() == 0:
        warnings.warn(hint, RuntimeWarning, stacklevel=2)


def world_size() -> int:
    """Size of the default process group; before there is one, the environment's WORLD_SIZE or 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _end_process_group() -> None:
    """Destroy the process groups if the script did not, so that gloo's threads end before Python.

    A process that ends with such a thread running aborts now and then ("terminate called
    without an active exception"), after all its work is done: the thread lets go of the last
    collective's tensors while Python is taken apart. Collecting garbage lets go of the last
    references to the group, whose end waits for its threads. If something else holds the group
    only `os._exit` is safe; our tools end by it. Without a group, nothing is done or collected.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def device_type() -> str:
    """Type of the device where parameters live unless a mesh says otherwise: "cuda", "cpu", ..."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Device of this rank on `mesh`: the CPU, or the current device of the mesh's type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


@dataclass(frozen=True)
class FullMesh:
    """Mesh on which a whole model lies, and the names of its data-parallel axes (`dp_mesh_dims`).

    Before sharding all parameters are DTensors on it, replicated over those axes.
    """

    mesh: DeviceMesh
    data_names: frozenset[str]

    @property
    def data_axes(self) -> tuple[int, ...]:
        """Positions of the data-parallel axes."""
        names = enumerate(self.mesh.mesh_dim_names or ())
        return tuple(axis for axis, name in names if name in self.data_names)


@dataclass(frozen=True)
class Axes:
    """Mesh for data parallelism, and what its axes are for.

    shard: the axis over which parameters are cut; None if every rank has them unsharded.
    replicate: the axis whose ranks hold copies of each other's shards; None if there is none.
    full: the mesh of which these are axes, if parameters were DTensors on that; else None.
    """

    mesh: DeviceMesh
    shard: DeviceMesh | None
    replicate: DeviceMesh | None
    full: FullMesh | None = None

    @property
    def shard_world(self) -> int:
        return 1 if self.shard is None else self.shard.size()

    @property
    def shard_rank(self) -> int:
        return 0 if self.shard is None else self.shard.get_local_rank()

    @property
    def replicate_world(self) -> int:
        return 1 if self.replicate is None else self.replicate.size()

    @property
    def num_ranks(self) -> int:
        return self.shard_world * self.replicate_world

    @property
    def shard_group(self) -> str:
        """Name of the group that parameters are cut over; "" if they are not."""
        return "" if self.shard is None else str(self.shard.get_group().group_name)

    @property
    def replicate_group(self) -> str:
        return "" if self.replicate is None else str(self.replicate.get_group().group_name)

    @property
    def shard_name(self) -> str:
        """Name of the axis that parameters are cut over; "shard" if it has none, or they aren't."""
        names = None if self.shard is None else self.shard.mesh_dim_names
        return names[0] if names else SHARD_AXIS

    def reduce_group(self, scatter_group: str) -> str:
        """Name of the group that gradients are averaged over, in the form of `passes/ir/groups.py`.

        scatter_group: name of the group for the reduce-scatter: `shard_group`, or another group of
            the same ranks. The group of replicas is added to it if there are several.
        """
        return groups.join(scatter_group, self.replicate_group if self._has_copies else "")

    @property
    def reduce_name(self) -> str:
        """Names of the axes that gradients are averaged over, joined: "shard+replicate".

        An axis without a name counts as "shard" or "replicate". The first is empty if parameters
        are not cut ("+replicate"); the second is left out, with the "+", if it has one rank.
        """
        names = None if self.replicate is None else self.replicate.mesh_dim_names
        replicate = (names[0] if names else REPLICATE_AXIS) if self._has_copies else ""
        return groups.join("" if self.shard is None else self.shard_name, replicate)

    @property
    def _has_copies(self) -> bool:
        return self.replicate_world > 1

    def placements(self, member: Member) -> tuple[Placement, ...]:
        """Placements of `member`, one for each axis of `mesh`: a scalar is replicated over all."""
        copies = () if self.replicate is None else (Replicate(),)
        cut = FlatShard() if member.is_flat else Shard(member.dim)
        own = Replicate() if member.is_scalar else cut
        return copies if self.shard is None else (*copies, own)


def check_is_mesh(mesh: object, what: str) -> None:
    """Raise TypeError if `mesh` is no DeviceMesh.

    what: the function that was given `mesh`, for the message.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{what} expects a DeviceMesh as mesh, not {type(mesh).__name__}")


def axes_of(mesh: DeviceMesh, what: str) -> Axes:
    """Say what the axes of `mesh` are for.

    The axis of a 1-D mesh shards, and nothing is replicated. Of a 2-D one, the first axis
    replicates and the second shards (HSDP).
    what: the public function that was given the mesh, for messages.
    Raises ValueError for a mesh of neither 1 nor 2 axes, or a 2-D one without names, and TypeError
    if `mesh` is no DeviceMesh.
    """
    check_is_mesh(mesh, what)
    if mesh.ndim == 1:
        return Axes(mesh, mesh, None)
    if mesh.ndim != 2:
        raise ValueError(
            f"{what} expects a 1D or 2D DeviceMesh but got a {mesh.ndim}D mesh {mesh}; pass the "
            'axes for data parallelism, for example mesh["shard"] or mesh["replicate", "shard"]'
        )
    if not mesh.mesh_dim_names:
        raise UsageError(
            f"{what} got a 2D mesh {mesh} without names: name its axes, as in "
            'init_device_mesh(..., mesh_dim_names=("replicate", "shard"))'
        )
    replicate, shard = mesh.mesh_dim_names
    return Axes(mesh, mesh[shard], mesh[replicate])


def axes_by_name(mesh: DeviceMesh, dims: DataParallelMeshDims, what: str) -> Axes:
    """Assign the axes of `mesh` that `dims` names; several for one purpose are flattened into one.

    The result's `mesh` has the data-parallel axes alone; its `full` is all of `mesh`. Flattening
    may make a process group, so that all ranks call this together.
    what: the public function that was given the mesh, for messages.
    Raises ValueError for a mesh without these names, or if `dims` names one twice, or none, and
    TypeError if `mesh` is no DeviceMesh.
    """
    check_is_mesh(mesh, what)
    names = (*dims.replicate_names, *dims.shard_names)
    if not mesh.mesh_dim_names:
        raise ValueError(
            f"{what} got dp_mesh_dims, and a mesh {mesh} without names: name its axes, as in "
            'init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
        )
    for name in names:
        if name not in mesh.mesh_dim_names:
            raise ValueError(
                f"{what} got dp_mesh_dims with {name!r}, which is no axis of the mesh: expected "
                f"some of {mesh.mesh_dim_names}"
            )
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"{what} got {dims}: expected at least one of shard and replicate, and each axis once"
        )
    replicate, shard = (
        _torch.dtensor.flatten_mesh(mesh, axes) if axes else None
        for axes in (dims.replicate_names, dims.shard_names)
    )
    meshes = [each for each in (replicate, shard) if each is not None]
    own = meshes[0] if len(meshes) == 1 else _torch.dtensor.join_meshes(meshes)
    return Axes(own, shard, replicate, FullMesh(mesh, frozenset(names)))


def replicate_axes(mesh: DeviceMesh, what: str) -> Axes:
    """Assign the axis of `mesh` to replicas: all of its ranks hold parameters unsharded.

    mesh: 1-D; or 2-D `(replicate, 1)`, named, of which the first axis is taken.
    what: the public function that was given the mesh, for messages.
    Raises ValueError for another mesh, TypeError if `mesh` is no DeviceMesh.
    """
    check_is_mesh(mesh, what)
    if mesh.ndim == 2 and mesh.size(1) == 1 and mesh.mesh_dim_names:
        mesh = mesh[mesh.mesh_dim_names[0]]
    if mesh.ndim != 1:
        raise ValueError(
            f"{what} expects a 1D DeviceMesh, or a 2D one of (replicate, shard) whose second axis "
            f"has size 1 and whose axes are named, but got {mesh}"
        )
    return Axes(mesh, None, mesh)


def separate_group(axes: Axes) -> str:
    """Return the name of a second process group over the ranks of `axes.shard`, for reduces.

    The first call for these ranks' group makes it, and all of them must make that call together;
    later calls return the same one. "" if parameters are not cut, or over one rank.
    """
    if axes.shard is None or axes.shard_world == 1:
        return ""
    made = _torch.dist.group_of_the_same_ranks(axes.shard.get_group(), "reduces")
    return str(made.group_name)


def smaller_axes(axes: Axes, ranks: int) -> Axes:
    """Make axes that shard over groups of `ranks` neighbors along the shard axis of `axes`.

    They replicate over nothing.
    ranks: a divisor of the number of ranks that shard.
    All ranks of the mesh call this together: the first call for their group and this number makes
    a group, of each its own, with the timeout of that of `axes`.
    """
    assert axes.shard is not None
    group = axes.shard.get_group()
    first = axes.shard_rank // ranks * ranks
    own = dist.get_process_group_ranks(group)[first : first + ranks]
    made = _torch.dist.group_within(group, own, f"by-{ranks}")
    names = (made.group_name,)
    mesh = _known.get(names)
    if mesh is None:
        mesh = _known[names] = DeviceMesh.from_group(
            made, axes.mesh.device_type, mesh_dim_names=("inner",)
        )
    return Axes(mesh, mesh, None)


NAMED = 16  # ranks of which a message names each


def name_ranks(ranks: Sequence[int], count: int | None = None) -> str:
    """Name `ranks`, of which there are `count`, as "ranks [1, 2] and 5 more", NAMED at most.

    count: as many as are given, if it is None.
    """
    count = len(ranks) if count is None else count
    shown = list(ranks[:NAMED])
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return f"ranks {shown}{more}"
