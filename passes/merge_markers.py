"""Leave one marker per parameter and graph, however often the model reads the parameter.

before:
    in %w: f32[4]
    in %dx: f32[7]
    in %dy: f32[7]
    %first: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', False, 0)
    %second: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', False, 0)
    %y: f32[7] = aten.mul.Tensor(%first, %second)
    %a: f32[4] = autoshard.reduce_grad(%dx, 'f32[7]', 'g', 0)
    %b: f32[4] = autoshard.reduce_grad(%dy, 'f32[7]', 'g', 0)
    %dw: f32[4] = aten.add.Tensor(%a, %b)
    return [%y, %dw]
after:
    in %w: f32[4]
    in %dx: f32[7]
    in %dy: f32[7]
    %first: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', False, 0)
    %y: f32[7] = aten.mul.Tensor(%first, %first)
    %add_tensor: f32[7] = aten.add.Tensor(%dx, %dy)
    %reduce_grad_default: f32[4] = autoshard.reduce_grad(%add_tensor, 'f32[7]', 'g', 0)
    return [%y, %reduce_grad_default]

A parameter that is read twice (tied, or used by two modules) leaves two markers in the joint graph,
and autograd adds two reduced gradients. A reduction is linear, so the sum may be reduced instead:
one gather, one reduce. The sum is then taken over unsharded gradients on each rank, as in the eager
runtime and in an unsharded model.
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.ir.match import (
    before_gather_of,
    is_before_gather,
    is_gradient,
    is_unshard,
    param_of,
)

_ADD = torch.ops.aten.add.Tensor


def merge_markers(gm: fx.GraphModule) -> fx.GraphModule:
    """Merge the markers of each parameter: gathers into the first, reduces into one of their sum.

    `unshard` markers of one parameter are merged whatever their other arguments; so are its
    `before_gather` calls, and the markers of each of their results. Two `reduce_grad`, or two
    `hold_grad`, of one parameter are merged if an `aten.add` without `alpha` sums them, and nothing
    else reads them; the merged one has the other arguments of the first. Others stay.

    Shapes:   unchanged.
    Numerics: reassociates the sum of a shared parameter's gradients over ranks and uses.
    """
    _merge_unshards(gm.graph)
    while _merge_one_sum(gm.graph):
        pass
    return gm


def _merge_unshards(graph: fx.Graph) -> None:
    """Replace all `unshard` markers, and `before_gather` calls, of each parameter by its first.

    Results of a `before_gather`, `getitem` nodes, are merged by index; markers that gather such
    results are merged only if the index is the same.
    """
    first: dict[tuple[object, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if is_unshard(node):
            piece = node.args[0]
            assert isinstance(piece, fx.Node)
            key: tuple[object, ...] = (
                param_of(node),
                piece.args[1] if before_gather_of(piece) else None,
            )
        elif is_before_gather(node):
            key = ("ask", param_of(node))
        elif before_gather_of(node):
            key = ("answer", *node.args)
        else:
            continue
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _merge_one_sum(graph: fx.Graph) -> bool:
    """Replace the first sum of two of a parameter's reduced gradients by a reduce of their sum.

    The summands are two `reduce_grad`, or two `hold_grad`, that only an `aten.add` without `alpha`
    reads; both may be the same node. The merged one stands at the `add`, with the other arguments
    of the first. Returns whether there was such a sum; one call merges one.
    """
    for add in graph.find_nodes(op="call_function", target=_ADD):
        left, right = add.args[:2]
        if not (_is_summand(left) and _is_summand(right) and not add.kwargs):
            continue
        if left.target != right.target or param_of(left) != param_of(right):
            continue
        with graph.inserting_before(add):
            whole = graph.call_function(_ADD, (left.args[0], right.args[0]))
            whole.meta.update(left.args[0].meta)
            reduced = graph.call_function(left.target, (whole, *left.args[1:]), left.kwargs)
            reduced.meta.update(left.meta)
        add.replace_all_uses_with(reduced)
        for node in dict.fromkeys((add, left, right)):  # both summands may be one node
            graph.erase_node(node)
        return True
    return False


def _is_summand(value: object) -> bool:
    return isinstance(value, fx.Node) and is_gradient(value) and len(value.users) == 1
