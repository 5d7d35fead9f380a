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
from collections.abc import Iterable, Sequence
from types import FrameType

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.runtime.eager import left_out
from autoshard.runtime.eager.saved import (
    Held,
    Source,
    Sources,
    in_checkpoint,
    in_recomputation,
    pop_hooks,
    push_hooks,
)
from autoshard.runtime.eager.tokens import Tokens
from autoshard.runtime.eager.unit_steps import (
    describe_forward,
    finish_reduces,
    order_of,
    steps_of,
    wait_for_optimizer,
)
from autoshard.runtime.eager.unordered import drop_all, gather_all
from autoshard.runtime.ranks.agreement import course
from autoshard.runtime.unit import reduce, uses
from autoshard.runtime.unit.param import ShardedParam, lend
from autoshard.runtime.unit.reduce import Reduction
from autoshard.runtime.unit.unit import Unit, units_below
from autoshard.runtime.unit.unsharded import Lent, Parts, Whole

_open = threading.local()

Grads = dict[ShardedParam, Tensor | None]
"""Whole gradients of all trainable parameters of a unit; None where this rank has none."""


def open_step() -> Step | None:
    """Return the step whose forward this thread is in, if any."""
    step: Step | None = getattr(_open, "step", None)
    return step


class Step:
    """Gathered parameters and autograd tokens from one forward of `owner` to its backward."""

    def __init__(self, owner: Unit) -> None:
        self.owner = owner
        self.has_hooks = False  # on saved tensors
        self.has_grad = torch.is_grad_enabled()  # whether a backward may follow
        self.opened_in: FrameType | None = None  # who called the owner, while it is open
        self.running: list[Unit] = []  # units whose forward is on the stack, outermost first
        self._ended: dict[Unit, int] = {}  # how many forwards of its modules are over
        self.order: list[Unit] = []  # units in the order in which they were first gathered
        self._forward: dict[Unit, Whole] = {}  # read, or on its way
        self._backward: dict[Unit, Whole] = {}
        self._read: set[Unit] = set()  # those of `_forward` that are not just fetched ahead
        self._read_again: dict[Unit, int] = {}  # of `_backward`; by which autograd graph task
        self._tokens: dict[Unit, weakref.ref[Tokens]] = {}  # the graph holds them
        self._trained: set[Unit] = set()  # units that have, or had, tokens
        self.sources = Sources()  # of what `_forward` has
        self._held: weakref.WeakValueDictionary[Source, Held] = weakref.WeakValueDictionary()
        self._lends = False  # some tokens do
        self._needed: set[Unit] = set()  # units of which backward wants something again
        self._run_again: set[Unit] = set()  # that checkpoints run again, in steps of their own
        self._parts: dict[Unit, Parts] = {}  # what backward gathers, of units that have `smaller`
        self._reduces: list[Reduction] = []
        self._callback_queued = False
        self._task, self._is_nested = -1, False  # of the callback that is queued
        self._expected = steps_of(owner).last_order  # what the previous step gathered, for prefetch

    @property
    def num_gathered(self) -> int:
        """Number of units that are gathered, or on the way, by this step."""
        return len({*self._forward, *self._backward})

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

    # ---- forward

    def read(self, param: ShardedParam) -> Tensor:
        """Return the unsharded parameter, as forward may use it."""
        return self.attach(param, self._in_forward(param.unit).tensors()[param])

    def read_in_backward(self, param: ShardedParam) -> Tensor:
        """Return the unsharded parameter, for a part of forward that a checkpoint runs again."""
        return self.attach(param, self.gather_again(param.unit).tensors()[param])

    def attach(self, param: ShardedParam, data: Tensor) -> Tensor:
        """Return `data`, gathered for `param`, with its gradient going to the unit's reduce."""
        if not (self.has_grad and param.param.requires_grad):
            return data if param.tp is None else param.tp.wrap(data)
        # Also under the caller's no_grad: what it reads may be used outside of that.
        with torch.enable_grad():
            attached = self._tokens_of(param.unit).attach(param, data)
            return attached if param.tp is None else param.tp.wrap(attached)

    def leave(self, unit: Unit, *, failed: bool) -> None:
        """End a forward of `unit`; drop its parameters if it was the last, and the unit reshards.

        failed: by an exception.
        """
        self.running.remove(unit)
        self._ended[unit] = self._ended.get(unit, 0) + 1
        # A unit of several modules is done when each of them has run.
        done = unit not in self.running and self._ended[unit] % len(unit.modules) == 0
        if done and (unit.reshards or not self.has_grad) and not unit.is_unordered:
            self._drop(unit, check=not failed)

    def close(self, *, failed: bool = False) -> None:
        """End the owner's forward: only what backward needs stays.

        failed: by an exception.
        """
        for unit in list(self._forward):
            keeps = unit.keeps_after_backward and unit not in self._run_again  # see `_drop`
            if keeps and self.has_grad and not unit.reshards and not failed:
                self._backward.setdefault(unit, self._forward[unit])
            if self.has_grad and unit.lends and not failed:
                self._lend(unit)
            self._drop(unit, check=not failed)
        steps_of(self.owner).last_order = tuple(self.order)
        if self.owner.is_unordered:
            return
        order = order_of(self.owner, "forward")
        order.forget() if failed else order.end()

    def _in_forward(self, unit: Unit) -> Whole:
        if unit in self._read:
            return self._forward[unit]
        if not self.order:  # a compiled forward opens a step too, and gathers nothing in it
            self._take_course()
            wait_for_optimizer(self.owner)
        self._take("forward", unit.gather)
        if unit.is_unordered and not _torch.autograd.in_backward():
            gather_all(self.owner if self.owner.is_root else unit)
        outer = steps_of(unit).last_step if _torch.autograd.in_backward() else None
        if unit not in self.order:
            self.order.append(unit)
            steps_of(unit).last_step = self
            for param in unit.params:
                param.is_updated_by_hook = False
        ahead = self._forward.get(unit)
        if ahead is not None and ahead.is_stale:  # written to since, as a momentum encoder is
            self._forward.pop(unit).drop()
        self._launch(unit, self._forward)
        self._read.add(unit)
        whole = self._forward[unit]
        self.sources.add(whole)
        if self._is_checkpointed(unit):
            self._run_again.add(unit)
        if unit.is_unordered:
            return whole
        for following in _ahead(
            unit, unit.settings.next_in_forward, self._expected, unit.settings.forward_prefetch
        ):
            if following not in self.order or unit.settings.next_in_forward is not None:
                self._launch(following, self._forward)
        if outer is not None and unit in outer._run_again:
            outer._prefetch_backward(unit)
            outer._run_again.discard(unit)
        return whole

    def _take_course(self) -> None:
        """Compare with other ranks that a forward of the owner begins."""
        if self.owner.is_unordered:
            return  # compiled code or a checkpoint, which others may not run, comes here, too
        what = f"an eager forward of {self.owner.name}"
        what += "" if self.has_grad else " without gradients"
        event = describe_forward(self.owner, what, units_below(self.owner))
        course.take(event, self.owner.axes.mesh)

    def _take(self, phase: str, event: str) -> None:
        """Note that `event` is about to be launched, in the order of all ranks if there is one."""
        if not self.owner.is_unordered:
            order_of(self.owner, phase).take(event)

    def _is_checkpointed(self, unit: Unit) -> bool:
        """Tell whether what reads `unit` in forward seems to be in a checkpoint, to be read again.

        That is when this step is closed.
        """
        if not self.has_grad:
            return False
        if not torch.is_grad_enabled():  # as in a reentrant one, or for a teacher, which is frozen
            return any(param.param.requires_grad for param in unit.params)
        if in_recomputation():  # the last time, unless the next forward finds it there
            return unit.keeps_after_backward
        return in_checkpoint()

    def _launch(self, unit: Unit, where: dict[Unit, Whole]) -> None:
        """Start gathering `unit`, unless it is gathered or on its way."""
        if unit in where:
            return
        if unit.is_unordered and unit.kept is not None and not unit.kept.is_stale:
            where[unit] = unit.kept  # for all of the step
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
            self.sources.remove(whole)
            if check:
                whole.check_unwritten()
        if whole is self._backward.get(unit) or whole is unit.kept:
            return
        # Autograd holds what is not freed, but for what a checkpoint runs again.
        if unit.is_unsharded_by_user or (unit in self._run_again and not unit.reshards):
            unit.kept = whole
            return
        if unit.settings.smaller is not None and unit in self._needed and unit not in self._parts:
            self._parts[unit] = whole.cut(unit.settings.smaller)
        whole.drop()

    def hold(self, source: Source) -> Held:
        """Return what keeps the memory of `source`, read in forward, while it is saved."""
        known = self._held.get(source)
        if known is None:
            unit = source.param.unit
            memory = self._forward[unit].sources()[source.param][source.index]
            known = self._held[source] = Held(self, unit, memory)
        return known

    def _lend(self, unit: Unit) -> None:
        """Have reads of `unit` outside of forward give unsharded parameters until backward."""
        tokens = self._made_tokens(unit)
        if tokens is not None and unit in self._read:
            tokens.lent = Lent(self._forward[unit])
            steps_of(unit).held.add(tokens)
            self._lends = True

    def lent(self, unit: Unit) -> Lent | None:
        """Return the unsharded parameters that `unit` lends until backward, if it does."""
        tokens = self._made_tokens(unit) if self._lends else None
        return None if tokens is None else tokens.lent

    def _take_back(self) -> None:
        self._lends = False
        for unit in self._tokens:
            tokens = self._made_tokens(unit)
            if tokens is not None:
                tokens.free()

    def _made_tokens(self, unit: Unit) -> Tokens | None:
        known = self._tokens.get(unit)
        return None if known is None else known()

    def _tokens_of(self, unit: Unit) -> Tokens:
        made = self._made_tokens(unit)
        if made is None:
            made = Tokens(self, unit)
            self._tokens[unit] = weakref.ref(made)
            self._trained.add(unit)
        return made

    # ---- backward

    def begin_backward(self) -> None:
        """Begin backward, as something saved in forward is wanted: launch its first gathers."""
        if self._lends and _torch.autograd.in_backward():
            self._take_back()
        wants_some = self._needed or self._run_again
        if self._callback_queued or not wants_some or not _torch.autograd.in_backward():
            return
        self._queue_callback()
        if not self.owner.settings.prefetches_after_backward:
            self._prefetch_backward(None)

    def needs_again(self, unit: Unit) -> None:
        """Note that backward will gather `unit`, for what forward saved of it."""
        self._needed.add(unit)

    def gather_again(self, unit: Unit) -> Whole:
        """Gather `unit` for backward, or for what a checkpoint runs again."""
        if unit in self._read_again:
            return self._backward[unit]
        self._take("backward", unit.gather)
        self._queue_callback()
        task = _torch.autograd.graph_task()
        # A unit that is not reduced has no end of its own: the next gather is it.
        for other, gathered_by in list(self._read_again.items()):
            if gathered_by == task != -1 and not self._will_reduce(other):
                self._end(other)
        self._launch(unit, self._backward)
        self._read_again[unit] = task
        whole = self._backward[unit]
        whole.tensors()
        if not unit.settings.prefetches_after_backward:
            self._prefetch_backward(unit)
        return whole

    def _will_reduce(self, unit: Unit) -> bool:
        """Tell whether this backward reduces `unit`.

        It does if something in `unit` trains, and is among the inputs of the backward.
        """
        tokens = self._made_tokens(unit)
        return tokens is not None and tokens.will_reduce()

    def _prefetch_backward(self, unit: Unit | None) -> None:
        """Launch the gathers that backward needs after `unit`, or, for None, first."""
        wanted = self._needed | self._run_again
        coming = [u for u in reversed(self.order) if u in wanted and u.settings.unshard_in_backward]
        of = unit or self.owner
        if unit is None and of.settings.next_in_backward is None:
            ahead: Sequence[Unit] = coming[: of.settings.backward_prefetch]
        else:
            ahead = _ahead(of, of.settings.next_in_backward, coming, of.settings.backward_prefetch)
        for following in ahead:
            if following in self._needed:
                self._launch(following, self._backward)
            elif following in self._run_again and following.kept is None:
                following.kept = Whole(following)  # that step finds it there

    def reshard(self, unit: Unit) -> None:
        """Drop what is kept of `unit` from forward to backward, or after it, unless in use."""
        if unit not in self._read_again and unit not in self._read:
            whole = self._backward.pop(unit, None)
            if whole is not None:
                whole.drop()

    def _end(self, unit: Unit) -> None:
        """End backward for `unit`: drop its unsharded parameters, or keep them for later."""
        whole = self._backward.pop(unit, None)
        self._read_again.pop(unit, None)
        if whole is None or whole is unit.kept:
            return
        if unit.keeps_after_backward or unit.is_unsharded_by_user:
            unit.kept = whole
        else:
            whole.drop()

    def reduce(self, unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> None:
        """Launch the reduce of `unit`, of which every gradient is in, and drop its parameters.

        grads: taken out, so that each is freed when it is copied.
        wanted: the parameters of which `.grad` is to be filled.
        """
        self._queue_callback()
        if self._lends:
            self._take_back()
        waits = not unit.reducer.syncs or unit.is_unordered
        if not unit.reducer.syncs:
            unit.check_may_wait()
        for param in wanted:
            param.hooks.set_aside(param.param)
        self._end(unit)
        self._join_arrived(unit, grads, wanted)
        if waits:
            for param in list(grads):
                grad = grads.pop(param)
                if grad is not None and param in wanted:
                    reduce.hold(param, grad, unit.reduced_member(param, grad.dtype).dtype)
        if grads:
            self._reduce_now(unit, grads, wanted)
        if unit.settings.prefetches_after_backward:
            self._prefetch_backward(unit)
        self._needed.discard(unit)

    def _reduce_now(self, unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> None:
        """Launch the reduce of `grads`, with gradients that waited added to them."""
        _add_pending(unit, grads, wanted)
        for reduction in self._reductions(unit, grads, wanted):
            self._start(reduction)

    def _reduce_waiting(self, unit: Unit) -> None:
        """Reduce gradients of `unit` that backwards have left to wait.

        Where ranks have no order, it does so with zeros for what no backward of this rank has
        reached.
        """
        if not unit.reducer.syncs:
            return
        if unit.is_unordered or any(reduce.pending_of(p) is not None for p in unit.params):
            trainable = [param for param in unit.params if param.param.requires_grad]
            if trainable:
                self._end(unit)
                self._reduce_now(unit, dict.fromkeys(trainable), set(trainable))

    def _join_arrived(self, unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> None:
        """Add to `grads` what came before in this backward; take out those that are to come again.

        See unit/uses.py.
        """
        tokens = self._made_tokens(unit)
        if tokens is not None:
            tokens.use.end()
        may_repeat = uses.may_repeat(unit)
        for param in list(grads):
            if not may_repeat and param.arriving is None:
                continue
            dtype = unit.reduced_member(param, unit.gathered_member(param).dtype).dtype
            if not uses.num_to_come(param):
                grads[param] = reduce.take_arrived(param, grads[param], dtype)
                continue
            grad = grads.pop(param)
            if grad is not None and param in wanted:
                reduce.arrive(param, grad, dtype)

    def reduce_now(
        self, unit: Unit, grads: Grads, wanted: set[ShardedParam]
    ) -> dict[ShardedParam, Tensor]:
        """Reduce gradients of `unit` as `reduce` does, but fill no `.grad`.

        Returns this rank's part of the mean gradients.
        """
        self._queue_callback()
        reduced: dict[ShardedParam, Tensor] = {}
        for reduction in self._reductions(unit, grads, wanted, stands_alone=True):
            reduction.launch()
            reduced.update(reduction.wait())
        self._end(unit)
        self._needed.discard(unit)
        return {param: part.to(param.member.dtype) for param, part in reduced.items()}

    def _reductions(
        self,
        unit: Unit,
        grads: Grads,
        wanted: set[ShardedParam],
        *,
        stands_alone: bool = False,
    ) -> list[Reduction]:
        self._take("backward", f"the reduce of {unit.name}")
        by_dtype: dict[torch.dtype, Grads] = {}
        for param in list(grads):
            grad = grads.pop(param)
            if grad is not None and grad.layout != torch.strided:
                raise NotImplementedError(
                    f"the gradient of {param.name} is sparse, which can't be reduced: build the "
                    "embedding with sparse=False"
                )
            own = unit.gathered_member(param).dtype  # of its gradient, on ranks that have none
            dtype = unit.reduced_member(param, own).dtype
            by_dtype.setdefault(dtype, {})[param] = grad
        return [
            Reduction(unit, same, wanted & same.keys(), dtype, stands_alone=stands_alone)
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
        if not self._callback_queued and _torch.autograd.in_backward():
            _torch.autograd.queue_backward_callback(self._finish_backward)
            self._callback_queued = True
            self._task = _torch.autograd.graph_task()
            self._is_nested = _torch.autograd.in_nested_backward()
            steps_of(self.owner).backward_ran = True
            left_out.note_backward()

    def _finish_backward(self, *, waits: bool = True) -> None:
        """End the backward: launch what is left to reduce, and drop what was gathered for it.

        waits: for reduces, too, where the owner does.
        """
        self._callback_queued = False
        if self.owner.is_unordered and self._is_nested:
            return  # the backward around it is what all ranks have
        own = steps_of(self.owner)
        if self.owner.is_unordered and own.reduced_in == self._task != -1:
            return  # another step of this backward has
        own.reduced_in = self._task
        for unit in units_below(self.owner):
            unit.shows_whole = False
            self._hold_arrived(unit)
            self._reduce_waiting(unit)  # used in earlier backwards, and not in this one
        for reduction in self._reduces:
            reduction.advance()
        for unit in units_below(self.owner):
            if unit.reducer.all_reduces:
                left: dict[torch.dtype, list[ShardedParam]] = {}
                for param, partial in unit.reducer.partial.items():
                    left.setdefault(partial.chunk.dtype, []).append(param)
                for dtype, params in left.items():
                    self._take("backward", f"what is left to all-reduce of {unit.name}")
                    self._start(Reduction(unit, dict.fromkeys(params), set(params), dtype))
        own.carried.extend(self._reduces)
        self._reduces = []
        if waits and own.is_last_backward:
            finish_reduces(self.owner)
        for unit in self._trained:
            for param in unit.params:
                param.hooks.put_back()  # of those that got no gradient
        for unit in units_below(self.owner):
            if not unit.reducer.partial and all(param.pending is None for param in unit.params):
                reduce.units_that_wait.discard(unit)
        for unit in list(self._backward):
            self._end(unit)
        drop_all(units_below(self.owner))
        if self._forward and not (self.opened_in and self.is_on_the_stack()):
            self.close()  # of a method, which has returned: nobody told
        for unit in self._run_again:  # fetched ahead, and not run again after all
            if unit.kept is not None and not unit.is_unsharded_by_user and unit.reshards:
                unit.kept.drop()
                unit.kept = None
        if not self.owner.is_unordered:
            order_of(self.owner, "backward").end()

    def _hold_arrived(self, unit: Unit) -> None:
        """Let sums that lack the last of their gradients wait for a later backward.

        This backward did not bring it.
        """
        for param in unit.params:
            dtype = unit.reduced_member(param, unit.gathered_member(param).dtype).dtype
            grad = None if param.arriving is None else reduce.take_arrived(param, None, dtype)
            if grad is not None:
                reduce.hold(param, grad, dtype)

    def abandon(self) -> None:
        """Drop everything after an exception, in flight or not."""
        for whole in (*self._forward.values(), *self._backward.values()):
            whole.drop()
        self._forward, self._backward = {}, {}
        self.sources.clear()
        self._read, self._read_again = set(), {}
        self._reduces, self.running, self._lends = [], [], False
        for unit in self._tokens:
            tokens = self._made_tokens(unit)
            if tokens is not None:
                tokens.lent = None
        for phase in ("forward", "backward"):
            order_of(self.owner, phase).forget()


def close_compiled(owner: Unit) -> None:
    """Do, at the end of a backward that runs compiled code, what is left of gradients.

    Of those in `owner`'s model that waited, some may be of parameters which that code doesn't use.
    """
    task = _torch.autograd.graph_task()
    if steps_of(owner).closed_in != task:
        steps_of(owner).closed_in = task
        step = Step(owner)
        step._trained = set(units_below(owner))
        step._queue_callback()


def finalize(owner: Unit) -> None:
    """Launch, outside of backward, what is left to reduce of `owner`'s model.

    As the end of a backward would; also drops what was kept for another. Raises RuntimeError inside
    of one, or of a forward.
    """
    if open_step() is not None or _torch.autograd.in_backward():
        raise RuntimeError("finalize_backward was called inside a forward or a backward")
    step = Step(owner)
    step._trained = set(units_below(owner))
    step._finish_backward(waits=False)
    for unit in units_below(owner):
        is_kept = unit.keeps_after_backward or unit.is_unsharded_by_user
        if unit.kept is not None and not is_kept:
            unit.kept.drop()
            unit.kept = None
            unit.describe()


def _add_pending(unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> None:
    """Add to each gradient that is wanted what waited for it."""
    for param in wanted & grads.keys():
        own = unit.gathered_member(param).dtype
        dtype = unit.reduced_member(param, own).dtype
        grads[param] = reduce.take_pending(param, grads[param], dtype)


def _ahead(
    unit: Unit, given: Sequence[Unit] | None, order: Iterable[Unit], limit: int
) -> Sequence[Unit]:
    """Select the units to gather ahead at `unit`: those `given`, or the next `limit` in `order`."""
    if given is not None:
        return given
    order = list(order)
    start = order.index(unit) + 1 if unit in order else len(order)
    return order[start : start + limit]


def step_in_backward(unit: Unit) -> Step:
    """Return the step whose backward is running, as far as `unit` can tell: its latest."""
    steps = steps_of(unit)
    if steps.last_step is None:
        steps.last_step = Step(unit)
    return steps.last_step


def read_unsharded(param: ShardedParam) -> Tensor:
    """Return the unsharded parameter, outside of forward, between `unshard()` and `reshard()`."""
    unit = param.unit
    if unit.kept is None or unit.kept.is_stale:
        unit.kept = Whole(unit)
    step = steps_of(unit).reading
    if step is None or step.has_grad != torch.is_grad_enabled():
        step = steps_of(unit).reading = Step(unit)
    return step.attach(param, unit.kept.tensors()[param])


def registered(param: ShardedParam) -> Tensor:
    """Return what `parameters()` gives for `param`: itself, or its unsharded copy if there is one.

    There is between `unshard()` and `reshard()` or the next backward, and between a forward that
    keeps it and its backward. A parameter that has a gradient is given as it is: code that clips
    gradients, or looks at them, is to find it.
    """
    unit = param.unit
    if open_step() is not None or _torch.autograd.in_backward() or param.param.grad is not None:
        return param.param
    if unit.is_unsharded_by_user:
        is_there = unit.shows_whole and unit.kept is not None and not unit.kept.is_stale
        return lend(param, read_unsharded(param)) if is_there else param.param
    step = steps_of(unit).last_step
    lent = None if step is None else step.lent(unit)
    if step is None or lent is None:
        return param.param
    return lend(param, step.attach(param, lent.tensors[param]))


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
