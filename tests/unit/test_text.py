"""Graphs as text: what is written is read back, and what cannot be read is named by its line."""

from __future__ import annotations

import math
import operator
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from autoshard.passes.ir import ops
from autoshard.passes.ir.layout import DTYPES
from autoshard.passes.ir.meta import SOURCE
from autoshard.passes.ir.text import parse, render

GRAPHS = {
    "compute": """
        in %x: f32[3,4]
        in %w: f32[5,4]
        %t: f32[4,5] = aten.t(%w)
        %mm: f32[3,5] = aten.mm(%x, %t)
        %relu: f32[3,5] = aten.relu(%mm)
        return [%relu, %x, None]
        """,
    "scalar output": """
        in %x: f32[3]
        %sum_1: f32[] = aten.sum(%x)
        return %sum_1
        """,
    "nothing": """
        return []
        """,
    "no output": """
        in %x: f32[0,3]
        return None
        """,
    "overloads": """
        in %x: f32[3]
        %add: f32[3] = aten.add.Tensor(%x, %x, alpha=2)
        %add_1: f32[3] = aten.add.Scalar(%add, 1.5)
        %prims: f16[3] = prims.convert_element_type(%add_1, torch.float16)
        %drawn: f32[3] = aten.random.from(%x, 0, 5)
        return [%prims, %drawn]
        """,
    "symbolic sizes": """
        in %n: sym(s0)
        in %m: sym(s27)
        in %x: f32[s0,64]
        in %y: f32[2*s0,4]
        in %z: f32[s0*s27,s0 + s27,s0 - 1]
        %half: sym((s0//2)) = operator.floordiv(%n, 2)
        %top: f32[(s0//2),64] = aten.slice.Tensor(%x, 0, 0, %half)
        %rest: f32[s0 - 2*((s0//3)),64] = aten.slice.Tensor(%x, 0, 0, %half)
        %cat: f32[s0 + 2*(((s27 + 2)//3))] = aten.cat([%x, %y])
        %mod: sym(Mod(s0, 3)) = operator.mod(%n, 3)
        return [%top, %rest, %cat, %mod]
        """,
    "sizes known late": """
        in %mask: b8[s0]
        in %u: sym(u0)
        %nonzero: i64[u0,1] = aten.nonzero(%mask)
        %twice: i64[2*u0] = aten.cat([%nonzero, %nonzero])
        return [%twice]
        """,
    "several values": """
        in %x: f32[3,4]
        in %w: f32[4]
        %norm: (f32[3,4], f32[3,1], f32[3,1]) = aten.native_layer_norm(%x, [4], %w, None, 1e-05)
        %getitem: f32[3,4] = getitem(%norm, 0)
        %getitem_1: f32[3,1] = getitem(%norm, 1)
        %nested: (f32[2], (i64[s0], sym(s0), int), NoneType) = aten.native_layer_norm(%x)
        %empty: () = aten.native_layer_norm(%x)
        return [%getitem, %getitem_1]
        """,
    "attributes": """
        in %x: f32[3]
        %_tensor_constant0: f32[3] = get_attr('_tensor_constant0')
        %weight: f32[3] = get_attr('inner.weight')
        %mul: f32[3] = aten.mul.Tensor(%_tensor_constant0, %weight)
        return [%mul]
        """,
    "factories": """
        %a: f16[2] = aten.empty.memory_format([2], dtype=torch.float16, layout=torch.strided, \
device=device('cpu'), pin_memory=False, memory_format=torch.contiguous_format)
        %b: f32[2]@cuda = aten.zeros([2], device=device('cuda:0'))
        %c: i64[4] = aten.arange.start_step(0, 4, 1, dtype=torch.int64)
        %d: f32[1,2,3,4] = aten.clone(%a, memory_format=torch.channels_last)
        %e: f32[2] = aten.clone(%a, memory_format=torch.preserve_format)
        return [%a, %b, %c, %d, %e]
        """,
    "constants": """
        in %x: f32[3]
        %a: f32[3] = aten.masked_fill.Scalar(%x, %x, -inf)
        %b: f32[3] = aten.clamp(%a, -1.5, inf)
        %c: f32[3] = aten.nan_to_num(%b, nan, 1e-08, -3)
        %d: f32[3] = aten.any.dim(%c, -1, True)
        %e: f32[3] = aten.index.Tensor(%x, [None, %c, [1, [-inf, nan, None]], []])
        %f: f32[3] = aten.gelu(%x, approximate='tanh')
        %g: f32[3] = aten.einsum('ij,jk->ik', [%x, %x])
        %h: object = getitem(%x, slice(None, 2, None))
        return [%d, %e, %f, %g, 1, -2.5, True, 'text']
        """,
    "strings with our signs": """
        in %x: f32[3]
        %a: f32[3] = aten.gelu(%x, approximate='100%x')
        %b: f32[3] = aten.gelu(%a, approximate='a  # b')  # layers.0.w
        %c: f32[3] = aten.gelu(%b, approximate="it's %a  # b")  # layers.1.w
        return [%c]
        """,
    "numbers": """
        in %n: int
        in %p: float
        in %flag: bool
        in %none: NoneType
        in %generator: object
        in %x: f32[3,4]
        %rows: int = aten.sym_size.int(%x, 0)
        %mul: int = operator.mul(%rows, %n)
        %root: float = operator.pow(%p, 0.5)
        %less: bool = operator.lt(%mul, 3)
        %view: f32[12] = aten.view(%x, [%mul])
        return [%view, %root, %less]
        """,
    "functions of python": """
        in %n: sym(s0)
        %sym_float: object = python.torch.sym_float(%n)
        %sym_max: sym(s0) = python.torch.sym_max(%n, 2)
        %ceil: int = python.math.ceil(%sym_float)
        return [%ceil, %sym_max]
        """,
    "higher-order": """
        in %pred: b8[]
        in %x: f32[s0]
        %true_graph_0: NoneType = get_attr('true_graph_0')
        %false_graph_0: NoneType = get_attr('false_graph_0')
        %cond: (f32[s0]) = hop.cond(%pred, %true_graph_0, %false_graph_0, [%x])
        %getitem: f32[s0] = getitem(%cond, 0)
        %again: (f32[s0]) = hop.invoke_subgraph(%true_graph_0, 'subgraph_0', %x)
        return [%getitem]
        """,
    "devices": """
        in %x: f32[3,4]@cuda
        in %y: bf16[s0,4]@cuda
        in %z: f32[3]
        %pair: (f32[3]@cuda, i64[3]) = aten.max.dim(%x, 0)
        return [%pair]
        """,
    "markers": """
        in %layers_0_w: f32[4,15]
        in %tangents_1: f32[3,15]
        %unshard: f32[7,15] = autoshard.unshard(%layers_0_w, 'f32[7,15]', 'shard', False, 3)  \
# layers.0.w
        %mm: f32[7,15] = aten.mm(%tangents_1, %unshard)
        %reduce_grad: f32[4,15] = autoshard.reduce_grad(%mm, 'f32[7,15]', 'shard', 3)  # layers.0.w
        return [%reduce_grad]
        """,
    "collectives": """
        in %layers_0_w: f32[4,15]
        in %layers_0_b: f32[4]
        %t: u8[1] = autoshard.launch_gather([%layers_0_w, %layers_0_b], 'f32[7,15] f32[7]', \
'shard', 0)  # layers.0
        %g: (f32[7,15], f32[7]) = autoshard.wait_gather(%t, 'f32[7,15] f32[7]', 'shard', 0)
        %whole_layers_0_w: f32[7,15] = getitem(%g, 0)  # layers.0.w
        %whole_layers_0_b: f32[7] = getitem(%g, 1)  # layers.0.b
        %t_1: u8[1] = autoshard.pack_grads([%whole_layers_0_b], 'f32[7]', 'shard', 1)
        %t_2: u8[1] = autoshard.launch_reduce(%t_1, 'f32[7]', 'shard', 1)
        %r: (f32[4]) = autoshard.wait_reduce(%t_2, 'f32[7]', 'shard', 1)  # layers.0
        %grad_layers_0_b: f32[4] = getitem(%r, 0)
        return [%whole_layers_0_w, %grad_layers_0_b]
        """,
    "names": """
        in %x_2: f32[3]
        in %x: f32[3]
        %mul_32: f32[3] = aten.mul.Tensor(%x_2, %x)
        %mul_5: f32[3] = aten.mul.Tensor(%mul_32, %x)
        %any_1: b8[] = aten.any(%mul_5)
        %_softmax: f32[3] = aten._softmax(%mul_5, -1, False)
        return [%any_1, %_softmax]
        """,
}


