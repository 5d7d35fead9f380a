"""Predicates on nodes, nothing else."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autoshard import _torch
from autoshard.passes import ops


def is_unshard(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.unshard


def is_reduce_grad(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.reduce_grad


def is_hold_grad(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.hold_grad


def is_gradient(node: fx.Node) -> bool:
    """Whether `node` says what becomes of a parameter's whole gradient."""
    return is_reduce_grad(node) or is_hold_grad(node)


def is_marker(node: fx.Node) -> bool:
    return is_unshard(node) or is_reduce_grad(node)


def is_launch(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (ops.launch_gather, ops.launch_reduce)


def is_pack(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.pack_grads


def is_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (ops.wait_gather, ops.wait_reduce)


def is_all_reduce(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.all_reduce


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


def event_of(node: fx.Node) -> str | None:
    """What `node` is to a plan, "launch" or "wait" for instance; None for any other node."""
    return _EVENTS.get(node.target) if node.op == "call_function" else None


def forward_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of `graph` that forward has; in a joint graph the gradients' come after them."""
    placeholders = graph.find_nodes(op="placeholder")
    return [node for node in placeholders if not node.name.startswith("tangents")]


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """The gradients of a joint graph's outputs, inputs of its backward."""
    placeholders = graph.find_nodes(op="placeholder")
    return [node for node in placeholders if node.name.startswith("tangents")]


def outputs_of(node: fx.Node) -> list[int]:
    """The numbers of forward's outputs that a `reduce_grad` or `hold_grad` has its gradient from;
    none if that is all of them, or can't be told."""
    outputs = node.kwargs.get("outputs", [])
    assert isinstance(outputs, (list, tuple))
    return [int(number) for number in outputs if isinstance(number, int)]


def table_of(node: fx.Node) -> fx.Node | None:
    """The table that a `reduce_grad` or `hold_grad` looks its parameter up in, if any yet."""
    table = node.kwargs.get("table")
    assert table is None or isinstance(table, fx.Node)
    return table


AGAIN = "again"


def stays_whole(node: fx.Node) -> bool:
    """Whether the runtime has what an `unshard` marker wants, and keeps it."""
    return "stay" in ops.flags(_reduce_of(node))


def is_again(node: fx.Node) -> bool:
    """Whether an `unshard` marker gathers over fewer ranks what was cut in forward."""
    return AGAIN in ops.flags(_reduce_of(node))


def smaller_group(node: fx.Node) -> str:
    """The group over which backward is to gather what an `unshard` marker wants; "" for its own."""
    return ops.flag(_reduce_of(node), "cut:")


def asks_shard(node: fx.Node) -> bool:
    """Whether the shard of an `unshard` marker says itself what is gathered for it."""
    return bool(ops.flag(_reduce_of(node), "ask:"))


def is_before_gather(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.before_gather


def asked_of(node: fx.Node) -> fx.Node | None:
    """The `before_gather` that `node`, a marker's input, is a piece of, if it is one."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) and is_before_gather(source) else None


def is_made_here(member: fx.Node) -> bool:
    """Whether what `member`, a marker, gathers is a piece or a copy, whose memory a compiler may
    use again before the gather is over: it is copied then."""
    return member.all_input_nodes[0].target is operator.getitem


def is_to_device(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.to_device


def is_to_host(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.to_host


def device_of_host_shard(node: fx.Node) -> str:
    """Where an `unshard` marker gathers a shard that lives on the host; "" for any other."""
    return ops.flag(_reduce_of(node), ops.FROM_HOST)


def is_preparation(node: fx.Node) -> bool:
    """Whether `node` is done for a launch, before it: no compute that a plan counts."""
    if is_to_device(node):
        return any(map(is_unshard, node.users))
    return is_before_gather(node) or asked_of(node) is not None


def begun_by(node: fx.Node) -> fx.Node | None:
    """What began the copy that `node`, the wait for one, waits for."""
    begun = node.args[0]
    if not isinstance(begun, fx.Node) or begun.target not in (ops.launch_load, ops.launch_store):
        return None
    is_load = begun.target is ops.launch_load
    return begun if node.target is (ops.wait_load if is_load else ops.wait_store) else None


def is_planned(node: fx.Node) -> bool:
    """Whether a plan says what becomes of `node`: a marker, what it takes and who takes it."""
    if is_to_host(node):
        return is_reduce_grad(node.all_input_nodes[0])
    return is_marker(node) or is_preparation(node)


_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")  # collectives of torch
_LOCAL = ("aten", "profiler")  # what has an effect there, a check or a line of text, has it here
_GROUP_ARGUMENTS = ("group", "group_name", "process_group", "pg")


def is_barrier(node: fx.Node) -> bool:
    """Whether no collective of a plan may be under way across `node`: an op with an effect, or one
    that says it communicates, by an argument for a group, and is neither ours nor torch's
    functional collective; or an op over a graph that has such a one.
    """
    if node.op != "call_function":
        return False
    op, namespace = _called(node), getattr(_called(node), "namespace", "")
    if node.target is _torch.with_effects:
        return namespace not in _LOCAL and not isinstance(op, _torch.Print)
    if namespace not in ("autoshard", *_FUNCTIONAL) and _takes_group(op):
        return True
    return any(is_barrier(inner) for graph in graphs_of(node) for inner in graph.nodes)


def _called(node: fx.Node) -> object:
    """The op behind what lets it have its effect, or gives it copies to write to."""
    if node.target is _torch.with_effects:
        return node.args[1]
    return node.args[0] if node.target in _torch.FUNCTIONALIZED else node.target


def _takes_group(op: object) -> bool:
    schema = getattr(op, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return any(
        each.name in _GROUP_ARGUMENTS
        and any(kind in str(each.type) for kind in ("str", "ProcessGroup", "Any"))  # not a number
        for each in arguments
    )


def graphs_of(node: fx.Node) -> list[fx.Graph]:
    """Those that `node`, an operator over graphs, takes."""
    owner = node.graph.owning_module
    if owner is None or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    given = (each for each in node.all_input_nodes if each.op == "get_attr")
    found = (getattr(owner, str(each.target), None) for each in given)
    return [each.graph for each in found if isinstance(each, fx.GraphModule)]


def op_of(node: fx.Node) -> str:
    """The op that `node` calls, or lets have its effect, as generated code has it."""
    op = _called(node)
    if isinstance(op, torch._ops.HigherOrderOperator):
        return f"higher_order.{op.name()}"
    return str(op)


def is_compute(node: fx.Node) -> bool:
    """Whether a plan counts `node`, and leaves it where it is."""
    return node.op not in ("placeholder", "output") and not is_planned(node)


def _reduce_of(unshard: fx.Node) -> str:
    return str(unshard.kwargs.get("reduce", ""))


_GATHERS = (ops.unshard, ops.launch_load, ops.wait_load, ops.launch_gather, ops.wait_gather)


def kind_of(node: fx.Node) -> str:
    """ "gather" or "reduce", of a marker, a pack, or a node that is an event."""
    return "gather" if node.target in _GATHERS else "reduce"


def members_of(node: fx.Node) -> str:
    """The members argument of a marker, pack, launch, all-reduce or wait."""
    return str(node.args[1])


def group_of(node: fx.Node) -> str:
    """Whom a marker, pack, launch, all-reduce or wait reaches; see `groups.py`."""
    return str(node.args[2])


_COPIES = (ops.launch_load, ops.wait_load, ops.launch_store, ops.wait_store)


def bucket_of(node: fx.Node) -> int:
    """The bucket number of a node that is an event, or a pack."""
    bucket = node.args[-1] if node.target in _COPIES else node.args[3]
    assert isinstance(bucket, int)
    return bucket


def param_of(node: fx.Node) -> int:
    """The parameter number of a marker."""
    param = node.args[-1]
    assert isinstance(param, int)
    return param


def is_kept(node: fx.Node) -> bool:
    """Whether an `unshard` marker asks that its result be kept for backward."""
    return bool(node.args[3])
