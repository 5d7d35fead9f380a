"""Put a copy between two markers, so that each stands beside something computed.

before: w' = unshard(w); dw = reduce_grad(w')
after:  w' = unshard(w); g = clone(w'); dw = reduce_grad(g)

The gradient of w * w / 2 is w itself. A plan counts positions by compute nodes, and a
reduce of a gathered parameter has none in between.
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.match import is_marker, is_reduce_grad

_CLONE = torch.ops.aten.clone.default


def part_markers(gm: fx.GraphModule) -> fx.GraphModule:
    """Clone what a `reduce_grad` reads straight from another marker.

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
