"""Graphs of a unit: what compiled code keeps with the unit of a graph's first parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoshard.passes.ir.plan import Plan
from autoshard.runtime.ranks.agreement import Agreed
from autoshard.runtime.unit.unit import Unit


@dataclass(eq=False)
class UnitGraphs:
    """Graphs of frames whose first parameter is in one unit.

    agreed:      (frame, digests of plans) that all ranks have; not compared again.
    known_plans: plans that ranks share, by frame and options.
    handed: decisions on what forward hands to backward, as text, by frame and options.
    deciders: of decisions that are under way; see `agreed_plan.py`.
    misses_plans: whether torch's caches had graphs whose plans are gone: then they are not used.
    """

    agreed: Agreed = field(default_factory=set)
    known_plans: dict[str, list[Plan]] = field(default_factory=dict)
    handed: dict[str, str] = field(default_factory=dict)
    deciders: dict[str, Any] = field(default_factory=dict)
    misses_plans: bool = False


def graphs_of(unit: Unit) -> UnitGraphs:
    """Return what compiled code keeps with `unit`; made, empty, at the first call."""
    return unit.state(UnitGraphs)
