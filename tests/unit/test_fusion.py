"""Kernels of a graph, as Inductor makes them: what is read, written and never there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.passes.planner.topology import Topology
from autoshard.passes.plans.fusion import Fusion, fuse
from autoshard.passes.plans.liveness import last_uses, live_bytes
from autoshard.passes.plans.roofline import node_us

ROWS, WIDTH = 64, 512
WHOLE = ROWS * WIDTH * 2  # bytes of bf16


def _traced(function: Callable[..., Any], *inputs: Tensor) -> tuple[fx.Graph, Fusion]:
    """Graph of what Inductor would get, and its kernels."""
    made = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs)
    made.graph.eliminate_dead_code()
    return made.graph, fuse(made.graph)


def _x(rows: int = ROWS, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, width, dtype=torch.bfloat16)


def _kernels(fusion: Fusion) -> list[tuple[int, int]]:
    """Bytes that each kernel reads and writes, in order."""
    found: list[list[int]] = []
    for node, part in fusion.parts.items():
        if part.first is node:
            found.append([0, 0])
        found[-1][0] += part.read
        found[-1][1] += part.written
    return [(read, written) for read, written in found]


def _node(graph: fx.Graph, name: str) -> fx.Node:
    (found,) = (node for node in graph.nodes if node.name == name)
    return found


def test_a_norm_is_one_kernel() -> None:
    """It reads its input and its weight once, and writes the result: nothing in float32."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).bfloat16() * weight

    graph, fusion = _traced(norm, _x(), torch.ones(WIDTH, dtype=torch.bfloat16))
    assert _kernels(fusion) == [(WHOLE + 2 * WIDTH, WHOLE)]
    assert _node(graph, "mean") in fusion.absent


def test_cross_entropy_has_no_logits_in_float32() -> None:
    """They are read once for the sums, and one number a row for the loss."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels)

    graph, fusion = _traced(loss, _x(), torch.zeros(ROWS, dtype=torch.int64))
    kernels = _kernels(fusion)
    assert WHOLE <= sum(read for read, _ in kernels) < 1.1 * WHOLE
    assert sum(written for _, written in kernels) < 0.1 * WHOLE
    wide = [node for node in graph.nodes if node.op == "call_function" and _bytes(node) > WHOLE]
    assert wide
    assert all(node in fusion.absent for node in wide)


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.itemsize if isinstance(value, Tensor) else 0


def test_a_sum_over_rows_is_a_kernel_of_its_own() -> None:
    """Rows are summed in another order than they are read: gradients of norms and of biases."""

    def sums(x: Tensor) -> tuple[Tensor, ...]:
        twice = x * 2
        return twice.sum(0), twice.sum(1)

    def before(x: Tensor) -> tuple[Tensor, ...]:
        return x * 2, x.sum(0)

    def after(x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(0), x * 2

    square, line = WIDTH * WIDTH * 2, WIDTH * 2
    for function, written in ((sums, [line, line]), (before, [square, line])):
        _, fusion = _traced(function, _x(WIDTH))
        assert _kernels(fusion) == [(square, each) for each in written]
    assert _kernels(_traced(after, _x(WIDTH))[1]) == [(square, line), (square, square)]


def test_dimensions_of_sums() -> None:
    """All of them, the last by a negative number, or by a keyword: rows; the first: not."""
    square, line = WIDTH * WIDTH * 2, WIDTH * 2
    x = _x(WIDTH)
    for function, size in (
        (lambda x: (x.sum(), x * 2), 2),
        (lambda x: (x.sum(-1), x * 2), line),
        (lambda x: (x.float().var(dim=-1, correction=0).bfloat16(), x * 2), line),
    ):
        graph, fusion = _traced(function, x)
        assert _kernels(fusion) == [(square, square + size)], graph
    assert len(_kernels(_traced(lambda x: (x.sum(-2), x * 2), x)[1])) == 2


def test_what_is_made_of_sums_is_a_part_of_their_kernel() -> None:
    def logs(x: Tensor) -> tuple[Tensor, Tensor]:
        sums = x.sum(1)
        return sums, sums.exp()

    assert _kernels(_traced(logs, _x())[1]) == [(WHOLE, 2 * ROWS * 2)]


def _read_twice(value: Tensor) -> tuple[Tensor, Tensor]:
    """Read `value` in two kernels that can't be one."""
    return value.sum(0), value.sum(1)


