"""Eager runtime: one forward of a root, and the backward that follows it.

forward   a parameter read gathers its unit; the unit's forward ends: dropped
backward  a saved parameter is wanted: its unit is gathered again;
          the last gradient of the unit is in: its reduce is launched, the gathered dropped;
          the end: every reduce is waited for and added to `.grad`

What autograd keeps of forward is the business of `saved.py`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.runtime.eager import unmanaged
from autoshard.runtime.eager.backward import Backward
from autoshard.runtime.eager.forward import Forward
from autoshard.runtime.eager.reduces import Reduces
from autoshard.runtime.eager.saved import Held, Source, Sources, pop_hooks, push_hooks
from autoshard.runtime.eager.tokens import Grads, StepTokens
from autoshard.runtime.eager.unit_steps import (
    describe_forward,
    finish_reduces,
    order_of,
    steps_of,
    take_in_order,
    wait_for_optimizer,
)
from autoshard.runtime.eager.unordered import begin_forward, drop_all, gather_all
from autoshard.runtime.ranks.order import forward_order
from autoshard.runtime.unit import reduce
from autoshard.runtime.unit.param import ShardedParam
from autoshard.runtime.unit.unit import Unit, units_below
from autoshard.runtime.unit.unsharded import Tensors, Unsharded, is_kept

_open = threading.local()


def open_step() -> Step | None:
    """Return the step whose forward this thread is in, if any."""
    step: Step | None = getattr(_open, "step", None)
    return step


class Step:
    """One forward of `owner`, and the backward that follows it.

    Its parts know nothing of it, so that it is freed with the graph that holds it.

    has_hooks: on saved tensors.
    has_grad:  whether a backward may follow.
    opened_in: who called the owner, while it is open.
    running:   units whose forward is on the stack, outermost first.
    has_ended: its backward.
    """

    def __init__(self, owner: Unit) -> None:
        self.owner = owner
        self.has_hooks = False
        self.has_grad = torch.is_grad_enabled()
        self.opened_in: FrameType | None = None
        self.running: list[Unit] = []
        self.has_ended = False
        self.tokens = StepTokens()
        self.backward = Backward(owner, self.tokens)
        self.forward = Forward(owner, self.backward, has_grad=self.has_grad)
        self.reduces = Reduces(owner, self.tokens, self.backward)
        self._ended: dict[Unit, int] = {}  # how many forwards of its modules are over
        self._held: weakref.WeakValueDictionary[Source, Held] = weakref.WeakValueDictionary()
        self._callback_queued = False
        self._task, self._is_nested = -1, False  # of the callback that is queued

    @property
    def num_gathered(self) -> int:
        """Number of units that are gathered, or on the way, by this step."""
        return len({*self.forward.gathered, *self.backward.gathered})

    def pop_hooks(self) -> None:
        """Remove the step's hooks on saved tensors."""
        if self.has_hooks:
            pop_hooks()

    def is_on_the_stack(self) -> bool:
        """Tell whether the owner's forward is still running; it may have broken off unnoticed."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.opened_in:
            frame = frame.f_back
        return frame is not None

    def is_over_for(self, unit: Unit) -> bool:
        """Tell whether what a method reads of `unit` from now on belongs to another step.

        It does after a backward, if parameters were written to, and for the first gradients after
        reads without.
        """
        if self.has_ended or (torch.is_grad_enabled() and not self.has_grad):
            return True
        return unit in self.forward.read and self.forward.gathered[unit].is_stale

    # ---- forward

    def read(self, param: ShardedParam) -> Tensor:
        """Return the unsharded parameter, as forward may use it."""
        return self.attach(param, self._in_forward(param.unit).tensors()[param])

    def attach(self, param: ShardedParam, data: Tensor) -> Tensor:
        """Return `data`, gathered for `param`, with its gradient going to the unit's reduce."""
        if not (self.has_grad and param.param.requires_grad):
            return data if param.tp is None else param.tp.wrap(data)
        # Also under the caller's no_grad: what it reads may be used outside of that.
        with torch.enable_grad():
            attached = self.tokens.of(param.unit, self).attach(param, data)
            return attached if param.tp is None else param.tp.wrap(attached)

    def _in_forward(self, unit: Unit) -> Unsharded:
        forward = self.forward
        if unit in forward.read:
            return forward.gathered[unit]
        if not forward.order:  # a compiled forward opens a step too, and gathers nothing in it
            self._note_forward()
            wait_for_optimizer(self.owner)
        take_in_order(self.owner, "forward", unit.gather)
        if unit.is_unordered and not is_kept(unit) and not _torch.autograd.in_backward():
            gather_all(self.owner if self.owner.is_root else unit)
        outer = steps_of(unit).last_step if _torch.autograd.in_backward() else None
        if unit not in forward.order:
            self._list(unit)
        whole = forward.gather(unit)
        if outer is not None and unit in outer.backward.run_again and not unit.is_unordered:
            outer.backward.prefetch(unit)
            outer.backward.run_again.discard(unit)
        return whole

    def _note_forward(self) -> None:
        """Compare with other ranks that a forward of the owner begins."""
        if self.owner.is_unordered:
            return  # compiled code or a checkpoint, which others may not run, comes here, too
        what = f"an eager forward of {self.owner.name}"
        what += "" if self.has_grad else " without gradients"
        event = describe_forward(self.owner, what, units_below(self.owner))
        forward_order.take(event, self.owner.axes.mesh)

    def _list(self, unit: Unit) -> None:
        self.forward.order.append(unit)
        steps_of(unit).last_step = self
        for param in unit.params:
            param.is_updated_by_hook = False

    def leave(self, unit: Unit, *, failed: bool) -> None:
        """End a forward of `unit`; drop its parameters if it was the last, and the unit reshards.

        failed: by an exception.
        """
        self.running.remove(unit)
        self._ended[unit] = self._ended.get(unit, 0) + 1
        # A unit of several modules is done when each of them has run.
        done = unit not in self.running and self._ended[unit] % len(unit.modules) == 0
        if done and (unit.reshards or not self.has_grad) and not unit.is_unordered:
            self.forward.drop(unit, check=not failed)

    def close(self, *, failed: bool = False) -> None:
        """End the owner's forward: only what backward needs stays.

        failed: by an exception.
        """
        for unit in list(self.forward.gathered):
            if self.has_grad and not failed:
                self.forward.keep_for_backward(unit)
                if unit.lends and unit in self.forward.read:
                    self.tokens.lend(unit, self.forward.gathered[unit])
            self.forward.drop(unit, check=not failed)
        steps_of(self.owner).last_order = tuple(self.forward.order)
        if self.owner.is_unordered:
            return
        order = order_of(self.owner, "forward")
        order.forget() if failed else order.end()

    @property
    def sources(self) -> Sources:
        """Storages of what forward has gathered."""
        return self.forward.sources

    def hold(self, source: Source) -> Held:
        """Return what keeps the memory of `source`, read in forward, while it is saved."""
        known = self._held.get(source)
        if known is None:
            unit = source.param.unit
            memory = self.forward.gathered[unit].sources()[source.param][source.index]
            known = self._held[source] = Held(self, unit, memory)
        return known

    # ---- backward

    def begin_backward(self) -> None:
        """Begin backward, as something saved in forward is wanted: launch its first gathers."""
        if not _torch.autograd.in_backward():
            return
        self.tokens.take_back()
        if self._callback_queued or not self.backward.wants_some:
            return
        self._queue_callback()
        if not self.owner.settings.prefetches_after_backward:
            self.backward.prefetch(None)

    def needs_again(self, unit: Unit) -> None:
        """Note that backward will gather `unit`, for what forward saved of it."""
        self.backward.needed.add(unit)

    def read_in_backward(self, param: ShardedParam) -> Tensor:
        """Return the unsharded parameter, for a part of forward that a checkpoint runs again."""
        return self.attach(param, self.gather_again(param.unit).tensors()[param])

    def gather_again(self, unit: Unit) -> Unsharded:
        """Gather `unit` for backward, or for what a checkpoint runs again."""
        if self.backward.has_read(unit):
            return self.backward.gathered[unit]
        take_in_order(self.owner, "backward", unit.gather)
        self._queue_callback()
        return self.backward.gather(unit)

    def reshard(self, unit: Unit) -> None:
        """Drop what is kept of `unit` from forward to backward, or after it, unless in use."""
        if unit not in self.forward.read:
            self.backward.reshard(unit)

    def reduce(self, unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> None:
        """Launch the reduce of `unit`, of which every gradient is in, and drop its parameters.

        grads: taken out, so that each is freed when it is copied.
        wanted: the parameters of which `.grad` is to be filled.
        """
        self._queue_callback()
        self.tokens.take_back()
        if not unit.reducer.syncs:
            unit.check_may_wait()
        for param in wanted:
            param.hooks.set_aside(param.param)
        self.backward.end(unit)
        self.reduces.take(unit, grads, wanted)
        if unit.settings.prefetches_after_backward:
            self.backward.prefetch(unit)
        self.backward.needed.discard(unit)

    def reduce_now(self, unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> Tensors:
        """Reduce gradients of `unit` as `reduce` does, but fill no `.grad`.

        Returns this rank's part of the mean gradients.
        """
        unit.check_may_return()
        self._queue_callback()
        reduced = self.reduces.reduce_apart(unit, grads, wanted)
        self.backward.end(unit)
        self.backward.needed.discard(unit)
        return reduced

    def _queue_callback(self) -> None:
        if not self._callback_queued and _torch.autograd.in_backward():
            _torch.autograd.queue_backward_callback(self.finish_backward)
            self._callback_queued = True
            self._task = _torch.autograd.graph_task()
            self._is_nested = _torch.autograd.in_nested_backward()
            steps_of(self.owner).backward_ran = True
            unmanaged.note_backward()

    def finish_backward(self, *, waits: bool = True) -> None:
        """End the backward: launch what is left to reduce, and drop what was gathered for it.

        waits: for reduces, too, where the owner does.
        """
        self._callback_queued = False
        owner, own = self.owner, steps_of(self.owner)
        if owner.is_unordered and self._is_nested:
            return  # the backward around it is what all ranks have
        if owner.is_unordered and own.reduced_in == self._task != -1:
            return  # another step of this backward has
        own.reduced_in = self._task
        self.has_ended = True
        units = units_below(owner)
        for unit in units:
            unit.shows_unsharded = False
        self.reduces.launch_what_waits(units)
        if waits and own.is_last_backward:
            finish_reduces(owner)
        for unit in self.tokens.trained:
            for param in unit.params:
                param.hooks.put_back()  # of those that got no gradient
        for unit in units:
            if not unit.reducer.partial and all(param.pending is None for param in unit.params):
                reduce.units_that_wait.discard(unit)
        for unit in list(self.backward.gathered):
            self.backward.end(unit)
        drop_all(units)
        if self.forward.gathered and open_step() is not self:
            self.close()  # of a method: nobody tells when it is over
        self.backward.drop_fetched_ahead()
        if not owner.is_unordered:
            order_of(owner, "backward").end()

    def abandon(self) -> None:
        """Drop everything after an exception, in flight or not."""
        self.forward.abandon()
        self.backward.abandon()
        self.reduces.abandon()
        self.tokens.abandon()
        self.running = []
        for phase in ("forward", "backward"):
            order_of(self.owner, phase).forget()


def close_compiled(owner: Unit) -> None:
    """Do, at the end of a backward that runs compiled code, what is left of gradients.

    Of those in `owner`'s model that waited, some may be of parameters which that code doesn't use.
    """
    task = _torch.autograd.graph_task()
    if steps_of(owner).closed_in != task:
        steps_of(owner).closed_in = task
        _step_over_all(owner)._queue_callback()


def take_part_in_backward(owner: Unit) -> None:
    """Gather and reduce what all ranks do in a backward, where each runs other parts of a model."""
    gather_all(owner)  # what was resharded since forward
    close_compiled(owner)


def finalize(owner: Unit) -> None:
    """Launch, outside of backward, what is left to reduce of `owner`'s model.

    As the end of a backward would; also drops what was kept for another. Raises RuntimeError inside
    of one, or of a forward.
    """
    if open_step() is not None or _torch.autograd.in_backward():
        raise RuntimeError("finalize_backward was called inside a forward or a backward")
    _step_over_all(owner).finish_backward(waits=False)
    for unit in units_below(owner):
        is_kept = unit.keeps_after_backward or unit.is_unsharded_by_user
        if unit.kept is not None and not is_kept:
            unit.kept.drop()
            unit.kept = None
            unit.describe()


def _step_over_all(owner: Unit) -> Step:
    """Make a step at whose end the hooks of all of `owner`'s model are looked after."""
    step = Step(owner)
    step.tokens.trained = set(units_below(owner))
    return step


def step_in_backward(unit: Unit) -> Step:
    """Return the step whose backward is running, as far as `unit` can tell: its latest."""
    steps = steps_of(unit)
    if steps.last_step is None:
        steps.last_step = Step(unit)
    return steps.last_step


def abandon_open_step() -> None:
    """Abandon the open step after an exception that no hook saw: nothing is open any more."""
    step = open_step()
    if step is not None:
        step.pop_hooks()
        _open.step = step.opened_in = None
        step.abandon()


def _caller() -> FrameType | None:
    """Return the innermost frame that is not of this package, nor of what wraps its functions."""
    frame: FrameType | None = sys._getframe()
    ours = ("autoshard.", "torch._dynamo.")
    while frame is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame = frame.f_back
    return frame


def enter(unit: Unit) -> None:
    """Begin the forward of a module of `unit`: open a step if none is open."""
    step = open_step()
    if step is not None and step.owner is unit and not step.is_on_the_stack():
        abandon_open_step()  # no hook ran for a KeyboardInterrupt
        step = None
    if step is None:
        step = _open.step = Step(unit)
        step.opened_in = _caller()
        step.has_hooks = push_hooks(step)
        if unit.is_unordered:
            begin_forward(unit)  # also on a rank that will read nothing
    step.running.append(unit)


def leave(unit: Unit) -> None:
    """End the forward of a module of `unit`, and close the step that `unit` opened.

    Also run for exceptions.
    """
    step = open_step()
    if step is None or unit not in step.running:
        return
    failed = sys.exc_info()[0] is not None  # an exception of forward's is being handled
    try:
        step.leave(unit, failed=failed)
    finally:
        if not step.running:
            step.pop_hooks()
            _open.step = step.opened_in = None
            step.close(failed=failed)
