"""The eager runtime: one forward of a root, and the backward that follows it.

forward   a parameter read gathers its unit; the unit's forward ends: dropped
backward  a saved parameter is wanted: its unit is gathered again;
          the last gradient of the unit is in: its reduce is launched, the gathered dropped;
          the end: every reduce is waited for and added to `.grad`

[Note: what autograd sees]
Whole parameters come and go, several times in one step, but a unit must be reduced
once. So autograd gets, per unit and step, one `_ReduceUnit` node whose outputs are
*tokens*: tensors with the shape of the whole parameters and the memory of one
element. Each gathered parameter is tied to its token by `_Attach`, which passes
gradients through. However often the unit is gathered or used, autograd sums the
gradients at the token, in the order in which it would for an unsharded parameter,
and runs `_ReduceUnit.backward` once, when the last is in.

[Note: what is saved for backward]
While a step is open, hooks on saved tensors replace a view of a gathered parameter
by a `_SavedView`: which parameter, which strides. Unpacking gathers the unit again
and makes the view anew. Nothing resizes storages, and nothing hangs on outputs.
Hooks of the user's that were there before (as of `save_on_cpu`) still get every
other tensor.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard import _torch
from autoshard.runtime import collectives, left_out, reduce
from autoshard.runtime.agreement import Order, course
from autoshard.runtime.collectives import InFlight
from autoshard.runtime.param import ShardedParam
from autoshard.runtime.reduce import Reduction
from autoshard.runtime.unit import Unit

_open = threading.local()


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
        self.running: list[Unit] = []  # units whose forward is on the stack, outermost first
        self._ended: dict[Unit, int] = {}  # how many forwards of its modules are over
        self.order: list[Unit] = []  # units in the order in which they were first gathered
        self._forward = _Gathered()
        self._backward = _Gathered()
        self._tokens: dict[Unit, dict[ShardedParam, Tensor]] = {}
        self._storages: dict[int, ShardedParam] = {}  # storage of a gathered tensor -> whose it is
        self._saved: set[Unit] = set()  # units of which backward wants something again
        self._reduces: list[Reduction] = []
        self._callback_queued = False
        self._expected = owner.last_order  # what the previous step gathered, for prefetch

    @property
    def num_gathered(self) -> int:
        """Units that are gathered, or on the way, by this step."""
        return len({*self._forward.units(), *self._backward.units()})

    # ---- forward

    def read(self, param: ShardedParam) -> Tensor:
        """The whole parameter, as forward may use it."""
        return self._attach(param, self._gathered_in_forward(param.unit)[param])

    def read_in_backward(self, param: ShardedParam) -> Tensor:
        """The whole parameter, for a part of forward that a checkpoint runs again."""
        return self._attach(param, self._gathered_in_backward(param.unit)[param])

    def _attach(self, param: ShardedParam, data: Tensor) -> Tensor:
        if not (self.has_grad and param.param.requires_grad):
            return data
        # Also under the caller's no_grad: what it reads may be used outside of that.
        with torch.enable_grad():
            attached: Tensor = _torch.apply(_Attach, self._token(param), data)
        return attached

    def leave(self, unit: Unit) -> None:
        """`unit`'s forward has ended."""
        self.running.remove(unit)
        self._ended[unit] = self._ended.get(unit, 0) + 1
        # A unit of several modules is done when each of them has run.
        done = unit not in self.running and self._ended[unit] % len(unit.modules) == 0
        if done and (unit.reshards or not self.has_grad):
            self._drop(unit)

    def close(self, *, failed: bool = False) -> None:
        """The owner's forward has ended: only what backward needs stays.

        failed: by an exception.
        """
        for unit in self._forward.units():
            self._drop(unit)
        self.owner.last_order = tuple(self.order)
        if failed:
            self._forward_order.forget()
        else:
            self._forward_order.end()

    @property
    def _forward_order(self) -> Order:
        return self.owner.order("forward")

    @property
    def _backward_order(self) -> Order:
        return self.owner.order("backward")

    def _gathered_in_forward(self, unit: Unit) -> dict[ShardedParam, Tensor]:
        if not self._forward.has(unit):
            if not self.order:  # a compiled forward opens a step too, and gathers nothing in it
                course.take(f"an eager forward of {self.owner.name}", self.owner.mesh)
            self._forward_order.take(f"the gather of {unit.name}")
            if unit not in self.order:
                self.order.append(unit)
                unit.last_step = self
            gathered = self._forward.gather(unit)
            for param, tensor in gathered.items():
                if tensor.numel() and param.world > 1:
                    self._storages[tensor.untyped_storage()._cdata] = param
            following = _after(unit, self._expected)
            if following is not None and following not in self.order:
                self._forward.launch(following)
        return self._forward.gather(unit)

    def _drop(self, unit: Unit) -> None:
        for tensor in self._forward.drop(unit):
            self._storages.pop(tensor.untyped_storage()._cdata, None)

    def _token(self, param: ShardedParam) -> Tensor:
        unit = param.unit
        if unit not in self._tokens:
            trainable = [p for p in unit.params if p.param.requires_grad]
            tokens = _torch.apply(_ReduceUnit, self, unit, trainable, *(p.param for p in trainable))
            self._tokens[unit] = dict(zip(trainable, tokens, strict=True))
        return self._tokens[unit][param]

    # ---- saved tensors

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps instead of `tensor`: itself, or how to gather it again."""
        param = self._storages.get(tensor.untyped_storage()._cdata)
        if param is None or not param.unit.reshards:
            return tensor
        self._saved.add(param.unit)
        return _SavedView(
            self,
            param,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            param.param._version,
        )

    def unpack(self, saved: _SavedView) -> Tensor:
        param = saved.param
        param.check_version(saved.version)
        whole = self._gathered_in_backward(param.unit)[param]
        return whole.as_strided(saved.size, saved.stride, saved.offset)

    # ---- backward

    def _gathered_in_backward(self, unit: Unit) -> dict[ShardedParam, Tensor]:
        if not self._backward.has(unit):
            self._backward_order.take(f"the gather of {unit.name}")
            self._queue_callback()
            # A unit that trains nothing has no reduce to end it: the next gather does.
            for other in self._backward.units():
                if other is not unit and other not in self._tokens:
                    self._backward.drop(other)
            self._backward.gather(unit)
            following = _after(unit, [u for u in reversed(self.order) if u in self._saved])
            if following is not None:
                self._backward.launch(following)
        return self._backward.gather(unit)

    def reduce(
        self, unit: Unit, grads: dict[ShardedParam, Tensor | None], wanted: set[ShardedParam]
    ) -> None:
        """Every gradient of `unit` is in: launch its reduce, let go of its parameters.

        grads: whole gradients of all its trainable parameters; None where this rank has none.
        wanted: the parameters of which `.grad` is to be filled.
        """
        for reduction in self._reductions(unit, grads, wanted):
            while len(self._reduces) >= reduce.MAX_IN_FLIGHT:
                self._reduces.pop(0).accumulate()
            reduction.launch()
            self._reduces.append(reduction)

    def reduce_now(
        self, unit: Unit, grads: dict[ShardedParam, Tensor | None], wanted: set[ShardedParam]
    ) -> dict[ShardedParam, Tensor]:
        """As `reduce`, but returns this rank's rows of the mean gradients and fills no `.grad`."""
        reduced: dict[ShardedParam, Tensor] = {}
        for reduction in self._reductions(unit, grads, wanted):
            reduction.launch()
            reduced.update(reduction.wait())
        return reduced

    def _reductions(
        self, unit: Unit, grads: dict[ShardedParam, Tensor | None], wanted: set[ShardedParam]
    ) -> list[Reduction]:
        self._backward_order.take(f"the reduce of {unit.name}")
        self._backward.drop(unit)
        self._saved.discard(unit)
        self._queue_callback()
        buckets = ({p: grads[p] for p in bucket if p in grads} for bucket in unit.buckets())
        return [Reduction(bucket, wanted) for bucket in buckets if bucket]

    def _queue_callback(self) -> None:
        if not self._callback_queued and _torch.in_backward():
            _torch.queue_backward_callback(self._finish_backward)
            self._callback_queued = True
            left_out.note_backward()

    def _finish_backward(self) -> None:
        self._callback_queued = False
        while self._reduces:
            self._reduces.pop(0).accumulate()
        for unit in self._backward.units():
            self._backward.drop(unit)
        self._backward_order.end()


