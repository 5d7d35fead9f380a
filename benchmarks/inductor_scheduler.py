"""What Inductor's own scheduler makes of a problem: its buckets and order, played through by ours.

The problem becomes a graph of functional collectives and matrix products, of which Inductor (torch
2.13; its own settings, no estimates of its own) is told what our simulator reckons with. What it
gives is read back as buckets, launches and waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard import _torch
from autoshard.passes.planner.costs import PACKED
from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.simulate import SimulatedBucket, Timeline, make_bucket, replay

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class Weight:
    """Parameter in order of use: rows and columns of a product, or the one size of a scale."""

    size: tuple[int, ...]

    @property
    def width(self) -> int:
        """Width of what goes in."""
        return self.size[0]


def inductor(problem: Problem, weights: Sequence[Weight], tokens: int, ranks: int) -> Timeline:
    """Return the timeline of `problem` as Inductor buckets and orders it.

    Without a process group, this process becomes rank 0 of `ranks` that are not there.
    weights: those of `problem.gathers`, in that order; each has an op in forward, two in backward.
    tokens: rows that go into each product.
    Raises ValueError if Inductor leaves a collective out.
    """
    if not torch.distributed.is_initialized():
        _torch.dist.pretend_ranks(ranks)
    drawn = _Drawn(problem, weights, tokens, ranks)
    scheduled = _schedule(drawn)
    return _read(drawn, scheduled)


class _Drawn:
    """Problem as a graph, with the numbers that its nodes have in the problem.

    op: number of a compute node, by its name.
    """

    def __init__(
        self, problem: Problem, weights: Sequence[Weight], tokens: int, ranks: int
    ) -> None:
        """Draw the graph, with fake tensors in bf16 as its values."""
        self.problem, self.ranks = problem, ranks
        self.graph = fx.Graph()
        self.op: dict[str, int] = {}
        self.shard: dict[str, int] = {}  # numbers of gathers, by the name of a placeholder
        self.gradient: dict[str, int] = {}  # of reduces, by the name of the node that makes it
        self.mode = FakeTensorMode()
        with self.mode:
            self._draw(weights, tokens)

    def _draw(self, weights: Sequence[Weight], tokens: int) -> None:
        """Add all nodes in program order: inputs, then gather, ops and reduce of each weight.

        Each collective is followed by its wait: Inductor moves them.
        """
        shards = [self._input(f"shard_{n}", self._shard_numel(w)) for n, w in enumerate(weights)]
        is_backward = bool(self.problem.reduces)
        x = self._input("x", (tokens, weights[0].size[-1 if is_backward else 0]))
        saved = [
            self._input(f"saved_{n}", (tokens, w.width)) if is_backward else x
            for n, w in enumerate(weights)
        ]
        results = []
        self.shard = {shard.name: number for number, shard in enumerate(shards)}
        for number, weight in enumerate(weights):
            whole = self._call(
                c10d.all_gather_into_tensor.default,
                shards[number],
                self.ranks,
                _torch.dist.default_group().group_name,
            )
            whole = self._call(c10d.wait_tensor.default, whole)
            whole = self._call(aten.view.default, whole, list(weight.size))
            if not is_backward:
                x = self._wide(x, tokens, weight.width)
                x = self._compute(*_forward(x, whole, weight))
                continue
            x = self._wide(x, tokens, weight.size[-1])
            gradient_of_x = self._compute(*_backward(self, x, whole, weight))
            made = self._compute(*_gradient(self, saved[number], x, weight))
            self.gradient[made.name] = number
            sent = self._call(
                c10d.reduce_scatter_tensor.default,
                made,
                "sum",
                self.ranks,
                _torch.dist.default_group().group_name,
            )
            results.append(self._call(c10d.wait_tensor.default, sent))
            x = gradient_of_x
        self.graph.output((x, *results))

    def _shard_numel(self, weight: Weight) -> tuple[int]:
        """Number of elements of a weight's shard, as sizes; a rest is left out."""
        numel = 1
        for size in weight.size:
            numel *= size
        return (numel // self.ranks,)

    def _input(self, name: str, size: Sequence[int]) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(size, dtype=torch.bfloat16)
        return node

    def _call(self, target: Any, *args: Any) -> fx.Node:
        """Add a node that calls `target`, with its fake result as "val"; return it."""
        node = self.graph.call_function(target, args)
        values = fx.node.map_arg(args, lambda each: each.meta["val"])
        node.meta["val"] = target(*values)
        return node

    def _compute(self, target: Any, *args: Any) -> fx.Node:
        """Add a node as `_call` does, and give it the next number in `op`; return it."""
        node = self._call(target, *args)
        self.op[node.name] = len(self.op)
        return node

    def _wide(self, x: fx.Node, tokens: int, width: int) -> fx.Node:
        """Return `x` cut or padded to `width` columns, by a node that costs nothing."""
        has = x.meta["val"].shape[1]
        if has > width:
            return self._call(aten.slice.Tensor, x, 1, 0, width)
        return self._call(aten.constant_pad_nd.default, x, [0, width - has]) if has < width else x


def _forward(x: fx.Node, whole: fx.Node, weight: Weight) -> tuple[Any, ...]:
    return (aten.mm.default if len(weight.size) == 2 else aten.mul.Tensor), x, whole


def _backward(drawn: _Drawn, x: fx.Node, whole: fx.Node, weight: Weight) -> tuple[Any, ...]:
    """Op and arguments of the gradient of what goes in; a transposition is added to the graph."""
    if len(weight.size) == 1:
        return aten.mul.Tensor, x, whole
    return aten.mm.default, x, drawn._call(aten.t.default, whole)


def _gradient(drawn: _Drawn, saved: fx.Node, x: fx.Node, weight: Weight) -> tuple[Any, ...]:
    """Op and arguments of a weight's gradient; another node may be added to the graph."""
    if len(weight.size) == 1:
        return aten.sum.dim_IntList, drawn._call(aten.mul.Tensor, saved, x), [0]
    return aten.mm.default, drawn._call(aten.t.default, saved), x


def _schedule(drawn: _Drawn) -> fx.GraphModule:
    """Have Inductor bucket and order the graph by our costs; return what it makes of it."""
    from torch._inductor.fx_passes import overlap_scheduling

    problem = drawn.problem
    links = problem.costs.links

    def estimate(node: fx.Node, size: int | None) -> float | None:
        """Milliseconds of a node: a collective by its link, an op as in the problem, others 0.

        Returns None for a wait.
        size: bytes of a collective, unsharded; None for those of the node.
        """
        if node.target is c10d.wait_tensor.default:
            return None
        if getattr(node.target, "namespace", "") == "_c10d_functional":
            is_gather = "all_gather" in str(node.target)
            value = node.meta["val"] if is_gather else node.all_input_nodes[0].meta["val"]
            num_bytes = value.numel() * value.dtype.itemsize if size is None else size
            (link,) = links["gather" if is_gather else "reduce"]
            return link.time_us(num_bytes, 1, PACKED) / 1e3
        number = drawn.op.get(node.name)
        return problem.op_us[number] / 1e3 if number is not None else 0.0

    gm = fx.GraphModule({}, drawn.graph)
    # It asks for a device's roofline before it asks for ours, and there may be no device.
    no_device = mock.patch.object(
        overlap_scheduling, "estimate_roofline_runtime_ms", return_value=0.0
    )
    with drawn.mode, no_device:
        return overlap_scheduling.schedule_overlap_bucketing(
            gm,
            collective_bucketing=True,
            compute_estimator="analytical",
            custom_runtime_estimation=estimate,
        )


def _read(drawn: _Drawn, gm: fx.GraphModule) -> Timeline:
    """Return the timeline of a scheduled graph: its buckets, launches and waits, played through.

    Compute may have another order than in the problem. Raises ValueError if an item is in no
    bucket.
    """
    order = [drawn.op[node.name] for node in gm.graph.nodes if node.name in drawn.op]
    at = {number: position for position, number in enumerate(order)}
    before = drawn.problem
    gathers = [
        dataclasses.replace(item, used=at[item.used], freed=at[item.freed - 1] + 1)
        for item in before.gathers
    ]
    reduces = [dataclasses.replace(item, ready=at[item.ready - 1] + 1) for item in before.reduces]
    problem = dataclasses.replace(
        before,
        op_us=tuple(before.op_us[number] for number in order),
        gathers=tuple(sorted(gathers, key=lambda item: item.used)),
        reduces=tuple(sorted(reduces, key=lambda item: item.ready)),
    )
    position = 0
    launched: dict[fx.Node, SimulatedBucket] = {}
    events: list[tuple[str, fx.Node, int]] = []
    for node in gm.graph.nodes:
        position += node.name in drawn.op
        if node.target is c10d.wait_tensor.default:
            events.append(("wait", node.all_input_nodes[0], position))
        elif getattr(node.target, "namespace", "") == "_c10d_functional":
            kind = "gather" if "all_gather" in str(node.target) else "reduce"
            known = drawn.shard if kind == "gather" else drawn.gradient
            items = gathers if kind == "gather" else reduces
            members = [items[known[name]] for name in _sources(node, known)]
            launched[node] = make_bucket(problem, kind, members, PACKED)
            events.append(("launch", node, position))
    if sum(len(each.items) for each in launched.values()) != len(gathers) + len(reduces):
        raise ValueError("an item is in no bucket")
    starts = sorted(launched, key=lambda node: launched[node].kind)  # gathers first
    number = {start: n for n, start in enumerate(starts)}
    return replay(
        problem,
        [launched[each] for each in starts if launched[each].kind == "gather"],
        [launched[each] for each in starts if launched[each].kind == "reduce"],
        tuple((what, number[start], at) for what, start, at in events),
    )


def _sources(node: fx.Node, known: dict[str, int]) -> Iterator[str]:
    """Names in `known` that `node` is made of, each once, through copies and views."""
    seen, queue = set(), list(node.all_input_nodes)
    while queue:
        each = queue.pop()
        if each in seen:
            continue
        seen.add(each)
        if each.name in known:
            yield each.name
        else:
            queue += each.all_input_nodes
