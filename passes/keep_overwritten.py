"""Have backward read what an input held before forward overwrote it.

before:
    in %primals_1: f32[4]
    in %primals_2: f32[4]
    in %tangents_1: f32[4]
    %new: f32[4] = aten.mul.Tensor(%primals_2, 0.9)
    %y: f32[4] = aten.mul.Tensor(%primals_1, %new)
    %copy_: f32[4] = aten.copy_(%primals_2, %new)
    %grad: f32[4] = aten.mul.Tensor(%tangents_1, %new)
    return [%y, %grad]
after:
    in %primals_1: f32[4]
    in %primals_2: f32[4]
    in %tangents_1: f32[4]
    %clone_default: f32[4] = aten.clone(%primals_2)
    %new: f32[4] = aten.mul.Tensor(%clone_default, 0.9)
    %y: f32[4] = aten.mul.Tensor(%primals_1, %new)
    %copy_: f32[4] = aten.copy_(%primals_2, %new)
    %grad: f32[4] = aten.mul.Tensor(%tangents_1, %new)
    return [%y, %grad]
    # recompute: clone_default MUST_SAVE

The partitioner takes an input for something that is there in backward, and may compute `%new` again
from it: from what was written, not from what was read. Inductor's own gradients are wrong then,
without a message (seen in torch 2.11 to 2.15, `test_inductor_forgets_that_inputs_are_overwritten`).
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.ir.match import forward_part
from autoshard.passes.ir.recompute import must_save

_CLONE = torch.ops.aten.clone.default
_COPY = torch.ops.aten.copy_.default


def keep_overwritten(gm: fx.GraphModule) -> fx.GraphModule:
    """Clone each input that forward overwrites, at the top, if backward may want what it held.

    All but what writes reads the clone, which is saved if backward needs it. Inputs that backward
    can't reach, as statistics that are only kept up to date, are left alone.
    Metadata: writes FX's `recompute` and `ac_graph_id`.
    Numerics: right; without it backward may compute with values of another time.
    """
    forward = frozenset(forward_part(gm.graph))
    for write in gm.graph.find_nodes(op="call_function", target=_COPY):
        held = write.args[0]
        assert isinstance(held, fx.Node)
        if held.op != "placeholder" or not _reaches_backward(held, forward):
            continue
        top = next(node for node in gm.graph.nodes if node.op != "placeholder")
        with gm.graph.inserting_before(top):
            clone = gm.graph.call_function(_CLONE, (held,))
        clone.meta["val"] = held.meta["val"].clone()
        must_save(clone)
        for user in list(held.users):
            if user is not clone and user is not write:
                user.replace_input_with(held, clone)
    return gm


def _reaches_backward(held: fx.Node, forward: frozenset[fx.Node]) -> bool:
    """Tell whether backward reads `held`, or what forward computes from it."""
    waiting, seen = [held], {held}
    while waiting:
        for user in waiting.pop().users:
            if user.op != "output" and user not in forward:
                return True
            if user in forward and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False
