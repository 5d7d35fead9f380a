"""Read parameters that the runtime keeps unsharded between microbatches from inputs of the graph.

before:
    in %primals_1: f32[4]
    in %primals_2: f32[7]
    in %primals_3: i64[1]
    in %tangents_1: f32[7]
    %whole: f32[7] = autoshard.unshard(%primals_1, 'f32[7]', 'g', True, 0, reduce='stay f32[7]
        g')
    %y: f32[7] = aten.relu(%whole)
    return [%y]
after:
    in %primals_1: f32[4]
    in %primals_2: f32[7]
    in %primals_3: i64[1]
    in %tangents_1: f32[7]
    %y: f32[7] = aten.relu(%primals_2)
    return [%y]

The kept parameters are the inputs of forward right before the last one, which is the table, in the
order of their numbers in the table. Their gradients are reduced as usual.
"""

from __future__ import annotations

from torch import fx

from autoshard.passes.ir.match import forward_inputs, is_unshard, param_of
from autoshard.passes.ir.ops import Unshard


def use_kept(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace each `unshard` flagged "stay" by the input that holds its parameter unsharded.

    These inputs stand right before the last input that is no tangent, in the order of the
    parameters' numbers. A graph without such markers is left as it is. Raises ValueError if there
    are fewer inputs than such parameters, or if an input's shape is not that of its parameter.
    Numerics: unchanged, bit for bit.
    """
    unshards = filter(is_unshard, gm.graph.nodes)
    markers = [node for node in unshards if Unshard.of(node).options.stays]
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
