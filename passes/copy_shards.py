"""Copy shards that live on the host to the device, and their gradients back.

before:
    in %w: f32[4]
    in %dy: f32[7]
    %y: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', False, 0, reduce='from_host:cpu
        f32[7]^host g')
    %dw: f32[4] = autoshard.reduce_grad(%dy, 'f32[7]^host', 'g', 0)
    return [%y, %dw]
after:
    in %w: f32[4]
    in %dy: f32[7]
    %to_device_default: f32[4] = autoshard.to_device(%w, 'cpu')
    %y: f32[7] = autoshard.unshard(%to_device_default, 'f32[7]', 'g', False, 0,
        reduce='from_host:cpu f32[7]^host g')
    %dw: f32[4] = autoshard.reduce_grad(%dy, 'f32[7]', 'g', 0)
    %to_host_default: f32[4] = autoshard.to_host(%dw)
    return [%y, %to_host_default]

In this form a graph waits for each copy where it stands. `insert_collectives` turns the copies next
to markers into launches and waits, placed by the plan. Copies whose marker is dropped, as its group
has one rank, stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoshard.passes.ir import groups, ops
from autoshard.passes.ir.layout import read_members, show_members
from autoshard.passes.ir.match import (
    is_reduce_grad,
    is_to_device,
    is_unshard,
    members_of,
)


def copy_shards(gm: fx.GraphModule) -> fx.GraphModule:
    """Insert `to_device` before each `unshard` of a host shard, and `to_host` after its gradient.

    An `unshard` gets no copy if it reads one already, or if it is backward's gather over a smaller
    group, whose shard is on the device. A `reduce_grad` is followed by a copy, which all its
    readers then read, if its member is `on_host`; it then loses that flag, as its own result is on
    the device.
    Numerics: unchanged, bit for bit.
    """
    for node in list(gm.graph.nodes):
        if is_unshard(node):
            options = ops.Unshard.of(node).options
            is_there = options.is_again or is_to_device(node.all_input_nodes[0])
            if options.host_device and not is_there:
                _copy_in(node, options.host_device)
        elif is_reduce_grad(node):
            (member,) = read_members(members_of(node))
            if member.on_host:
                _copy_out(node, show_members((replace(member, on_host=False),)))
    return gm


def _copy_in(marker: fx.Node, device: str) -> None:
    """Insert a `to_device` of its shard right before `marker`, an `unshard` that then reads it."""
    shard = marker.all_input_nodes[0]
    with marker.graph.inserting_before(marker):
        copied = marker.graph.call_function(ops.to_device, (shard, device))
    copied.meta["val"] = shard.meta["val"].new_empty(shard.meta["val"].shape, device=device)
    marker.replace_input_with(shard, copied)


def _copy_out(marker: fx.Node, members: str) -> None:
    """Insert a `to_host` right after `marker`, a `reduce_grad`; its readers then read that copy.

    The marker itself gets the argument `members`, and a fake value on its gradient's device.
    members: as before, but without `on_host`.
    """
    grad, _, *rest = marker.args
    marker.args = (grad, members, *rest)
    with marker.graph.inserting_after(marker):
        copied = marker.graph.call_function(ops.to_host, (marker,))
    marker.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
    copied.meta["val"] = marker.meta["val"]
    assert isinstance(grad, fx.Node)
    (member,) = read_members(members)
    size, dtype = groups.local_size(member, str(rest[0])), member.shard_dtype or member.dtype
    marker.meta["val"] = grad.meta["val"].new_empty(size, dtype=dtype)
