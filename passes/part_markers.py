"""Insert a copy between two markers, so that each stands beside something computed.

before:
    in %w: f32[4]
    %whole: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', False, 0)
    %dw: f32[4] = autoshard.reduce_grad(%whole, 'f32[7]', 'g', 0)
    return [%dw]
after:
    in %w: f32[4]
    %whole: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', False, 0)
    %clone_default: f32[7] = aten.clone(%whole)
    %dw: f32[4] = autoshard.reduce_grad(%clone_default, 'f32[7]', 'g', 0)
    return [%dw]

For instance, the gradient of w * w / 2 is w itself. A plan counts positions by compute nodes, and
there is none between a gathered parameter and its own reduce.
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.ir.match import is_marker, is_reduce_grad

_CLONE = torch.ops.aten.clone.default


def part_markers(gm: fx.GraphModule) -> fx.GraphModule:
    """Clone the input of each `reduce_grad` that reads an `unshard` or `reduce_grad` directly.

    The clone stands right before the `reduce_grad`, the only one that reads it.
    Numerics: unchanged, bit for bit.
    """
    for node in list(gm.graph.nodes):
        if not is_reduce_grad(node):
            continue
        grad = node.args[0]
        assert isinstance(grad, fx.Node)
        if is_marker(grad):
            with gm.graph.inserting_before(node):
                copy = gm.graph.call_function(_CLONE, (grad,))
            copy.meta["val"] = grad.meta["val"]
            node.replace_input_with(grad, copy)
    return gm
