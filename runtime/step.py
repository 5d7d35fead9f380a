"""The eager runtime: one forward of a root, and the backward that follows it.

forward   a parameter read gathers its unit; the unit's forward ends: dropped
backward  a saved parameter is wanted: its unit is gathered again;
          the last gradient of the unit is in: its reduce is launched, the gathered dropped;
          the end: every reduce is waited for and added to `.grad`

[Note: what is saved for backward]
While a step is open, hooks on saved tensors replace a view of a gathered parameter
by a `_SavedView`: which parameter, which strides. Unpacking gathers the unit again
and makes the view anew. Nothing resizes storages, and nothing hangs on outputs.
Hooks of the user's that were there before (as of `save_on_cpu`) still get every
other tensor. With hooks, autograd leaves it to them to find writes to what is saved.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime import left_out, reduce
from autoshard.runtime.agreement import course
from autoshard.runtime.param import ShardedParam, Stamp, local_tensor
from autoshard.runtime.reduce import Reduction
from autoshard.runtime.tokens import Tokens
from autoshard.runtime.unit import Unit, units_below
from autoshard.runtime.whole import Parts, Whole

_open = threading.local()

Grads = dict[ShardedParam, Tensor | None]
"""Whole gradients of all trainable parameters of a unit; None where this rank has none."""


def open_step() -> Step | None:
    """The step whose forward this thread is in, if any."""
    step: Step | None = getattr(_open, "step", None)
    return step


class Step:
    """Gathered parameters and autograd tokens from one forward of `owner` to its backward."""

    def __init__(self, owner: Unit) -> None:
        self.owner = owner
        self.has_hooks = False  # see [Note: what is saved for backward]
        self.has_grad = torch.is_grad_enabled()  # whether a backward may follow
        self.opened_in: FrameType | None = None  # who called the owner, while it is open
        self.running: list[Unit] = []  # units whose forward is on the stack, outermost first
        self._ended: dict[Unit, int] = {}  # how many forwards of its modules are over
        self.order: list[Unit] = []  # units in the order in which they were first gathered
        self._forward: dict[Unit, Whole] = {}  # read, or on its way
        self._backward: dict[Unit, Whole] = {}
        self._read: set[Unit] = set()  # those of `_forward` that are not just fetched ahead
        self._read_again: set[Unit] = set()  # of `_backward`
        self._tokens: dict[Unit, weakref.ref[Tokens]] = {}  # the graph holds them
        self._trained: set[Unit] = set()  # units that have, or had, tokens
        self._storages: dict[int, ShardedParam] = {}  # storage of a gathered tensor -> whose it is
        self._saved: set[Unit] = set()  # units of which backward wants something again
        self._parts: dict[Unit, Parts] = {}  # what backward gathers, of units that have `smaller`
        self._reduces: list[Reduction] = []
        self._callback_queued = False
        self._expected = owner.last_order  # what the previous step gathered, for prefetch

    @property
    def num_gathered(self) -> int:
        """Units that are gathered, or on the way, by this step."""
        return len({*self._forward, *self._backward})

    def is_on_the_stack(self) -> bool:
        """Whether the owner's forward is still running, or was broken off and nobody told us."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.opened_in:
            frame = frame.f_back
        return frame is not None

    # ---- forward

    def read(self, param: ShardedParam) -> Tensor:
        """The whole parameter, as forward may use it."""
        return self.attach(param, self._in_forward(param.unit)[param])

    def read_in_backward(self, param: ShardedParam) -> Tensor:
        """The whole parameter, for a part of forward that a checkpoint runs again."""
        return self.attach(param, self._in_backward(param.unit)[param])

    def attach(self, param: ShardedParam, data: Tensor) -> Tensor:
        """`data`, its gathered data, with its gradient going to the unit's reduce."""
        if not (self.has_grad and param.param.requires_grad):
            return data if param.tp is None else param.tp.wrap(data)
        # Also under the caller's no_grad: what it reads may be used outside of that.
        with torch.enable_grad():
            attached = self._tokens_of(param.unit).attach(param, data)
            return attached if param.tp is None else param.tp.wrap(attached)

    def leave(self, unit: Unit, *, failed: bool) -> None:
        """`unit`'s forward has ended."""
        self.running.remove(unit)
        self._ended[unit] = self._ended.get(unit, 0) + 1
        # A unit of several modules is done when each of them has run.
        done = unit not in self.running and self._ended[unit] % len(unit.modules) == 0
        if done and (unit.reshards or not self.has_grad):
            self._drop(unit, check=not failed)

    def close(self, *, failed: bool = False) -> None:
        """The owner's forward has ended: only what backward needs stays.

        failed: by an exception.
        """
        for unit in list(self._forward):
            if unit.keeps_after_backward and self.has_grad and not unit.reshards and not failed:
                self._backward.setdefault(unit, self._forward[unit])
            self._drop(unit, check=not failed)
        self.owner.last_order = tuple(self.order)
        order = self.owner.order("forward")
        order.forget() if failed else order.end()

    def _in_forward(self, unit: Unit) -> dict[ShardedParam, Tensor]:
        if unit in self._read:
            return self._forward[unit].tensors()
        if not self.order:  # a compiled forward opens a step too, and gathers nothing in it
            course.take(f"an eager forward of {self.owner.name}", self.owner.axes.mesh)
            if self.owner.post_optim_event is not None:
                self.owner.post_optim_event.wait()
                self.owner.post_optim_event = None
        self.owner.order("forward").take(f"the gather of {unit.name}")
        if unit not in self.order:
            self.order.append(unit)
            unit.last_step = self
        ahead = self._forward.get(unit)
        if ahead is not None and ahead.is_stale:  # written to since, as a momentum encoder is
            self._forward.pop(unit).drop()
        self._launch(unit, self._forward)
        self._read.add(unit)
        gathered = self._forward[unit].tensors()
        for param, tensor in gathered.items():
            if tensor.numel() and tensor.untyped_storage()._cdata != _storage(param.shard):
                self._storages[_storage(tensor)] = param
        for following in _ahead(unit, unit.next_in_forward, self._expected, unit.forward_prefetch):
            if following not in self.order or unit.next_in_forward is not None:
                self._launch(following, self._forward)
        return gathered

    def _launch(self, unit: Unit, where: dict[Unit, Whole]) -> None:
        """Start gathering `unit`, unless it is gathered or on its way."""
        if unit in where:
            return
        kept, unit.kept = unit.kept, None
        if kept is not None and not kept.is_stale:
            where[unit] = kept
        else:
            parts = self._parts.pop(unit, None) if where is self._backward else None
            where[unit] = Whole(unit, parts)

    def _drop(self, unit: Unit, *, check: bool = True) -> None:
        whole = self._forward.pop(unit, None)
        self._read.discard(unit)
        if whole is None:
            return
        if whole.is_here:
            for tensor in whole.tensors().values():
                self._storages.pop(_storage(tensor), None)
            if check:
                whole.check_unwritten()
        if whole is self._backward.get(unit):
            return
        if unit.is_unsharded_by_user:
            unit.kept = whole
            return
        if unit.smaller is not None and unit in self._saved and unit not in self._parts:
            self._parts[unit] = whole.cut(unit.smaller)
        whole.drop()

    def _tokens_of(self, unit: Unit) -> Tokens:
        known = self._tokens.get(unit)
        made = None if known is None else known()
        if made is None:
            made = Tokens(self, unit)
            self._tokens[unit] = weakref.ref(made)
            self._trained.add(unit)
        return made

    # ---- saved tensors

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps instead of `tensor`: itself, or how to gather it again."""
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        param = self._storages.get(_storage(local))
        if param is None or not param.unit.reshards:
            return tensor
        self._saved.add(param.unit)
        return _SavedView(
            self,
            param,
            local.size(),
            local.stride(),
            int(local.storage_offset()),
            param.stamp,
            tensor._spec if isinstance(tensor, DTensor) else None,
        )

    def unpack(self, saved: _SavedView) -> Tensor:
        param = saved.param
        param.check_unwritten(saved.stamp)
        whole = self._in_backward(param.unit)[param]
        local = whole.as_strided(saved.size, saved.stride, saved.offset)
        return local if saved.spec is None else _torch.dtensor_of_spec(local, saved.spec)

    # ---- backward

    def _in_backward(self, unit: Unit) -> dict[ShardedParam, Tensor]:
        if unit in self._read_again:
            return self._backward[unit].tensors()
        self.owner.order("backward").take(f"the gather of {unit.name}")
        self._queue_callback()
        # A unit that trains nothing has no reduce to end it: the next gather does.
        for other in list(self._backward):
            if other in self._read_again and other not in self._trained:
                self._end(other)
        self._launch(unit, self._backward)
        self._read_again.add(unit)
        gathered = self._backward[unit].tensors()
        if not unit.prefetches_after_backward:
            self._prefetch_backward(unit)
        return gathered

    def _prefetch_backward(self, unit: Unit) -> None:
        coming = [u for u in reversed(self.order) if u in self._saved and u.unshard_in_backward]
        for following in _ahead(unit, unit.next_in_backward, coming, unit.backward_prefetch):
            if following in self._saved:
                self._launch(following, self._backward)

    def _end(self, unit: Unit) -> None:
        """Backward is over for `unit`: drop its whole parameters, or keep them for the next."""
        whole = self._backward.pop(unit, None)
        self._read_again.discard(unit)
        if whole is None:
            return
        if unit.keeps_after_backward or unit.is_unsharded_by_user:
            unit.kept = whole
        else:
            whole.drop()

    def reduce(self, unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> None:
        """Every gradient of `unit` is in: launch its reduce, let go of its parameters.

        wanted: the parameters of which `.grad` is to be filled.
        """
        self._queue_callback()
        if not unit.reducer.syncs:
            unit.check_may_wait()
        for param in wanted:
            param.hooks.set_aside()
        if unit.reducer.syncs:
            for reduction in self._reductions(unit, _with_pending(unit, grads, wanted), wanted):
                self._start(reduction)
        else:
            for param, grad in grads.items():
                if grad is not None and param in wanted:
                    reduce.hold(param, grad, unit.reduced_member(param, grad.dtype).dtype)
        self._end(unit)
        if unit.prefetches_after_backward:
            self._prefetch_backward(unit)
        self._saved.discard(unit)

    def reduce_now(
        self, unit: Unit, grads: Grads, wanted: set[ShardedParam]
    ) -> dict[ShardedParam, Tensor]:
        """As `reduce`, but returns this rank's part of the mean gradients and fills no `.grad`."""
        self._queue_callback()
        reduced: dict[ShardedParam, Tensor] = {}
        for reduction in self._reductions(unit, grads, wanted, stands_alone=True):
            reduction.launch()
            reduced.update(reduction.wait())
        self._end(unit)
        self._saved.discard(unit)
        return {param: part.to(param.member.dtype) for param, part in reduced.items()}

    def _reductions(
        self,
        unit: Unit,
        grads: Grads,
        wanted: set[ShardedParam],
        *,
        stands_alone: bool = False,
    ) -> list[Reduction]:
        self.owner.order("backward").take(f"the reduce of {unit.name}")
        by_dtype: dict[torch.dtype, Grads] = {}
        for param, grad in grads.items():
            if grad is not None and grad.layout != torch.strided:
                raise NotImplementedError(
                    f"the gradient of {param.name} is sparse, which can't be reduced: build the "
                    "embedding with sparse=False"
                )
            own = unit.gathered_member(param).dtype  # of its gradient, on ranks that have none
            dtype = unit.reduced_member(param, own).dtype
            by_dtype.setdefault(dtype, {})[param] = grad
        return [
            Reduction(unit, same, wanted, dtype, stands_alone=stands_alone)
            for dtype, same in by_dtype.items()
        ]

    def _start(self, reduction: Reduction) -> None:
        queue = self._reduces
        for earlier in queue:
            earlier.advance()  # an all-reduce runs beside the next gather and reduce-scatter
        while len(queue) >= reduction.max_in_flight:
            queue.pop(0).accumulate()
        reduction.launch()
        queue.append(reduction)

    def _queue_callback(self) -> None:
        if not self._callback_queued and _torch.in_backward():
            _torch.queue_backward_callback(self._finish_backward)
            self._callback_queued = True
            left_out.note_backward()

    def _finish_backward(self) -> None:
        self._callback_queued = False
        for unit in units_below(self.owner):
            if unit.reducer.syncs and any(reduce.pending_of(p) is not None for p in unit.params):
                # Used in earlier backwards, and not in this one.
                trainable = [param for param in unit.params if param.param.requires_grad]
                self.reduce(unit, dict.fromkeys(trainable), set(trainable))
        for reduction in self._reduces:
            reduction.advance()
        for unit in units_below(self.owner):
            if unit.reducer.all_reduces:
                for params, partial in list(unit.reducer.partial.items()):
                    self.owner.order("backward").take(f"what is left to all-reduce of {unit.name}")
                    self._start(
                        Reduction(unit, dict.fromkeys(params), set(params), partial.flat.dtype)
                    )
        self.owner.carried.extend(self._reduces)
        self._reduces = []
        if self.owner.is_last_backward:
            self.owner.finish_reduces()
        for unit in self._trained:
            for param in unit.params:
                param.hooks.put_back()  # of those that got no gradient
        for unit in list(self._backward):
            self._end(unit)
        self.owner.order("backward").end()

    def abandon(self) -> None:
        """After an exception: let go of everything, in flight or not."""
        for whole in (*self._forward.values(), *self._backward.values()):
            whole.drop()
        self._forward, self._backward, self._storages = {}, {}, {}
        self._read, self._read_again = set(), set()
        self._reduces, self.running = [], []
        for phase in ("forward", "backward"):
            self.owner.order(phase).forget()


