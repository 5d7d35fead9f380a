"""On a group of one rank the shard is the parameter: no marker, no collective.

before: w' = unshard(w); dw = reduce_grad(g)
after:  w' = w;          dw = g
"""

from __future__ import annotations

from torch import fx

from autoshard._torch import group_size
from autoshard.passes.match import group_of, is_marker


def drop_local_markers(gm: fx.GraphModule) -> fx.GraphModule:
    """Remove the markers whose group has one rank.

    Numerics: unchanged, bit for bit.
    """
    for node in list(gm.graph.nodes):
        if is_marker(node) and group_size(group_of(node)) == 1:
            (value,) = node.all_input_nodes
            node.replace_all_uses_with(value)
            gm.graph.erase_node(node)
    return gm
