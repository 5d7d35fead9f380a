"""Modules and optimizers: private methods that a sharded module's class replaces, frames of calls.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

BatchNorm: type[nn.Module] = _BatchNorm
"""Class of the modules that normalise over a batch, of one dim or more."""

CALL = nn.Module._call_impl.__code__
"""Code of the frame in which `module(...)` runs hooks and forward."""

BEFORE_CALL = nn.Module._wrapped_call_impl.__code__
"""Code of the frame around `CALL`, which calls what was compiled, if anything was."""

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer."""


def replaced_methods(
    convert: Callable[..., nn.Module], load: Callable[..., None]
) -> dict[str, Callable[..., Any]]:
    """Attributes of a module's subclass, by which `to()` and `load_state_dict()` call these.

    convert: takes the place of `convert_module`, load: that of `load_module`.

    Patched: `_apply` and `_load_from_state_dict`, of the subclass alone.
    Why:     both put other tensors into parameters that units know. torch's own hooks on loading
             run before a parameter is assigned; on conversion there are none.
    Tests:   in tests/parity/training/test_state.py `test_meta_init_and_conversion` and
             `test_assigned_parameters_are_used_at_once`, work.
    """
    return {"_apply": convert, "_load_from_state_dict": load}


def convert_module(original: Any, module: nn.Module, *args: Any) -> nn.Module:
    """Convert the parameters and buffers of `module`, and below, as its class `original` does."""
    converted: nn.Module = original._apply(module, *args)
    return converted


def load_module(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Load the parameters and buffers of `module` alone, as its class `original` does."""
    original._load_from_state_dict(module, *args, **kwargs)


def replaced_weights(read: Callable[[Any], list[Any]]) -> dict[str, property]:
    """Attributes of a subclass of `nn.RNNBase`, by which `read` gives the weights to forward.

    It caches its parameters in a list at construction; forward reads that list.

    Patched: `_flat_weights`, of the subclass alone.
    Why:     the list would keep what forward has read unsharded.
    Tests:   `test_recurrent_modules_keep_what_they_read`, needed; in
             tests/parity/compiled/test_mixes.py `test_modules_that_cache_parameters`, works.
    """

    def ignore(rnn: Any, value: list[Any]) -> None:
        """Ignore what `nn.RNNBase` assigns to its cache of parameters; ours is made on reading."""

    return {"_flat_weights": property(read, ignore)}


def weight_names(rnn: Any) -> list[str]:
    """Names of the parameters of an `nn.RNNBase`, in the order in which forward wants them."""
    names: list[str] = rnn._flat_weights_names
    return names
