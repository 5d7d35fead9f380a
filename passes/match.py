"""Predicates on nodes, nothing else."""

from __future__ import annotations

import operator

from torch import fx

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


def is_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (ops.wait_gather, ops.wait_reduce)


def is_all_reduce(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.all_reduce


def event_of(node: fx.Node) -> str | None:
    """ "launch", "all_reduce" or "wait", as events of a plan; None for any other node."""
    if is_launch(node):
        return "launch"
    if is_wait(node):
        return "wait"
    return "all_reduce" if is_all_reduce(node) else None


def forward_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of `graph` that forward has; in a joint graph the gradients' come after them."""
    placeholders = graph.find_nodes(op="placeholder")
    return [node for node in placeholders if not node.name.startswith("tangents")]


def table_of(node: fx.Node) -> fx.Node | None:
    """The table that a `reduce_grad` or `hold_grad` looks its parameter up in, if any yet."""
    table = node.kwargs.get("table")
    assert table is None or isinstance(table, fx.Node)
    return table


AGAIN, _CUT = "again", "cut:"


def stays_whole(node: fx.Node) -> bool:
    """Whether the runtime has what an `unshard` marker wants, and keeps it."""
    return "stay" in _flags(node)


def is_again(node: fx.Node) -> bool:
    """Whether an `unshard` marker gathers over fewer ranks what was cut in forward."""
    return AGAIN in _flags(node)


def smaller_group(node: fx.Node) -> str:
    """The group over which backward is to gather what an `unshard` marker wants; "" for its own."""
    return next((flag.removeprefix(_CUT) for flag in _flags(node) if flag.startswith(_CUT)), "")


def asks_shard(node: fx.Node) -> bool:
    """Whether the shard of an `unshard` marker says itself what is gathered for it."""
    return "ask" in _flags(node)


def is_before_gather(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.before_gather


def asked_of(node: fx.Node) -> fx.Node | None:
    """The `before_gather` that `node`, a marker's input, is a piece of, if it is one."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) and is_before_gather(source) else None


def is_preparation(node: fx.Node) -> bool:
    """Whether `node` is done for a launch, right before it: no compute that a plan counts."""
    return is_before_gather(node) or asked_of(node) is not None


def _flags(unshard: fx.Node) -> list[str]:
    return str(unshard.kwargs.get("reduce", "")).split(" ")[:-2]


def kind_of(node: fx.Node) -> str:
    """ "gather" or "reduce", of a marker, launch, all-reduce or wait."""
    gathers = (ops.unshard, ops.launch_gather, ops.wait_gather)
    return "gather" if node.target in gathers else "reduce"


def members_of(node: fx.Node) -> str:
    """The members argument of a marker, launch, all-reduce or wait."""
    return str(node.args[1])


def group_of(node: fx.Node) -> str:
    """Whom a marker, launch, all-reduce or wait reaches; see `groups.py`."""
    return str(node.args[2])


def bucket_of(node: fx.Node) -> int:
    """The bucket number of a launch, all-reduce or wait."""
    bucket = node.args[3]
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
