"""Saved-tensor hooks: what autograd keeps for backward while a step is open.

They replace a view of a gathered parameter by a `_SavedView`: which parameter, which strides.
Unpacking gathers the unit again and makes the view anew; memory that stays unsharded after forward
is `Held` meanwhile, and gathered again only if the unit is resharded.
Nothing resizes storages, and nothing hangs on outputs. Hooks of the user's that were there
before (as of `save_on_cpu`) still get every other tensor. With hooks, autograd leaves it to
them to find writes to what is saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.eager import decided
from autoshard.runtime.eager.unit_steps import steps_of
from autoshard.runtime.unit.param import ShardedParam, Stamp

if TYPE_CHECKING:
    from autoshard.runtime.eager.step import Step
    from autoshard.runtime.unit.unit import Unit
    from autoshard.runtime.unit.unsharded import Unsharded


@dataclass(frozen=True)
class Source:
    """Owner of a storage's memory: the parameter, and which of its `Unsharded.sources` it is."""

    param: ShardedParam
    index: int
    dtype: torch.dtype


class Sources:
    """Storages of unsharded parameters that are gathered now, each with its `Source`."""

    def __init__(self) -> None:
        self._by_storage: dict[int, Source] = {}

    def add(self, whole: Unsharded) -> None:
        """Add the storages of `whole`, waiting for its gather.

        Not those of shards themselves, as in a world of one, nor empty ones.
        """
        for param, tensors in whole.sources().items():
            own = {_torch.tensors.storage_id(each) for each in _plain_tensors(param.shard)}
            for index, tensor in enumerate(tensors):
                storage = _torch.tensors.storage_id(tensor)
                if tensor.numel() and storage not in own:
                    self._by_storage[storage] = Source(param, index, tensor.dtype)

    def remove(self, whole: Unsharded) -> None:
        """Remove the storages of `whole`, waiting for its gather."""
        for tensors in whole.sources().values():
            for tensor in tensors:
                self._by_storage.pop(_torch.tensors.storage_id(tensor), None)

    def of(self, tensor: Tensor) -> Source | None:
        """Find the owner of the memory of `tensor`, which is no subclass.

        None if that is no unsharded parameter's, or is viewed in another dtype.
        """
        source = self._by_storage.get(_torch.tensors.storage_id(tensor))
        return source if source is not None and source.dtype == tensor.dtype else None

    def clear(self) -> None:
        self._by_storage = {}


class Held:
    """Memory of an unsharded parameter that stays from forward to backward.

    Tensors that autograd has saved hold this object, and let go of it as backward goes on.
    `reshard()` of the unit frees it sooner.
    """

    def __init__(self, step: Step, unit: Unit, memory: Tensor) -> None:
        """Hold `memory`, of `unit`, and add this object to what `reshard()` of the unit frees."""
        self.memory: Tensor | None = memory
        self._step, self._unit = step, unit
        steps_of(unit).held.add(self)

    def free(self) -> None:
        """Let go of the memory; backward is to gather it again."""
        if self.memory is not None:
            self.memory = None
            self._step.needs_again(self._unit)


class _Regathered:
    """Object that autograd keeps in place of a tensor whose memory is a gathered parameter's."""

    def unpack(self) -> Tensor:
        """Return the tensor that was saved, made again."""
        raise NotImplementedError


@dataclass(frozen=True)
class _SavedView(_Regathered):
    """View of a gathered parameter, to be made again: of held memory, or else of a new gather.

    `unpack` raises RuntimeError if the parameter, or the held memory, was written to since.
    """

    step: Step
    source: Source
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    stamp: Stamp  # of the parameter: the values that forward saw
    spec: Any  # of the DTensor that was saved, if it was one
    version: int
    held: Held | None = None

    def unpack(self) -> Tensor:
        """Make the view again, of held memory, or else of a new gather, which is waited for.

        The first of a unit launches that gather, and those that come next (`Step.gather_again`).
        Raises RuntimeError if the parameter, or the held memory, was written to since.
        """
        param = self.source.param
        memory = None if self.held is None else self.held.memory
        if memory is None:
            param.check_unwritten(self.stamp)
            memory = self.step.gather_again(param.unit).sources()[param][self.source.index]
        else:
            _check_version(memory, self.version)
        local = memory.as_strided(self.size, self.stride, self.offset)
        return local if self.spec is None else _torch.dtensor.from_spec(local, self.spec)


@dataclass(frozen=True)
class _SavedSubclass(_Regathered):
    """Tensor subclass with gathered memory inside, as all-gather extensions may make one."""

    kind: Any
    parts: dict[str, Any]  # each a tensor or `_Regathered`
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    def unpack(self) -> Tensor:
        """Make the tensor subclass again, of its parts, each unpacked if it was gathered memory."""
        inner = {
            name: part.unpack() if isinstance(part, _Regathered) else part
            for name, part in self.parts.items()
        }
        made: Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return made