def lines(text: str) -> str:
    return textwrap.dedent(text).lstrip()


@pytest.mark.parametrize("name", GRAPHS)
def test_hand_written_graph(name: str) -> None:
    text = lines(GRAPHS[name])
    graph = parse(text)
    graph.lint()
    assert render(graph) == text


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    text = f"in %x: {dtype}[2]\n%a: {dtype}[2] = aten.to.dtype(%x, {DTYPES[dtype]})\nreturn [%a]\n"
    graph = parse(text)
    assert node(graph, "x").meta["val"].dtype == DTYPES[dtype]
    assert node(graph, "a").args[1] == DTYPES[dtype]
    assert render(graph) == text


def test_arguments_are_what_they_were() -> None:
    graph = parse(lines(GRAPHS["constants"]))
    assert node(graph, "a").args[2] == -math.inf
    assert math.isnan(node(graph, "c").args[1])
    assert node(graph, "d").args[2] is True
    assert node(graph, "e").args[1][0] is None
    assert node(graph, "e").args[1][1] is node(graph, "c")
    assert node(graph, "f").kwargs == {"approximate": "tanh"}
    assert node(graph, "h").args[1] == slice(None, 2, None)
    made = node(parse(lines(GRAPHS["factories"])), "a")
    assert made.kwargs == {
        "dtype": torch.float16,
        "layout": torch.strided,
        "device": torch.device("cpu"),
        "pin_memory": False,
        "memory_format": torch.contiguous_format,
    }


