"""Let reduces find the runtime's table of parameters: an input that nothing in forward reads.

before: in %primals_9: i64[1]; dw = reduce_grad(g, ..., 3)
after:  in %primals_9: i64[1]; dw = reduce_grad(g, ..., 3, table=%primals_9)

Backward then has the table among what is saved for it, as it does the shards. It is the
last input of a frame's graph; AOTAutograd keeps inputs in their order.
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.match import forward_inputs, is_gradient

TABLE = "table"  # what the input is called when it has been found


def give_table(gm: fx.GraphModule) -> fx.GraphModule:
    """Set the `table` of every `reduce_grad` and `hold_grad` of a joint graph that has one.

    Numerics: unchanged, bit for bit.
    """
    inputs = forward_inputs(gm.graph)
    if inputs and _is_table(inputs[-1]):
        for node in gm.graph.nodes:
            if is_gradient(node):
                node.kwargs = {"table": inputs[-1]}
    return gm


def _is_table(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.int64
        and tuple(value.shape) == (1,)
        and all(map(is_gradient, node.users))
    )
