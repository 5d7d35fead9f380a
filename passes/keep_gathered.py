"""Keep gathered parameters from forward to backward, as if their units did not reshard.

before: w' = unshard(w, ..., False, 3)
after:  w' = unshard(w, ..., True, 3)

`planner/keep.py` finds the parameters for which this is worth its memory.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autoshard.passes.match import (
    asks_shard,
    device_of_host_shard,
    is_kept,
    is_unshard,
    param_of,
    smaller_group,
    stays_whole,
)


def keep_gathered(gm: fx.GraphModule, *, params: Collection[int]) -> fx.GraphModule:
    """Set `keep` of the `unshard` markers of `params`, by number, where they can be kept.

    Numerics: unchanged, bit for bit.
    """
    for node in gm.graph.nodes:
        if is_unshard(node) and param_of(node) in params and can_be_kept(node):
            node.update_arg(3, True)
    return gm


def can_be_kept(marker: fx.Node) -> bool:
    """Tell whether backward would gather an `unshard` marker's parameter again as forward does."""
    is_its_own = smaller_group(marker) or asks_shard(marker) or device_of_host_shard(marker)
    return not (is_kept(marker) or stays_whole(marker) or is_its_own)
