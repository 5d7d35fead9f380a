"""Read parameters that the runtime keeps unsharded between microbatches from inputs of the graph.

before: in %primals_9: f32[7]; w' = unshard(w, ..., 3, reduce='stay f32[7] 0'); y = x * w'
after:  in %primals_9: f32[7]; y = x * %primals_9

These inputs stand before the last one, which is the table of parameters, in the order of the
numbers of their parameters. Their gradients are reduced as usual.
"""

from __future__ import annotations

from torch import fx

from autoshard.passes.ir.match import forward_inputs, is_unshard, param_of, stays_whole


def use_kept(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace the markers of parameters that stay unsharded by the inputs that hold these.

    Numerics: unchanged, bit for bit.
    """
    markers = [node for node in gm.graph.nodes if is_unshard(node) and stays_whole(node)]
    numbers = sorted({param_of(marker) for marker in markers})
    inputs = forward_inputs(gm.graph)
    whole = dict(zip(numbers, inputs[-1 - len(numbers) : -1], strict=True))
    for marker in markers:
        kept = whole[param_of(marker)]
        if kept.meta["val"].shape != marker.meta["val"].shape:
            raise ValueError(f"%{kept.name} is not the parameter that %{marker.name} wants")
        marker.replace_all_uses_with(kept)
        gm.graph.erase_node(marker)
    return gm
