"""What torch.compile(..., backend="autoshard") gives back, and its first call.

The backend itself is only called if Dynamo captures a graph, and then in the middle of
a forward. A model that Dynamo captures nothing of (a recurrent network, say) would run
unsharded, each rank for itself, and say nothing. So a compiled module is sharded when
it is first called, before its forward begins; graphs come after that. Of a compiled
function the modules are those in its graphs: the others that it can name, if an optimizer
steps them unsharded, are an error then, as are compiled modules that were never called.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autoshard import _torch
from autoshard.runtime.adopt import adopt_module, modules_named_by
from autoshard.runtime.mesh import world_size
from autoshard.runtime.names import keep_names
from autoshard.runtime.optimizers import uncalled_modules, watch_optimizers
from autoshard.runtime.precision import cast_buffers, units_that_cast
from autoshard.runtime.unit import Unit

ReadOptions = Callable[[Mapping[str, Any]], dict[str, Any]]
"""The backend's options, checked, as the arguments of `shard()`."""

num_graphs = 0  # compiled so far, of those that read sharded parameters


def watch_first_calls(read_options: ReadOptions) -> None:
    """Have modules compiled with autoshard from now on sharded at their first call."""

    def wrap(fn: Any, compiled: Any, options: dict[str, Any]) -> Any:
        arguments = read_options(options)
        if isinstance(compiled, nn.Module):
            keep_names(compiled)  # its forward comes here too, as a method
            return compiled
        owner = getattr(fn, "__self__", None) or getattr(fn, "__wrapped__", None)
        if isinstance(owner, nn.Module):
            return _sharding_first(owner, compiled, arguments)
        return _expecting_a_graph(fn, compiled)

    _torch.watch_compile("autoshard", wrap)
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" and world_size() > 1:
        warnings.warn(
            "TORCHDYNAMO_DISABLE=1 switches torch.compile off, and with it the sharding of models "
            "by it: call autoshard.shard(model), or set TORCH_COMPILE_DISABLE=1 instead, which "
            "leaves the eager runtime",
            RuntimeWarning,
            stacklevel=2,
        )


def _sharding_first(module: nn.Module, compiled: Any, arguments: dict[str, Any]) -> Any:
    uncalled_modules.add(module)  # an optimizer that steps it uncalled is told so
    watch_optimizers()
    pending = True
    casting: list[Unit] = []

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal pending
        if pending:
            adopt_module(module, arguments)
            uncalled_modules.discard(module)
            casting.extend(units_that_cast(module))
            pending = False
        for unit in casting:  # Dynamo looks at dtypes before it runs any hook
            cast_buffers(unit)
        return compiled(*args, **kwargs)

    return call


def _expecting_a_graph(fn: Any, compiled: Any) -> Any:
    pending = True

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal pending
        before = num_graphs
        result = compiled(*args, **kwargs)
        if pending:
            uncalled_modules.update(modules_named_by(fn))
            watch_optimizers()
        if pending and num_graphs == before:
            warnings.warn(
                f"Dynamo captured no model in {compiled.__qualname__}: autoshard has sharded "
                "nothing in it; compile the model itself, or call autoshard.shard(model) first",
                RuntimeWarning,
                stacklevel=2,
            )
        pending = False
        return result

    return call
