"""Tag nodes, so that the partitioner saves unsharded parameters only where their units keep them.

before:
    in %w: f32[4]
    in %v: f32[4]
    %freed: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', False, 0)
    %half: f32[7] = aten.mul.Tensor(%freed, 0.5)
    %kept: f32[7] = autoshard.unshard(%v, 'f32[7]', 'g', True, 1)
    %y: f32[7] = aten.mul.Tensor(%half, %kept)
    return [%y]
after:
    # unchanged
    # recompute: freed MUST_RECOMPUTE
    # recompute: half MUST_RECOMPUTE
    # recompute: kept MUST_SAVE

A marker of a unit that reshards is tagged MUST_RECOMPUTE, and with it all that is computed from
parameters alone (a transpose, a cast): the partitioner then saves the shard, which is an input
anyway, and puts a marker of its own into the backward graph. A marker whose unit keeps its
parameters is tagged MUST_SAVE. Left alone, the partitioner would weigh bytes, and could keep every
unsharded parameter alive from forward to backward, so that sharding would save no memory.
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.ir import ops
from autoshard.passes.ir.match import is_barrier, is_before_gather, is_unshard
from autoshard.passes.ir.ops import Unshard
from autoshard.passes.ir.recompute import must_recompute, must_save


def tag_recompute(gm: fx.GraphModule) -> fx.GraphModule:
    """Tag what the partitioner has to recompute in backward, and what it has to save.

    MUST_RECOMPUTE: each `unshard` whose parameter is not kept, the calls that make its shard, each
        `before_gather` of which no `unshard` is kept, and ops whose inputs are all computed from
        these markers and `before_gather` alone. Not tagged are random ops, barriers, at which ranks
        would meet once more, and what is computed from either.
    MUST_SAVE: each `unshard` whose parameter is kept, and each `cut`.

    Metadata: writes FX's `recompute` and `ac_graph_id`.
    Numerics: unchanged, bit for bit.
    """
    freed: set[fx.Node] = set()  # computed from parameters that are not kept, alone
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if is_unshard(node):
            if Unshard.of(node).is_kept:
                must_save(node)
            else:
                freed.add(node)
                must_recompute(node)
                _tag_way_to(node)
        elif is_before_gather(node):
            readers = (user for got in node.users for user in got.users)
            if not any(Unshard.of(user).is_kept for user in readers if is_unshard(user)):
                freed.add(node)
                must_recompute(node)
        elif node.target is ops.cut:
            must_save(node)
        elif node.all_input_nodes and all(n in freed for n in node.all_input_nodes):
            if _is_random(node) or is_barrier(node):  # ranks would meet once more in backward
                continue
            freed.add(node)
            must_recompute(node)
    return gm


def _tag_way_to(marker: fx.Node) -> None:
    """Tag MUST_RECOMPUTE the calls from an input, or from a `cut`, to `marker`.

    Neither end is tagged. Of a call with several inputs, the first is followed.
    """
    node = marker.args[0]
    while isinstance(node, fx.Node) and node.op == "call_function" and node.all_input_nodes:
        if node.target is ops.cut:
            return
        must_recompute(node)
        node = node.all_input_nodes[0]


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