@dataclass(frozen=True)
class _SavedView:
    """A view of a gathered parameter, to be made again from a new gather."""

    step: Step
    param: ShardedParam
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    stamp: Stamp  # of the parameter: the values that forward saw
    spec: Any  # of the DTensor that was saved, if it was one


@dataclass(frozen=True)
class _Saved:
    """Any other tensor, and the version that it had."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a {self.tensor.dtype} tensor of size "
                f"{list(self.tensor.shape)} is at version {self.tensor._version}, expected version "
                f"{self.version}; write to a copy of it"
            )
        return self.tensor


def _with_pending(unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> Grads:
    """`grads`, each that is wanted with what waited for it."""
    return {
        param: grad
        if param not in wanted
        else reduce.take_pending(
            param, grad, unit.reduced_member(param, unit.gathered_member(param).dtype).dtype
        )
        for param, grad in grads.items()
    }


def _ahead(
    unit: Unit, given: list[Unit] | None, order: Iterable[Unit], limit: int
) -> Sequence[Unit]:
    """What to gather ahead at `unit`: those `given`, or the next `limit` in `order`."""
    if given is not None:
        return given
    order = list(order)
    start = order.index(unit) + 1 if unit in order else len(order)
    return order[start : start + limit]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def step_in_backward(unit: Unit) -> Step:
    """The step whose backward is running, as far as `unit` can tell: its latest."""
    if unit.last_step is None:
        unit.last_step = Step(unit)
    return unit.last_step


def read_unsharded(param: ShardedParam) -> Tensor:
    """The whole parameter, outside of forward, between `unshard()` and `reshard()`."""
    unit = param.unit
    if unit.kept is None or unit.kept.is_stale:
        unit.kept = Whole(unit)
    step = unit.reading
    if step is None or step.has_grad != torch.is_grad_enabled():
        step = unit.reading = Step(unit)
    return step.attach(param, unit.kept.tensors()[param])


def abandon_open_step() -> None:
    """After an exception that no hook saw: nothing is open any more."""
    step = open_step()
    if step is not None:
        _pop_hooks(step)
        _open.step = step.opened_in = None
        step.abandon()


def _caller() -> FrameType | None:
    """The innermost frame that is not of this package, nor of what wraps its functions."""
    frame: FrameType | None = sys._getframe()
    ours = ("autoshard.", "torch._dynamo.")
    while frame is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame = frame.f_back
    return frame


def enter(unit: Unit) -> None:
    """A module of `unit` starts its forward: open a step if none is."""
    step = open_step()
    if step is not None and step.owner is unit and not step.is_on_the_stack():
        abandon_open_step()  # no hook ran for a KeyboardInterrupt
        step = None
    if step is None:
        step = _open.step = Step(unit)
        step.opened_in = _caller()
        _push_hooks(step)
    step.running.append(unit)


def leave(unit: Unit) -> None:
    """The matching end; closes the step that `unit` opened. Also run for exceptions."""
    step = open_step()
    if step is None or unit not in step.running:
        return
    failed = sys.exc_info()[0] is not None  # an exception of forward's is being handled
    try:
        step.leave(unit, failed=failed)
    finally:
        if not step.running:
            _pop_hooks(step)
            _open.step = step.opened_in = None
            step.close(failed=failed)


def _push_hooks(step: Step) -> None:
    """See [Note: what is saved for backward]."""
    outer = _torch.saved_tensors_hooks_on_top()
    around_checkpoint = outer is not None and _torch.is_checkpoint_hook(outer[0])
    # A checkpointed block is run again in backward, parameters and all, and what that
    # second forward saves is wanted at once: neither is gathered a second time.
    step.has_hooks = not (around_checkpoint or _torch.in_backward())
    if not step.has_hooks:
        return
    if outer is None:

        def pack(tensor: Tensor) -> Any:
            packed = step.pack(tensor)
            return packed if isinstance(packed, _SavedView) else _Saved(tensor, tensor._version)

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, _SavedView):
                return saved.step.unpack(saved)
            tensor: Tensor = saved.unpack()
            return tensor

    else:
        outer_pack, outer_unpack = outer

        def pack(tensor: Tensor) -> Any:
            packed = step.pack(tensor)
            return packed if isinstance(packed, _SavedView) else outer_pack(packed)

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, _SavedView):
                return saved.step.unpack(saved)
            unpacked: Tensor = outer_unpack(saved)
            return unpacked

    # Autograd calls these, inside compiled code too: Dynamo is to leave them alone.
    _torch.push_saved_tensors_hooks(_torch.disable(pack), _torch.disable(unpack))


def _pop_hooks(step: Step) -> None:
    if step.has_hooks:
        _torch.pop_saved_tensors_hooks()
