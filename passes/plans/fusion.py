"""Kernels that Inductor makes of pointwise ops and reductions: what they read, write and keep.

    inlined   a pointwise op is computed where it is read, once for each kernel that reads it, if
              what it reads is little: it is never in memory
    realized  the others, reductions, and what an op that is no such kernel reads: a kernel each,
              but for those that are fused
    fused     realized ops of one iteration space, if one reads the other or both read the same, and
              nothing between them waits for one of the two: one kernel, which reads each input once
              and writes what others read

So a norm is one kernel, as is a softmax over logits that nothing else reads.

Source: Inductor's `ir.py` (`StorageBox.should_realize_on_reuse`, `realize_hint`) and `scheduler.py`
(`can_fuse`), by what they do; thresholds are the defaults of `torch._inductor.config`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autoshard import _torch
from autoshard.passes.plans.values import (
    arguments_of,
    base_of,
    bytes_of,
    is_view,
    name_of,
    numel_of,
    owner_of,
    readers_of,
    tensors_of,
)

MOST_READS = 4  # of an inlined op with several readers: `realize_reads_threshold`
MOST_READS_AT_ALL = 8  # of any inlined op: `realize_acc_reads_threshold`
MOST_OPS = 30  # that an inlined op with several readers computes: `realize_opcount_threshold`

REDUCTIONS = {
    *("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "any", "all"),
    *("var", "var_mean", "std"),
}
INDEXED = {"gather", "embedding", "index", "index_select"}
"""Ops that read as many elements of their first tensor as they give."""

MOVING = {
    *("cat", "constant_pad_nd", "slice_scatter", "select_scatter", "_to_copy", "copy"),
    *("full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "arange", "scalar_tensor"),
}
"""Further ops that are computed where they are read, of which torch does not say so."""

_FUSIBLE = REDUCTIONS | INDEXED | MOVING


@dataclass(frozen=True)
class Part:
    """Share of a realized op in its kernel.

    first: first op of the kernel.
    read: bytes that no earlier op of the kernel reads.
    written: bytes of its result, if others read it.
    """

    first: fx.Node
    read: int
    written: int


@dataclass(frozen=True)
class Fusion:
    """Kernels of a graph.

    parts: of each realized op.
    absent: ops whose results are never in memory: inlined, or read by their own kernel alone.
    sources: for each realized op, what it reads from memory, or from its own kernel.
    """

    parts: Mapping[fx.Node, Part]
    absent: frozenset[fx.Node]
    sources: Mapping[fx.Node, tuple[fx.Node, ...]]


@dataclass(frozen=True)
class _Loop:
    """Iteration space of an op.

    numel: of the loop over all that is read. rows: results of a reduction, 0 for a pointwise op.
    is_by_rows: whether what is reduced is the last dimensions of what is read.
    """

    numel: int
    rows: int = 0
    is_by_rows: bool = True


@dataclass
class _Kernel:
    """Kernel that is being made.

    first: its first op.
    level: larger than that of all kernels, and of other ops, that it waits for.
    numel, rows, is_by_rows: those of its ops; rows is 0 without a reduction.
    reads, makes: values.
    """

    first: fx.Node
    level: int
    numel: int
    rows: int = 0
    is_by_rows: bool = True
    reads: set[fx.Node] = field(default_factory=set)
    makes: set[fx.Node] = field(default_factory=set)

    def has(self, value: fx.Node) -> bool:
        """Tell whether this kernel reads or makes `value` already."""
        return value in self.reads or value in self.makes

    def takes(self, loop: _Loop) -> bool:
        """Tell whether an op with that iteration space may become a part of it."""
        if loop.rows and self.rows:
            return loop == _Loop(self.numel, self.rows, self.is_by_rows)
        if loop.rows:
            return loop.is_by_rows and loop.numel == self.numel
        if self.rows and loop.numel == self.rows:
            return True
        return self.is_by_rows and loop.numel == self.numel


def fuse(graph: fx.Graph, handed_on: Collection[fx.Node] = ()) -> Fusion:
    """Tell which kernels Inductor makes of the pointwise ops and reductions of `graph`.

    handed_on: nodes whose results are in memory, as a part of `graph` will hand them on.
    """
    return _Fuser(graph, handed_on).result()


class _Fuser:
    """Kernels of a graph, made op by op in order.

    inlined: for each inlined op, bytes that it reads of each value in memory, and how many ops it
        computes.
    sources: for each realized op, bytes that it reads of each value in memory, or of its kernel.
    new_bytes: those of them that no earlier op of its kernel reads.
    levels: of ops that are neither.
    readers: kernels that read a value. consumers: ops that read it, inlined ones left out.
    """

    def __init__(self, graph: fx.Graph, handed_on: Collection[fx.Node]) -> None:
        """Make the kernels of `graph`."""
        self.inlined: dict[fx.Node, tuple[dict[fx.Node, float], int]] = {}
        self.sources: dict[fx.Node, dict[fx.Node, float]] = {}
        self.new_bytes: dict[fx.Node, float] = {}
        self.kernels: dict[fx.Node, _Kernel] = {}
        self.levels: dict[fx.Node, int] = {}
        self.readers: dict[fx.Node, list[_Kernel]] = {}
        self.consumers: dict[fx.Node, set[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "output" or not is_fusible(node):
                if not is_view(node):
                    self._wait(node)
                continue
            if is_view(node):
                continue
            sources, ops = self._read_by(node)
            if node in handed_on or _is_realized(node, len(sources), ops):
                self._realize(node, sources)
            else:
                self.inlined[node] = (sources, ops)

    def _wait(self, node: fx.Node) -> None:
        """Note what an op reads that is no kernel of Inductor's, and how far down it is."""
        bases = {base_of(each) for each in node.all_input_nodes}
        self.levels[node] = 1 + max(map(self._level, bases), default=0)
        for base in bases:
            self.consumers.setdefault(base, set()).add(node)

    def _level(self, owner: fx.Node) -> int:
        base = base_of(owner)
        kernel = self.kernels.get(base)
        return self.levels[base] if kernel is None else kernel.level

    def _read_by(self, node: fx.Node) -> tuple[dict[fx.Node, float], int]:
        """Bytes that `node` reads of each value in memory, through what is inlined; and its ops."""
        sources: dict[fx.Node, float] = {}
        ops = 1
        for number, each in enumerate(node.all_input_nodes):
            base, wanted = base_of(each), bytes_of(each)
            if number == 0 and name_of(node) in INDEXED:
                wanted = min(wanted, bytes_of(node))
            whole = bytes_of(base)
            if base not in self.inlined:
                owner = base if base in self.kernels else owner_of(each)
                sources[owner] = max(sources.get(owner, 0.0), min(wanted, whole))
                continue
            inner, more = self.inlined[base]
            ops += more
            share = min(1.0, wanted / whole) if whole else 0.0
            for source, size in inner.items():
                sources[source] = max(sources.get(source, 0.0), share * size)
        return sources, ops

    def _realize(self, node: fx.Node, sources: dict[fx.Node, float]) -> None:
        """Make `node` a part of the kernel that it shares most bytes with, or of one of its own."""
        loop = _loop_of(node)
        before = [self.kernels[each] for each in sources if each in self.kernels]
        others = [each for each in sources if each not in self.kernels]
        behind = 1 + max(map(self._level, others), default=-1)
        kernel = self._best(loop, sources, before, behind)
        if kernel is None:
            level = max([behind, *(each.level + 1 for each in before)])
            kernel = _Kernel(node, level, loop.numel)
        if loop.rows:
            kernel.rows, kernel.is_by_rows = loop.rows, loop.is_by_rows
        new = [each for each in sources if not kernel.has(each)]
        for each in new:
            self.readers.setdefault(each, []).append(kernel)
        for each in sources:
            self.consumers.setdefault(each, set()).add(node)
        kernel.reads.update(new)
        kernel.makes.add(node)
        self.kernels[node], self.sources[node] = kernel, sources
        self.new_bytes[node] = sum(sources[each] for each in new)

    def _best(
        self, loop: _Loop, sources: Mapping[fx.Node, float], before: list[_Kernel], behind: int
    ) -> _Kernel | None:
        """Kernel that can take an op and shares most bytes with it; None if there is none.

        before: kernels that make some of `sources`. behind: the least level, by other ops.
        """
        best, most = None, -1.0
        near = [*before, *(kernel for each in sources for kernel in self.readers.get(each, ()))]
        for kernel in near:
            waits = any(each is not kernel and each.level >= kernel.level for each in before)
            if waits or kernel.level < behind or not kernel.takes(loop):
                continue
            shared = sum(size for each, size in sources.items() if kernel.has(each))
            if shared > most:
                best, most = kernel, shared
        return best

    def result(self) -> Fusion:
        """Return the kernels."""
        parts, absent = {}, set(self.inlined)
        for node, kernel in self.kernels.items():
            readers = self.consumers.get(node, ())
            if all(self.kernels.get(each) is kernel for each in readers):
                absent.add(node)
            written = 0 if node in absent else bytes_of(node)
            parts[node] = Part(kernel.first, round(self.new_bytes[node]), written)
        sources = {node: tuple(each) for node, each in self.sources.items()}
        return Fusion(parts, frozenset(absent), sources)