@dataclass(frozen=True)
class _SavedOther:
    """Tensor that is no gathered parameter's, and the version that it had.

    It is detached: the result of an op that is saved for the op's own backward would otherwise hold
    what holds it, and a forward without a backward would never be freed.
    `unpack` raises RuntimeError if it was written to since.
    """

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if it was written to since it was saved."""
        _check_version(self.tensor, self.version)
        return self.tensor


def _check_version(tensor: Tensor, expected: int) -> None:
    """Raise RuntimeError, as autograd would, if `tensor` was written to since it was saved."""
    if tensor._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a {tensor.dtype} tensor of size {list(tensor.shape)} is at "
            f"version {tensor._version}, expected version {expected}; write to a copy of it"
        )


def _pack(step: Step, tensor: Tensor) -> Any:
    """Return what autograd keeps instead of `tensor`: itself, or how to gather it again.

    In the latter case, backward is told to gather the unit again, or, if the unit doesn't reshard,
    the memory is held. A tensor subclass with gathered memory inside is packed part by part.
    """
    if _torch.tensors.is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # as checked
        parts = {name: _pack(step, getattr(tensor, name)) for name in names}
        if not any(isinstance(part, _Regathered) for part in parts.values()):
            return tensor
        return _SavedSubclass(type(tensor), parts, context, tensor.size(), tensor.stride())
    local = _torch.dtensor.local_of(tensor)
    source = step.sources.of(local)
    if source is None:
        return tensor
    held = None
    if source.param.unit.reshards and not decided.is_kept(source.param):
        step.needs_again(source.param.unit)
    else:
        held = step.hold(source)
    return _SavedView(
        step,
        source,
        local.size(),
        local.stride(),
        int(local.storage_offset()),
        source.param.stamp,
        _torch.dtensor.spec_of(tensor) if isinstance(tensor, DTensor) else None,
        # A part of a subclass counts versions of its own: the memory is what is looked at again.
        local._version if held is None or held.memory is None else held.memory._version,
        held,
    )


def push_hooks(step: Step) -> bool:
    """Push hooks by which autograd saves what `_pack` makes of tensors; returns whether it did.

    Other tensors go to the hooks that were on top before, or are checked for writes. Unpacking
    begins the backward of `step`. Nothing is pushed in a non-reentrant checkpoint, in backward, or
    in a transform of torch.func.
    """
    outer = _torch.autograd.saved_tensors_hooks_on_top()
    # A checkpointed block is run again in backward, parameters and all, and what that
    # second forward saves is wanted at once: neither is gathered a second time.
    # torch.func takes no hooks: what it saves of parameters is theirs until backward is over.
    if in_checkpoint() or _torch.autograd.in_backward() or _torch.autograd.in_functorch():
        return False

    def pack(tensor: Tensor) -> Any:
        """Return what autograd keeps of `tensor`: of gathered memory, how to gather it again.

        Else what the hook that was on top before makes of it; without one, the tensor and its
        version.
        """
        packed = _pack(step, tensor)
        if isinstance(packed, _Regathered):
            return packed
        if outer is not None:
            return outer[0](tensor)
        return decided.moved(tensor) or _SavedOther(tensor.detach(), tensor._version)

    def unpack(saved: Any) -> Tensor:
        """Return the tensor that `pack` was given. The first call begins the backward of `step`.

        Raises RuntimeError if the tensor was written to since.
        """
        tensor: Tensor
        step.begin_backward()
        if outer is None or isinstance(saved, _Regathered):
            tensor = saved.unpack()
        else:
            tensor = outer[1](saved)
        return tensor

    # Autograd calls these, inside compiled code too.
    own: Any = _torch.dynamo.leave_alone(pack)
    own._autoshard_step = step
    _torch.autograd.push_saved_tensors_hooks(own, _torch.dynamo.leave_alone(unpack))
    return True


@contextlib.contextmanager
def without_hooks() -> Iterator[Step | None]:
    """Take the hooks of a step away in this context, if they are on top; gives that step, or None.

    For code that saves no memory of gathered parameters, as a graph that gathers them itself:
    autograd keeps what is saved as it is, or as the user's hooks have it, and looks for writes.
    Whoever runs it has to call the step's `begin_backward` in backward.
    """
    pair = _torch.autograd.saved_tensors_hooks_on_top()
    step: Step | None = None if pair is None else getattr(pair[0], "_autoshard_step", None)
    if step is None:
        yield None
        return
    _torch.autograd.pop_saved_tensors_hooks()
    try:
        yield step
    finally:
        assert pair is not None
        _torch.autograd.push_saved_tensors_hooks(*pair)


def in_checkpoint() -> bool:
    """Tell whether what runs now does so inside a non-reentrant checkpoint."""
    hooks = _torch.autograd.saved_tensors_hooks_on_top()
    return hooks is not None and _torch.autograd.is_checkpoint_hook(hooks[0])


def in_recomputation() -> bool:
    """Tell whether a non-reentrant checkpoint is recomputing its forward now.

    False inside a checkpoint nested in it, and under saved-tensor hooks of the user's in it.
    """
    hooks = _torch.autograd.saved_tensors_hooks_on_top()
    return hooks is not None and _torch.autograd.is_recomputation_hook(hooks[0])


def pop_hooks() -> None:
    """Remove the hooks of the latest `push_hooks` that returned True."""
    _torch.autograd.pop_saved_tensors_hooks()


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield `tensor`, or the tensors that a subclass is made of."""
    if _torch.tensors.is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # as checked
            yield from _plain_tensors(getattr(tensor, name))
    else:
        yield tensor
