"""Unshard all parameters of a module in a context, outside of steps.

shards -> unsharded plain parameters in their places -> the block -> this rank's rows of them back
into the shards
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.comm import flat_shard
from autoshard.runtime.eager import access
from autoshard.runtime.eager import step as steps
from autoshard.runtime.ranks.order import compare_event
from autoshard.runtime.unit.param import ShardedParam, remember_origin


@contextlib.contextmanager
def full_params(module: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Context in which all parameters of `module` and below are unsharded, on every rank.

    Plain parameters stand in the places of the sharded ones. Entering gathers them one by one, so
    all ranks enter together, and wait for each other; leaving needs no other rank. Inside, all
    compiled code of the process runs eagerly. On leaving, also by an exception, the sharded
    parameters are put back, and with `writeback` this rank's rows of what then stands in their
    places are written to them. `ShardedModule.full_params` says more.

    Raises RuntimeError for a parameter on meta, inside a forward, a backward or a `full_params()`
    of the same parameters, or, if `module` heads a unit, where other ranks don't enter; ValueError
    for a parameter that was replaced by one sharded otherwise; on leaving, unless the block raises,
    what `_give_back` returns.
    """
    _refuse_full_params(module)
    params = access.params_below(module)
    for param in params:
        param.refresh()
    _refuse_meta(params)
    unit = access.unit_of(module)
    if unit is not None:
        compare_event(f"full_params() of {unit.name}", unit.axes.mesh, hint=_ENTER_HINT)
    borrowed = [_Borrowed(param, _gather(param)) for param in params]
    heads = [each for each in module.modules() if access.unit_of(each) is not None]
    # Compiled code gathers for itself, and would be traced anew over plain parameters.
    with torch.compiler.set_stance("force_eager"):
        access.unsharded_heads.update(heads)
        _unsharded.update(params)
        for each in borrowed:
            each.put()
        failed = True
        try:
            yield
            failed = False
        finally:
            access.unsharded_heads.difference_update(heads)
            _unsharded.difference_update(params)
            problem = _give_back(borrowed, writeback)
            if problem is not None and not failed:  # else the block's own exception goes on
                raise problem


def refuse_inside(module: nn.Module, what: str) -> None:
    """Raise RuntimeError if a unit or parameter in `module` is inside a `full_params()` now.

    what: the method that was called, for the message.
    """
    if not (access.unsharded_heads or _unsharded):
        return
    for each in module.modules():
        if each in access.unsharded_heads:
            raise RuntimeError(
                f"{what} of {_name(module)} was called on rank {_rank()} inside full_params() of a "
                f"model that {_name(each)} is in: leave that first; one full_params() of the "
                "outermost module covers all of it"
            )
    for param in access.params_below(module):
        if param in _unsharded:
            raise RuntimeError(
                f"{what} of {_name(module)} was called on rank {_rank()} inside full_params() of "
                f"another module, which shares {param.name} with it: leave that first"
            )


_unsharded: weakref.WeakSet[ShardedParam] = weakref.WeakSet()
"""Parameters inside a `full_params()`."""

_ENTER_HINT = "entering full_params() gathers, so all ranks of the model's mesh must do it together"


@dataclass
class _Borrowed:
    """Sharded parameter that is unsharded in a `full_params()`.

    replaced: every (module, attribute) where `unsharded` was put in its place.
    """

    param: ShardedParam
    unsharded: nn.Parameter
    replaced: list[tuple[nn.Module, str]] = field(default_factory=list)

    def put(self) -> None:
        """Put the unsharded parameter wherever the sharded one is registered."""
        for module, attribute in self.param.registrations:
            if module._parameters.get(attribute) is self.param.param:
                module._parameters[attribute] = self.unsharded
                self.replaced.append((module, attribute))

    def take_out(self) -> list[Tensor | None]:
        """Put the sharded parameter back in all places where `put` has replaced it.

        Returns what stood in those places other than the unsharded one: what the block had put
        there, or None where it had removed it. Empty if it had changed none.
        """
        found = [module._parameters.get(attribute) for module, attribute in self.replaced]
        for module, attribute in self.replaced:
            # Registering anew, not setting: a deleted one comes back too.
            module._parameters[attribute] = self.param.param
        return [other for other in found if other is not self.unsharded]

    def keep(self, unsharded: Tensor) -> None:
        """Write this rank's rows of `unsharded`, if they differ, and its requires_grad back.

        Called without gradients enabled. No other rank is needed. A shard of the same bits is not
        written to.
        """
        param = self.param.param
        layout = param.data
        assert isinstance(layout, DTensor)
        rows = flat_shard.cut(unsharded.detach(), layout.device_mesh, layout.placements)
        # A write that changes nothing does not make a forward's saved parameters stale.
        shard = self.param.shard  # on the host, if it is offloaded
        if not _same_bits(_torch.dtensor.local_tensor(rows).to(shard.device), shard):
            param.copy_(rows)
        param.requires_grad_(unsharded.requires_grad)

    def accepts(self, other: Tensor | None) -> bool:
        """Tell whether `other`, put in place of the unsharded parameter, can be written back.

        It can if it is a plain tensor of the same size and dtype, and not on meta.
        """
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
    """Gather `param` to a plain parameter of the global size, with memory of its own.

    All ranks that share it call this together; it waits for the gather. `requires_grad` is kept.
    The step of an optimizer that holds the result raises.
    """
    sharded = param.param.detach()
    assert isinstance(sharded, DTensor)
    unsharded = sharded.full_tensor()
    if unsharded.untyped_storage().data_ptr() == param.shard.untyped_storage().data_ptr():
        unsharded = unsharded.clone()  # one rank has all of it: still a copy, as with several
    made = nn.Parameter(unsharded, requires_grad=param.param.requires_grad)
    remember_origin(made, param)  # so that an optimizer built over it is told
    return made


@torch.inference_mode(False)
@torch.no_grad()
def _give_back(borrowed: list[_Borrowed], writeback: bool) -> Exception | None:
    """Put all sharded parameters back; if `writeback`, write what is in their places to the shards.

    That is the values and requires_grad of the unsharded parameter, or of what replaced it.

    Returns, for the caller to raise: with `writeback`, a ValueError if a parameter was removed,
    converted, or replaced by what `accepts` refuses (the others are written); else a RuntimeError
    if one has a gradient, which is lost; else None.
    """
    refused, trained = [], []
    for each in borrowed:
        others = each.take_out()
        unsharded = next((other for other in others if other is not None), each.unsharded)
        if all(map(each.accepts, (*others, each.unsharded))):
            if writeback:
                each.keep(unsharded)
        else:
            refused.append(each.param.name)
        if each.unsharded.grad is not None or unsharded.grad is not None:
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
    """Tell whether two tensors of one dtype are equal bit for bit: NaN equals NaN, 0 is not -0."""
    if left.shape != right.shape or left.device != right.device:
        return False
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _refuse_full_params(module: nn.Module) -> None:
    """Raise RuntimeError inside a forward or a backward, of any model, or as `refuse_inside`."""
    name = _name(module)
    if steps.open_step() is not None or _torch.autograd.in_backward():
        raise RuntimeError(
            f"full_params() of {name} was entered inside a forward or backward on rank {_rank()}: "
            "enter it outside; in forward, reading a parameter gives all of it"
        )
    refuse_inside(module, "full_params()")


def _refuse_meta(params: list[ShardedParam]) -> None:
    """Raise RuntimeError if one of `params` is still on meta."""
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
