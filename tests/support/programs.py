"""Graphs with markers, random ones and hand-written ones, and what tests ask of their nodes."""

from __future__ import annotations

import operator
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import fx, nn

from autoshard import Plan, passes
from autoshard.passes import ParamInfo
from autoshard.passes.ir.layout import DTYPES, local_rows
from autoshard.passes.ir.match import (
    bucket_of,
    event_of,
    is_launch,
    is_pack,
    is_planned,
    is_wait,
    kind_of,
)
from autoshard.passes.ir.meta import PLAN
from autoshard.passes.ir.text import parse
from autoshard.passes.planner.topology import Topology

WORLD = 2

_LIBRARY = torch.library.Library("autoshard_tests", "FRAGMENT")
_LIBRARY.define("exchange(Tensor x, str group_name) -> Tensor")
_LIBRARY.impl("exchange", lambda x, group_name: x.clone(), "CompositeExplicitAutograd")


def group() -> str:
    return str(dist.group.WORLD.group_name)


@dataclass(frozen=True)
class Param:
    """A parameter of a random graph; `viewed` says that its shard comes flat, `on_host` that it
    lives in host memory.
    """

    unit: int
    dtype: str
    rows: int
    cols: int
    viewed: bool
    on_host: bool

    @property
    def whole(self) -> str:
        return f"{self.dtype}[{self.rows},{self.cols}]"

    @property
    def shard(self) -> str:
        return f"{self.dtype}[{local_rows(self.rows, WORLD, 0)},{self.cols}]"

    @property
    def flat(self) -> str:
        return f"{self.dtype}[{local_rows(self.rows, WORLD, 0) * self.cols}]"


PRICES = passes.Prices(Topology.load("gloo"), is_fused=False)


@dataclass(frozen=True)
class Program:
    """A graph with markers, as text, and the parameters that they are for."""

    text: str
    params: tuple[Param, ...]

    @property
    def table(self) -> list[ParamInfo]:
        return [
            ParamInfo(f"layers.{p.unit}.w{n}", f"layers.{p.unit}", "shard", "shard")
            for n, p in enumerate(self.params)
        ]

    def module(self) -> fx.GraphModule:
        return module(self.text)

    def pipeline(self, bucketing: Any) -> tuple[passes.Pass, ...]:
        return passes.pipeline(self.table, graph="backward", bucketing=bucketing, prices=PRICES)

    def planned(self, bucketing: Any) -> fx.GraphModule:
        return passes.run(self.module(), self.pipeline(bucketing))


