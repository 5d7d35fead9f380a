"""Ways of checkpointing, each applied to a copy of one joint graph, before it is partitioned.

What a call of a unit computes is a region. `torch.utils.checkpoint`, compiled, does no more than to
tag the nodes of its regions, and the partitioner does the rest: so a model is traced once, without
checkpoints, for all ways.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import annotate
from torch.utils.checkpoint import CheckpointPolicy

from autoshard.passes.pipeline import copied
from autoshard.passes.planner.save import at_price
from autoshard.passes.plans.saved import SavedValues
from autoshard.passes.tag_saved import tag_saved

CHECKPOINTING = ("none", "full", "ops")
"""Ways of checkpointing: backward computes nothing again of a unit; all; or all but products and
attention."""

VALUES = "values"  # way of checkpointing: value by value, as a memory budget decides
STEP = 20  # percent of the bytes that values can give up, from one graph that is traced to the next
BY_VALUES = tuple(f"{VALUES}:{percent}" for percent in range(STEP, 101, STEP))
TRACED = (*CHECKPOINTING, *BY_VALUES)
"""Ways of which a step is traced; others are spliced of two of them."""

_REGION = "autoshard.region"  # among a node's annotations


def mark_regions(units: Iterable[nn.Module]) -> None:
    """Have each call of one of `units` traced as a region of its own.

    Of units inside of other ones, the outer are regions.
    """
    calls: list[None] = []
    outer: list[nn.Module] = []
    for unit in units:
        if not any(unit is each for above in outer for each in above.modules()):
            outer.append(unit)
            marked = functools.partial(_marked, unit.forward, calls)
            unit.forward = marked  # type: ignore[method-assign]  # the instance's, not the class's


def _marked(forward: Callable[..., Any], calls: list[None], *args: Any, **kwargs: Any) -> Any:
    """Call `forward`; what it computes is annotated with how many calls there have been."""
    calls.append(None)
    with annotate({_REGION: len(calls)}):
        return forward(*args, **kwargs)


def tagged(joint: fx.GraphModule, way: str) -> fx.GraphModule:
    """Copy a joint graph, with tags as `torch.utils.checkpoint` makes them around each region.

    way: one of `CHECKPOINTING`.
    """
    gm = copied(joint)
    for node in gm.graph.nodes:
        region = node.meta.get("custom", {}).get(_REGION)
        is_backward = node.meta.get("partitioner_tag") == "is_backward"
        if way == "none" or region is None or is_backward or node.op != "call_function":
            continue
        is_saved = way == "ops" and _is_saved(node)
        node.meta["ac_graph_id"] = region
        node.meta["recompute"] = (
            CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
        )
    return gm


def saving(
    joint: fx.GraphModule, values: SavedValues, way: str
) -> tuple[fx.GraphModule, frozenset[str]]:
    """Copy a joint graph, with tags by which a share of what its values can give up is given up.

    Those go first that cost least time for their bytes: to the host, if `values` may lie there,
    then those that are computed again. The last block, with the loss, gives up nothing: backward
    begins with it, when memory is at its peak.
    way: one of `BY_VALUES`.
    Returns the names of the values on the host, too.
    """
    taken = (*at_price(values.curves[:-1], int(way.partition(":")[2]) / 100), 0)
    return tag_saved(copied(joint), saved=values.names(taken)), values.moved(taken)


def _is_saved(node: fx.Node) -> bool:
    """Tell whether `node` is a matrix product or attention, or a result of it."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _is_saved(node.args[0])
    return node.target in _saved_ops()


@functools.cache
def _saved_ops() -> frozenset[Any]:
    aten = torch.ops.aten
    names = [each for each in dir(aten) if each.startswith("_scaled_dot_product")]
    attention = [getattr(aten, name).default for name in names if not name.endswith("backward")]
    return frozenset([*attention, aten.mm.default, aten.addmm.default, aten.bmm.default])
