"""The process group and the mesh, made from what torchrun says if nobody made them."""

from __future__ import annotations

import atexit
import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import _torch

SHARD_AXIS = "shard"


def default_mesh() -> DeviceMesh:
    """A 1-D mesh over all ranks, on the accelerator if there is one, else the CPU.

    Initialises the default process group first if nobody did: from torchrun's
    environment, or, with none, as a world of one.
    """
    ensure_process_group()
    return init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=(SHARD_AXIS,))


def ensure_process_group() -> None:
    """Initialise the default process group if nobody did."""
    _end_group_at_exit()
    if dist.is_initialized():
        return
    cuda = device_type() == "cuda"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=_torch.HashStore(), rank=0, world_size=1)


def world_size() -> int:
    """Of the default process group, or of the one that torchrun's environment calls for."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


_ends_at_exit = False


def _end_group_at_exit() -> None:
    global _ends_at_exit
    if not _ends_at_exit:
        _ends_at_exit = True
        atexit.register(_end_process_group)


def _end_process_group() -> None:
    """End the group if the script did not, so that gloo's threads do not outlive Python.

    A process that ends with such a thread running aborts now and then ("terminate called
    without an active exception"), after all its work is done. Collecting garbage lets go of
    the last references to the group's threads before C++ tears down what they use.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def device_type() -> str:
    """ "cuda", "cpu", ...: where parameters live unless a mesh says otherwise."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank on `mesh`."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


def check_mesh(mesh: DeviceMesh, what: str) -> None:
    """Raise ValueError unless `mesh` is one that `what` (a public name) can shard over."""
    if mesh.ndim != 1:
        raise ValueError(
            f"{what} expects a 1D DeviceMesh but got a {mesh.ndim}D mesh {mesh}; "
            'pass one axis of it, for example mesh["shard"]'
        )