class _Writer:
    """Writes a graph's lines, and each parameter's markers at most once."""

    def __init__(self, params: Sequence[Param]) -> None:
        self.params = params
        self.lines: list[str] = []
        self.values = ["x", "y"]  # activations, f32[3]
        self.grads: list[str] = []
        self._gathered: set[int] = set()
        self._reduced: set[int] = set()

    def gather(self, n: int) -> None:
        if n in self._gathered:
            return
        self._gathered.add(n)
        param, shard = self.params[n], f"p{n}"
        if param.viewed:
            shard = f"v{n}"
            size = [local_rows(param.rows, WORLD, 0), param.cols]
            self.lines.append(f"%v{n}: {param.shard} = aten.view(%p{n}, {size})")
        reduce = f"from_host:cpu {param.whole}^host {group()}"
        told = f", reduce={reduce!r}" if param.on_host else ""
        self.lines.append(
            f"%u{n}: {param.whole} = autoshard.unshard"
            f"(%{shard}, '{param.whole}', '{group()}', False, {n}{told})"
        )

    def compute(self, n: int, value: int) -> None:
        """Read the whole parameter."""
        self.gather(n)
        name = self._fresh("s")
        self.lines.append(f"%{name}: f32[] = aten.sum(%u{n}, dtype=torch.float32)")
        self._add(value, name)

    def mix(self, one: int, other: int) -> None:
        """Read activations alone."""
        self._add(one, self.values[other % len(self.values)])

    def exchange(self, value: int) -> None:
        """Let an op that nobody knows communicate."""
        name, at = self._fresh("e"), self.values[value % len(self.values)]
        self.lines.append(f"%{name}: f32[3] = autoshard_tests.exchange(%{at}, '{group()}')")
        self.values.append(name)

    def reduce(self, n: int, value: int) -> None:
        """Make a gradient from an activation, and from the whole parameter if it is there."""
        if n in self._reduced:
            return
        self._reduced.add(n)
        param, at = self.params[n], self.values[value % len(self.values)]
        dtype, size = DTYPES[param.dtype], [param.rows, param.cols]
        self.lines.append(f"%t{n}: {param.dtype}[] = aten.sum(%{at}, dtype={dtype})")
        if n in self._gathered:
            self.lines.append(f"%g{n}: {param.whole} = aten.mul.Tensor(%u{n}, %t{n})")
        else:
            self.lines.append(f"%g{n}: {param.whole} = aten.expand(%t{n}, {size})")
        self._reduce(n, f"g{n}")

    def reduce_input(self, n: int) -> None:
        """Reduce a gradient that is an input of the graph."""
        if n in self._reduced:
            return
        self._reduced.add(n)
        self._reduce(n, f"d{n}")

    def read_grad(self, value: int) -> None:
        """Compute with a gradient that is reduced."""
        if not self.grads:
            return
        name = self._fresh("s")
        grad = self.grads[value % len(self.grads)]
        self.lines.append(f"%{name}: f32[] = aten.sum(%{grad}, dtype=torch.float32)")
        self._add(value, name)

    def text(self, outputs: Sequence[int]) -> str:
        inputs = [f"in %p{n}: {p.flat if p.viewed else p.shard}" for n, p in enumerate(self.params)]
        inputs += [f"in %d{n}: {p.whole}" for n, p in enumerate(self.params)]
        results = [f"%{self.values[n % len(self.values)]}" for n in outputs]
        results += [f"%{grad}" for grad in self.grads]
        results += [f"%u{n}" for n in outputs if n in self._gathered]
        body = "\n".join([*inputs, "in %x: f32[3]", "in %y: f32[3]", *self.lines])
        return f"{body}\nreturn [{', '.join(results)}]\n"

    def _reduce(self, n: int, grad: str) -> None:
        param = self.params[n]
        self.lines.append(
            f"%r{n}: {param.shard} = autoshard.reduce_grad"
            f"(%{grad}, '{param.whole}{'^host' if param.on_host else ''}', '{group()}', {n})"
        )
        self.grads.append(f"r{n}")

    def _add(self, value: int, other: str) -> None:
        name = self._fresh("a")
        at = self.values[value % len(self.values)]
        self.lines.append(f"%{name}: f32[3] = aten.add.Tensor(%{at}, %{other})")
        self.values.append(name)

    def _fresh(self, prefix: str) -> str:
        return f"{prefix}{len(self.lines)}"


INDEX = st.integers(0, 7)
PARAM = st.builds(
    Param,
    unit=st.integers(0, 4),
    dtype=st.sampled_from(["f32", "bf16"]),
    rows=st.integers(1, 5),
    cols=st.integers(1, 3),
    viewed=st.booleans(),
    on_host=st.booleans(),
)


KINDS = [*["compute", "reduce"] * 3, "gather", "mix", "reduce_input", "read_grad", "read_grad"]


@st.composite
def programs(draw: st.DrawFn, *, more: Sequence[str] = ()) -> Program:
    """Straight-line graphs: whole parameters and activations mixed, gradients reduced.

    more: kinds of lines that there may be beside, "exchange".
    """
    params = draw(_lists(PARAM, 1, 6))
    writer = _Writer(params)
    kinds = st.sampled_from([*KINDS, *more])
    for kind, n, value in draw(_lists(st.tuples(kinds, INDEX, INDEX), 0, 24)):
        n %= len(params)
        if kind == "gather":
            writer.gather(n)
        elif kind == "compute":
            writer.compute(n, value)
        elif kind == "mix":
            writer.mix(n, value)
        elif kind == "reduce":
            writer.reduce(n, value)
        elif kind == "reduce_input":
            writer.reduce_input(n)
        elif kind == "exchange":
            writer.exchange(value)
        else:
            writer.read_grad(value)
    return Program(writer.text(draw(st.lists(INDEX, max_size=3))), tuple(params))


