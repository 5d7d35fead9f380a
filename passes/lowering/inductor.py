"""Lower a planned graph with Inductor, and make it keep the plan's order.

Inductor may reorder nodes three times: in its own graph passes, in its scheduler, and, from torch
2.14, in a pass that overlaps collectives by itself. So

- the passes that move collectives, or reorder for locality or peak memory, are switched off
  (SETTINGS);
- the planned order is applied again to the last graph before lowering: launches, waits, packs and
  barriers are chained by control dependencies. Compute is not chained: that would cost fusion;
- the generated code is read, and must hold the launches, waits and barriers in that order.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard import _torch
from autoshard.passes.ir.match import (
    bucket_of,
    event_of,
    graphs_of,
    is_barrier,
    is_pack,
    kind_of,
    move_of,
    op_of,
)
from autoshard.passes.ir.meta import PLAN
from autoshard.passes.ir.plan import Plan
from autoshard.passes.plans.values import tensors_of

SETTINGS = {
    "reorder_for_locality": False,  # of graphs without gradients; it puts launches before waits
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations__enable_simple_overlap": False,  # from torch 2.14
    "aten_distributed_optimizations__enable_overlap_scheduling": False,
}


class OrderError(RuntimeError):
    """Error for lowered code that does not launch and wait in the planned order."""


def lower_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, has_budget: bool = False, **kwargs: Any
) -> Any:
    """Compile `gm`, a planned graph, with Inductor, and return what its `inner_compile` returns.

    In this compilation Inductor's passes that reorder, and a custom pass over joint graphs, are
    off; `KeepOrder` takes the place of a custom pass after Inductor's own, and applies the planned
    order; buffers are reused only if all of them are on a host, and there is no budget; the layout
    that a convolution prefers does not spread through autoshard's ops. Settings are restored at the
    end. The generated code is checked afterwards, if the graph has launches, waits or barriers.

    has_budget: whether memory has to be as the plan says.
    kwargs: those of `inner_compile`.
    Raises OrderError if the generated code departs from the planned order.
    """
    planned = planned_order(gm.graph)
    settings = {
        **_torch.inductor.known_settings(**SETTINGS),
        "allow_buffer_reuse": _is_on_host(gm.graph) and not has_budget,
        # They have run; what is compiled here may come from a cache.
        "joint_custom_post_pass": None,
        "custom_partitioner_fn": None,
        "post_grad_custom_post_pass": KeepOrder(gm.graph, PLAN.get(gm)),
    }
    compiled = _torch.inductor.compile_graph(
        gm, example_inputs, settings, has_no_layout=_is_ours, **kwargs
    )
    if planned:
        check_order(getattr(compiled, "source_code", ""), planned)
    return compiled


def _is_on_host(graph: fx.Graph) -> bool:
    """Tell whether all that `graph` computes lies in host memory.

    Elsewhere Inductor is not to use a buffer again for a later one of its size: it would hold the
    memory in between, which the plan counts as free, and which torch's allocator hands on at once.
    On a host that saves page faults, which counts for more if there is no budget.
    """
    return all(each.device.type == "cpu" for node in graph.nodes for each in tensors_of(node))


Order = list[tuple[str, str, int]]
"""Events and barriers in program order: (what, "gather" or "reduce", bucket) for an event of a
plan, (what, "copy", its number) for a saved value's copy, ("barrier", its op, 0) for a barrier.
"""


_ARRIVED = {"load": "loaded", "store": "stored"}
_MOVED = {"offload": "offloaded", "reload": "reloaded"}


def planned_order(graph: fx.Graph) -> Order:
    """List the launches, all-reduces, waits, copies and barriers of `graph`, in program order.

    Higher-order ops over graphs are left out, even as barriers: the code of those graphs stands
    elsewhere.
    """
    found: Order = []
    for node in graph.nodes:
        what = event_of(node)
        if what is not None:
            found.append((what, kind_of(node), bucket_of(node)))
        elif (move := move_of(node)) is not None:
            found.append((move, "copy", int(str(node.args[-1]))))
        elif is_barrier(node) and not graphs_of(node):  # the code of those stands elsewhere
            found.append(("barrier", op_of(node), 0))
    return found


# members, group and bucket are the second to the fourth argument of collectives
_CALL = re.compile(
    r"autoshard\.(launch|wait|all)_(gather|reduce)\.default\(.*, '[^']*', '[^']*', (\d+)"
)
_MOVE = re.compile(r"autoshard\.(launch|wait)_(offload|reload)\.default\(.*, (\d+)\)")
_COPY = re.compile(r"autoshard\.(launch|wait)_(load|store)\.default\(.*, (\d+)\)")


def check_order(source: str, planned: Order) -> None:
    """Raise OrderError unless `source`, generated Python, has the events and barriers of `planned`.

    They must be the same ones, in the same order. Lines that are comments don't count, nor do ops
    that are no barrier in `planned`.
    """
    found: Order = []
    barriers = {op for what, op, _ in planned if what == "barrier"}
    for line in source.splitlines():
        if line.lstrip().startswith("#"):
            continue
        if match := _CALL.search(line):
            what = "all_reduce" if match[1] == "all" else match[1]
            found.append((what, match[2], int(match[3])))
        elif match := _MOVE.search(line):
            what = match[2] if match[1] == "launch" else _MOVED[match[2]]
            found.append((what, "copy", int(match[3])))
        elif match := _COPY.search(line):
            what = match[2] if match[1] == "launch" else _ARRIVED[match[2]]
            found.append((what, "gather" if match[2] == "load" else "reduce", int(match[3])))
        else:
            found += [("barrier", op, 0) for op in barriers if f"torch.ops.{op}(" in line]
    if found == planned:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(found, planned, strict=False)) if a != b),
        min(len(found), len(planned)),
    )
    raise OrderError(
        f"lowered code departs from the plan at event {at}: planned {_event(planned, at)}, "
        f"generated {_event(found, at)}; lower with options={{'lowering': 'eager'}} meanwhile"
    )


def _event(order: Order, at: int) -> str:
    return " ".join(map(str, order[at])) if at < len(order) else "the end"


class KeepOrder(_torch.inductor.CustomGraphPass):
    """Pass for Inductor that applies `keep_order` to the last graph before lowering.

    Its `uuid` is part of the key in Inductor's cache. It covers the sizes that our ops return: a
    shard may have more rows on one rank than on another, in graphs whose inputs are alike. It also
    covers the plan, with its figures, which is found again by the graph's name in that cache
    (`plan_cache.py`).

    planned: graph with collectives, as it is handed to Inductor; it is only read.
    plan: that graph's, if it has one.
    """

    def __init__(self, planned: fx.Graph, plan: Plan | None) -> None:
        """Hash the sizes that autoshard's ops in `planned` return, and `plan`, for `uuid`.

        Neither is kept: the pass orders whatever graph it is called with.
        """
        super().__init__()
        ours = filter(_is_ours, planned.nodes)
        sizes = [[tuple(each.shape) for each in tensors_of(node)] for node in ours]
        text = f"{sizes} {plan.to_json() if plan else None}"
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def __call__(self, graph: fx.Graph) -> None:
        keep_order(graph)

    def uuid(self) -> str:
        return f"autoshard.keep_order.8 {self.digest}"


def _is_ours(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "autoshard"


def keep_order(graph: fx.Graph) -> None:
    """Add control dependencies to `graph` that keep launches, waits, packs and barriers in order.

    Each of these events depends on the event before it, and on the last compute op between the two.
    Where an event gives a list, a `getitem` of it is moved right behind it, to depend on. Compute
    needs no dependency: it reads a wait of the plan anyway, or the next event depends on it. Nodes
    that Inductor looks for, to rewrite them, get none; on an event without a tensor, nothing
    depends.
    """
    after: dict[fx.Node, list[fx.Node]] = {}
    event: fx.Node | None = None
    op: fx.Node | None = None
    for node in list(graph.nodes):
        if _is_event(node) or is_pack(node) or is_barrier(node):
            needed = [n for n in (event, op) if n is not None and n not in node.all_input_nodes]
            if needed and not _is_rewritten(node):
                after[node] = needed
            result = _as_tensor(node)
            if result is not None:
                event, op = result, None
        elif node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
            op = node
    _torch.inductor.keep_nodes_behind(graph, after)


def _is_event(node: fx.Node) -> bool:
    """Tell whether `node` is an event of a plan, or begins or ends a saved value's copy."""
    return event_of(node) is not None or move_of(node) is not None


def _is_rewritten(node: fx.Node) -> bool:
    """Tell whether Inductor later looks for `node` itself, to write something else in its place."""
    return node.target in _torch.ops.FUNCTIONALIZED or bool(graphs_of(node))


def _as_tensor(event: fx.Node) -> fx.Node | None:
    """Return a node that stands for `event` in dependencies; None if it gives no tensor.

    This is `event` if it gives one tensor, else the `getitem` of a tensor of its list, which is
    moved right behind it: torch 2.11 does not see a list as a dependency.
    """
    if isinstance(event.meta.get("val"), torch.Tensor):
        return event
    for user in event.users:
        if user.target is operator.getitem and isinstance(user.meta.get("val"), torch.Tensor):
            event.append(user)
            return user
    return None