def test_targets_are_what_they_were() -> None:
    graph = parse(lines(GRAPHS["collectives"]))
    assert node(graph, "t").target is ops.launch_gather
    assert node(graph, "g").target is ops.wait_gather
    assert node(graph, "t_1").target is ops.pack_grads
    assert node(graph, "t_2").target is ops.launch_reduce
    assert node(graph, "r").target is ops.wait_reduce
    assert node(graph, "whole_layers_0_w").target is operator.getitem
    graph = parse(lines(GRAPHS["higher-order"]))
    assert node(graph, "cond").target is torch.ops.higher_order.cond
    assert node(graph, "true_graph_0").op == "get_attr"
    graph = parse(lines(GRAPHS["overloads"]))
    assert node(graph, "add").target is torch.ops.aten.add.Tensor
    assert node(parse(lines(GRAPHS["compute"])), "mm").target is torch.ops.aten.mm.default


def test_a_symbol_is_one_symbol_in_the_whole_graph() -> None:
    graph = parse(lines(GRAPHS["symbolic sizes"]))
    size = node(graph, "n").meta["val"]
    assert isinstance(size, torch.SymInt)
    assert node(graph, "x").meta["val"].shape[0].node.expr == size.node.expr
    assert node(graph, "y").meta["val"].shape[0].node.expr == 2 * size.node.expr


def test_sources_are_read() -> None:
    graph = parse(lines(GRAPHS["collectives"]))
    assert SOURCE.get(node(graph, "t")) == "layers.0"
    assert SOURCE.get(node(graph, "whole_layers_0_w")) == "layers.0.w"
    assert SOURCE.get(node(graph, "g")) is None