def is_fusible(node: fx.Node) -> bool:
    """Tell whether Inductor makes a kernel of its own of `node`, or a part of one.

    That are pointwise ops, reductions, what only moves or makes values, and views of all these.
    """
    return is_pointwise(node) or name_of(base_of(node)) in _FUSIBLE


def is_pointwise(node: fx.Node) -> bool:
    """Tell whether `node` is a pointwise op, or a view of one."""
    return _is_pointwise_op(base_of(node).target)


@functools.cache
def _is_pointwise_op(target: object) -> bool:
    return isinstance(target, _torch.ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target.namespace == "prims"
    )


def _is_realized(node: fx.Node, reads: int, ops: int) -> bool:
    """Tell whether the result of `node` gets memory, or a kernel's registers, at least.

    reads: how many values in memory it reads. ops: that are computed for it.
    """
    if name_of(node) in REDUCTIONS or reads > MOST_READS_AT_ALL:
        return True
    readers = list(readers_of(node))
    if not all(map(is_fusible, readers)):
        return True
    return len(readers) > 1 and (reads > MOST_READS or ops > MOST_OPS)


def _loop_of(node: fx.Node) -> _Loop:
    """Iteration space of a pointwise op, or of a reduction."""
    numel = max(map(numel_of, tensors_of(node)), default=0)
    if name_of(node) not in REDUCTIONS:
        return _Loop(numel)
    whole = tensors_of(node.all_input_nodes[0])[0]
    rank = whole.dim()
    reduced = {dim % rank for dim in _dims_of(node) or range(rank)}
    return _Loop(numel_of(whole), numel, reduced == set(range(rank - len(reduced), rank)))


def _dims_of(node: fx.Node) -> Sequence[int]:
    """Dimensions that a reduction reduces; none for all of them."""
    dims = arguments_of(node.target, node.args, node.kwargs).get("dim")
    if dims is None:
        return ()
    return (dims,) if isinstance(dims, int) else tuple(dims)
