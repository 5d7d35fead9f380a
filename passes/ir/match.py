"""Predicates on FX nodes, and look-ups of what our ops carry in their arguments."""

from __future__ import annotations

import operator

from torch import fx

from autoshard import _torch
from autoshard.passes.ir import ops

TABLE = "table"  # name of the input for the runtime's table, where a graph has one


def calls(node: fx.Node, *targets: object) -> bool:
    """Tell whether `node` calls one of `targets`, which are ops."""
    return node.op == "call_function" and node.target in targets


def is_unshard(node: fx.Node) -> bool:
    return calls(node, ops.unshard)


def is_reduce_grad(node: fx.Node) -> bool:
    return calls(node, ops.reduce_grad)


def is_hold_grad(node: fx.Node) -> bool:
    return calls(node, ops.hold_grad)


def is_gradient(node: fx.Node) -> bool:
    """Tell whether `node` is a `reduce_grad` or `hold_grad`, which take an unsharded gradient."""
    return calls(node, ops.reduce_grad, ops.hold_grad)


def is_marker(node: fx.Node) -> bool:
    return calls(node, ops.unshard, ops.reduce_grad)


def is_launch(node: fx.Node) -> bool:
    return calls(node, ops.launch_gather, ops.launch_reduce)


def is_pack(node: fx.Node) -> bool:
    return calls(node, ops.pack_grads)


def is_wait(node: fx.Node) -> bool:
    return calls(node, ops.wait_gather, ops.wait_reduce)


def is_all_reduce(node: fx.Node) -> bool:
    return calls(node, ops.all_reduce)


def is_before_gather(node: fx.Node) -> bool:
    return calls(node, ops.before_gather)


def is_to_device(node: fx.Node) -> bool:
    return calls(node, ops.to_device)


def is_to_host(node: fx.Node) -> bool:
    return calls(node, ops.to_host)


_EVENTS: dict[object, str] = {
    ops.launch_load: "load",
    ops.wait_load: "loaded",
    ops.launch_gather: "launch",
    ops.wait_gather: "wait",
    ops.launch_reduce: "launch",
    ops.all_reduce: "all_reduce",
    ops.wait_reduce: "wait",
    ops.launch_store: "store",
    ops.wait_store: "stored",
}


_MOVES: dict[object, str] = {
    ops.launch_offload: "offload",
    ops.wait_offload: "offloaded",
    ops.launch_reload: "reload",
    ops.wait_reload: "reloaded",
}


def move_of(node: fx.Node) -> str | None:
    """Name what `node` does with a value that forward saves on the host, "offload" for instance.

    None for other nodes. What it does is no event of a plan: a plan counts it as compute.
    """
    return _MOVES.get(node.target) if node.op == "call_function" else None


def event_of(node: fx.Node) -> str | None:
    """Plan event that `node` is, "launch" or "wait" for instance; None for other nodes."""
    return _EVENTS.get(node.target) if node.op == "call_function" else None


def forward_inputs(graph: fx.Graph) -> list[fx.Node]:
    """List the placeholders of `graph` except tangents, which AOTAutograd names `tangents_<n>`."""
    placeholders = graph.find_nodes(op="placeholder")
    return [node for node in placeholders if not node.name.startswith("tangents")]


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """List the placeholders of `graph` for gradients of outputs; none if there is no backward."""
    placeholders = graph.find_nodes(op="placeholder")
    return [node for node in placeholders if node.name.startswith("tangents")]


def forward_part(graph: fx.Graph) -> list[fx.Node]:
    """List the nodes of a joint graph, in order, that were traced in its forward.

    No tangent reaches them. What forward alone does not need is among them, such as a result that
    an op keeps for its own backward.
    """
    backward = set(tangents(graph))
    for node in graph.nodes:
        is_backward = node.meta.get("partitioner_tag") == "is_backward"
        if is_backward or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    return [node for node in graph.nodes if node not in backward and node.op != "output"]


def outputs_of(node: fx.Node) -> list[int]:
    """List the numbers of forward's outputs from which `node`, a gradient marker, has its gradient.

    Empty if the gradient comes from all of them, or if this is unknown.
    """
    outputs = node.kwargs.get("outputs", [])
    assert isinstance(outputs, (list, tuple))
    return [int(number) for number in outputs if isinstance(number, int)]


def table_of(node: fx.Node) -> fx.Node | None:
    """Return the table that `node` looks its parameter up in; None if it has none yet.

    node: a `reduce_grad`, `hold_grad` or `before_gather`; other nodes have none.
    """
    table = node.kwargs.get("table")
    assert table is None or isinstance(table, fx.Node)
    return table


