"""Search for units: ask a policy, or see which blocks repeat, and put parents first."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from torch import nn

from autoshard.runtime.eager import access
from autoshard.runtime.sharding.wrap_policies import CustomPolicy, Overrides, Policy
from autoshard.runtime.sharding.wrap_policies import ModuleWrapPolicy as ModuleWrapPolicy
from autoshard.runtime.unit.unit import ROOT_NAME

log = logging.getLogger(__name__)


def find_units(
    model: nn.Module, policy: Policy | None, ignored: Set[nn.Module] = frozenset()
) -> dict[nn.Module, Overrides]:
    """Find the modules of `model` that become units, each with a dict of overrides of its own.

    Parents come first; `model` is not among them. A module in several places is one unit. No unit
    is made of a module without forward, which is never called, or without parameters.

    policy: see `wrap_policies.py`. None takes the classes that Hugging Face's `_no_split_modules`
        names, or else the model's repeated blocks.
    ignored: modules that become no units, with all below them; their parameters don't count.

    Raises ValueError, naming the module, if one is sharded already, or if the policy returns
    something else than its form may; TypeError if `policy` can't be called in any of the forms.
    """
    candidates = _Candidates(model, ignored)
    if policy is None:
        units = candidates.chosen_by(_automatic_policy(model))
    elif isinstance(policy, CustomPolicy):
        units = candidates.chosen_by(policy, overrides=True)
    elif _takes(policy, module=model, recurse=True, nonwrapped_numel=0):
        units = candidates.chosen_on_the_way_up(policy)
    elif _takes(policy, model):
        units = candidates.chosen_by(policy)
    else:
        raise TypeError(
            f"policy {policy!r} can't be called with a module, or with module, recurse and "
            "nonwrapped_numel by name: pass a ModuleWrapPolicy, a CustomPolicy or a function, "
            "and bind its other arguments with functools.partial"
        )
    return _parents_first(model, units)


def override_mixed_precision(
    model: nn.Module,
    classes: Iterable[type[nn.Module]],
    units: Mapping[nn.Module, Overrides],
    ignored: Set[nn.Module] = frozenset(),
) -> dict[nn.Module, Overrides]:
    """Return `units` with each module of `classes` as a unit in full precision; parents first.

    Such a unit has the override {"mp_policy": None}, in place of an "mp_policy" that it had; its
    other overrides stay. All dicts are new. An instance need not have parameters. `model` itself,
    modules without forward, and modules in `ignored` or below one are not made units, and stay as
    they are if they are in `units`.
    Raises ValueError, naming the module, if one outside of `ignored` is sharded already.
    """
    candidates = _Candidates(model, ignored)
    wanted = tuple(set(classes))
    found = {unit: dict(overrides) for unit, overrides in units.items()}
    for module in model.modules():
        # One without parameters too: its inputs would be cast by the unit around it.
        if isinstance(module, wanted) and candidates.may_be_called(module):
            found.setdefault(module, {})["mp_policy"] = None
    return _parents_first(model, found)


def log_mixed_units(model: nn.Module) -> None:
    """Log, at level INFO, each unit in sharded `model` that has frozen and trainable parameters.

    Such a unit trains correctly, but backward gathers its frozen parameters with the others,
    though they have no gradient to reduce. FSDP1 warned, or refused.
    """
    units = dict.fromkeys(access.unit_of(module) for module in model.modules())
    for unit in filter(None, units):
        frozen = [each.name for each in unit.params if not each.param.requires_grad]
        trainable = [each.name for each in unit.params if each.param.requires_grad]
        if frozen and trainable:
            log.info(
                "unit %s has frozen parameters %s beside trainable ones %s",
                *(unit.name, frozen, trainable),
            )


class _Candidates:
    """Modules of a model that may become units.

    Raises ValueError if one of them, outside of `ignored`, heads a unit already.
    """

    def __init__(self, model: nn.Module, ignored: Set[nn.Module]) -> None:
        """Note `model`, and what is ignored: modules in `ignored` and below, and their parameters.

        Raises ValueError, naming the module, if `model` or one in it, not ignored, heads a unit
        already.
        """
        self._model = model
        self._ignored = {below for module in ignored for below in module.modules()}
        self._ignored_params = {param for module in ignored for param in module.parameters()}
        for path, module in model.named_modules():
            if access.unit_of(module) is not None and module not in self._ignored:
                raise ValueError(
                    f"{path or ROOT_NAME} ({type(module).__name__}) is sharded already, and the "
                    "units of a model are found all at once: shard the model in one call, or "
                    "call fully_shard on every unit and then on the model"
                )

    def chosen_by(self, policy: Policy, *, overrides: bool = False) -> dict[nn.Module, Overrides]:
        """Select the modules for which `policy(module)` is true, each with its overrides.

        Modules that `may_be_called` refuses, or that have no parameters but ignored ones, are not
        asked about. They are in the order of `named_modules()`.

        overrides: whether `policy` may return a dict of overrides; it must then return that or a
            bool.
        Raises ValueError for another answer; without `overrides`, only a dict is one.
        """
        units = {}
        for path, module in self._model.named_modules():
            if self._may_be_unit(module):
                answer = policy(module)
                if isinstance(answer, dict) and not overrides:
                    raise ValueError(
                        f"the policy returned {answer!r} for {path}: it should return True or "
                        "False, or be given as CustomPolicy(function) to return overrides"
                    )
                if overrides and not isinstance(answer, (bool, dict)):
                    raise ValueError(
                        f"the function given to CustomPolicy returned {answer!r} for {path}: it "
                        "should return True, False, or a dict of arguments of fully_shard"
                    )
                if answer:
                    units[module] = dict(answer) if isinstance(answer, dict) else {}
        return units

    def chosen_on_the_way_up(self, policy: Policy) -> dict[nn.Module, Overrides]:
        """Select modules by a policy of FSDP1's form, asked up to twice of each; no overrides.

        On the way down `policy(module=, recurse=True, nonwrapped_numel=)` says whether to look at a
        module at all; if not, there is no unit in it. On the way up, with recurse=False, it says
        whether the module is a unit. `nonwrapped_numel` counts elements of parameters that are not
        ignored: first all of the module's, then those in no unit below. The model itself, modules
        without forward and those without parameters are asked about on the way down alone, ignored
        ones never, and one in several places not again. Children come first in the result.
        """
        units: dict[nn.Module, Overrides] = {}
        seen: dict[nn.Module, set[nn.Parameter]] = {}

        def visit(module: nn.Module) -> set[nn.Parameter]:
            """Return the parameters that units in `module`, or itself, take; decide only once."""
            if module not in seen:
                seen[module] = decide(module)
            return seen[module]

        def decide(module: nn.Module) -> set[nn.Parameter]:
            """Ask the policy about `module` and what is in it; add what becomes a unit to `units`.

            Returns the parameters that these units take.
            """
            params = self._params(module)
            if not policy(module=module, recurse=True, nonwrapped_numel=_numel(params)):
                return set()
            taken: set[nn.Parameter] = set()
            for child in module.children():
                if child not in self._ignored:
                    taken |= visit(child)
            left = _numel(params - taken)
            if self._may_be_unit(module) and policy(
                module=module, recurse=False, nonwrapped_numel=left
            ):
                units[module] = {}
                return params
            return taken

        visit(self._model)
        return units

    def may_be_called(self, module: nn.Module) -> bool:
        """Tell whether `module` is not the model itself, has a forward and is not ignored."""
        return (
            module is not self._model
            and module not in self._ignored
            and type(module).forward is not nn.Module.forward
        )

    def _may_be_unit(self, module: nn.Module) -> bool:
        return self.may_be_called(module) and bool(self._params(module))

    def _params(self, module: nn.Module) -> set[nn.Parameter]:
        return set(module.parameters()) - self._ignored_params


def _takes(policy: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Tell whether `policy` can be called with these arguments; never if it is a class.

    A function written in C may show no signature: it is taken to have positional arguments only.
    """
    if isinstance(policy, type) or not callable(policy):
        return False
    try:
        inspect.signature(policy).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # written in C, it shows no signature
        return not kwargs
    return True


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def _parents_first(
    model: nn.Module, units: Mapping[nn.Module, Overrides]
) -> dict[nn.Module, Overrides]:
    """Sort `units` in the order of `model.modules()`, but each behind all units that contain it.

    The two differ for a module in several places. If units are made in the reverse order, those
    inside a unit are made before it.
    """
    found = [module for module in model.modules() if module in units]
    around: dict[nn.Module, list[nn.Module]] = {unit: [] for unit in found}
    for unit in found:
        for below in unit.modules():
            if below in around and below is not unit:
                around[below].append(unit)
    ordered: dict[nn.Module, Overrides] = {}

    def place(unit: nn.Module) -> None:
        """Put `unit` next in the order, behind the units around it, which are put there first."""
        for outer in around[unit]:
            if outer not in ordered:
                place(outer)
        ordered[unit] = units[unit]

    for unit in found:
        place(unit)
    return ordered


