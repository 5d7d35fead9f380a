"""Clip gradients by their norm, which is the replicated model's.

shards of gradients -> this rank's sum of powers -> all-reduce -> norm -> scaled

Each DTensor is asked how it is laid out, its mesh and its placements, so a mesh with axes that
replicate is nothing special: such an axis is never reduced over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autoshard import _torch
from autoshard.runtime.comm.mesh import mesh_device
from autoshard.runtime.eager import access
from autoshard.runtime.training.full_params import refuse_inside
from autoshard.runtime.unit.param import find
from autoshard.runtime.unit.reduce import is_waiting

EPSILON = 1e-6  # added to the norm that is divided by, as torch.nn.utils.clip_grad_norm_ does


@_torch.dynamo.disable
@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients in `module`, in place, so that their norm is at most `max_norm`.

    The norm is that of the replicated model, and so needs small all-reduces: all ranks call this
    together. It runs eagerly, also when called in compiled code. `ShardedModule.clip_grad_norm_`
    says more.

    Returns the norm before scaling, a scalar, the same on every rank; 0 if there is no gradient.
    Raises ValueError if `norm_type` is not greater than 0, or a gradient is laid out as a partial
    sum; RuntimeError inside `full_params()`, or while a gradient waits to be reduced.
    """
    power = float(norm_type)
    if not power > 0:
        raise ValueError(f"norm_type should be greater than 0, or inf, not {norm_type!r}")
    refuse_inside(module, "clip_grad_norm_")
    shares = _shares(module)
    total = _total_norm(shares, power)
    scale = (float(max_norm) / (total + EPSILON)).clamp(max=1.0)
    for share in shares:
        for device, grads in _by_device(share.grads).items():
            torch._foreach_mul_(grads, scale.to(device))
    return total


def _check_reduced(name: str, param: Tensor) -> None:
    """Raise RuntimeError if a gradient of `param`, called `name`, still waits to be reduced.

    A plain parameter has none that waits.
    """
    sharded = find(param)
    if sharded is not None and is_waiting(sharded):
        raise RuntimeError(
            f"clip_grad_norm_ was called while the gradient of {name} is waiting to be reduced "
            f"on rank {dist.get_rank()}, so there is nothing to clip yet: clip after the last "
            "backward before the optimizer's step, and outside of no_sync()"
        )


_Layout = tuple[DeviceMesh | None, tuple[int, ...]]  # a mesh, and its axes that shard


@dataclass
class _Share:
    """Gradients on this rank that are laid out over the same ranks.

    mesh: None for plain tensors, which no collective sums.
    axes: of `mesh`, those over which the gradients are cut.
    is_double: whether a parameter is f64 or c128.
    """

    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    device: torch.device
    grads: list[Tensor] = field(default_factory=list)  # local, none of them empty
    is_double: bool = False

    def norm_power(self, power: float) -> Tensor:
        """Sum the powers of all absolute values, over all ranks; for inf, find their maximum.

        Runs one all-reduce for each of `axes`, also if there are no gradients. Returns f64[2]: the
        sum or maximum, and, for inf, 1 if there was a NaN, which the maximum leaves out; else 0.
        """
        found = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.grads:
            # Stacked first: to cast each by itself would be a kernel each.
            each_on = _by_device(_norms(self.grads, power)).values()
            norms = torch.cat([torch.stack(norms).to(found) for norms in each_on])
            found[0] = norms.amax() if math.isinf(power) else norms.pow(power).sum()
        if math.isinf(power):
            # Which of a NaN and a number is the larger depends on who compares them.
            found[1] = found[0].isnan()
            found.nan_to_num_(nan=0.0, posinf=math.inf)
        for axis in self.axes:
            assert self.mesh is not None
            op = dist.ReduceOp.MAX if math.isinf(power) else dist.ReduceOp.SUM
            dist.all_reduce(found, op, group=self.mesh.get_group(axis))
        return found


def _shares(module: nn.Module) -> list[_Share]:
    """Group gradients below `module` by mesh and sharding axes, in the order of parameters.

    Parameters without a gradient make a group, too, maybe an empty one: so every rank issues the
    same collectives whichever gradients it has. Gradients are local tensors; empty ones are left
    out. Plain ones make a group without a mesh. Raises as `_sharding_axes` and `_check_reduced`.
    """
    shares: dict[_Layout, _Share] = {}
    axes_of: dict[tuple[Placement, ...], tuple[int, ...]] = {}
    for name, param in access.named_sharded(module):
        _check_reduced(name, param)
        grad = param.grad
        laid_out = param if grad is None else grad
        if isinstance(laid_out, DTensor):
            placements = laid_out.placements
            if placements not in axes_of:
                axes_of[placements] = _sharding_axes(name, laid_out)
            key: _Layout = laid_out.device_mesh, axes_of[placements]
            device = mesh_device(laid_out.device_mesh)
        else:
            key, device = (None, ()), param.device
        share = shares.setdefault(key, _Share(*key, device))
        share.is_double |= param.dtype in (torch.float64, torch.complex128)
        if grad is not None:
            local = _torch.dtensor.local_of(grad)
            if local.numel():  # an empty tensor has no inf-norm
                share.grads.append(local)
    return list(shares.values())


def _sharding_axes(name: str, tensor: DTensor) -> tuple[int, ...]:
    """Return the axes of its mesh that cut `tensor`, the gradient of parameter `name`.

    Raises ValueError if it is a partial sum.
    """
    partial = [placement for placement in tensor.placements if placement.is_partial()]
    if partial:
        raise ValueError(
            f"the gradient of {name} is laid out {tensor.placements} on rank {dist.get_rank()}, "
            "and a sum that is still to be reduced has no norm: redistribute it first"
        )
    return tuple(i for i, at in enumerate(tensor.placements) if not isinstance(at, Replicate))


def _total_norm(shares: list[_Share], power: float) -> Tensor:
    """Return the norm of all gradients on all ranks, a scalar, f32 unless a parameter is double.

    All-reduces as `_Share.norm_power` does, share by share. Powers are summed in f64: that rounds
    off no more than the result does. 0 without shares; NaN, for inf too, if a gradient has a NaN.
    """
    device = shares[0].device if shares else torch.device("cpu")
    dtype = torch.float64 if any(share.is_double for share in shares) else torch.float32
    found = [share.norm_power(power).to(device) for share in shares]
    if not found:
        return torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack(found)  # (shares, 2)
    if math.isinf(power):
        largest, has_nan = stacked.amax(dim=0)
        return torch.where(has_nan > 0, math.nan, largest).to(dtype)
    return stacked[:, 0].sum().pow(1 / power).to(dtype)


def _norms(grads: list[Tensor], power: float) -> Iterator[Tensor]:
    """Yield the p-norm, for p of `power`, of each of `grads`: halves first, in f32, then others."""
    halves = [grad for grad in grads if grad.dtype in (torch.float16, torch.bfloat16)]
    others = [grad for grad in grads if grad.dtype not in (torch.float16, torch.bfloat16)]
    if halves:
        yield from torch._foreach_norm(halves, power, dtype=torch.float32)
    if others:
        yield from torch._foreach_norm(others, power)


def _by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Group `tensors` by their device; each group keeps their order."""
    split: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        split.setdefault(tensor.device, []).append(tensor)
    return split
