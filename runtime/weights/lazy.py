"""Tensors that are read later, and in part: a conversion runs first, then its result is read.

    file:  q [4, 8], k [4, 8]  --torch.cat--> qkv [8, 8], nothing read
    rank 1 of 2 has rows 4 to 8 of qkv: read_box(qkv, ((4, 8), (0, 8))) reads k, and nothing of q

transformers converts weights by functions of torch, which know nothing of ranks. They are run on
`LazyTensor`s: operators that move elements are noted (`_RULES`), and a part of the result asks for
the parts of the sources that it is made of. Any other operator is run when its result is read, on
all of its inputs.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.passes.ir.layout import split_run

Box = tuple[tuple[int, int], ...]
"""Part of a tensor: for each dim the first index, and the one after the last."""

MOST_RUNS = 256  # of elements that lie apart, each read by itself; with more, all is read


class Node(abc.ABC):
    """Tensor to be read: its `size` and `dtype`, and how a part of it is read."""

    def __init__(self, size: Sequence[int], dtype: torch.dtype) -> None:
        self.size = tuple(size)
        self.dtype = dtype

    @abc.abstractmethod
    def read(self, box: Box) -> Tensor:
        """Read the part `box`, of the box's size; it may be a view of something larger."""

    def read_into(self, into: Tensor, box: Box) -> None:
        """Read the part `box` into `into`, of its size; without room beside it, where possible."""
        into.copy_(self.read(box))

    def inputs(self) -> Sequence[Node]:
        """List what it is made of; nothing for a source."""
        return ()

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    @property
    def all_of_it(self) -> Box:
        """Box of the whole tensor."""
        return tuple((0, length) for length in self.size)


class LazyTensor(Tensor):
    """Tensor of a true size and dtype without values, on which operators are noted, and not run."""

    _node: Node

    @staticmethod
    def of(node: Node) -> LazyTensor:
        """Make the tensor that `node` reads."""
        made = _torch.tensors.without_values(LazyTensor, node.size, node.dtype)
        made._node = node
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the operator `func`.

        Raises NotImplementedError if it writes to a tensor, or gives no tensors.
        """
        rule = _RULES.get(func)
        if rule is not None:
            return rule(*args, **(kwargs or {}))
        return _computed(func, args, kwargs or {})


def node_of(tensor: Tensor) -> Node:
    """Return what reads `tensor`; a plain one is held."""
    return tensor._node if isinstance(tensor, LazyTensor) else _Held(tensor)


def read_box(tensor: Tensor, box: Box) -> Tensor:
    """Read the part `box` of `tensor`, a plain tensor of the box's size."""
    return node_of(tensor).read(box)


def read_box_into(into: Tensor, tensor: Tensor, box: Box) -> None:
    """Read the part `box` of `tensor` into `into`, whatever its dtype and device."""
    node = node_of(tensor)
    if into.dtype == node.dtype:
        node.read_into(into, box)
    else:
        into.copy_(node.read(box))


def sources_of(tensor: Tensor) -> list[Node]:
    """List what `tensor` is made of in the end, each once, in order."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        inside = node.inputs()
        if not inside:
            found[node] = None
        for each in inside:
            visit(each)

    visit(node_of(tensor))
    return list(found)


class _Held(Node):
    """Plain tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor

    def read(self, box: Box) -> Tensor:
        return part_of(self._tensor, box)


class _Joined(Node):
    """Tensors, one after the other along `dim`."""

    def __init__(self, nodes: Sequence[Node], dim: int) -> None:
        size = list(nodes[0].size)
        size[dim] = sum(node.size[dim] for node in nodes)
        super().__init__(size, nodes[0].dtype)
        self._nodes, self._dim = nodes, dim

    def inputs(self) -> Sequence[Node]:
        return self._nodes

    def read(self, box: Box) -> Tensor:
        pieces = [node.read(part) for node, part in self._parts(box)]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, self._dim) if pieces else _nothing(box, self.dtype)

    def read_into(self, into: Tensor, box: Box) -> None:
        done = 0
        for node, part in self._parts(box):
            start, stop = part[self._dim]
            node.read_into(into.narrow(self._dim, done, stop - start), part)
            done += stop - start

    def _parts(self, box: Box) -> Iterator[tuple[Node, Box]]:
        """Yield what `box` has of each tensor, in order."""
        start, stop = box[self._dim]
        first = 0
        for node in self._nodes:
            length = node.size[self._dim]
            begin, end = max(start - first, 0), min(stop - first, length)
            if begin < end:
                yield node, (*box[: self._dim], (begin, end), *box[self._dim + 1 :])
            first += length


class _Narrowed(Node):
    """Part of a tensor along one dim."""

    def __init__(self, node: Node, dim: int, start: int, length: int) -> None:
        super().__init__((*node.size[:dim], length, *node.size[dim + 1 :]), node.dtype)
        self._node, self._dim, self._start = node, dim, start

    def inputs(self) -> Sequence[Node]:
        return (self._node,)

    def read(self, box: Box) -> Tensor:
        return self._node.read(self._moved(box))

    def read_into(self, into: Tensor, box: Box) -> None:
        self._node.read_into(into, self._moved(box))

    def _moved(self, box: Box) -> Box:
        begin, end = (at + self._start for at in box[self._dim])
        return (*box[: self._dim], (begin, end), *box[self._dim + 1 :])


