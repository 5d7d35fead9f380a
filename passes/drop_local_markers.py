"""Remove markers over groups of one rank, whose shard is the whole parameter.

before:
    in %w: f32[7]
    in %dy: f32[7]
    %whole: f32[7] = autoshard.unshard(%w, 'f32[7]', 'alone', False, 0)
    %y: f32[7] = aten.relu(%whole)
    %dw: f32[7] = autoshard.reduce_grad(%dy, 'f32[7]', 'alone', 0)
    return [%y, %dw]
after:
    in %w: f32[7]
    in %dy: f32[7]
    %y: f32[7] = aten.relu(%w)
    return [%y, %dy]

Where the gather or reduce would cast, a cast takes the marker's place.
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.ir import groups
from autoshard.passes.ir.layout import read_members
from autoshard.passes.ir.match import group_of, is_marker, members_of, outputs_of

_CAST = torch.ops.prims.convert_element_type.default  # Inductor lowers no aten cast any more here


def drop_local_markers(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace each `unshard` and `reduce_grad` over a group of one rank by its input.

    It is cast where the op would cast it: by an `unshard` to the dtype that is gathered, by a
    `reduce_grad` to the dtype that is reduced and then to the shard's. So a gradient is rounded
    even if it has the same dtype before and after. What has the dtype already is not cast.

    Two kinds stay: those to which the user's settings apply, such as a hook or a divide factor
    (`groups.is_custom`), and each `reduce_grad` whose gradient comes from some of forward's outputs
    only (`outputs_of`): whether there is a gradient is then known at run time.
    Numerics: unchanged, bit for bit.
    """
    for node in list(gm.graph.nodes):
        # With outputs told, the runtime is to say whether there is a gradient at all.
        if is_marker(node) and _is_local(group_of(node)) and not outputs_of(node):
            value = node.args[0]
            assert isinstance(value, fx.Node)
            (member,) = read_members(members_of(node))
            with gm.graph.inserting_before(node):
                value = _cast(value, member.dtype)
                value = _cast(value, member.shard_dtype or member.dtype)
            node.replace_all_uses_with(value)
            gm.graph.erase_node(node)
    return gm


def _is_local(group: str) -> bool:
    return groups.size(group) == 1 and not groups.is_custom(group)


def _cast(value: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a cast of `value` to `dtype`, and return it; `value` itself if it has that dtype."""
    if value.meta["val"].dtype == dtype:
        return value
    cast = value.graph.call_function(_CAST, (value, dtype))
    cast.meta["val"] = value.meta["val"].to(dtype)
    return cast
