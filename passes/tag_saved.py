"""Tag what forward saves for backward, as was decided, and have all else computed again.

before:
    # saved: sin:0
    in %primals_1: f32[4]
    in %tangents_1: f32[4]
    %a: f32[4] = aten.sin(%primals_1)
    %b: f32[4] = aten.exp(%a)
    %c: f32[4] = aten.sin(%b)
    %d: f32[4] = aten.mul.Tensor(%tangents_1, %b)
    return [%c, %d]
after:
    # unchanged
    # recompute: a MUST_SAVE
    # recompute: b MUST_RECOMPUTE
    # recompute: c MUST_RECOMPUTE

Left alone, the partitioner saves what takes longer to compute than to keep, however little memory
there is. `planner/save.py` finds what is worth its memory under a budget.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autoshard.passes.ir.match import forward_part
from autoshard.passes.ir.recompute import is_tagged, must_recompute, must_save
from autoshard.passes.plans.saved import can_be_recomputed
from autoshard.passes.plans.values import base_of, is_result, numbered


def tag_saved(gm: fx.GraphModule, *, saved: Collection[str] | None) -> fx.GraphModule:
    """Tag each node that forward computes: to be saved if `saved` names it, else to be recomputed.

    Not tagged are nodes that have a tag, of the user's checkpointing, and those that can't be
    computed again. Backward computes again only what it reads.

    saved: names of nodes as `numbered` gives them; None tags nothing.
    Metadata: writes VALUE, and FX's `recompute` and `ac_graph_id`.
    Numerics: unchanged, bit for bit; random ops give the same numbers again.
    """
    forward = numbered(forward_part(gm.graph))
    if saved is None:
        return gm
    # An op of several results is tagged as they are: those that are saved, and no others.
    several = {node.all_input_nodes[0] for node in forward.values() if is_result(node)}
    kept = {base_of(node) for name, node in forward.items() if name in saved} & several
    for name, node in forward.items():
        if is_tagged(node):
            continue
        if name in saved or node in kept:
            must_save(node)
        elif is_result(node) and node.all_input_nodes[0] in kept:
            continue
        elif can_be_recomputed(node):
            must_recompute(node)
    return gm
