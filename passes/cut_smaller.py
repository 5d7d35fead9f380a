"""Gather over fewer ranks in backward, where a unit reshards over fewer ranks after forward.

before:
    in %w: f32[2]
    in %tangents_1: f32[7]
    %whole: f32[7] = autoshard.unshard(%w, 'f32[7]', 'four', False, 0, reduce='cut:two f32[7]
        four')
    %y: f32[7] = aten.relu(%whole)
    %dy: f32[7] = aten.mul.Tensor(%tangents_1, %whole)
    return [%y, %dy]
after:
    in %w: f32[2]
    in %tangents_1: f32[7]
    %whole: f32[7] = autoshard.unshard(%w, 'f32[7]', 'four', False, 0, reduce='cut:two f32[7]
        four')
    %cut_default: f32[4] = autoshard.cut(%whole, 'f32[7]', 'two')
    %unshard_default: f32[7] = autoshard.unshard(%cut_default, 'f32[7]', 'two', False, 0,
        reduce='again f32[7] two')
    %y: f32[7] = aten.relu(%unshard_default)
    %dy: f32[7] = aten.mul.Tensor(%tangents_1, %unshard_default)
    return [%y, %dy]

`tag_recompute` makes the partitioner save the `cut`, and put the second marker into the backward
graph. In the forward graph `merge_markers` merges the two markers again, as any two of a parameter.
"""

from __future__ import annotations

from torch import fx

from autoshard.passes.ir import groups, ops
from autoshard.passes.ir.layout import read_members
from autoshard.passes.ir.match import (
    forward_inputs,
    is_unshard,
)


def cut_smaller(gm: fx.GraphModule) -> fx.GraphModule:
    """Insert a `cut` and a second `unshard` after each `unshard` that has a `smaller_group`.

    The `cut` takes this rank's part of the unsharded parameter over that group, and the second
    `unshard`, flagged "again" and not kept, gathers the parts. All other readers of the first
    marker then read the second one. A graph without tangents among its inputs has no backward, and
    is left as it is.
    Numerics: unchanged, bit for bit.
    """
    if len(forward_inputs(gm.graph)) == len(gm.graph.find_nodes(op="placeholder")):
        return gm
    for marker in [node for node in gm.graph.nodes if is_unshard(node)]:
        asked = ops.Unshard.of(marker)
        members, group = asked.members, asked.options.smaller_group
        if not group:
            continue
        options = ops.UnshardOptions(is_again=True, members=members, group=group)
        whole = marker.meta["val"]
        with gm.graph.inserting_after(marker):
            part = gm.graph.call_function(ops.cut, (marker, members, group))
        with gm.graph.inserting_after(part):
            again = gm.graph.call_function(
                ops.unshard,
                (part, members, group, False, asked.param),
                {"reduce": options.show()},
            )
        (member,) = read_members(members)
        part.meta["val"] = whole.new_empty(groups.local_size(member, group))
        again.meta["val"] = whole
        marker.replace_all_uses_with(again, delete_user_cb=lambda user, part=part: user is not part)
    return gm
