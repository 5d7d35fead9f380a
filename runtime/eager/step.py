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
from autoshard.runtime.comm import threads
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

    Its parts hold no reference to it, so that it is freed with the autograd graph that holds it.

    owner:     unit of the outermost module that runs.
    has_hooks: whether it has pushed hooks on saved tensors.
    has_grad:  whether gradients were enabled when it began, so that a backward may follow.
    opened_in: Python frame that called the owner's module, or of the method that reads parameters,
        while the forward is open; else None.
    running:   units whose forward is on the stack, outermost first, each with the exception that
        was being handled when the forward began.
    has_ended: whether a backward of it has ended.
    """

    def __init__(self, owner: Unit) -> None:
        """Make a step that has gathered nothing; hooks are not pushed, and it is not opened.

        Only if gradients are enabled now can it have a backward. It expects units in the order of
        the owner's last forward.
        """
        self.owner = owner
        self.has_hooks = False
        self.has_grad = torch.is_grad_enabled()
        self.opened_in: FrameType | None = None
        self.running: list[tuple[Unit, BaseException | None]] = []
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
        """Tell whether the Python frame that opened the step is still on this thread's stack.

        It is not after a KeyboardInterrupt, which ends a forward without running its hooks.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.opened_in:
            frame = frame.f_back
        return frame is not None

    def is_over_for(self, unit: Unit) -> bool:
        """Tell whether the next read of `unit` in a method needs another step than this one.

        It does in three cases: a backward of this step has ended; gradients are enabled now and
        were not when the step began; or the unit's parameters were written to since this step has
        read them.
        """
        if self.has_ended or (torch.is_grad_enabled() and not self.has_grad):
            return True
        return unit in self.forward.read and self.forward.gathered[unit].is_stale

    # ---- forward

    def read(self, param: ShardedParam) -> Tensor:
        """Return the unsharded parameter for a read in forward, gathering its unit if need be."""
        return self.attach(param, self._in_forward(param.unit).tensors()[param])

    def attach(self, param: ShardedParam, data: Tensor) -> Tensor:
        """Return `data`, gathered for `param`, with its gradient going to the unit's reduce.

        Also under no_grad, if the step began with gradients; the first such call for a unit makes
        its tokens, which count as a use of it (`Unit.uses`). In a step without, or for a frozen
        parameter, `data` get no gradient. `data` of a parameter that was a tensor-parallel DTensor
        are wrapped as such a DTensor again.
        """
        if not (self.has_grad and param.param.requires_grad):
            return data if param.tp is None else param.tp.wrap(data)
        # Also under the caller's no_grad: what it reads may be used outside of that.
        with torch.enable_grad():
            attached = self.tokens.of(param.unit, self).attach(param, data)
            return attached if param.tp is None else param.tp.wrap(attached)

    def _in_forward(self, unit: Unit) -> Unsharded:
        """Return what forward has of `unit`; its first read gathers it, waits, and prefetches.

        With that read this step becomes the unit's latest one, which forgets updates by hooks
        (`_list`). Ranks compare the gather, and wait for each other if it is new. The first read of
        a step also compares the forward with other ranks', and has compute wait for the event of
        `set_post_optim_event`. With `strict_order=False` a unit that is not kept has all units of
        the model gathered, but not in backward. In a checkpoint that runs again, what backward
        needs after `unit` is prefetched.
        Raises RuntimeError if other ranks gather another unit now, or run another forward.
        """
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
        """Raise RuntimeError unless all ranks begin this forward of the owner now.

        Waits for them if it is new after the forward before. The owner then counts as having had no
        backward since. With `strict_order=False` nothing is done.
        """
        if self.owner.is_unordered:
            return  # compiled code or a checkpoint, which others may not run, comes here, too
        what = f"an eager forward of {self.owner.name}"
        what += "" if self.has_grad else " without gradients"
        event = describe_forward(self.owner, what, units_below(self.owner))
        forward_order.take(event, self.owner.axes.mesh)

    def _list(self, unit: Unit) -> None:
        """Append `unit` to forward's order, and make this step the unit's latest one.

        Also forget which of its parameters a hook has updated.
        """
        self.forward.order.append(unit)
        steps_of(unit).last_step = self
        for param in unit.params:
            param.is_updated_by_hook = False

    def is_running(self, unit: Unit) -> bool:
        """Tell whether a forward of one of `unit`'s modules is on the stack."""
        return any(each is unit for each, _ in self.running)

    def leave(self, unit: Unit, *, failed: bool) -> None:
        """End a forward of one of `unit`'s modules; after the last one, drop unsharded parameters.

        The last one has run when each module of the unit has. Nothing is dropped here with
        `strict_order=False`, or if a backward may follow and the unit does not reshard after
        forward. After `unshard()` the unit keeps what is dropped (`Forward.drop`).

        failed: whether an exception ended it. If not, RuntimeError is raised for an unsharded
            parameter that is dropped and was written to.
        """
        last = max(at for at, (each, _) in enumerate(self.running) if each is unit)
        del self.running[last]
        self._ended[unit] = self._ended.get(unit, 0) + 1
        # A unit of several modules is done when each of them has run.
        done = not self.is_running(unit) and self._ended[unit] % len(unit.modules) == 0
        if done and (unit.reshards or not self.has_grad) and not unit.is_unordered:
            self.forward.drop(unit, check=not failed)

    def close(self, *, failed: bool = False) -> None:
        """End the owner's forward: of unsharded parameters, only what backward is to find stays.

        Notes what was gathered, in order, for the prefetch of the next forward. After a forward
        with gradients, `parameters()` gives unsharded copies of units that lend (`Unit.lends`).
        Waits for prefetched gathers that nobody has read, and for other ranks if the end is new
        here; with `strict_order=False` ranks compare nothing.
        failed: whether an exception ended it: then the order of collectives so far is forgotten. If
            not, RuntimeError is raised for an unsharded parameter that was written to, or if other
            ranks gather more.
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
        """Storages of the unsharded parameters that forward has read."""
        return self.forward.sources

    def hold(self, source: Source) -> Held:
        """Return the `Held` of `source`, which forward has read: the same for all saved tensors."""
        known = self._held.get(source)
        if known is None:
            unit = source.param.unit
            memory = self.forward.gathered[unit].sources()[source.param][source.index]
            known = self._held[source] = Held(self, unit, memory)
        return known

    # ---- backward

    def begin_backward(self) -> None:
        """Begin backward, as a tensor saved in forward is unpacked: launch the first gathers.

        Has `finish_backward` run at its end, and `parameters()` give no unsharded copies from now
        on. Called at each such tensor: once begun, outside of a backward, or if backward gathers no
        unit again, it launches nothing; nor if the owner `prefetches_after_backward`. Raises
        RuntimeError if an unsharded copy that `parameters()` gave was written to.
        """
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
        """Return `unit` gathered for backward, or for what a checkpoint runs again.

        The first call gathers it, waits, and prefetches what backward wants next; `finish_backward`
        then runs at the end of the running backward. Waits for other ranks if the gather is new.
        Raises RuntimeError if other ranks launch another collective now.
        """
        if self.backward.has_read(unit):
            return self.backward.gathered[unit]
        take_in_order(self.owner, "backward", unit.gather)
        self._queue_callback()
        return self.backward.gather(unit)

    def reshard(self, unit: Unit) -> None:
        """Drop what was gathered of `unit` for backward, unless forward or backward is using it.

        A gather in flight is waited for.
        """
        if unit not in self.forward.read:
            self.backward.reshard(unit)

    def reduce(self, unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> None:
        """Launch the reduce of `unit`, of which every gradient is in, and drop its parameters.

        The unit may be configured to keep them (`Backward.end`). Gradients that wait for others, or
        for a later backward, are kept instead of sent: `Reduces.take`, which may also wait for
        earlier reduces and fill their `.grad`. With `prefetches_after_backward` what backward wants
        next is gathered. `parameters()` gives no unsharded copies from now on.
        Hooks on the wanted parameters are set aside until `.grad` is filled, which the end of this
        backward sees to (`finish_backward`).

        grads: unsharded; the dict is emptied, so that each is freed when it is copied.
        wanted: parameters whose `.grad` the running backward is to fill.
        Raises NotImplementedError for a sparse gradient; RuntimeError if other ranks launch another
        collective now, if gradients are to wait for a later backward and a parameter has a
        post-accumulate-grad hook, or if an unsharded copy that `parameters()` gave was written to.
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
        """Reduce gradients of `unit` for `torch.autograd.grad`, wait, and fill no `.grad`.

        Backward then ends for the unit (`Backward.end`), and `finish_backward` runs at the end of
        the running backward. grads: as of `reduce`.
        wanted: parameters whose gradients are to be returned.
        Returns this rank's part of the mean gradients, but none for parameters without a gradient
        on any rank, unless the unit `sends_unused`. Raises NotImplementedError with
        `strict_order=False`, and otherwise as `Reduces.reduce_apart`.
        """
        unit.check_may_return()
        self._queue_callback()
        reduced = self.reduces.reduce_apart(unit, grads, wanted)
        self.backward.end(unit)
        self.backward.needed.discard(unit)
        return reduced

    def _queue_callback(self) -> None:
        """Have `finish_backward` run when the running backward ends; outside of one do nothing.

        Once a backward. Also notes that a backward of the owner's steps runs, and reaches sharded
        parameters.
        """
        if not self._callback_queued and _torch.autograd.in_backward():
            _torch.autograd.queue_backward_callback(self.finish_backward)
            self._callback_queued = True
            self._task = _torch.autograd.graph_task()
            self._is_nested = _torch.autograd.in_nested_backward()
            steps_of(self.owner).backward_ran = True
            unmanaged.note_backward(self.owner)

    def finish_backward(self, *, waits: bool = True) -> None:
        """End the backward: launch what is left to reduce, and drop what was gathered for it.

        Also puts hooks on parameters back, closes a method's forward that is still open, and has
        `parameters()` give sharded ones again after `unshard()`. What units are configured to keep
        is not dropped (`Backward.end`). Waits for other ranks if a launch, or the end, is new.
        With `strict_order=False` only the first step to end in a backward does so, and none in a
        backward that runs inside another one.

        waits: whether to wait for reduces and fill `.grad`, too, unless the owner was told
            `set_is_last_backward(False)`.
        Raises RuntimeError if other ranks launch more, or if an unsharded parameter was written to.
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
        """Drop all that this step has gathered or launched, after an exception.

        Copies that `parameters()` gave are no longer given, and the orders of the owner's
        collectives, which ranks compare, begin anew.
        """
        self.forward.abandon()
        self.backward.abandon()
        self.reduces.abandon()
        self.tokens.abandon()
        self.running = []
        for phase in ("forward", "backward"):
            order_of(self.owner, phase).forget()


def close_compiled(owner: Unit) -> None:
    """Have the running backward, which runs compiled code, end as an eager one does.

    At its end, gradients in `owner`'s model that still wait are reduced: they may be of parameters
    that this code doesn't use. Hooks that were set aside are put back. Done once a backward.
    """
    task = _torch.autograd.graph_task()
    if steps_of(owner).closed_in != task:
        steps_of(owner).closed_in = task
        _step_over_all(owner)._queue_callback()


def take_part_in_backward(owner: Unit) -> None:
    """Gather all units of `owner`'s model, and have the end of the running backward reduce them.

    For `strict_order=False`, where each rank runs other parts of the model. Units that are still
    unsharded are not gathered again.
    """
    gather_all(owner)  # what was resharded since forward
    close_compiled(owner)


def finalize(owner: Unit) -> None:
    """Launch, outside of backward, what is left to reduce in `owner`'s model.

    `finish_reduces` waits for that. Unsharded parameters that were kept for another backward are
    dropped, unless `set_reshard_after_backward(False)` or `unshard()` keeps them. Hooks that were
    set aside are put back. A launch may wait for earlier reduces and fill `.grad`. Raises
    RuntimeError inside a forward or a backward, and as `Step.finish_backward`.
    """
    if open_step() is not None or _torch.autograd.in_backward():
        raise RuntimeError("finalize_backward was called inside a forward or a backward")
    _step_over_all(owner).finish_backward(waits=False)
    for unit in units_below(owner):
        is_kept = unit.keeps_after_backward or unit.is_unsharded_by_user
        if unit.kept is not None and not is_kept:
            unit.kept.drop()
            unit.kept = None
            unit.update_markers()


def _step_over_all(owner: Unit) -> Step:
    """Make a step whose `finish_backward` puts back the hooks of all units of `owner`'s model."""
    step = Step(owner)
    step.tokens.trained = set(units_below(owner))
    return step