@dataclass(frozen=True)
class _SavedView:
    """A view of a gathered parameter, to be made again from a new gather."""

    step: Step
    param: ShardedParam
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int  # of the parameter: the values that forward saw


class _Gathered:
    """Whole parameters of some units: launched, gathered, dropped."""

    def __init__(self) -> None:
        self._flights: dict[Unit, list[tuple[list[ShardedParam], InFlight]]] = {}
        self._tensors: dict[Unit, dict[ShardedParam, Tensor]] = {}
        self._versions: dict[Unit, list[int]] = {}  # of those tensors, when they were made

    def has(self, unit: Unit) -> bool:
        return unit in self._tensors

    def units(self) -> list[Unit]:
        """Units that are gathered or on the way."""
        return list(dict.fromkeys((*self._tensors, *self._flights)))

    def launch(self, unit: Unit) -> None:
        """Start gathering `unit`, unless it is gathered or on its way."""
        if unit in self._tensors or unit in self._flights or unit.world == 1:
            return
        unit.make_ready()
        self._flights[unit] = [
            (
                bucket,
                collectives.launch_gather(
                    [param.shard for param in bucket],
                    tuple(param.member for param in bucket),
                    bucket[0].group,
                ),
            )
            for bucket in unit.buckets()
        ]

    def gather(self, unit: Unit) -> dict[ShardedParam, Tensor]:
        """Its whole parameters, waiting for them if need be."""
        if unit not in self._tensors:
            self.launch(unit)
            if unit.world == 1:
                unit.make_ready()
                self._tensors[unit] = {param: param.shard.detach() for param in unit.params}
            else:
                self._tensors[unit] = {
                    param: tensor
                    for bucket, flight in self._flights.pop(unit)
                    for param, tensor in zip(bucket, collectives.wait_gather(flight), strict=True)
                }
            if not torch.is_inference_mode_enabled():  # its tensors count no versions
                self._versions[unit] = [t._version for t in self._tensors[unit].values()]
        return self._tensors[unit]

    def drop(self, unit: Unit) -> list[Tensor]:
        """Let go of `unit`, waiting for what is still on its way; returns what was gathered.

        Raises RuntimeError if a whole parameter was written to, which would be lost.
        """
        for _, flight in self._flights.pop(unit, []):
            flight.work.wait()
        gathered = self._tensors.pop(unit, {})
        versions = self._versions.pop(unit, ())
        written = [
            param.name
            for (param, tensor), version in zip(gathered.items(), versions, strict=False)
            if tensor._version != version
        ]
        if written and unit.world > 1:
            raise RuntimeError(
                f"parameters {written} were written to in forward, where they are gathered copies: "
                "write to the module's parameter outside of forward, before the call or after the "
                "optimizer's step (for Embedding(max_norm=...), renormalise there)"
            )
        return list(gathered.values())


