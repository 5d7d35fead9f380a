"""Forwards that no hook sees: methods other than `forward`, and what began before sharding."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType

from torch import nn

from autoshard import _torch
from autoshard.runtime.eager import step as steps
from autoshard.runtime.unit.param import ShardedParam
from autoshard.runtime.unit.unit import Unit, root_of, unit_of


@dataclass
class MethodForward:
    """Forward, or other method, that reads parameters and for which no hook has opened a step.

    It had begun when its model was sharded, or modules of the model are called by another method
    of it, or by themselves.

    frame: Python frame of the method: steps are open for it until it returns.
    root:  the unit that owns the steps.
    units: all units of the model that `root` heads.
    step:  the one that reads belong to now.
    thread: whose frame it is.
    """

    frame: FrameType
    root: Unit
    units: frozenset[Unit]
    step: steps.Step
    thread: int

    def step_for(self, unit: Unit) -> steps.Step:
        """Return the step that reads of `unit` belong to now.

        If the step so far is over for `unit` (`Step.is_over_for`), it is closed and replaced;
        closing may wait and raise, as `Step.close`.
        """
        if self.step.is_over_for(unit):
            self.close()
            self.step = _step_in(self.root, self.frame)
        return self.step

    def close(self) -> None:
        """End the forward: only what backward needs stays. Waits and raises as `Step.close`."""
        self.step.opened_in = None
        self.step.close()


_open: list[MethodForward] = []


def began_before(root: nn.Module) -> bool:
    """Open a step for a running forward of `root` that began before `root` was sharded, if any.

    Returns whether there is such a forward, in which reads gather from now on, until its outermost
    method returns. There is when Dynamo gave up on the root's forward, and called the backend for a
    function further in. False, too, if `root` heads no unit.
    """
    frame: FrameType | None = sys._getframe()
    outermost = None
    before_forward = _torch.nn.BEFORE_CALL  # calls what was compiled, first of all
    while frame is not None:
        if frame.f_locals.get("self") is root and frame.f_code is not before_forward:
            outermost = frame
        frame = frame.f_back
    if outermost is None or unit_of(root) is None:
        return False
    _open_in(root, outermost)
    return True


def _open_in(root: nn.Module, frame: FrameType) -> steps.Step:
    """Open a step for what `frame` reads of `root`, which heads a unit, and return the step.

    It is noted in `_open`, and closed by the first `close_returned` after `frame` has returned. No
    hooks are pushed on what autograd saves.
    """
    unit = unit_of(root)
    assert unit is not None
    units = frozenset(filter(None, map(unit_of, root.modules())))
    step = _step_in(unit, frame)
    _open.append(MethodForward(frame, unit, units, step, threading.get_ident()))
    return step


def _step_in(root: Unit, frame: FrameType) -> steps.Step:
    step = steps.Step(root)
    step.opened_in = frame
    return step


def begin_step(module: nn.Module, sharded: ShardedParam) -> steps.Step | None:
    """Open a step for a read of `sharded` where no hook has opened one, and return it.

    It does so if the innermost running call of a module is of `module`, or of a module around it,
    as when another method of the model calls its layers. The step is owned by the outermost sharded
    module around `module`, and open until the outermost running method of that model returns.
    Returns None, and opens nothing, where no such call runs, as in a function that initialises.

    module: whose parameter is read.
    """
    reader = None
    outermost = None
    inside: set[nn.Module] = set()
    root = module
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module):
            if reader is None and code is _torch.nn.CALL:
                if not any(each is module for each in owner.modules()):
                    return None
                reader, root = owner, root_of(sharded)
                inside = set(root.modules())
            if reader is not None and owner in inside and _is_method(owner, code):
                outermost = frame
        frame = frame.f_back
    return None if outermost is None else _open_in(root, outermost)


def _is_method(owner: nn.Module, code: CodeType) -> bool:
    """Tell whether `code` is of a method or property of `owner`, decorated or not.

    A function that takes `owner` as its first argument, as a training loop may, is none.
    """
    own: list[object] = list(vars(owner).values())
    functions = (each for cls in type(owner).__mro__ for each in vars(cls).values())
    return any(code in _codes(each) for each in itertools.chain(own, functions))


def _codes(value: object) -> Iterator[CodeType]:
    """Yield the code of a function, method or property, and of functions that it wraps.

    Nothing for another value.
    """
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    elif isinstance(value, MethodType):
        value = value.__func__
    while isinstance(value, FunctionType):
        yield value.__code__
        value = getattr(value, "__wrapped__", None)


def step_open_for(unit: Unit) -> steps.Step | None:
    """Return the step that reads of `unit` belong to, if a `MethodForward` of its model is running.

    Else None. Steps of forwards that have returned are closed first; a step that is over for `unit`
    is closed, and replaced (`MethodForward.step_for`). Closing may wait and raise, as `Step.close`.
    """
    close_returned()
    return next((late.step_for(unit) for late in _open if unit in late.units), None)


def close_returned() -> None:
    """Close the steps of each `MethodForward` whose frame is no longer on the stack.

    Those of other threads, which have stacks of their own, are left to them. Unsharded parameters
    are dropped but for what backward needs. Waits and raises as `Step.close`.
    """
    if not _open:
        return
    frames: set[FrameType] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    others = {*sys._current_frames()} - {threading.get_ident()}
    for late in list(_open):
        if late.thread not in others and late.frame not in frames:
            _open.remove(late)
            late.close()