def step_in_backward(unit: Unit) -> Step:
    """Return the step whose backward is running, as far as `unit` can tell.

    It is the latest step that gathered `unit`; if there is none, a new one, owned by `unit`, which
    counts as the latest from then on.
    """
    steps = steps_of(unit)
    if steps.last_step is None:
        steps.last_step = Step(unit)
    return steps.last_step


def abandon_open_step() -> None:
    """Abandon this thread's open step, if any, after an exception that no hook saw.

    Its hooks on saved tensors are popped, and what it has gathered or launched is dropped
    (`Step.abandon`).
    """
    step = open_step()
    if step is not None:
        step.pop_hooks()
        _open.step = step.opened_in = None
        threads.end_forward()
        step.abandon()


def _caller() -> FrameType | None:
    """Return the innermost Python frame that is neither in this package nor in Dynamo."""
    frame: FrameType | None = sys._getframe()
    ours = ("autoshard.", "torch._dynamo.")
    while frame is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame = frame.f_back
    return frame


def enter(unit: Unit) -> None:
    """Begin the forward of a module of `unit`: open a step if none is open in this thread.

    A new step hooks what autograd saves (`push_hooks`), and has a backward only if gradients are
    enabled now; with `strict_order=False` it launches the gathers of all units. An open step of the
    same unit whose forward has broken off unnoticed is abandoned first.
    """
    step = open_step()
    if step is not None and step.owner is unit and not step.is_on_the_stack():
        abandon_open_step()  # no hook ran for a KeyboardInterrupt
        step = None
    if step is None:
        step = _open.step = Step(unit)
        step.opened_in = _caller()
        step.has_hooks = push_hooks(step)
        threads.begin_forward(step.opened_in)
        if unit.is_unordered:
            begin_forward(unit)  # also on a rank that will read nothing
    step.running.append((unit, sys.exc_info()[1]))


def failure_of(unit: Unit) -> BaseException | None:
    """Return the exception that ends the running forward of `unit`; None if it ends by itself.

    An exception that was being handled when the forward began, as where a model is called in an
    `except:` block, is not returned.
    """
    step, error = open_step(), sys.exc_info()[1]
    known = reversed(step.running) if step is not None else ()
    before = next((handled for each, handled in known if each is unit), None)
    return None if error is before else error


def leave(unit: Unit) -> None:
    """End the forward of a module of `unit`, and close the step if this forward opened it.

    Unsharded parameters are dropped unless kept for backward (`Step.leave`); closing may wait for
    other ranks (`Step.close`). Also run for exceptions. Does nothing if `unit` is not running in an
    open step.
    Raises RuntimeError, unless an exception ended the forward, if an unsharded parameter was
    written to, or if other ranks gather more.
    """
    step = open_step()
    if step is None or not step.is_running(unit):
        return
    failed = failure_of(unit) is not None
    try:
        step.leave(unit, failed=failed)
    finally:
        if not step.running:
            step.pop_hooks()
            _open.step = step.opened_in = None
            threads.end_forward()
            step.close(failed=failed)