def _automatic_policy(model: nn.Module) -> Policy:
    """Make the policy for None: `_no_split_classes`, or, if there are none, `_repeated_blocks`."""
    classes = _no_split_classes(model)
    blocks = set() if classes else _repeated_blocks(model)
    return lambda module: type(module) in classes or module in blocks


def _no_split_classes(model: nn.Module) -> set[type]:
    """Find the classes in `model` that Hugging Face's `_no_split_modules` of any module names."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return {type(module) for module in model.modules() if type(module).__name__ in names}


def _repeated_blocks(model: nn.Module) -> set[nn.Module]:
    """Find blocks of one class that are, twice or more, direct children of one container.

    A container is a ModuleList, ModuleDict or Sequential. A block is a module with children,
    other than a ModuleList or ModuleDict, or an RNN, GRU or LSTM. Blocks inside such a block
    (experts, heads) are not found: they stay in its unit.
    """
    found: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        """Add the repeated blocks among `module`'s children to `found`; visit other children."""
        children = list(module.children())
        counts = Counter(type(child) for child in children if _has_layers(child))
        repeated = set()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            repeated = {cls for cls, count in counts.items() if count > 1 and _is_block(cls)}
        for child in children:
            if type(child) in repeated:
                found.add(child)
            else:
                visit(child)

    visit(model)
    return found


def _has_layers(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) or bool(list(module.children()))


def _is_block(cls: type) -> bool:
    return not issubclass(cls, (nn.ModuleList, nn.ModuleDict))
