"""Flat placements: DTensors that are cut into equal runs of elements, not of rows.

A parameter of 8 experts on 64 ranks has too few rows for all of them, and one of 4,096 rows on
3,000 ranks is sent with twice as many. Cut through its rows, it is shared evenly by any number of
ranks, and what a gather receives is still the parameter, without a copy:

    [3, 4] over 2 ranks:   0 0 0 0      [3, 4] over 5 ranks:   0 0 0 1
                           0 0 1 1                             1 1 2 2
                           1 1 1 1                             2 3 3 3

To everybody else it is a DTensor of its true size. torch's operators know no such placement, so
`FlatDTensor` runs each of them on DTensors that they know:

- What works element by element, as optimizers do, or sums up everything, as norms do, runs on the
  tensor's *line*: the same memory as a DTensor of one dim, which `Shard(0)` cuts in just this way.
- All else runs on the gathered tensor, and gives ordinary DTensors. As with torch's own, a view of
  such a result is none of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from autoshard import _torch
from autoshard.passes.ir.layout import FLAT, Member, first_row, rows_of, split_run


class FlatShard(Placement):
    """Placement over a mesh axis on whose ranks lie equal runs of a tensor's elements.

    Elements are taken in row-major order, ceil(elements / ranks) a rank; the last ranks may have
    fewer, or none. The local tensor has one dim. At most one axis of a mesh may have it.
    """

    def __init__(self) -> None:
        super().__init__()
        _torch.dtensor.distribute_also(FlatShard, cut)

    def __eq__(self, other: object) -> bool:
        return type(other) is FlatShard

    def __hash__(self) -> int:
        return hash(FlatShard)

    def __repr__(self) -> str:
        return "FlatShard()"

    def __str__(self) -> str:
        return "F"

    def __reduce__(self) -> tuple[type[FlatShard], tuple[()]]:
        return FlatShard, ()


class FlatDTensor(DTensor):
    """DTensor one of whose placements is a `FlatShard`; see the module for how operators run."""

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], rest: Any, size: torch.Size, stride: tuple[int, ...]
    ) -> FlatDTensor:
        """Make the tensor anew from what `__tensor_flatten__` gave."""
        made = DTensor.__tensor_unflatten__(inner, rest, size, stride)
        spec, local = _torch.dtensor.spec_of(made), _torch.dtensor.local_tensor(made)
        return _torch.dtensor.make(FlatDTensor, local, spec, requires_grad=made.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run operator `func` on lines or on gathered tensors; see the module.

        Raises NotImplementedError if it would write to a flat tensor, and not element by element.
        """
        return _Call(func, args, kwargs or {}).run()

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **keywords: Any,
    ) -> DTensor:
        """Redistribute as a DTensor does; to what is not flat, by gathering all of it."""
        if placements is not None and tuple(placements) == self.placements:
            return self
        gathered: DTensor = _Gather.apply(self)  # type: ignore[no-untyped-call]  # torch's is untyped
        return gathered.redistribute(device_mesh, placements, **keywords)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's run of elements, 1-D, to which gradients flow back.

        Raises ValueError for `grad_placements` other than its own placements.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise ValueError(
                f"to_local(grad_placements={tuple(grad_placements)}) of a tensor that is placed as "
                f"{self.placements}: its gradient can only be placed alike"
            )
        if not torch.is_grad_enabled():
            return _torch.dtensor.local_tensor(self)
        local: Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]  # likewise
        return local

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """List what this rank writes to a checkpoint, for torch's planner: a box at a time."""
        properties = TensorProperties.create_from_tensor(_torch.dtensor.local_tensor(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List the boxes of the tensor that this rank's run is made of, for torch's checkpoints."""
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes, _ in _boxes(self)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the part of the local tensor that is the box at `index.offset`, as a view."""
        local = _torch.dtensor.local_tensor(self)
        for offsets, sizes, start in _boxes(self):
            if index.offset is None or tuple(index.offset) == offsets:
                return local[start : start + math.prod(sizes)].view(sizes)
        raise ValueError(f"{index} is no part of the tensor that rank {self._place()[1]} has")

    def _place(self) -> tuple[int, int]:
        """Number of ranks that share the tensor, or this rank's box of it, and this rank's."""
        axis = self.placements.index(FlatShard())
        return self.device_mesh.size(axis), self.device_mesh.get_local_rank(axis)


def cut(
    whole: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = None,
) -> DTensor:
    """Distribute `whole` as `distribute_tensor` does, to placements with a `FlatShard` or without.

    The result may share memory with `whole`.
    src_data_rank: None, and nothing is sent: every rank has all of `whole`.
    """
    placements = tuple(placements)
    if FlatShard() not in placements:
        return distribute_tensor(whole, mesh, placements, src_data_rank=src_data_rank)
    if isinstance(whole, DTensor) and whole.placements == placements:
        return whole
    gathered = _gathered(placements)
    around = distribute_tensor(whole, mesh, gathered, src_data_rank=src_data_rank)
    box = _torch.dtensor.local_tensor(around).detach()
    flat = _cut_box(box, mesh, placements, tuple(whole.shape))
    flat.requires_grad_(whole.requires_grad)
    return flat


def _cut_box(
    box: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], size: tuple[int, ...]
) -> FlatDTensor:
    """Cut `box`, what the axes other than the flat one have left of a tensor of `size`."""
    axis = list(placements).index(FlatShard())
    member = Member(box.dtype, tuple(box.shape), FLAT)
    run = rows_of(box, member, mesh.size(axis), mesh.get_local_rank(axis))
    return _torch.dtensor.make(
        FlatDTensor, run, _torch.dtensor.make_spec(mesh, placements, size, box.dtype)
    )


def _gathered(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements of the tensor once it was gathered over the flat axis."""
    return tuple(Replicate() if each == FlatShard() else each for each in placements)


def _gather(flat: FlatDTensor) -> DTensor:
    """Gather `flat` to an ordinary DTensor, replicated over the flat axis; all ranks join in."""
    mesh, axis = flat.device_mesh, flat.placements.index(FlatShard())
    names = mesh.mesh_dim_names
    own = mesh if mesh.ndim == 1 or names is None else mesh[names[axis]]
    local = _torch.dtensor.local_tensor(flat)
    box = _box(flat)[0]
    spec = _torch.dtensor.make_spec(own, (Shard(0),), (math.prod(box),), local.dtype)
    whole = _torch.dtensor.from_spec(local, spec).full_tensor().view(box)
    placements = _gathered(flat.placements)
    return _torch.dtensor.from_spec(
        whole, _torch.dtensor.make_spec(mesh, placements, tuple(flat.shape), local.dtype)
    )


def _cut_like(tensor: DTensor, like: FlatDTensor) -> FlatDTensor:
    """Cut `tensor`, which can be expanded to the size of `like`, as `like` is cut."""
    if isinstance(tensor, FlatDTensor) and _layout(tensor) == _layout(like):
        return tensor
    if tensor.shape != like.shape:
        expanded = tensor.expand(like.shape)
        assert isinstance(expanded, DTensor)
        tensor = expanded
    around = tensor.redistribute(like.device_mesh, _gathered(like.placements))
    box = _torch.dtensor.local_tensor(around)
    return _cut_box(box, like.device_mesh, like.placements, tuple(like.shape))


def _layout(flat: FlatDTensor) -> tuple[Any, ...]:
    return flat.device_mesh, flat.placements, flat.shape


class _Gather(torch.autograd.Function):
    """Gathers a flat tensor; its gradient is cut as it is."""

    @staticmethod
    def forward(ctx: Any, flat: FlatDTensor) -> DTensor:
        ctx.like = _torch.dtensor.spec_of(flat)
        return _gather(flat)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> FlatDTensor:
        spec = ctx.like
        around = grad.redistribute(spec.mesh, _gathered(spec.placements))
        box = _torch.dtensor.local_tensor(around)
        return _cut_box(box, spec.mesh, spec.placements, tuple(grad.shape))


class _ToLocal(torch.autograd.Function):
    """Gives the local tensor of a flat tensor; its gradient becomes such a tensor again."""

    @staticmethod
    def forward(ctx: Any, flat: FlatDTensor) -> Tensor:
        ctx.spec = _torch.dtensor.spec_of(flat)
        local = _torch.dtensor.local_tensor(flat)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return _torch.dtensor.make(FlatDTensor, grad, ctx.spec)


def _line(flat: FlatDTensor) -> DTensor:
    """Return the line of `flat`: a DTensor of one dim, in the same memory."""
    placements = tuple(
        Replicate() if isinstance(each, Replicate) else Shard(0) for each in flat.placements
    )
    local = _torch.dtensor.local_tensor(flat)
    size = (flat.numel(),)
    spec = _torch.dtensor.make_spec(flat.device_mesh, placements, size, local.dtype)
    return _torch.dtensor.from_spec(local, spec)


def _from_line(line: DTensor, like: FlatDTensor) -> FlatDTensor:
    """Make the flat tensor, placed and sized as `like`, whose line is `line`."""
    spec = _torch.dtensor.make_spec(
        like.device_mesh, like.placements, tuple(like.shape), line.dtype
    )
    return _torch.dtensor.make(FlatDTensor, _torch.dtensor.local_tensor(line), spec)


_ELEMENTWISE = frozenset(
    {
        *("alias", "clone", "detach", "lift_fresh", "_to_copy", "_pin_memory", "is_pinned"),
        *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
        *("bernoulli_", "copy_", "exponential_", "fill_", "normal_", "random_", "uniform_"),
        *("equal", "zero_"),
    }
)
"""Operators that work element by element, other than those which torch tags as such."""

_OF_ALL = frozenset(
    {"all", "any", "linalg_vector_norm", "max", "mean", "min", "norm", "prod", "sum"}
)
"""Operators that sum all elements up, if they are given no dims."""


_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.expand.default)
"""Operators of `view_as` and `expand_as`, by which torch and others ask a tensor for its graph."""


class _Call:
    """Call of an operator, one of whose arguments is flat."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in _RESHAPES and tuple(args[0].shape) == tuple(args[1]):
            func, args = torch.ops.aten.alias.default, args[:1]
        self._func, self._args, self._kwargs = func, args, kwargs
        schema = _torch.ops.schema_of(func)
        name = schema.name.removeprefix("aten::")
        names = [argument.name for argument in schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._is_of_many = name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        self._by_line = (
            self._is_of_many
            or torch.Tag.pointwise in func.tags
            or name in _ELEMENTWISE
            or (name in _OF_ALL and given.get("dim") in (None, [], ()) and not given.get("keepdim"))
        )
        written = [given.get(each.name) for each in schema.arguments if _is_written(each)]
        self._written = set(map(id, _torch.tensors.tree_leaves(written)))

    def run(self) -> Any:
        """Run the operator; return what it returns, flat where an argument was and nothing moved.

        Raises NotImplementedError as `__torch_dispatch__` does.
        """
        return self._run_on_lines() if self._by_line else self._run_on_wholes()

    def _run_on_lines(self) -> Any:
        """Run on lines: arguments at the same place of lists belong together, else all of them."""
        lines: dict[int, Any] = {}  # by id of the argument
        likes = self._likes()
        for number, arguments in self._together():
            like = likes.get(number)
            for each in arguments:
                lines[id(each)] = self._replaced(each, like)
        args, kwargs = _torch.tensors.tree_map(
            lambda leaf: lines.get(id(leaf), leaf), (self._args, self._kwargs)
        )
        result = self._func(*args, **kwargs)
        originals = {
            id(lines[id(leaf)]): leaf
            for leaf in _torch.tensors.tree_leaves((self._args, self._kwargs))
            if id(leaf) in lines
        }
        if isinstance(result, (list, tuple)):
            return type(result)(
                self._returned(each, originals, likes.get(number if self._is_of_many else 0))
                for number, each in enumerate(result)
            )
        return self._returned(result, originals, likes.get(0))

    def _together(self) -> list[tuple[int, list[Tensor]]]:
        """List the tensors that belong together, each group with its number."""
        everything = (*self._args, *self._kwargs.values())
        if not self._is_of_many:
            leaves = _torch.tensors.tree_leaves(everything)
            return [(0, [leaf for leaf in leaves if isinstance(leaf, Tensor)])]
        lists = [each for each in everything if isinstance(each, (list, tuple))]
        longest = max(map(len, lists), default=0)
        return [
            (at, [each[at] for each in lists if at < len(each) and isinstance(each[at], Tensor)])
            for at in range(longest)
        ]

    def _likes(self) -> dict[int, FlatDTensor]:
        """Choose for each group the flat tensor as which the others are cut, by its number.

        There is none where a tensor that is not flat is written to, or where the result has another
        size: then all are gathered.
        """
        likes = {}
        for number, together in self._together():
            flats = [each for each in together if isinstance(each, FlatDTensor)]
            ordinary = [each for each in together if not isinstance(each, FlatDTensor)]
            if any(id(each) in self._written and each.dim() for each in ordinary):
                continue
            size = torch.broadcast_shapes(*(each.shape for each in together))
            found = next((each for each in flats if each.shape == size), None)
            if found is not None:
                likes[number] = found
        return likes

    def _replaced(self, given: Tensor, like: FlatDTensor | None) -> Tensor:
        """Return what stands for `given`: the line of it, cut like `like`; or gathered."""
        if like is None:
            return _gather(given) if isinstance(given, FlatDTensor) else given
        if not isinstance(given, DTensor) or not given.dim():
            return given
        return _line(_cut_like(given, like))

    def _returned(self, value: Any, originals: dict[int, Any], like: FlatDTensor | None) -> Any:
        """Return what the operator's `value` is to the caller."""
        if id(value) in originals:
            return originals[id(value)]
        if like is None or not isinstance(value, DTensor) or not value.dim():
            return value
        return _from_line(value, like)

    def _run_on_wholes(self) -> Any:
        leaves = _torch.tensors.tree_leaves((self._args, self._kwargs))
        flats = [leaf for leaf in leaves if isinstance(leaf, FlatDTensor)]
        if any(id(flat) in self._written for flat in flats):
            raise NotImplementedError(
                f"{self._func} would write to a tensor of size {list(flats[0].shape)} placed as "
                f"{flats[0].placements}, of which each rank has a run of elements: write to it "
                "element by element, or in full_params()"
            )
        wholes = {id(flat): _gather(flat) for flat in flats}
        args, kwargs = _torch.tensors.tree_map(
            lambda leaf: wholes.get(id(leaf), leaf), (self._args, self._kwargs)
        )
        return self._func(*args, **kwargs)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _box(flat: FlatDTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and offset of what the axes other than the flat one have left of `flat` here."""
    return _torch.dtensor.local_box(tuple(flat.shape), flat.device_mesh, _gathered(flat.placements))


def _boxes(flat: FlatDTensor) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split this rank's run of `flat` into boxes: (offsets, sizes, where it begins in the run)."""
    size, corner = _box(flat)
    world, rank = flat._place()
    numel = math.prod(size)
    start, end = first_row(numel, world, rank), first_row(numel, world, rank + 1)
    return [
        (tuple(map(sum, zip(corner, offsets, strict=True))), sizes, first - start)
        for offsets, sizes, first in split_run(size, start, end)
    ]


torch.serialization.add_safe_globals([FlatDTensor, FlatShard])