def test_devices_are_read() -> None:
    graph = parse(lines(GRAPHS["devices"]))
    assert node(graph, "x").meta["val"].device.type == "cuda"
    assert node(graph, "z").meta["val"].device.type in ("cpu", "meta")


def test_groups_are_shown_as_axes() -> None:
    text = lines(GRAPHS["markers"])
    counted = text.replace("'shard'", "'5'")
    graph = parse(counted)
    assert render(graph) == counted
    assert render(graph, axes={"5": "shard", "7": "replicate"}) == text
    assert render(graph, axes={"7": "replicate"}) == counted


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "",
        "%a: f32[3]",
        "%a: f32[3] = aten.relu(%x",
        "%a: f32[3] = aten.relu(%absent)",
        "%a: f32[3] = aten.no_such_op(%x)",
        "%a: f32[3] = aten.add.no_such_overload(%x)",
        "%a: f32[3] = no_such_namespace.add(%x)",
        "%a: f32[3] = hop.no_such_op(%x)",
        "%a: f32[3] = aten.relu(%x, dtype=torch.no_such_dtype)",
        "%a: f32[3] = aten.relu(sorted(%x))",
        "%a: q8[3] = aten.relu(%x)",
        "%a: f32[?] = aten.relu(%x)",
        "%a: tensor = aten.relu(%x)",
        "%x: f32[3] = aten.relu(%x)",
        "in %x: f32[3]",
        "return [%absent]",
    ],
)
def test_unreadable_line_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=r"^line 2: ") as raised:
        parse(f"in %x: f32[3]\n{line}\nreturn [%x]\n")
    assert repr(line) in str(raised.value)


def attention(
    tokens: Tensor, table: Tensor, weight: Tensor, bias: Tensor, qkv: Tensor, out: Tensor
) -> Tensor:
    """Embedding, layer norm, causal attention with one head, a scalar loss."""
    x = functional.embedding(tokens, table)
    x = functional.layer_norm(x, (x.shape[-1],), weight, bias)
    q, k, v = (x @ qkv).chunk(3, dim=-1)
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v @ out).square().mean()


def attention_and_gradients(tokens: Tensor, *params: Tensor) -> list[Tensor]:
    loss = attention(tokens, *params)
    return [loss, *torch.autograd.grad(loss, params)]


@pytest.mark.parametrize("function", [attention, attention_and_gradients])
@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_traced_graph(function: Callable[..., Any], tracing_mode: str) -> None:
    params = [torch.randn(size, requires_grad=True) for size in ((11, 6), 6, 6, (6, 18), (6, 6))]
    tokens = torch.zeros(3, 5, dtype=torch.int64)
    traced = make_fx(function, tracing_mode=tracing_mode)(tokens, *params).graph
    text = render(traced)
    again = parse(text)
    assert render(again) == text
    for old, new in zip(traced.nodes, again.nodes, strict=True):
        assert (new.name, new.op) == (old.name, old.op)
        if old.op == "call_function":
            assert new.target is old.target
        if old.op != "output":
            assert like(new.meta["val"]) == like(old.meta["val"])


def like(value: Any) -> Any:
    """What the text form keeps of a value."""
    if isinstance(value, (list, tuple)):
        return [like(each) for each in value]
    if isinstance(value, Tensor):
        return value.dtype, [str(size) for size in value.shape]
    return str(value) if isinstance(value, torch.SymInt) else None


def node(graph: fx.Graph, name: str) -> fx.Node:
    (found,) = (node for node in graph.nodes if node.name == name)
    return found


def test_names_of_inputs_stay_as_they_are() -> None:
    """FX would write those of inputs in small letters, as of a LayerNorm's weight."""
    text = "in %norm_LayerNorm_weight: f32[4]\nreturn [%norm_LayerNorm_weight]\n"
    assert render(parse(text)) == text
