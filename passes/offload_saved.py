"""Copy values that forward saves to the host, and back before backward reads them.

before:
    # moved: a
    in %x: f32[4]
    %a: f32[4] = aten.sin(%x)
    %b: f32[4] = aten.exp(%a)
    %c: f32[4] = aten.sin(%b)
    return [%c, %a]
after:
    in %x: f32[4]
    %a: f32[4] = aten.sin(%x)
    %b: f32[4] = aten.exp(%a)
    %launch_offload_a: u8[1] = autoshard.launch_offload(%a, 0)  # a
    %c: f32[4] = aten.sin(%b)
    %wait_offload_a: f32[4] = autoshard.wait_offload(%launch_offload_a, %a, 0)  # a
    return [%c, %wait_offload_a]

A value is copied once forward has read it for the last time, and waited for as soon as its copy is
over, by predicted times: only then its memory is free. Backward launches copies as late as it can
while each is over when it is first read; see `planner/copies.py`.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.passes.ir import ops
from autoshard.passes.ir.match import is_compute
from autoshard.passes.ir.meta import EXPOSED_US, SOURCE, VALUE
from autoshard.passes.planner.copies import place_offloads, place_reloads
from autoshard.passes.planner.costs import HostLink
from autoshard.passes.plans.fusion import fuse
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.values import bytes_of, is_view, readers_of


def offload_saved(
    gm: fx.GraphModule, *, moved: Collection[str], prices: Prices | None
) -> fx.GraphModule:
    """Insert launches of copies of saved values, and waits for them, where times say.

    A forward then returns them on the host, and a backward takes them from there. Of a graph's
    values, those are copied that are inputs or outputs of it.

    moved: values, by the names that `numbered` gives them, or that nodes have; see
        `plans.saved.movable`.
    prices: of a topology with a host; without one nothing is copied.
    Metadata: reads VALUE; writes SOURCE and EXPOSED_US.
    Numerics: unchanged, bit for bit.
    """
    link = None if prices is None else prices.topology.host_link
    values = [node for node in gm.graph.nodes if _name(node) in moved and node.users]
    output = gm.graph.output_node()
    given = [node for node in values if node.op == "placeholder"]
    handed_on = [node for node in values if node.op != "placeholder" and output in node.users]
    if link is None or prices is None or not values:
        return gm
    fusion = fuse(gm.graph) if prices.is_fused else None
    compute = _Compute(gm.graph, [*filter(is_compute, gm.graph.nodes)])
    op_us = [prices.op_us(node, fusion) for node in compute.nodes]
    if handed_on:
        _offload(handed_on, compute, op_us, link)
    if given:
        _reload(given, compute, op_us, link)
    return gm


class _Compute:
    """Compute nodes of a graph, and the places of all its nodes, as they were before a pass."""

    def __init__(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        self.nodes = nodes
        self.order = {node: at for at, node in enumerate(graph.nodes)}
        self._order_of_nodes = [self.order[node] for node in nodes]
        self._ends = [*nodes, graph.output_node()]

    def position(self, node: fx.Node) -> int:
        """Position, as of plans, of what stands right before `node`."""
        return bisect.bisect_left(self._order_of_nodes, self.order[node])

    def at(self, position: int) -> fx.Node:
        """Node at a position, before which an event stands: the output behind the last one."""
        return self._ends[position]


def _offload(
    values: Sequence[fx.Node], compute: _Compute, op_us: Sequence[float], link: HostLink
) -> None:
    """Insert copies of `values` to the host; the output then has these in their place."""
    graph = values[0].graph
    last = {
        value: max(
            (each for each in readers_of(value) if each.op != "output"),
            key=compute.order.__getitem__,
            default=value,
        )
        for value in values
    }
    values = sorted(values, key=lambda value: (compute.order[last[value]], compute.order[value]))
    # Right behind an op stands what takes its results: behind these is the next op's position.
    ready = [compute.position(last[value].next) for value in values]
    copy_us = [link.time_us(bytes_of(value)) for value in values]
    placed = place_offloads(op_us, ready, copy_us)
    for number, (value, copy) in enumerate(zip(values, placed, strict=True)):
        with graph.inserting_before(compute.at(copy.launch)):
            launch = _call(ops.launch_offload, (value, number), value)
        launch.meta["val"] = _on_host(value).new_empty(1, dtype=torch.uint8)
        with graph.inserting_before(compute.at(copy.wait)):
            wait = _call(ops.wait_offload, (launch, value, number), value)
        wait.meta["val"] = _on_host(value)
        EXPOSED_US.set(wait, copy.exposed_us)
        graph.output_node().replace_input_with(value, wait)


def _reload(
    values: Sequence[fx.Node], compute: _Compute, op_us: Sequence[float], link: HostLink
) -> None:
    """Insert copies to the device of `values`, inputs that are on the host from now on."""
    graph = values[0].graph
    first = {value: min(readers_of(value), key=compute.order.__getitem__) for value in values}
    values = sorted(values, key=lambda value: (compute.order[first[value]], compute.order[value]))
    used = [compute.position(first[value]) for value in values]
    copy_us = [link.time_us(bytes_of(value)) for value in values]
    placed = place_reloads(op_us, used, copy_us)
    for number, (value, copy) in enumerate(zip(values, placed, strict=True)):
        before = min(compute.at(copy.launch), first[value], key=compute.order.__getitem__)
        readers, on_device, on_host = list(value.users), value.meta["val"], _on_host(value)
        arguments = (value, on_device.device.type, number)
        with graph.inserting_before(before):
            launch = _call(ops.launch_reload, arguments, value)
        launch.meta["val"] = on_host.new_empty(1, dtype=torch.uint8)
        with graph.inserting_before(first[value]):
            wait = _call(ops.wait_reload, (launch, *arguments), value)
        wait.meta["val"] = on_device
        EXPOSED_US.set(wait, copy.exposed_us)
        value.meta = {**value.meta, "val": on_host}  # forward's node has the same one
        for reader in readers:
            reader.replace_input_with(value, wait)
        _move_views_behind(wait)


def _move_views_behind(wait: fx.Node) -> None:
    """Move views of what `wait` gives right behind it, if they stand before it."""
    behind = wait
    for view in _views(wait):
        if view < wait:
            behind.append(view)
            behind = view


def _call(op: Any, args: tuple[Any, ...], value: fx.Node) -> fx.Node:
    """Insert a call of `op`, named by it and the value that it copies."""
    name = _name(value)
    identifier = re.sub(r"\W", "_", name)
    made = value.graph.create_node(
        "call_function", op, args, name=f"{op.overloadpacket.__name__}_{identifier}"
    )
    SOURCE.set(made, name)
    return made


def _name(node: fx.Node) -> str:
    return VALUE.get(node) or node.name


def _on_host(value: fx.Node) -> Tensor:
    return torch.empty_like(value.meta["val"], device="cpu")


def _views(value: fx.Node) -> Iterator[fx.Node]:
    """Yield the views of `value`, each behind what it is a view of."""
    for user in value.users:
        if is_view(user):
            yield user
            yield from _views(user)