def test_what_reads_little_is_computed_twice() -> None:
    """And what reads more than four values, or computes more than thirty ops, is written once."""

    def of_inputs(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return _read_twice(functools.reduce(torch.add, inputs))

    def of_ops(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        for _ in range(count):
            x = x + 1
        return _read_twice(x)

    def reads_and_writes(fusion: Fusion) -> tuple[int, int]:
        kernels = _kernels(fusion)
        return sum(read for read, _ in kernels), sum(write for _, write in kernels)

    sums = 2 * (ROWS + WIDTH)
    _, four = _traced(of_inputs, *(_x() for _ in range(4)))
    _, five = _traced(of_inputs, *(_x() for _ in range(5)))
    assert reads_and_writes(four) == (8 * WHOLE, sums)
    assert reads_and_writes(five) == (6 * WHOLE, WHOLE + sums)  # its kernel has one of the sums
    for count, is_written in ((30, False), (31, True)):
        _, fusion = _traced(functools.partial(of_ops, count=count), _x())
        assert reads_and_writes(fusion) == (2 * WHOLE, sums + WHOLE * is_written)


def test_what_reads_very_much_is_written_for_one_reader() -> None:
    def of_inputs(*inputs: Tensor) -> Tensor:
        return functools.reduce(torch.add, inputs).sum(0)

    _, eight = _traced(of_inputs, *(_x() for _ in range(8)))
    _, nine = _traced(of_inputs, *(_x() for _ in range(9)))
    assert _kernels(eight) == [(8 * WHOLE, 2 * WIDTH)]
    assert _kernels(nine) == [(9 * WHOLE, WHOLE), (WHOLE, 2 * WIDTH)]


def test_what_is_expanded_is_read_once() -> None:
    def added(x: Tensor, bias: Tensor) -> Tensor:
        return x + bias.expand(ROWS, WIDTH)

    _, fusion = _traced(added, _x(), torch.zeros(WIDTH, dtype=torch.bfloat16))
    assert _kernels(fusion) == [(WHOLE + 2 * WIDTH, WHOLE)]


def test_times() -> None:
    """A kernel is launched once; a measured sum has its time, and what is fused with it none."""

    def sums(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(1), x.amax(1)

    h100 = Topology.load("h100")
    graph, fusion = _traced(sums, _x(2, 2))
    assert sum(node_us(node, h100, fusion) for node in graph.nodes) < 1.01 * h100.op_us
    key = "aten.sum.dim_IntList(bf16[2, 2])"
    timed = dataclasses.replace(h100, ops={key: 7.0})
    assert node_us(_node(graph, "sum_1"), timed, fusion) == 7


def test_what_waits_for_a_product_is_not_fused_with_what_the_product_reads() -> None:
    """Else the kernel would wait for itself."""

    def around(x: Tensor, y: Tensor) -> Tensor:
        first = x.relu()
        return (first @ y) + first

    graph, fusion = _traced(around, _x(WIDTH), _x(WIDTH))
    relu, add = (_node(graph, name) for name in ("relu", "add"))
    assert fusion.parts[relu].first is relu
    assert fusion.parts[add].first is add
    assert relu not in fusion.absent


def test_two_readers_of_one_value_share_a_kernel() -> None:
    def pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x * y

    _, fusion = _traced(pair, _x(), _x())
    assert _kernels(fusion) == [(2 * WHOLE, 2 * WHOLE)]


def test_memory() -> None:
    """What is computed where it is read takes none, and what it reads stays until then."""

    def late(x: Tensor, y: Tensor) -> Tensor:
        first = (x @ y).float()  # inlined below, beside a product
        again = y @ y
        return first.exp() + again

    graph, fusion = _traced(late, _x(WIDTH), _x(WIDTH))
    nodes = list(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    product, add = _node(graph, "mm"), _node(graph, "add")
    plain = last_uses(graph, position, len(nodes), None)
    fused = last_uses(graph, position, len(nodes), fusion)
    assert position[add] == fused[product] > plain[product]
    whole = WIDTH * WIDTH * 2
    assert max(live_bytes(graph, "forward").temporaries) == 5 * whole  # mm_1, _to_copy, exp
    assert max(live_bytes(graph, "forward", fusion).temporaries) == 2 * whole  # mm, mm_1


def test_a_gather_reads_what_it_gives() -> None:
    def look_up(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table) * 2

    _, fusion = _traced(look_up, _x(1000), torch.zeros(4, dtype=torch.int64))
    assert _kernels(fusion) == [(4 * WIDTH * 2 + 4 * 8, 4 * WIDTH * 2)]