class _ReduceUnit(torch.autograd.Function):
    """Forward makes a unit's tokens; backward, run when all their gradients are in, reduces.

    See [Note: what autograd sees].
    """

    @staticmethod
    def forward(
        ctx: Any, step: Step, unit: Unit, trainable: list[ShardedParam], *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.unit, ctx.trainable = step, unit, trainable
        ctx.set_materialize_grads(False)
        return tuple(
            param.shard.new_empty((1,) * len(param.member.size)).expand(param.member.size)
            for param in trainable
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        whole = dict(zip(ctx.trainable, grads, strict=True))
        leaves = [node for node, _ in ctx.next_functions]
        returned = _select(ctx.trainable, map(_torch.returns_gradient, leaves))
        if returned:  # torch.autograd.grad(): `.grad` is none of its business
            rows = ctx.step.reduce_now(ctx.unit, whole, returned)
            handed_out = (p.grad_from(rows[p]) if p in rows else None for p in ctx.trainable)
            return None, None, None, *handed_out
        wanted = _select(ctx.trainable, map(_torch.accumulates_gradient, leaves))
        ctx.step.reduce(ctx.unit, whole, wanted)
        return (None,) * (3 + len(grads))


def _select(params: list[ShardedParam], chosen: Iterable[bool]) -> set[ShardedParam]:
    return {param for param, is_chosen in zip(params, chosen, strict=True) if is_chosen}


class _Attach(torch.autograd.Function):
    """The gathered data, with its gradient going to the token."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, data: Tensor) -> Tensor:
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _after(unit: Unit, order: Any) -> Unit | None:
    """The unit that follows `unit` in `order`, or None."""
    order = list(order)
    position = order.index(unit) + 1 if unit in order else len(order)
    return order[position] if position < len(order) else None


def step_in_backward(unit: Unit) -> Step:
    """The step whose backward is running, as far as `unit` can tell: its latest."""
    if unit.last_step is None:
        unit.last_step = Step(unit)
    return unit.last_step


def enter(unit: Unit) -> None:
    """A module of `unit` starts its forward: open a step if none is."""
    step = open_step()
    if step is None:
        step = _open.step = Step(unit)
        _push_hooks(step)
    step.running.append(unit)


def leave(unit: Unit) -> None:
    """The matching end; closes the step that `unit` opened."""
    step = open_step()
    if step is None or unit not in step.running:
        return
    step.leave(unit)
    if not step.running:
        _pop_hooks(step)
        _open.step = None
        # Run for exceptions too, from where they are handled.
        step.close(failed=sys.exc_info()[0] is not None)


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
            return step.pack(tensor)

        def unpack(saved: Any) -> Tensor:
            return saved.step.unpack(saved) if isinstance(saved, _SavedView) else saved

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
