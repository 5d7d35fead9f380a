"""State of all of a sharded module at once: the norm of its gradients, its parameters.

clip_grad_norm_   shards of gradients -> this rank's sum of powers -> all-reduce -> norm -> scaled
full_params       shards -> unsharded plain parameters in their places -> the block -> this rank's
                  rows of them back into the shards

Both ask each DTensor how it is laid out, its mesh and its placements, so a mesh with
axes that replicate is nothing special: such an axis is never reduced over.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autoshard import _torch
from autoshard.runtime.comm.mesh import mesh_device
from autoshard.runtime.eager import access
from autoshard.runtime.eager import step as steps
from autoshard.runtime.ranks.agreement import course
from autoshard.runtime.unit.param import ShardedParam, remember_origin

EPSILON = 1e-6  # added to the norm that is divided by, as torch.nn.utils.clip_grad_norm_ does


# ---- the norm of the gradients


@_torch.dynamo.disable
@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the norm of gradients: see `ShardedModule.clip_grad_norm_`."""
    power = float(norm_type)
    if not power > 0:
        raise ValueError(f"norm_type should be greater than 0, or inf, not {norm_type!r}")
    _refuse_whole(module, "clip_grad_norm_")
    shares = _shares(module)
    total = _total_norm(shares, power)
    scale = (float(max_norm) / (total + EPSILON)).clamp(max=1.0)
    for share in shares:
        for device, grads in _by_device(share.grads).items():
            torch._foreach_mul_(grads, scale.to(device))
    return total


_Layout = tuple[DeviceMesh | None, tuple[int, ...]]  # a mesh, and its axes that shard


@dataclass
class _Share:
    """Gradients on this rank that are laid out over the same ranks.

    axes: of `mesh`, those over which the gradients are cut.
    """

    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    device: torch.device
    grads: list[Tensor] = field(default_factory=list)  # local, none of them empty
    is_double: bool = False

    def norm_power(self, power: float) -> Tensor:
        """Sum the powers of all elements, over all ranks; for a norm of inf, their maximum.

        Returns f64[2]: that, and, for a norm of inf, whether there was a NaN.
        """
        found = torch.zeros(2, dtype=torch.float64, device=self.device)
        norms = [norm.to(found) for norm in _norms(self.grads, power)]
        if norms:
            stacked = torch.stack(norms)
            found[0] = stacked.amax() if math.isinf(power) else stacked.pow(power).sum()
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
    """Group gradients by mesh and sharding axes, in the order of parameters.

    There is a group also where no parameter has a gradient: so every rank issues the same
        collectives
    whichever gradients it has.
    """
    shares: dict[_Layout, _Share] = {}
    for name, param in access.named_sharded(module):
        grad = param.grad
        laid_out = param if grad is None else grad
        if isinstance(laid_out, DTensor):
            key: _Layout = laid_out.device_mesh, _sharding_axes(name, laid_out)
            device = mesh_device(laid_out.device_mesh)
        else:
            key, device = (None, ()), param.device
        share = shares.setdefault(key, _Share(*key, device))
        share.is_double |= param.dtype in (torch.float64, torch.complex128)
        if grad is not None:
            local = _torch.dtensor.local_tensor(grad) if isinstance(grad, DTensor) else grad
            if local.numel():  # an empty tensor has no inf-norm
                share.grads.append(local)
    return list(shares.values())


def _sharding_axes(name: str, tensor: DTensor) -> tuple[int, ...]:
    partial = [placement for placement in tensor.placements if placement.is_partial()]
    if partial:
        raise ValueError(
            f"the gradient of {name} is laid out {tensor.placements} on rank {dist.get_rank()}, "
            "and a sum that is still to be reduced has no norm: redistribute it first"
        )
    return tuple(i for i, at in enumerate(tensor.placements) if not isinstance(at, Replicate))


def _total_norm(shares: list[_Share], power: float) -> Tensor:
    """Norm of all gradients, a scalar, f32 unless a parameter is f64.

    Powers are summed in f64: that rounds off no more than the result does.
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
    """Yield each gradient's norm, those of half precision in f32, and first."""
    halves = [grad for grad in grads if grad.dtype in (torch.float16, torch.bfloat16)]
    others = [grad for grad in grads if grad.dtype not in (torch.float16, torch.bfloat16)]
    if halves:
        yield from torch._foreach_norm(halves, power, dtype=torch.float32)
    if others:
        yield from torch._foreach_norm(others, power)


def _by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    split: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        split.setdefault(tensor.device, []).append(tensor)
    return split


# ---- whole parameters


