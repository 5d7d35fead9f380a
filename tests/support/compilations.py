"""Compilations that serve several tests: what a rank has compiled once it does not compile again.

Most of a test of compiled code is compilation, and many tests compile the same graph with the same
options. Dynamo traces anew for each test, and ranks compare outcomes as ever; what is reused is
what AOTAutograd and the passes have made of an equal graph before, in the same process. A test that
is about compilation itself asks for `on_ranks(..., compiles=True)`.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from autoshard.compilation import Compilation

MOST = 100  # that are kept

_done: collections.OrderedDict[tuple[Any, ...], tuple[Any, ...]] = collections.OrderedDict()
_compile_anew = Compilation._compile_eagerly


def reused() -> contextlib.AbstractContextManager[Any]:
    """Have compilations in this context reuse those of equal graphs."""
    return mock.patch.object(Compilation, "_compile_eagerly", _compile)


def _compile(self: Compilation) -> Callable[..., Any]:
    """Compile as `Compilation` does, or take what an equal one has made, and its plans."""
    key = _key(self)
    if key in _done:
        _done.move_to_end(key)
        call, plans, self.priced = _done[key]
        for plan in plans:
            self._tell(plan, None)
        return call
    guards = _num_guards()
    call = _compile_anew(self)
    if key is not None and _num_guards() == guards:
        _done[key] = call, list(self.plans), self.priced
        if len(_done) > MOST:
            _done.popitem(last=False)
    return call


def _key(of: Compilation) -> tuple[Any, ...] | None:
    """All that the result depends on; None if it is not to be reused."""
    inputs, params = of.frame.inputs, of.frame.params
    if type(of) is not Compilation:
        return None
    if any(isinstance(each, torch.SymInt) for each in inputs):  # it may add guards
        return None
    if any(param.is_extended for param in params):  # it depends on what their shards say
        return None
    facts = of._cache_key()
    if facts is None:
        return None
    return facts, of.frame.gm.code, torch.is_grad_enabled(), tuple(map(_seen, inputs))


def _seen(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return (
        type(value),
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_leaf,
    )


def _num_guards() -> int:
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return 0
    return len(context.guards_context.aotautograd_guards) + len(context.fake_mode.shape_env.guards)