class _Permuted(Node):
    """Tensor with its dims in another order: its dim i is dim `dims[i]` of the other."""

    def __init__(self, node: Node, dims: Sequence[int]) -> None:
        super().__init__([node.size[dim] for dim in dims], node.dtype)
        self._node, self._dims = node, tuple(dims)

    def inputs(self) -> Sequence[Node]:
        return (self._node,)

    def read(self, box: Box) -> Tensor:
        before = [box[self._dims.index(dim)] for dim in range(len(box))]
        return self._node.read(tuple(before)).permute(self._dims)


class _Viewed(Node):
    """Tensor of the same elements in row-major order, and another size."""

    def __init__(self, node: Node, size: Sequence[int]) -> None:
        super().__init__(size, node.dtype)
        self._node = node

    def inputs(self) -> Sequence[Node]:
        return (self._node,)

    def read(self, box: Box) -> Tensor:
        runs = _runs(self.size, box)
        if runs is None or not self._node.size:
            whole = self._node.read(self._node.all_of_it)
            return part_of(whole.reshape(self.size), box)
        made = _nothing(box, self.dtype)
        self._read_runs(made.view(-1), runs)
        return made

    def read_into(self, into: Tensor, box: Box) -> None:
        runs = _runs(self.size, box)
        if runs is None or not self._node.size or not into.is_contiguous():
            into.copy_(self.read(box))
        else:
            self._read_runs(into.view(-1), runs)

    def _read_runs(self, into: Tensor, runs: list[tuple[int, int]]) -> None:
        """Read runs of elements into `into`, of one dim, one after the other."""
        done = 0
        for start, stop in runs:
            for offsets, sizes, _ in split_run(self._node.size, start, stop):
                part = tuple((at, at + of) for at, of in zip(offsets, sizes, strict=True))
                of = math.prod(sizes)
                self._node.read_into(into[done : done + of].view(sizes), part)
                done += of


class _Cast(Node):
    """Tensor in another dtype."""

    def __init__(self, node: Node, dtype: torch.dtype) -> None:
        super().__init__(node.size, dtype)
        self._node = node

    def inputs(self) -> Sequence[Node]:
        return (self._node,)

    def read(self, box: Box) -> Tensor:
        return self._node.read(box).to(self.dtype)


