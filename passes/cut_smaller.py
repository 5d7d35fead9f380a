"""Gather over fewer ranks in backward, where a unit reshards over fewer ranks after forward.

before: w' = unshard(w, ..., reduce='cut:inner f32[7] shard'); y = x * w'; dx = dy * w'
after:  w' = unshard(w, ..., reduce='cut:inner f32[7] shard'); p = cut(w', 'f32[7]', 'inner')
        w'' = unshard(p, 'f32[7]', 'inner', ...); y = x * w''; dx = dy * w''

The partitioner is made to save `p` and to recompute w'' (`tag_recompute`). In the forward graph the
two markers of the parameter are merged again, as any two are (`merge_markers`).
"""

from __future__ import annotations

from torch import fx

from autoshard.passes.ir import groups, ops
from autoshard.passes.ir.layout import read_members
from autoshard.passes.ir.match import (
    AGAIN,
    forward_inputs,
    is_unshard,
    members_of,
    param_of,
    smaller_group,
)


def cut_smaller(gm: fx.GraphModule) -> fx.GraphModule:
    """Insert a `cut`, and a marker over fewer ranks, after each marker whose unit asks for them.

    A graph without a backward is left as it is.
    Numerics: unchanged, bit for bit.
    """
    if len(forward_inputs(gm.graph)) == len(gm.graph.find_nodes(op="placeholder")):
        return gm
    for marker in [node for node in gm.graph.nodes if is_unshard(node)]:
        group = smaller_group(marker)
        if not group:
            continue
        members = members_of(marker)
        whole = marker.meta["val"]
        with gm.graph.inserting_after(marker):
            part = gm.graph.call_function(ops.cut, (marker, members, group))
        with gm.graph.inserting_after(part):
            again = gm.graph.call_function(
                ops.unshard,
                (part, members, group, False, param_of(marker)),
                {"reduce": f"{AGAIN} {members} {group}"},
            )
        (member,) = read_members(members)
        part.meta["val"] = whole.new_empty(groups.local_size(member, group))
        again.meta["val"] = whole
        marker.replace_all_uses_with(again, delete_user_cb=lambda user, part=part: user is not part)
    return gm
