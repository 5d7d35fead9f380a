"""Metadata keys that autoshard writes on a node or a graph, each with the type of its value.

Values are immutable: FX copies `node.meta` shallowly, so a list in it would be the
same list in both graphs. FX's own keys (`val`, `recompute`) are read as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from torch import fx

from autoshard.passes.planner.costs import PACKED

if TYPE_CHECKING:
    from autoshard.passes.ir.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Key(Generic[T]):
    """Key of `meta`, with the type of its value."""

    name: str

    def get(self, at: fx.Node | fx.GraphModule) -> T | None:
        return cast("T | None", at.meta.get(self.name))

    def pop(self, at: fx.Node | fx.GraphModule) -> T | None:
        return cast("T | None", at.meta.pop(self.name, None))

    def set(self, at: fx.Node | fx.GraphModule, value: T) -> None:
        at.meta[self.name] = value


@dataclass(frozen=True)
class ParamInfo:
    """Facts that passes may use about the parameter behind a marker.

    name: from the root module, "layers.3.mlp.w1".
    unit: name of its unit, unique in one compilation.
    axis: mesh axis that it is sharded over.
    reduce_axis: mesh axes that its gradient is averaged over, "shard" or "shard+replicate".
    layout: "packed" or "grouped", for its gather's bucket if no planner decides; one grouped member
        makes its bucket grouped.
    """

    name: str
    unit: str
    axis: str
    reduce_axis: str
    layout: str = PACKED


PARAM: Key[ParamInfo] = Key("autoshard.param")  # on a marker: whose it is
CHUNKS: Key[int] = Key("autoshard.chunks")  # in which a value is computed
SOURCE: Key[str] = Key("autoshard.source")  # for people: what a node is about
VALUE: Key[str] = Key("autoshard.value")  # of a joint graph's forward, in every part and copy
EXPOSED_US: Key[float] = Key("autoshard.exposed_us")  # on a copy's wait: compute's, as predicted
PLAN: Key[Plan] = Key("autoshard.plan")  # on a graph module: what the acting passes obey
