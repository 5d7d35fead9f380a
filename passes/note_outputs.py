"""Record which of the graph's outputs each gradient comes from, if not from all of them.

before:
    in %primals_1: i64[1]
    in %tangents_1: f32[7]
    in %tangents_2: f32[7]
    %g: f32[7] = aten.relu(%tangents_2)
    %dw: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', 'g', 0, table=%primals_1)
    return [%dw]
after:
    in %primals_1: i64[1]
    in %tangents_1: f32[7]
    in %tangents_2: f32[7]
    %g: f32[7] = aten.relu(%tangents_2)
    %dw: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', 'g', 0, table=%primals_1, outputs=[1])
    return [%dw]

AOTAutograd fills in zeros for the gradient of an output that no loss uses, and so gives gradients
of zeros to parameters that had none. The runtime knows which outputs have no gradient in a
backward: a parameter that is used for those alone has none either, and an optimizer skips it, as it
does in eager code.
"""

from __future__ import annotations

from torch import fx

from autoshard.passes.ir.match import is_gradient, tangents


def note_outputs(gm: fx.GraphModule) -> fx.GraphModule:
    """Set `outputs` of every `reduce_grad` and `hold_grad` that some tangents reach, but not all.

    It lists the numbers of these tangents, counted in the order of the graph's inputs. A gradient
    that no tangent reaches is left alone: it is there whenever backward runs.
    Numerics: unchanged, bit for bit.
    """
    number_of = {node: number for number, node in enumerate(tangents(gm.graph))}
    if len(number_of) < 2:
        return gm
    reached: dict[fx.Node, frozenset[int]] = {}
    for node in gm.graph.nodes:
        own = frozenset([number_of[node]]) if node in number_of else frozenset()
        reached[node] = own.union(*(reached[each] for each in node.all_input_nodes))
        if is_gradient(node) and 0 < len(reached[node]) < len(number_of):
            node.kwargs = {**node.kwargs, "outputs": sorted(reached[node])}
    return gm
