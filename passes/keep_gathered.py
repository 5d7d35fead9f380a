"""Keep gathered parameters from forward to backward, as if their units did not reshard.

before: w' = unshard(w, ..., False, 3)
after:  w' = unshard(w, ..., True, 3)

`planner/keep.py` finds the parameters for which this is worth its memory.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autoshard.passes.ir.match import can_be_kept, is_unshard, param_of


def keep_gathered(gm: fx.GraphModule, *, params: Collection[int]) -> fx.GraphModule:
    """Set `keep` of the `unshard` markers of `params`, by number, where they can be kept.

    Numerics: unchanged, bit for bit.
    """
    for node in gm.graph.nodes:
        if is_unshard(node) and param_of(node) in params and can_be_kept(node):
            node.update_arg(3, True)
    return gm