def before_gather_of(node: fx.Node) -> fx.Node | None:
    """Return the `before_gather` of which `node`, a `getitem`, is a result; None if of none."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) and is_before_gather(source) else None


def is_made_here(member: fx.Node) -> bool:
    """Tell whether `member`, a marker, gathers a tensor that the graph has made, not an input.

    That is a result of `before_gather`, or a copy from the host that was waited for. A compiler may
    reuse its memory before the gather is over, so the gather copies it first.
    """
    return member.all_input_nodes[0].target is operator.getitem


def is_preparation(node: fx.Node) -> bool:
    """Tell whether `node` prepares a launch: a `before_gather`, its result, a copy to the device.

    A copy is one only if an `unshard` reads it. A plan does not count preparations as compute.
    """
    if is_to_device(node):
        return any(map(is_unshard, node.users))
    return is_before_gather(node) or before_gather_of(node) is not None


def begun_by(node: fx.Node) -> fx.Node | None:
    """Return the launch of copies that `node`, a wait for copies, waits for.

    None if its first argument is no launch, or one of another kind.
    """
    begun = node.args[0]
    if isinstance(begun, fx.Node) and begun.target is _BEGUN_BY.get(node.target):
        return begun
    return None


_BEGUN_BY: dict[object, object] = {
    ops.wait_load: ops.launch_load,
    ops.wait_store: ops.launch_store,
    ops.wait_offload: ops.launch_offload,
    ops.wait_reload: ops.launch_reload,
}


def is_planned(node: fx.Node) -> bool:
    """Tell whether a plan places `node`: a marker, a preparation, a gradient's copy to the host."""
    if is_to_host(node):
        return is_reduce_grad(node.all_input_nodes[0])
    return is_marker(node) or is_preparation(node)


_LOCAL = ("aten", "profiler")  # what has an effect there, a check or a line of text, has it here
_GROUP_ARGUMENTS = ("group", "group_name", "process_group", "pg")


def is_barrier(node: fx.Node) -> bool:
    """Tell whether no collective of a plan may be under way across `node`.

    Barriers are calls with a registered effect, except prints and effects of aten's ops, which are
    checks, or of the profiler's; other ops that have an argument for a process group, except ours
    and torch's functional collectives; and higher-order ops over a graph that has a barrier.
    """
    if node.op != "call_function":
        return False
    op, namespace = _called(node), getattr(_called(node), "namespace", "")
    if node.target is _torch.ops.with_effects:
        return namespace not in _LOCAL and not isinstance(op, _torch.ops.Print)
    if namespace not in ("autoshard", *_torch.ops.FUNCTIONAL_COLLECTIVES) and _takes_group(op):
        return True
    return any(is_barrier(inner) for graph in graphs_of(node) for inner in graph.nodes)


def _called(node: fx.Node) -> object:
    """Op that `node` calls, seen through the wrappers for effects and for functionalized writes."""
    if node.target is _torch.ops.with_effects:
        return node.args[1]
    return node.args[0] if node.target in _torch.ops.FUNCTIONALIZED else node.target


def _takes_group(op: object) -> bool:
    """Tell whether `op` has an argument for a process group, by the argument's name and type.

    False for an op without a schema, and for an argument of that name that is a number.
    """
    schema = _torch.ops.schema_of(op)
    arguments = () if schema is None else schema.arguments
    return any(
        each.name in _GROUP_ARGUMENTS
        and any(kind in str(each.type) for kind in ("str", "ProcessGroup", "Any"))  # not a number
        for each in arguments
    )


def graphs_of(node: fx.Node) -> list[fx.Graph]:
    """List the graphs that `node` takes, if it calls a higher-order operator; else none.

    They are found in the module that owns the graph of `node`; without such a module there are
    none.
    """
    owner = node.graph.owning_module
    if owner is None or not isinstance(node.target, _torch.ops.HigherOrderOperator):
        return []
    given = (each for each in node.all_input_nodes if each.op == "get_attr")
    found = (getattr(owner, str(each.target), None) for each in given)
    return [each.graph for each in found if isinstance(each, fx.GraphModule)]


def op_of(node: fx.Node) -> str:
    """Name of the op that `node` calls, as generated code has it, such as "aten.mm.default".

    A higher-order operator is "higher_order.<name>". The wrappers for effects and for
    functionalized writes are seen through.
    """
    op = _called(node)
    if isinstance(op, _torch.ops.HigherOrderOperator):
        return f"higher_order.{op.name()}"
    return str(op)


def is_compute(node: fx.Node) -> bool:
    """Tell whether a plan counts `node` as compute, and leaves it where it is.

    That is every node except inputs, the output, and what a plan places (`is_planned`).
    """
    return node.op not in ("placeholder", "output") and not is_planned(node)


_GATHERS = (ops.unshard, ops.launch_load, ops.wait_load, ops.launch_gather, ops.wait_gather)


def kind_of(node: fx.Node) -> str:
    """Kind, "gather" or "reduce", of a marker, a pack, or a node that is an event.

    A copy to the device belongs to a gather, a copy to the host to a reduce.
    """
    return "gather" if node.target in _GATHERS else "reduce"


def members_of(node: fx.Node) -> str:
    """Members argument of a marker, pack, launch, all-reduce or wait."""
    return str(node.args[1])


def group_of(node: fx.Node) -> str:
    """Group argument of a marker, pack, launch, all-reduce or wait; see `groups.py`."""
    return str(node.args[2])


_COPIES = (ops.launch_load, ops.wait_load, ops.launch_store, ops.wait_store)


def bucket_of(node: fx.Node) -> int:
    """Bucket number of a node that is an event, or of a pack."""
    bucket = node.args[-1] if node.target in _COPIES else node.args[3]
    assert isinstance(bucket, int)
    return bucket


def param_of(node: fx.Node) -> int:
    """Parameter number of a marker, `hold_grad` or `before_gather`."""
    param = node.args[-1]
    assert isinstance(param, int)
    return param
