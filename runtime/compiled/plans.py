"""Plans of a model's compiled graphs, for the user to look at."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from autoshard.passes.ir.plan import Plan
from autoshard.runtime.unit.unit import Unit, root_unit, unit_of

_plans: weakref.WeakKeyDictionary[nn.Module, list[Plan]] = weakref.WeakKeyDictionary()


def plans(model: nn.Module) -> list[Plan]:
    """List the plans of the graphs compiled so far of `model`, or of modules in it: one a graph.

    model: sharded, or what torch.compile made of it. Empty before the first call.
    """
    return [plan for module in model.modules() for plan in _plans.get(module, [])]


def plans_by_root(model: nn.Module) -> dict[nn.Module, list[Plan]]:
    """Return the same plans by the outermost sharded module, from which their names count."""
    found: dict[nn.Module, list[Plan]] = {}
    for module in model.modules():
        unit = unit_of(module)
        if module in _plans and unit is not None:
            found.setdefault(root_unit(unit).modules[0], []).extend(_plans[module])
    return found


def record(units: Iterable[Unit], found: Iterable[Plan]) -> None:
    """Record plans for the outermost of the modules that head `units`; `plans` finds them there.

    units: those whose parameters the plans' graphs read.
    """
    root = min(units, key=lambda unit: (not unit.is_root, unit.name.count("."))).modules[0]
    _plans.setdefault(root, []).extend(found)
