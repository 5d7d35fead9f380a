"""Graphs of a unit: what compiled code keeps with the outermost unit of what it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.passes.ir.plan import Plan
from autoshard.runtime.ranks.agreement import Agreed
from autoshard.runtime.unit.unit import Unit


@dataclass(eq=False)
class UnitGraphs:
    """Graphs that were compiled for a unit.

    agreed:      what ranks have agreed on about them.
    known_plans: plans that ranks share, by frame.
    kept_params: parameters that stay unsharded from forward to backward, likewise.
    misses_plans: of graphs that torch's caches have: nothing is taken from them.
    """

    agreed: Agreed = field(default_factory=set)
    known_plans: dict[str, list[Plan]] = field(default_factory=dict)
    kept_params: dict[str, frozenset[str]] = field(default_factory=dict)
    misses_plans: bool = False


def graphs_of(unit: Unit) -> UnitGraphs:
    """Return the graphs of `unit`."""
    return unit.state(UnitGraphs)
