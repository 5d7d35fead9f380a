"""Autograd: the backward that runs, its nodes and hooks, and transforms of torch.func.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._C import _autograd
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _python_dispatch, checkpoint

push_saved_tensors_hooks: Callable[..., None] = _autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
# What graphs call to begin and end a part without gradients.
set_grad_enabled: Any = torch._C._set_grad_enabled
is_profiled: Callable[[], bool] = _autograd._profiler_enabled  # in this thread, or in all

_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_APPLY_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call `function.apply(*args)`, which torch leaves untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]  # as it says above


def clear_saved(ctx: Any) -> None:
    """Have `ctx`, of a backward that runs, let go of what it saved, unless it is to run again."""
    ctx.maybe_clear_saved_tensors()


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward now running has finished."""
    # The engine is put on the class at run time, where type checkers don't see it.
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def graph_task() -> int:
    """Number of the backward that this thread is inside; -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Tell whether this thread is inside a backward."""
    return graph_task() != -1


def in_nested_backward() -> bool:
    """Tell whether a node of another backward has started the running one.

    A reentrant checkpoint does so in its backward.
    """
    calls, outermost = 0, sys._getframe()
    frame: FrameType | None = outermost
    while frame is not None:
        calls += frame.f_code is _RUN_BACKWARD
        outermost, frame = frame, frame.f_back
    # Threads of a device are autograd's own: the call that woke them stands in another one.
    return calls > (outermost.f_code is not _APPLY_BACKWARD)


def will_run(node: Any) -> bool:
    """Tell whether the running backward runs the autograd node `node`, or has done so.

    Raises RuntimeError outside a backward, and for a leaf whose gradient `torch.autograd.grad()`
    is to return.
    """
    # torch's type information puts it on another class, here and below.
    return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]


def accumulates_gradient(leaf: Any) -> bool:
    """Tell whether the running backward adds to `.grad` at `leaf`, an AccumulateGrad node."""
    return _leaf_use(leaf) is True


def returns_gradient(leaf: Any) -> bool:
    """Tell whether the running backward returns the gradient at `leaf`, an AccumulateGrad node.

    It does if it is a `torch.autograd.grad()` with that leaf among its inputs. Only called in a
    backward: outside, the answer is always True.
    """
    return _leaf_use(leaf) is None


def _leaf_use(leaf: Any) -> bool | None:
    """Tell whether the running backward runs `leaf`; None if it returns the gradient there instead.

    None also outside a backward.
    """
    try:
        return will_run(leaf)
    except RuntimeError:  # so says torch when autograd.grad() captures what arrives there
        return None


def hooks_of(param: torch.Tensor) -> list[dict[int, Callable[..., Any]]]:
    """Dicts of the hooks on the gradient of `param`, before and after it is accumulated.

    They are the dicts themselves that autograd reads, without those that are empty.
    """
    kinds = (param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None))
    return [hooks for hooks in kinds if hooks]


def has_hooks(param: torch.Tensor) -> bool:
    """Tell whether there are hooks on the gradient of `param`, before or after accumulation."""
    return bool(param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None))


def hooks_on_gradient(param: torch.Tensor) -> dict[int, Callable[..., Any]]:
    """Hooks by `register_hook`: the dict itself that autograd reads, or an empty one."""
    return param._backward_hooks or {}


def hooks_after_accumulation(param: torch.Tensor) -> dict[int, Callable[..., Any]]:
    """Hooks by `register_post_accumulate_grad_hook`: the dict itself, or an empty one."""
    return getattr(param, "_post_accumulate_grad_hooks", None) or {}


def saved_tensors_hooks_on_top() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the (pack, unpack) pair of hooks that autograd would call now, or None."""
    pair: Any = _autograd._top_saved_tensors_default_hooks(False)
    return None if pair is None else (pair[0], pair[1])


def is_checkpoint_hook(pack: Callable[..., Any]) -> bool:
    """Tell whether `pack` is a hook that non-reentrant `torch.utils.checkpoint` installs."""
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint"


def is_recomputation_hook(pack: Callable[..., Any]) -> bool:
    """Tell whether `pack` is the hook of a non-reentrant checkpoint that runs forward again."""
    return is_checkpoint_hook(pack) and pack.__qualname__.startswith("_recomputation_hook.")


def in_functorch() -> bool:
    """Tell whether a transform of torch.func (grad, vmap, jvp, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_functorch() -> contextlib.AbstractContextManager[Any]:
    """Hide what is done in this context from transforms of torch.func.

    Tensors made inside are constants to them, with a graph of autograd's own.
    """
    context: contextlib.AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return context


def in_selective_checkpoint() -> bool:
    """Tell whether a checkpoint that saves some results runs its forward, the first or again."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, _SELECTIVE) for mode in modes)


@contextlib.contextmanager
def outside_selective_checkpoint() -> Iterator[None]:
    """Hide what is done in this context from checkpoints that save some results.

    They count the ops of each kind, and want as many where forward runs again. Other modes see
    what is done.
    """
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    first = next(place for place, mode in enumerate(modes) if isinstance(mode, _SELECTIVE))
    inner = [_python_dispatch._pop_mode() for _ in modes[first:]][::-1]
    others = [mode for mode in inner if not isinstance(mode, _SELECTIVE)]
    for mode in others:
        _python_dispatch._push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _python_dispatch._pop_mode()
        for mode in inner:
            _python_dispatch._push_mode(mode)