class _Computed(Node):
    """Output of an operator that has no rule: it is run on all of its inputs at each read."""

    def __init__(self, like: Tensor, run: Callable[[], Tensor], nodes: Sequence[Node]) -> None:
        super().__init__(like.shape, like.dtype)
        self._run, self._nodes = run, nodes

    def inputs(self) -> Sequence[Node]:
        return self._nodes

    def read(self, box: Box) -> Tensor:
        return part_of(self._run(), box)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Note an operator that has no rule. Raises as `LazyTensor.__torch_dispatch__`."""
    if _torch.ops.schema_of(func).is_mutable:
        raise NotImplementedError(f"{func} writes to a tensor that is not read yet")
    if torch.Tag.data_dependent_output in func.tags:
        raise NotImplementedError(f"{func} asks for the values of a tensor that is not read yet")
    given = args, kwargs
    nodes = [
        leaf._node for leaf in _torch.tensors.tree_leaves(given) if isinstance(leaf, LazyTensor)
    ]

    def run_on(values: Callable[[LazyTensor], Tensor]) -> Any:
        some, named = _torch.tensors.tree_map(
            lambda leaf: values(leaf) if isinstance(leaf, LazyTensor) else leaf, given
        )
        return func(*some, **named)

    shapes = run_on(lambda lazy: torch.empty(lazy._node.size, dtype=lazy.dtype, device="meta"))
    outputs, tree = _torch.tensors.tree_flatten(shapes)

    def output(index: int) -> LazyTensor:
        def run() -> Tensor:
            results = run_on(lambda lazy: lazy._node.read(lazy._node.all_of_it))
            result: Tensor = _torch.tensors.tree_leaves(results)[index]
            return result

        return LazyTensor.of(_Computed(outputs[index], run, nodes))

    return _torch.tensors.tree_unflatten([output(i) for i in range(len(outputs))], tree)


def _same(tensor: LazyTensor, **_: Any) -> LazyTensor:
    return LazyTensor.of(tensor._node)


def _to(tensor: LazyTensor, *, dtype: torch.dtype | None = None, **_: Any) -> LazyTensor:
    node = tensor._node
    return LazyTensor.of(node if dtype in (None, node.dtype) else _Cast(node, dtype or node.dtype))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> LazyTensor:
    nodes = [node_of(each) for each in tensors]
    if len({node.dtype for node in nodes}) > 1:
        dtype = functools.reduce(torch.promote_types, (node.dtype for node in nodes))
        nodes = [node if node.dtype == dtype else _Cast(node, dtype) for node in nodes]
    return LazyTensor.of(_Joined(nodes, dim % len(nodes[0].size)))


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> LazyTensor:
    dim %= len(node_of(tensors[0]).size) + 1
    return _cat([_unsqueeze(LazyTensor.of(node_of(each)), dim) for each in tensors], dim)


def _narrow(tensor: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    return LazyTensor.of(_Narrowed(tensor._node, dim, start, length))


def _split_with_sizes(
    tensor: LazyTensor, sizes: Sequence[int], dim: int = 0
) -> tuple[LazyTensor, ...]:
    dim %= len(tensor._node.size)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(_narrow(tensor, dim, start, of) for start, of in zip(starts, sizes, strict=True))


def _split(tensor: LazyTensor, size: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    length = tensor._node.size[dim]
    sizes = [min(size, length - start) for start in range(0, length, size)] or [0]
    return _split_with_sizes(tensor, sizes, dim)


def _slice(
    tensor: LazyTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    if step != 1:
        return _computed(torch.ops.aten.slice.Tensor, (tensor, dim, start, end, step), {})
    dim %= len(tensor._node.size)
    first, last, _ = slice(start, end).indices(tensor._node.size[dim])
    return _narrow(tensor, dim, first, max(last - first, 0))


def _select(tensor: LazyTensor, dim: int, index: int) -> LazyTensor:
    size = tensor._node.size
    dim %= len(size)
    part = _narrow(tensor, dim, index % size[dim], 1)
    return _view(part, (*size[:dim], *size[dim + 1 :]))


def _unbind(tensor: LazyTensor, dim: int = 0) -> tuple[LazyTensor, ...]:
    return tuple(_select(tensor, dim, index) for index in range(tensor._node.size[dim]))


def _permute(tensor: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    of = len(tensor._node.size)
    return LazyTensor.of(_Permuted(tensor._node, [dim % of for dim in dims]))


def _transpose(tensor: LazyTensor, first: int = 0, second: int = 1) -> LazyTensor:
    dims = list(range(len(tensor._node.size)))
    dims[first], dims[second] = dims[second], dims[first]
    return _permute(tensor, dims)


def _t(tensor: LazyTensor) -> LazyTensor:
    return _transpose(tensor) if len(tensor._node.size) == 2 else tensor


def _view(tensor: LazyTensor, size: Sequence[int]) -> LazyTensor:
    if -1 in size:
        rest = -math.prod(size)  # of the other dims
        size = [math.prod(tensor._node.size) // rest if of == -1 else of for of in size]
    return LazyTensor.of(_Viewed(tensor._node, size))


def _unsqueeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    size = tensor._node.size
    dim %= len(size) + 1
    return _view(tensor, (*size[:dim], 1, *size[dim:]))


def _squeeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    size = tensor._node.size
    dim %= len(size)
    return _view(tensor, (*size[:dim], *size[dim + 1 :])) if size[dim] == 1 else tensor


_aten = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {
    _aten.alias.default: _same,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _torch.ops.COPY: _to,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _t,
    _aten.view.default: _view,
    _torch.ops.VIEW_OF_COPY: _view,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _squeeze,
}
"""Operators that only move elements."""


def part_of(tensor: Tensor, box: Box) -> Tensor:
    """Return the part `box` of a plain `tensor`, a view."""
    return tensor[tuple(slice(*each) for each in box)] if box else tensor


def _nothing(box: Box, dtype: torch.dtype) -> Tensor:
    return torch.empty([stop - start for start, stop in box], dtype=dtype)


def _runs(size: tuple[int, ...], box: Box) -> list[tuple[int, int]] | None:
    """List the runs of elements, (first, one after the last), that `box` of a tensor is.

    They are in order. None if there are more than `MOST_RUNS`.

    >>> _runs((4, 6), ((1, 3), (0, 6)))
    [(6, 18)]
    >>> _runs((4, 6), ((1, 3), (2, 4)))
    [(8, 10), (14, 16)]
    """
    if any(start >= stop for start, stop in box):
        return []
    last = len(size)  # dims from here on are all in the box
    while last and box[last - 1] == (0, size[last - 1]):
        last -= 1
    if not last:
        return [(0, math.prod(size))]
    outer = box[: last - 1]
    if math.prod(stop - start for start, stop in outer) > MOST_RUNS:
        return None
    row = math.prod(size[last:])
    start, stop = box[last - 1]

    def firsts(dim: int, before: int) -> Iterator[int]:
        """Yield the index of each row of the outer dims, as if `last` were the only inner one."""
        if dim == last - 1:
            yield before
            return
        for index in range(*outer[dim]):
            yield from firsts(dim + 1, before * size[dim] + index)

    bases = (index * size[last - 1] for index in firsts(0, 0))
    return [((base + start) * row, (base + stop) * row) for base in bases]
