"""Remove markers whose result nothing reads: the parameter is looked at but not computed with.

before:
    in %w: f32[4]
    in %x: f32[7]
    %unread: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', False, 0)
    %y: f32[7] = aten.relu(%x)
    return [%y]
after:
    in %w: f32[4]
    in %x: f32[7]
    %y: f32[7] = aten.relu(%x)
    return [%y]
"""

from __future__ import annotations

from torch import fx

from autoshard.passes.ir.match import is_preparation, is_unshard


def drop_dead_markers(gm: fx.GraphModule) -> fx.GraphModule:
    """Remove each `unshard` that nothing reads, and each `before_gather` that none but these read.

    Unread results, `getitem`, of a `before_gather` are removed, too. A gradient's reduce is never
    dropped here: it is an output of the graph, and another rank would wait for it.
    Numerics: unchanged, bit for bit.
    """
    for node in reversed(list(gm.graph.nodes)):
        if (is_unshard(node) or is_preparation(node)) and not node.users:
            gm.graph.erase_node(node)
    return gm