@contextlib.contextmanager
def full_params(module: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Unshard all parameters in a context: see `ShardedModule.full_params`."""
    _refuse_full_params(module)
    params = _params_below(module)
    for param in params:
        param.refresh()
    _refuse_meta(params)
    unit = access.unit_of(module)
    if unit is not None:
        course.meet(f"full_params() of {unit.name}", unit.axes.mesh, hint=_ENTER_HINT)
    borrowed = [_Borrowed(param, _gather(param)) for param in params]
    heads = [each for each in module.modules() if access.unit_of(each) is not None]
    # Compiled code gathers for itself, and would be traced anew over plain parameters.
    with torch.compiler.set_stance("force_eager"):
        access.whole_heads.update(heads)
        _whole.update(params)
        for each in borrowed:
            each.put()
        failed = True
        try:
            yield
            failed = False
        finally:
            access.whole_heads.difference_update(heads)
            _whole.difference_update(params)
            problem = _give_back(borrowed, writeback)
            if problem is not None and not failed:  # else the block's own exception goes on
                raise problem


_whole: weakref.WeakSet[ShardedParam] = weakref.WeakSet()
"""Parameters inside a `full_params()`."""

_ENTER_HINT = "entering full_params() gathers, so all ranks of the model's mesh must do it together"


@dataclass
class _Borrowed:
    """Parameter that is unsharded in `full_params()`, and the places where it was put meanwhile."""

    param: ShardedParam
    whole: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def put(self) -> None:
        for module, attribute in self.param.places:
            if module._parameters.get(attribute) is self.param.param:
                module._parameters[attribute] = self.whole
                self.places.append((module, attribute))

    def take_out(self) -> list[Tensor | None]:
        """Put the sharded one back; returns what stood there instead of the unsharded one."""
        found = [module._parameters.get(attribute) for module, attribute in self.places]
        for module, attribute in self.places:
            # Registering anew, not setting: a deleted one comes back too.
            module._parameters[attribute] = self.param.param
        return [other for other in found if other is not self.whole]

    def keep(self, whole: Tensor) -> None:
        """Write this rank's rows of `whole` to its shard, where they differ."""
        param = self.param.param
        layout = param.data
        assert isinstance(layout, DTensor)
        rows = distribute_tensor(
            whole.detach(), layout.device_mesh, layout.placements, src_data_rank=None
        )
        # A write that changes nothing does not make a forward's saved parameters stale.
        if not _same_bits(_torch.dtensor.local_tensor(rows), self.param.shard):
            param.copy_(rows)
        param.requires_grad_(whole.requires_grad)

    def accepts(self, other: Tensor | None) -> bool:
        """Tell whether `other`, put in place of the unsharded parameter, can be written back."""
        member = self.param.member
        return (
            other is not None
            and not isinstance(other, DTensor)
            and tuple(other.shape) == member.size
            and other.dtype == member.dtype
            and not other.is_meta
        )


@torch.inference_mode(False)
@torch.no_grad()
def _gather(param: ShardedParam) -> nn.Parameter:
    sharded = param.param.detach()
    assert isinstance(sharded, DTensor)
    whole = sharded.full_tensor()
    if whole.untyped_storage().data_ptr() == param.shard.untyped_storage().data_ptr():
        whole = whole.clone()  # one rank has all of it: still a copy, as with several
    made = nn.Parameter(whole, requires_grad=param.param.requires_grad)
    remember_origin(made, param)  # so that an optimizer built over it is told
    return made


@torch.inference_mode(False)
@torch.no_grad()
def _give_back(borrowed: list[_Borrowed], writeback: bool) -> Exception | None:
    """Make all parameters sharded again; returns an error if something can't be kept."""
    refused, trained = [], []
    for each in borrowed:
        others = each.take_out()
        whole = next((other for other in others if other is not None), each.whole)
        if all(map(each.accepts, (*others, each.whole))):
            if writeback:
                each.keep(whole)
        else:
            refused.append(each.param.name)
        if each.whole.grad is not None or whole.grad is not None:
            trained.append(each.param.name)
    if refused and writeback:
        return ValueError(
            f"parameters {refused} were removed, converted, or replaced by some of another size or "
            f"dtype inside full_params() on rank {_rank()}: that is not kept, they are as they "
            "were; do it to the sharded model, outside of full_params()"
        )
    if trained:
        return RuntimeError(
            f"parameters {trained} got gradients inside full_params() on rank {_rank()}, which are "
            "lost: train outside of full_params(), where gradients are reduced"
        )
    return None


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Tell whether two tensors are equal bit for bit: a NaN to itself too, and 0 not to -0."""
    if left.shape != right.shape or left.device != right.device:
        return False
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _params_below(module: nn.Module) -> list[ShardedParam]:
    found: dict[ShardedParam, None] = {}
    for each in module.modules():
        found.update(dict.fromkeys(each.__dict__.get(access.PARAMS, {}).values()))
    return list(found)


def _refuse_full_params(module: nn.Module) -> None:
    name = _name(module)
    if steps.open_step() is not None or _torch.autograd.in_backward():
        raise RuntimeError(
            f"full_params() of {name} was entered inside a forward or backward on rank {_rank()}: "
            "enter it outside; in forward, reading a parameter gives all of it"
        )
    _refuse_whole(module, "full_params()")


def _refuse_whole(module: nn.Module, what: str) -> None:
    """Raise RuntimeError if a parameter below `module` is unsharded by `full_params()` already."""
    for each in module.modules():
        if each in access.whole_heads:
            raise RuntimeError(
                f"{what} of {_name(module)} was called on rank {_rank()} inside full_params() of a "
                f"model that {_name(each)} is in: leave that first; one full_params() of the "
                "outermost module covers all of it"
            )
    for param in _params_below(module):
        if param in _whole:
            raise RuntimeError(
                f"{what} of {_name(module)} was called on rank {_rank()} inside full_params() of "
                f"another module, which shares {param.name} with it: leave that first"
            )


def _refuse_meta(params: list[ShardedParam]) -> None:
    meta = [param.name for param in params if param.shard.is_meta]
    if meta:
        raise RuntimeError(
            f"parameters {meta} are still on the meta device on rank {_rank()}: call "
            "model.to_empty(device=...) and initialise them before full_params()"
        )


def _name(module: nn.Module) -> str:
    unit = access.unit_of(module)
    return f"{type(module).__name__} (unit {unit.name!r})" if unit else type(module).__name__


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
