"""Modules and optimizers: private methods that sharded modules' classes replace, frames of calls.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

BatchNorm: type[nn.Module] = _BatchNorm
"""Class of the modules that normalise over a batch, of one dim or more."""

CALL = nn.Module._call_impl.__code__
"""Code of the frame in which `module(...)` runs hooks and forward."""

BEFORE_CALL = nn.Module._wrapped_call_impl.__code__
"""Code of the frame around `CALL`, which calls what was compiled, if anything was."""

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that hold its hooks, before a step and after it."""


def is_last_before_step(optimizer: torch.optim.Optimizer, hook_id: int) -> bool:
    """Tell whether a hook is the last of the optimizer's own that run before its step."""
    before, _ = STEP_HOOKS
    return next(reversed(getattr(optimizer, before)), None) == hook_id


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the `step` of the optimizer's class, to be called with an optimizer, without hooks.

    torch wraps it, when a first optimizer of the class is made, to run hooks and be profiled; and
    tools wrap that.
    """
    step: Any = type(optimizer).step
    while hasattr(step, "hooked"):
        step = step.__wrapped__
    return cast(Callable[..., Any], step)


def replaced_methods(
    convert: Callable[..., nn.Module], load: Callable[..., None]
) -> dict[str, Callable[..., Any]]:
    """Attributes for the subclass of a sharded module: its `_apply` and `_load_from_state_dict`.

    convert: becomes `_apply`, which `to()`, `half()` and the like call with a function of a tensor.
    load: becomes `_load_from_state_dict`, which `load_state_dict()` calls for each module.
    torch passes them the module and the arguments of these methods. They call `convert_module` and
    `load_module` for what torch itself does.

    Patched: `_apply` and `_load_from_state_dict`, of the subclass alone.
    Why:     both put other tensors into parameters that units know. torch's own hooks on loading
             run before a parameter is assigned; on conversion there are none.
    Tests:   in tests/parity/training/test_state.py `test_meta_init_and_conversion` and
             `test_assigned_parameters_are_used_at_once`, work.
    """
    return {"_apply": convert, "_load_from_state_dict": load}


def convert_module(original: Any, module: nn.Module, *args: Any) -> nn.Module:
    """Convert the parameters and buffers of `module`, and below, by the `_apply` of `original`.

    original: class of `module`, without our subclass if torch's own conversion is wanted.
    args: of `_apply`: a function of a tensor, and whether to convert modules below.
    """
    converted: nn.Module = original._apply(module, *args)
    return converted


def load_module(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Load the parameters and buffers of `module` alone, by `original._load_from_state_dict`.

    original: class of `module`, without our subclass.
    args, kwargs: of that method.
    """
    original._load_from_state_dict(module, *args, **kwargs)


def replaced_weights(read: Callable[[Any], list[Any]]) -> dict[str, property]:
    """Attributes for a subclass of `nn.RNNBase` whose forward takes its weights from `read`.

    `nn.RNNBase` caches its parameters in the list `_flat_weights`, which its forward reads, and
    weak references to them. The list becomes a property that calls `read`, the references one that
    has none; both ignore what is assigned.
    read: given the module, returns its weights, in the order of `weight_names`.

    Patched: `_flat_weights` and `_flat_weight_refs`, of the subclass alone.
    Why:     the list would keep what forward has read unsharded; and by the references Dynamo would
             come to parameters from before sharding.
    Tests:   `test_recurrent_modules_keep_what_they_read`, needed; in
             tests/parity/compiled/test_mixes.py `test_modules_that_cache_parameters`, works.
    """

    def ignore(rnn: Any, value: list[Any]) -> None:
        """Ignore what `nn.RNNBase` assigns to its cache of parameters; ours is made on reading."""

    def no_references(rnn: Any) -> list[None]:
        """List none for each weight: forward then does not ask whether it is another one."""
        return [None] * len(weight_names(rnn))

    return {
        "_flat_weights": property(read, ignore),
        "_flat_weight_refs": property(no_references, ignore),
    }


def weight_names(rnn: Any) -> list[str]:
    """Names of the parameters of an `nn.RNNBase`, in the order in which forward wants them."""
    names: list[str] = rnn._flat_weights_names
    return names


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of the module's own buffers that are in no state dict."""
    return module._non_persistent_buffers_set


def hooks_of(module: nn.Module) -> list[dict[Any, Any]]:
    """List the dicts in which hooks on the forward and backward of `module` are registered."""
    return [
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    ]


def call_instead(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have a call of `module` run `call` instead of its forward and hooks, as after `compile()`."""
    module._compiled_call_impl = call  # type: ignore[assignment]  # as Module.compile sets it


def global_hooks() -> list[dict[Any, Any]]:
    """List the dicts of hooks that run for all modules."""
    found = vars(nn.modules.module)
    return [
        found[name]
        for name in sorted(found)
        if name.startswith("_global_") and name[-5:] == "hooks"
    ]


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict in which `module` has the modules in it, by name."""
    return module._modules
