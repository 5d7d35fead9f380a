"""Replace markers by the launches and waits of the graph's plan.

before:
    in %l_w: f32[4,8]
    in %l_b: f32[4]
    in %x: f32[3,8]
    %w: f32[7,8] = autoshard.unshard(%l_w, 'f32[7,8]', 'g', False, 0)  # l.w
    %w_t: f32[8,7] = aten.t(%w)
    %h: f32[3,7] = aten.mm(%x, %w_t)
    %b: f32[7] = autoshard.unshard(%l_b, 'f32[7]', 'g', False, 1)  # l.b
    %y: f32[3,7] = aten.add.Tensor(%h, %b)
    return [%y]
after:
    in %l_w: f32[4,8]
    in %l_b: f32[4]
    in %x: f32[3,8]
    %launch_gather_l: u8[1] = autoshard.launch_gather([%l_w, %l_b], 'f32[7,8] f32[7]', 'g', 0)
        # l
    %wait_gather_l: (f32[7,8], f32[7]) = autoshard.wait_gather(%launch_gather_l, 'f32[7,8]
        f32[7]', 'g', 0)  # l
    %whole_l_w: f32[7,8] = getitem(%wait_gather_l, 0)  # l.w
    %whole_l_b: f32[7] = getitem(%wait_gather_l, 1)  # l.b
    %w_t: f32[8,7] = aten.t(%whole_l_w)
    %h: f32[3,7] = aten.mm(%x, %w_t)
    %y: f32[3,7] = aten.add.Tensor(%h, %whole_l_b)
    return [%y]

The markers of a bucket, a gather's or a reduce's, become one launch and one wait, both where the
plan says, and one `getitem` a member. Right before a reduce is launched, its gradients are packed;
with replicas, an all-reduce stands between its launch and its wait. Copies from and to the host
become one launch and one wait a bucket, too.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from autoshard.passes.ir import ops
from autoshard.passes.ir.match import (
    before_gather_of,
    group_of,
    is_compute,
    is_launch,
    is_made_here,
    is_marker,
    is_to_host,
    outputs_of,
    table_of,
)
from autoshard.passes.ir.meta import PLAN, SOURCE
from autoshard.passes.ir.plan import Bucket
from autoshard.passes.planner.costs import GROUPED
from autoshard.passes.plans.drafts import markers_of

_FIRST = {
    "gather": (ops.launch_gather, "launch_gather"),
    "reduce": (ops.pack_grads, "pack_grads"),
}
_WAIT = {"gather": ops.wait_gather, "reduce": ops.wait_reduce}
_RESULT = {"gather": "whole", "reduce": "grad"}


def insert_collectives(gm: fx.GraphModule) -> fx.GraphModule:
    """Insert the launches, waits and copies of the graph's plan in place of markers and copies.

    Each stands right before the compute node, or the output, at its event's position; a reduce is
    packed right before its launch, and a `before_gather` moves to right before the launch of its
    results. What read a marker, or a copy that the plan places, reads one of its wait's results
    instead, and these nodes are erased.

    A graph without a plan, or without markers, is left as it is. Fails with AssertionError if the
    plan's buckets do not have exactly the graph's markers. Raises ValueError if `name_params` has
    not run.
    Metadata: reads PLAN, and PARAM of the markers; writes SOURCE on what it inserts.
    Numerics: unchanged, bit for bit.
    """
    plan = PLAN.get(gm)
    graph = gm.graph
    markers = [node for node in graph.nodes if is_marker(node)]
    if plan is None or not markers:
        return gm
    members = markers_of(plan.buckets, markers)
    assert members is not None, "the plan is of another graph"
    body = [node for node in graph.nodes if is_compute(node) or node.op == "output"]
    to_host = {user.args[0]: user for user in graph.nodes if is_to_host(user)}
    tickets: dict[int, fx.Node] = {}
    for event in plan.schedule:
        number, bucket = event.bucket, plan.buckets[event.bucket]
        before = body[event.position]
        with graph.inserting_before(before):
            match event.what:
                case "load":
                    tickets[number] = _load(graph, number, bucket, members[number])
                case "loaded":
                    _loaded(graph, tickets[number], bucket, members[number])
                case "launch":
                    _prepare(members[number], before)
                    tickets[number] = _launch(graph, number, bucket, members[number])
                case "all_reduce":
                    launched = tickets[number]
                    tickets[number] = _follow(graph, ops.all_reduce, launched, "all_reduce", bucket)
                case "wait":
                    _wait(graph, tickets[number], bucket, members[number])
                case "store":
                    copies = [to_host[member] for member in members[number]]
                    tickets[number] = _store(graph, number, bucket, copies)
                case "stored":
                    copies = [to_host[member] for member in members[number]]
                    _stored(graph, tickets[number], bucket, copies)
    for marker in markers:
        graph.erase_node(marker)
    return gm


def _prepare(members: list[fx.Node], before: fx.Node) -> None:
    """Move each `before_gather` that `members` gather from, and its results, right before `before`.

    One stays where it is if a launch takes a result of it already.
    members: markers of one bucket; those that gather something else need nothing.
    """
    for member in members:
        asked = before_gather_of(member.all_input_nodes[0])
        if asked is not None and not _has_launch(asked):
            for node in (asked, *asked.users):
                before.prepend(node)


def _has_launch(asked: fx.Node) -> bool:
    """Tell whether a launch reads a result of `asked`, a `before_gather`."""
    return any(is_launch(user) for answer in asked.users for user in answer.users)


def _launch(graph: fx.Graph, number: int, bucket: Bucket, members: list[fx.Node]) -> fx.Node:
    """Insert the launch of `bucket`, for a reduce after its pack. Returns the node of the ticket.

    A gather is grouped if the bucket is, and copies shards first if the graph itself has made one
    of them. A pack takes the markers' table, if they have one, and with it the numbers of the
    parameters, and of the outputs that gradients come from, if not all come from all.

    number: of the bucket in the plan.
    members: its markers; they stay in the graph.
    """
    inputs = [member.args[0] for member in members]
    arguments: tuple[Any, ...] = (inputs, bucket.members, group_of(members[0]), number)
    table = table_of(members[0])
    if bucket.kind == "gather":
        copies = any(map(is_made_here, members))
        if bucket.layout == GROUPED:
            arguments = (*arguments, copies, True)
        elif copies:
            arguments = (*arguments, True)
    if table is not None:
        arguments = (*arguments, table, list(bucket.params))
        if any(map(outputs_of, members)):
            arguments = (*arguments, ops.show_outputs(map(outputs_of, members)))
    first, name = _FIRST[bucket.kind]
    ticket = _call(graph, first, arguments, name, bucket)
    ticket.meta["val"] = members[0].meta["val"].new_empty(1, dtype=torch.uint8)
    if bucket.kind == "reduce":
        ticket = _follow(graph, ops.launch_reduce, ticket, "launch_reduce", bucket)
    return ticket


def _follow(graph: fx.Graph, op: Any, ticket: fx.Node, name: str, bucket: Bucket) -> fx.Node:
    """Insert a call of `op`, which takes `ticket` and gives another one. Returns its node.

    The members, group and bucket number are those of the call that gave `ticket`.
    """
    follower = _call(graph, op, (ticket, *ticket.args[1:4]), name, bucket)
    follower.meta["val"] = ticket.meta["val"].new_empty(1)
    return follower


def _wait(graph: fx.Graph, ticket: fx.Node, bucket: Bucket, members: list[fx.Node]) -> None:
    """Insert the wait for a collective; readers of its markers, `members`, read its results."""
    waited = _call(
        graph, _WAIT[bucket.kind], (ticket, *ticket.args[1:4]), f"wait_{bucket.kind}", bucket
    )
    _unpack(waited, members, bucket, _RESULT[bucket.kind])


def _load(graph: fx.Graph, number: int, bucket: Bucket, members: list[fx.Node]) -> fx.Node:
    """Insert one launch of the copies to the device that `members` read. Returns its node.

    The `to_device` nodes stay, until `_loaded`.
    """
    copies = [member.all_input_nodes[0] for member in members]
    shards, device = [copy.args[0] for copy in copies], copies[0].args[1]
    ticket = _call(graph, ops.launch_load, (shards, device, number), "launch_load", bucket)
    ticket.meta["val"] = copies[0].meta["val"].new_empty(1, dtype=torch.uint8, device="cpu")
    return ticket


def _loaded(graph: fx.Graph, ticket: fx.Node, bucket: Bucket, members: list[fx.Node]) -> None:
    """Insert the wait for the copies that `members` read, and erase their `to_device` nodes.

    `members` then read the wait's results.
    """
    waited = _call(graph, ops.wait_load, (ticket, *ticket.args), "wait_load", bucket)
    copies = [member.all_input_nodes[0] for member in members]
    _unpack(waited, copies, bucket, "loaded")
    for copy in copies:
        graph.erase_node(copy)


def _store(graph: fx.Graph, number: int, bucket: Bucket, copies: list[fx.Node]) -> fx.Node:
    """Insert one launch for `copies`, which are `to_host` nodes and stay. Returns its node."""
    grads = [copy.args[0] for copy in copies]
    ticket = _call(graph, ops.launch_store, (grads, number), "launch_store", bucket)
    ticket.meta["val"] = copies[0].meta["val"].new_empty(1, dtype=torch.uint8, device="cpu")
    return ticket


def _stored(graph: fx.Graph, ticket: fx.Node, bucket: Bucket, copies: list[fx.Node]) -> None:
    """Insert the wait for `copies`, `to_host` nodes, and erase these; readers read its results."""
    waited = _call(graph, ops.wait_store, (ticket, *ticket.args), "wait_store", bucket)
    _unpack(waited, copies, bucket, "stored")
    for copy in copies:
        graph.erase_node(copy)


def _call(graph: fx.Graph, op: Any, args: tuple[Any, ...], name: str, bucket: Bucket) -> fx.Node:
    """Insert a call of `op`, named by `name` and the bucket's unit; the unit is its SOURCE, too."""
    node = graph.create_node("call_function", op, args, name=f"{name}_{_identifier(bucket.unit)}")
    SOURCE.set(node, bucket.unit)
    return node


def _unpack(waited: fx.Node, values: list[fx.Node], bucket: Bucket, prefix: str) -> None:
    """Have readers of each of `values` read the tensor at its index in the list `waited` returns.

    Inserts a `getitem` for each, named by `prefix` and the parameter. `values` stay in the graph.
    `waited` gets their fake values.
    """
    graph = waited.graph
    waited.meta["val"] = [value.meta["val"] for value in values]
    for index, (value, name) in enumerate(zip(values, bucket.names, strict=True)):
        result = graph.create_node(
            "call_function",
            operator.getitem,
            (waited, index),
            name=f"{prefix}_{_identifier(name)}",
        )
        result.meta["val"] = value.meta["val"]
        SOURCE.set(result, name)
        value.replace_all_uses_with(result)


def _identifier(name: str) -> str:
    """Turn a module's or parameter's name into the name of a node."""
    return re.sub(r"\W", "_", name)
