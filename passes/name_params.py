"""Record the parameter of each marker, and name the graph's inputs after the parameters they hold.

before:
    # params: layers.0.w
    in %primals_1: f32[4]
    %whole: f32[7] = autoshard.unshard(%primals_1, 'f32[7]', 'g', False, 0)
    return [%whole]
after:
    in %layers_0_w: f32[4]
    %whole: f32[7] = autoshard.unshard(%layers_0_w, 'f32[7]', 'g', False, 0)  # layers.0.w
    return [%whole]
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

from autoshard import _torch
from autoshard.passes.ir.match import (
    TABLE,
    is_before_gather,
    is_hold_grad,
    is_marker,
    is_to_device,
    is_unshard,
    param_of,
    table_of,
)
from autoshard.passes.ir.meta import PARAM, SOURCE, ParamInfo


def name_params(gm: fx.GraphModule, *, table: Sequence[ParamInfo]) -> fx.GraphModule:
    """Note the parameter of each marker, `hold_grad` and `before_gather`, and rename inputs.

    An input that is a shard, copied to the device or not, gets the parameter's name, as an
    identifier; an input that is the runtime's table gets the name "table". A number is added to a
    name that is taken. An input from which a shard is computed, by a view for instance, keeps its
    name.

    table: facts about the parameters, indexed by the last argument of markers.
    Metadata: writes PARAM and SOURCE on these nodes, and SOURCE on copies to the device.
    Numerics: unchanged, bit for bit.
    """
    for node in gm.graph.nodes:
        if not (is_marker(node) or is_hold_grad(node) or is_before_gather(node)):
            continue
        info = table[param_of(node)]
        PARAM.set(node, info)
        SOURCE.set(node, info.name)
        looked_up_in = table_of(node)
        if looked_up_in is not None and looked_up_in.name != TABLE:
            _torch.fx.rename(looked_up_in, TABLE)
        if not (is_unshard(node) or is_before_gather(node)):
            continue
        shard = node.all_input_nodes[0]
        if is_to_device(shard):
            SOURCE.set(shard, info.name)
            shard = shard.all_input_nodes[0]
        if shard.op == "placeholder":
            _torch.fx.rename(shard, _identifier(info.name))
    return gm


def _identifier(name: str) -> str:
    """Turn a parameter's name into the name of a node: "0.in-proj" into "_0_in_proj"."""
    return re.sub(r"\W|^(?=\d)", "_", name)
