"""FX graphs: generated code, names of nodes, and symbolic sizes.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._sympy import functions as _functions
from torch.utils._sympy.numbers import int_oo as int_oo
from torch.utils._sympy.value_ranges import ValueRanges as ValueRanges

from autoshard._torch import aot

size_functions: Any = _functions
"""Module of the functions, as `FloorDiv` and `Max`, that symbolic sizes are made of."""


def boxed(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the generated code of `gm` as a function of a list of inputs, which it empties.

    Boxed, an input dies after its last use; passed one by one, the caller's frame
    would keep every saved activation alive through the whole backward. The graph of `gm` generates
    boxed code from then on.
    """
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    forward = torch.fx.GraphModule(gm, gm.graph).forward

    return aot.mark_boxed(lambda args: forward(args))


def copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Copy `graph`, with nodes of its own, whose metadata is a shallow copy.

    What generates its code is the same one: a deep copy of pytrees in it warns.
    """
    made = torch.fx.Graph(tracer_cls=graph._tracer_cls)
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    output = made.output(made.graph_copy(graph, values))
    output.meta = dict(graph.output_node().meta)
    made.set_codegen(graph._codegen)
    return made


def graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Make a graph module whose code is generated when it is first needed.

    Inductor needs the code only to hash the graph.
    """
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def rename(node: torch.fx.Node, name: str) -> None:
    """Rename `node` to `name`, with a number added if another node of its graph is called that."""
    node._rename(name)
