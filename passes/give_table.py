"""Give ops the runtime's table of parameters, an input that the model itself doesn't read.

before:
    in %w: f32[4]
    in %dy: f32[7]
    in %primals_3: i64[1]
    %dw: f32[4] = autoshard.reduce_grad(%dy, 'f32[7]', 'g', 0)
    return [%dw]
after:
    in %w: f32[4]
    in %dy: f32[7]
    in %primals_3: i64[1]
    %dw: f32[4] = autoshard.reduce_grad(%dy, 'f32[7]', 'g', 0, table=%primals_3)
    return [%dw]

The ops are `reduce_grad`, `hold_grad` and `before_gather`, which look their parameter up in it.

Once an op of backward reads the table, the partitioner saves it for backward, as it saves shards.
The table is the last input of a frame's graph, and AOTAutograd keeps inputs in their order.
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.ir.match import forward_inputs, is_before_gather, is_gradient, table_of


def give_table(gm: fx.GraphModule) -> fx.GraphModule:
    """Set the `table` of every `reduce_grad`, `hold_grad` and `before_gather` that has none yet.

    The table is the last input that is no tangent, a gradient of an output. If that is no i64[1],
    or if other ops read it, too, the graph is left as it is, without an error.
    Numerics: unchanged, bit for bit.
    """
    inputs = forward_inputs(gm.graph)
    wanting = [node for node in gm.graph.nodes if _looks_up(node) and table_of(node) is None]
    if inputs and _is_table(inputs[-1]):
        for node in wanting:
            node.kwargs = {**node.kwargs, "table": inputs[-1]}
    return gm


def _looks_up(node: fx.Node) -> bool:
    return is_gradient(node) or is_before_gather(node)


def _is_table(node: fx.Node) -> bool:
    """Tell whether `node` is an i64[1] that only ops with a `table` read."""
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.int64
        and tuple(value.shape) == (1,)
        and all(map(_looks_up, node.users))
    )