def _lists(elements: st.SearchStrategy[Any], least: int, most: int) -> st.SearchStrategy[Any]:
    """Lists of every length alike; `st.lists` by itself makes mostly short ones."""
    lengths = st.integers(least, most)
    return lengths.flatmap(lambda length: st.lists(elements, min_size=length, max_size=length))


BUCKETINGS = st.sampled_from(
    [
        "per_unit",
        "none",
        "auto",
        [],
        ["layers.0", ["layers.1", "layers.2"]],
        [["layers.0", "layers.1", "layers.2", "layers.3"]],
        [["layers.0.w0", "layers.1"], "layers.0"],
        ["layers.1.w1", "absent"],
    ]
)


def module(text: str) -> fx.GraphModule:
    return fx.GraphModule(nn.Module(), parse(text))


def small(text: str, **groups: str) -> fx.GraphModule:
    """A hand-written graph; GROUP stands for the group of all ranks."""
    text = textwrap.dedent(text).lstrip()
    for name, value in {**groups, "GROUP": group()}.items():
        text = text.replace(name, repr(value))
    return module(text)


def is_compute(node: fx.Node) -> bool:
    """Whether `node` is neither an input, a marker, nor part of a collective or a copy."""
    if node.op in ("placeholder", "output") or is_planned(node) or is_pack(node):
        return False
    if event_of(node):
        return False
    return not (node.target is operator.getitem and event_of(node.all_input_nodes[0]))


def named(graph: fx.Graph, name: str) -> fx.Node:
    (found,) = (node for node in graph.nodes if node.name == name)
    return found


def plan_of(gm: fx.GraphModule) -> Plan:
    plan = PLAN.get(gm)
    return plan if plan is not None else Plan("", "", 0, (), ())


def events_of(gm: fx.GraphModule, kind: str) -> list[tuple[str, int]]:
    return [
        ("launch" if is_launch(node) else "wait", bucket_of(node))
        for node in gm.graph.nodes
        if (is_launch(node) or is_wait(node)) and kind_of(node) == kind
    ]


STEP = """
in %p0: f32[4,2]
in %p1: bf16[4]
in %p2: f32[1,3]
in %x: f32[3]
%u0: f32[7,2] = autoshard.unshard(%p0, 'f32[7,2]', GROUP, False, 0)
%u1: bf16[8] = autoshard.unshard(%p1, 'bf16[8]', GROUP, False, 1)
%u2: f32[2,3] = autoshard.unshard(%p2, 'f32[2,3]', GROUP, False, 2)
%s0: f32[] = aten.sum(%u0)
%a: f32[3] = aten.add.Tensor(%x, %s0)
%s1: f32[] = aten.sum(%u1, dtype=torch.float32)
%b: f32[3] = aten.add.Tensor(%a, %s1)
%s2: f32[] = aten.sum(%u2)
%c: f32[3] = aten.add.Tensor(%b, %s2)
%g: f32[2,3] = aten.expand(%c, [2, 3])
%r: f32[1,3] = autoshard.reduce_grad(%g, 'f32[2,3]', GROUP, 2)
return [%c, %r]
"""
STEP_TABLE = [
    ParamInfo("first.w", "first", "shard", "shard"),
    ParamInfo("first.b", "first", "shard", "shard"),
    ParamInfo("second.w", "second", "shard", "shard"),
]


def step() -> fx.GraphModule:
    transforms = passes.pipeline(STEP_TABLE, graph="forward", bucketing="per_unit")
    return passes.run(small(STEP), transforms)
