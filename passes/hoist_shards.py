"""Move the ops that make a marker's shard out of graph inputs up to the inputs.

before:
    in %flat: f32[4]
    in %x: f32[3]
    %a: f32[3] = aten.relu(%x)
    %w: f32[4] = aten.view(%flat, [4])
    %whole: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', False, 0)
    return [%a, %whole]
after:
    in %flat: f32[4]
    in %x: f32[3]
    %w: f32[4] = aten.view(%flat, [4])
    %a: f32[3] = aten.relu(%x)
    %whole: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', False, 0)
    return [%a, %whole]

A gather can be launched no earlier than its shard exists. Shards are inputs, or views of inputs, so
nothing keeps them from existing at the top. A `before_gather` stays: its results take memory, and
`insert_collectives` puts it right before the launch. A copy from the host stays, too: the plan
places it.
"""

from __future__ import annotations

from torch import fx

from autoshard.passes.ir.match import is_preparation, is_unshard


def hoist_shards(gm: fx.GraphModule) -> fx.GraphModule:
    """Move the calls that make the shard of each `unshard` right after the graph's inputs.

    A copy to the device or a `before_gather`, and the calls from there to the `unshard`, stay.
    Numerics: unchanged, bit for bit.
    """
    body = next((node for node in gm.graph.nodes if node.op != "placeholder"), None)
    if body is None:
        return gm
    hoisted: set[fx.Node] = set()
    for marker in [node for node in gm.graph.nodes if is_unshard(node)]:
        for node in _way_from_inputs(marker):
            if is_preparation(node):
                break
            if node is body:
                body = node.next
            elif node not in hoisted:  # moved again, it would land behind its users
                body.prepend(node)
            hoisted.add(node)
    return gm


def _way_from_inputs(marker: fx.Node) -> list[fx.Node]:
    """List the calls that make `marker`'s shard, in an order in which they can be executed.

    Placeholders are left out.
    """
    way: list[fx.Node] = []

    def visit(node: fx.Node) -> None:
        """Append to `way` what `node` is made of, then `node`; no placeholders, nothing twice."""
        if node.op == "placeholder" or node in way:
            return
        for each in node.all_input_nodes:
            visit(each)
        way.append(node)

    for node in marker.all_input_nodes:
        visit(node)
    return way
