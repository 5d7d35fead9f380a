"""Policies: which modules become units. `find_units.py` asks them.

A policy has one of three forms, told apart by the arguments it takes:

    policy(module) -> bool                                  a function
    policy(module) -> bool or dict                          CustomPolicy
    policy(module=, recurse=, nonwrapped_numel=) -> bool    what FSDP1 calls

The third is asked twice about a module: on the way down with recurse=True, whether to look
at its children, and on the way up with recurse=False, whether it becomes a unit. Not to look
at the children is to make no unit of any, nor of the module itself.
`nonwrapped_numel` counts elements of parameters: on the way down all of the module's, on the
way up those that no unit below has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

from torch import nn

Overrides = dict[str, Any]
"""Arguments of `fully_shard` that a unit has for itself."""

Policy = Callable[..., bool | Overrides]
"""Says of a module whether it becomes a unit of its own."""


class ModuleWrapPolicy:
    """Make a unit of every module that is an instance of one of `module_classes`."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = tuple(set(module_classes))

    def __call__(self, module: nn.Module, recurse: bool = False, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self._module_classes)

    def __repr__(self) -> str:
        names = sorted(cls.__name__ for cls in self._module_classes)
        return f"ModuleWrapPolicy({', '.join(names)})"


class CustomPolicy:
    """Policy that asks `lambda_fn(module)` if it is a unit, and if it differs from the others.

    It returns False or {} for no unit, True for a unit, or a dict for a unit with those
    arguments of `fully_shard`, as {"reshard_after_forward": False}. Anything else is a
    ValueError, naming the module.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Overrides]) -> None:
        self._lambda_fn = lambda_fn

    def __call__(self, module: nn.Module) -> bool | Overrides:
        return self._lambda_fn(module)

    def __repr__(self) -> str:
        return f"CustomPolicy({getattr(self._lambda_fn, '__qualname__', self._lambda_fn)})"


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Make a unit of every module that has parameters and a forward."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Make a unit of every module for which `lambda_fn(module)` is true.

    Bind it: `functools.partial(lambda_auto_wrap_policy, lambda_fn=...)`.
    """
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Set[type[nn.Module]],
) -> bool:
    """Make a unit of every instance of a class in `transformer_layer_cls`, as transformer blocks.

    The rest, such as embeddings and a head tied to them, stays in the unit around.
    Bind it: `functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})`.
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Set[type[nn.Module]] | None = None,
    exclude_wrap_modules: Set[type[nn.Module]] | None = None,
) -> bool:
    """Make a unit of every module that has enough parameters in no unit below.

    With `recurse`, tell whether to look at the children: not in a module that has too few
    parameters in all, or is of a class in `force_leaf_modules`. Without, tell whether `module`
    becomes a unit.

    min_num_params: how many are enough, in elements.
    force_leaf_modules: classes that become no units, nor do modules inside them; by default
        this function's attribute FORCE_LEAF_MODULES.
    exclude_wrap_modules: classes that become no units, though their children may; by default
        this function's attribute EXCLUDE_WRAP_MODULES.
    """
    if recurse:
        refused, default = force_leaf_modules, "FORCE_LEAF_MODULES"
    else:
        refused, default = exclude_wrap_modules, "EXCLUDE_WRAP_MODULES"
    if refused is None:
        refused = getattr(size_based_auto_wrap_policy, default)
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(refused))


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def _wrap_module_cls_individually(
    module: nn.Module,
    module_classes: Iterable[type[nn.Module]],
    recurse: bool,
    *args: Any,
    **kwargs: Any,
) -> bool:
    """Apply a ModuleWrapPolicy as a function; private in torch too, but scripts import it."""
    return recurse or isinstance(module, tuple(module_classes))


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., bool]],
) -> bool:
    """Apply several `policies` of FSDP1's form; True if one of them says so.

    Private in torch too, but scripts import it.
    """
    arguments = {"module": module, "recurse": recurse, "nonwrapped_numel": nonwrapped_numel}
    return any(policy(**arguments) for policy in policies)
