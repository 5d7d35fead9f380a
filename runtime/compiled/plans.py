"""Plans of a model's compiled graphs, for the user to look at."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from autoshard.passes.ir.plan import Plan
from autoshard.runtime.unit.unit import Unit

_plans: weakref.WeakKeyDictionary[nn.Module, list[Plan]] = weakref.WeakKeyDictionary()


def plans(model: nn.Module) -> list[Plan]:
    """List the plans of the graphs compiled so far of `model`, or of modules in it: one a graph.

    model: sharded, or what torch.compile made of it. Empty before the first call.
    """
    return [plan for module in model.modules() for plan in _plans.get(module, [])]


def record(units: Iterable[Unit], found: Iterable[Plan]) -> None:
    """Record plans for the outermost of the modules that head `units`; `plans` finds them there.

    units: those whose parameters the plans' graphs read.
    """
    root = min(units, key=lambda unit: (not unit.is_root, unit.name.count("."))).modules[0]
    _plans.setdefault(root, []).extend(found)
