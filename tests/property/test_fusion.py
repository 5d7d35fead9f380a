"""Kernels of random graphs: none waits for itself, and each value is there or not for a reason."""

from __future__ import annotations

import graphlib

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autoshard.passes.plans.fusion import fuse

aten = torch.ops.aten
SIDE = 8

UNARY = [aten.relu.default, aten.exp.default]
ROWS = [aten.sum.dim_IntList, aten.amax.default]


@st.composite
def graphs(draw: st.DrawFn) -> fx.Graph:
    """Graph of square matrices, and of columns of sums, with products in between."""
    graph = fx.Graph()
    whole = torch.empty(SIDE, SIDE, device="meta")
    column = torch.empty(SIDE, 1, device="meta")
    squares, columns = [], []
    for number in range(2):
        squares.append(graph.placeholder(f"x{number}"))
        squares[-1].meta["val"] = whole
    for _ in range(draw(st.integers(1, 40))):
        one, other = (draw(st.sampled_from(squares)) for _ in range(2))
        kind = draw(st.sampled_from(["unary", "add", "rows", "columns", "mm", "spread"]))
        if kind == "rows":
            made = graph.call_function(draw(st.sampled_from(ROWS)), (one, [1], True))
        elif kind == "columns":
            made = graph.call_function(aten.sum.dim_IntList, (one, [0], True))
        elif kind == "spread" and columns:
            made = graph.call_function(aten.mul.Tensor, (one, draw(st.sampled_from(columns))))
        elif kind == "mm":
            made = graph.call_function(aten.mm.default, (one, other))
        elif kind == "add":
            made = graph.call_function(aten.add.Tensor, (one, other))
        else:
            made = graph.call_function(draw(st.sampled_from(UNARY)), (one,))
        is_column = kind == "rows"
        made.meta["val"] = column if is_column else whole
        if kind == "columns":
            made.meta["val"] = torch.empty(1, SIDE, device="meta")
        elif is_column:
            columns.append(made)
        else:
            squares.append(made)
    # What is put out is realized: of more such, more kernels may be fused.
    graph.output(draw(st.lists(st.sampled_from(squares + columns), min_size=1, max_size=20)))
    return graph


@given(graphs())
def test_no_kernel_waits_for_itself(graph: fx.Graph) -> None:
    fusion = fuse(graph)
    kernels = {node: part.first for node, part in fusion.parts.items()}
    waits: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        if node in fusion.absent and node not in fusion.parts:
            continue
        read = fusion.sources.get(node, node.all_input_nodes)
        mine = kernels.get(node, node)
        waits.setdefault(mine, set()).update(kernels.get(each, each) for each in read)
        waits[mine].discard(mine)
    list(graphlib.TopologicalSorter(waits).static_order())  # raises CycleError


@given(graphs())
def test_what_is_read_elsewhere_is_in_memory(graph: fx.Graph) -> None:
    """By an op that is no kernel of Inductor's, by the output, or by another kernel."""
    fusion = fuse(graph)
    for node in graph.nodes:
        part = fusion.parts.get(node)
        read = fusion.sources.get(node, () if node in fusion.absent else node.all_input_nodes)
        for each in read:
            if each in fusion.absent:
                assert part is not None
                assert fusion.parts[each].first is part.first
