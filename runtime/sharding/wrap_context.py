"""`enable_wrap` and `wrap`: units named while the model is built.

    with enable_wrap(wrapper_cls=fully_shard, mesh=mesh):
        self.up = wrap(nn.Linear(512, 2048))  # sharded before the next layer is made

Outside of the context `wrap` does nothing, so the same class builds a plain model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

from torch import nn


def enable_wrap(
    *, wrapper_cls: Callable[..., Any], **wrapper_kwargs: Any
) -> AbstractContextManager[None]:
    """Have `wrap(module)` call `wrapper_cls(module, **wrapper_kwargs)` in this context.

    wrapper_cls: `fully_shard`, or whatever takes a module and returns one.

    It holds for the thread that entered it, may be entered again after it was left, and decorates
    functions, too. Raises TypeError if `wrapper_cls` can't be called, and NotImplementedError on
    entering one context inside another; the outer one goes on.
    """
    if not callable(wrapper_cls):
        raise TypeError(
            f"enable_wrap expects a function of a module as wrapper_cls, such as "
            f"autoshard.fully_shard, but got {wrapper_cls!r}"
        )
    return _WrapContext(wrapper_cls, wrapper_kwargs)


def wrap(module: nn.Module, **wrap_overrides: Any) -> Any:
    """Return what the `wrapper_cls` of the enclosing `enable_wrap` makes of `module`.

    Without one, return `module` itself. Of an argument that is given several times, the value in
    `module._wrap_overrides` (a dict, if there) wins, then that in `wrap_overrides`, then that of
    `enable_wrap`.
    """
    context = _local.context
    if context is None:
        return module
    forced = getattr(module, "_wrap_overrides", {})
    return context.wrapper_cls(module, **{**context.arguments, **wrap_overrides, **forced})


class _WrapContext(ContextDecorator, AbstractContextManager[None]):
    def __init__(self, wrapper_cls: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.wrapper_cls = wrapper_cls
        self.arguments = arguments

    def __enter__(self) -> None:
        """Have `wrap` use this context in this thread.

        Raises NotImplementedError inside another context, or this one, which goes on.
        """
        if _local.context is not None:
            raise NotImplementedError(
                "enable_wrap inside enable_wrap is not supported: leave the outer context first, "
                "or give wrap() the arguments that differ"
            )
        _local.context = self

    def __exit__(self, *raised: object) -> None:
        _local.context = None


class _Local(threading.local):
    context: _WrapContext | None = None


_local = _Local()
