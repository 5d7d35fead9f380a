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
- All else runs on the gathered tensor, and gives ordinary DTensors; views of it are for reading
  only (`GatheredView`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
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
    mesh: DeviceMesh | None,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = None,
) -> DTensor:
    """Distribute `whole` as `distribute_tensor` does, to placements with a `FlatShard` or without.

    The result may share memory with `whole`.
    src_data_rank: None, and nothing is sent: every rank has all of `whole`.
    Raises ValueError for a `FlatShard` over one of several axes that have no names.
    """
    placements = tuple(placements)
    if FlatShard() not in placements:
        return distribute_tensor(whole, mesh, placements, src_data_rank=src_data_rank)
    if isinstance(whole, DTensor) and whole.placements == placements:
        return whole
    around = distribute_tensor(whole, mesh, _gathered(placements), src_data_rank=src_data_rank)
    box = _torch.dtensor.local_tensor(around).detach()
    flat = _cut_box(box, around.device_mesh, placements, tuple(whole.shape))
    flat.requires_grad_(whole.requires_grad)
    return flat


def _cut_box(
    box: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], size: tuple[int, ...]
) -> FlatDTensor:
    """Cut `box`, what the axes other than the flat one have left of a tensor of `size`."""
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise ValueError(
            f"FlatShard() needs {mesh} to have names: init_device_mesh(..., mesh_dim_names=(...))"
        )
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
    own = mesh if mesh.ndim == 1 else mesh[(names or ())[axis]]
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
        ctx.spec = _torch.dtensor.spec_of(flat)
        return _gather(flat)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        around = grad.redistribute(ctx.spec.mesh, _gathered(ctx.spec.placements))
        return _Cut.apply(around, ctx.spec)  # type: ignore[no-untyped-call]  # torch's is untyped


class _Cut(torch.autograd.Function):
    """Cuts a gathered tensor; its gradient is gathered. The backward of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, gathered: DTensor, spec: Any) -> FlatDTensor:
        box = _torch.dtensor.local_tensor(gathered)
        return _cut_box(box, spec.mesh, spec.placements, tuple(gathered.shape))

    @staticmethod
    def backward(ctx: Any, grad: FlatDTensor) -> Any:
        return _Gather.apply(grad), None  # type: ignore[no-untyped-call]  # torch's is untyped


class _ToLocal(torch.autograd.Function):
    """Gives the local tensor of a flat tensor; its gradient becomes such a tensor again."""

    @staticmethod
    def forward(ctx: Any, flat: FlatDTensor) -> Tensor:
        ctx.spec = _torch.dtensor.spec_of(flat)
        local = _torch.dtensor.local_tensor(flat)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _FromLocal.apply(grad, ctx.spec)  # type: ignore[no-untyped-call]  # likewise


class _FromLocal(torch.autograd.Function):
    """Makes a flat tensor of a local one. The backward of `_ToLocal`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: Any) -> FlatDTensor:
        return _torch.dtensor.make(FlatDTensor, local.contiguous(), spec)

    @staticmethod
    def backward(ctx: Any, grad: FlatDTensor) -> Any:
        return grad.to_local(), None


def _line(flat: FlatDTensor) -> DTensor:
    """Return the line of `flat`: a DTensor of one dim, in the same memory."""
    local, mesh = _torch.dtensor.local_tensor(flat), flat.device_mesh
    spec = _torch.dtensor.make_spec(mesh, _line_placements(flat), (flat.numel(),), local.dtype)
    return _torch.dtensor.from_spec(local, spec)


def _line_placements(flat: FlatDTensor) -> tuple[Placement, ...]:
    return tuple(Replicate() if each == Replicate() else Shard(0) for each in flat.placements)


def _from_line(line: DTensor, like: FlatDTensor) -> FlatDTensor:
    """Make the flat tensor, placed and sized as `like`, whose line is `line`, moved if need be."""
    wanted = _line_placements(like)
    if line.placements != wanted:
        line = line.redistribute(like.device_mesh, wanted)
    spec = _torch.dtensor.make_spec(
        like.device_mesh, like.placements, tuple(like.shape), line.dtype
    )
    return _torch.dtensor.make(FlatDTensor, _torch.dtensor.local_tensor(line), spec)


class GatheredView(DTensor):
    """View of a flat tensor that was gathered for it: to be read only.

    A write would go to the gathered copy, and be lost.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run operator `func` as on a DTensor.

        Raises NotImplementedError if it would write to a view.
        """
        given = args, kwargs or {}
        written = _written_ids(func, *given)
        for each in _torch.tensors.tree_leaves(given):
            if isinstance(each, GatheredView) and id(each) in written:
                raise _no_write(func, each)
        args, kwargs = _torch.tensors.tree_map(_as_dtensor, given)
        return _as_views(func, func(*args, **kwargs))


def _as_dtensor(leaf: Any) -> Any:
    if not isinstance(leaf, GatheredView):
        return leaf
    return _torch.dtensor.from_spec(_torch.dtensor.local_tensor(leaf), _torch.dtensor.spec_of(leaf))


def _as_views(func: Any, result: Any) -> Any:
    """Return `result` of `func`, which ran on what was gathered, as views if it is views of it."""
    returns = _torch.ops.schema_of(func).returns
    if not any(each.alias_info is not None and not each.alias_info.is_write for each in returns):
        return result
    return _torch.tensors.tree_map(
        lambda leaf: (
            _torch.dtensor.make(
                GatheredView, _torch.dtensor.local_tensor(leaf), _torch.dtensor.spec_of(leaf)
            )
            if isinstance(leaf, DTensor)
            else leaf
        ),
        result,
    )


def _no_write(func: Any, tensor: Tensor) -> NotImplementedError:
    """Make the error of `func`, which would write to `tensor`, to raise."""
    return NotImplementedError(
        f"{func} would write to a parameter, or a view of one, of size {list(tensor.shape)}, of "
        "which each rank has a run of elements (FlatShard()): write to all of it element by "
        "element, or in full_params(), or shard it with shard_placement_fn=None"
    )


_ELEMENTWISE = frozenset(
    {
        *("alias", "clone", "detach", "lift_fresh", "_to_copy", "_pin_memory", "is_pinned"),
        *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
        *("bernoulli_", "copy_", "exponential_", "fill_", "normal_", "random_", "uniform_"),
        *("cauchy_", "equal", "geometric_", "log_normal_", "masked_fill_", "zero_"),
    }
)
"""Operators that work element by element, other than those which torch tags as such."""

_OF_ALL = frozenset(
    {"all", "any", "linalg_vector_norm", "max", "mean", "min", "norm", "prod", "sum"}
)
"""Operators that sum all elements up, if they are given no dims."""

_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.expand.default)
"""Operators of `view_as` and `expand_as`, by which torch and others ask a tensor for its graph."""

_NEW = {
    torch.ops.aten.new_empty.default: torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default: torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_ones.default: torch.ops.aten.ones_like.default,
    torch.ops.aten.new_full.default: torch.ops.aten.full_like.default,
}
"""Operators that make a tensor of a size, and those that do so for a tensor's own."""


@functools.cache
def _is_elementwise(func: Any) -> bool:
    """Tell whether `func` works element by element.

    torch tags some operators as pointwise, and not their forms that write to their first argument.
    """
    name = _name_of(func)
    if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE:
        return True
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    forms = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    return any(torch.Tag.pointwise in each.tags for each in forms)


def _name_of(func: Any) -> str:
    name: str = _torch.ops.schema_of(func).name
    return name.removeprefix("aten::")


def _given(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `func` by name."""
    names = [argument.name for argument in _torch.ops.schema_of(func).arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _written_ids(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int]:
    """Return the ids of what a call of `func` writes to."""
    given = _given(func, args, kwargs)
    written = [
        given.get(each.name)
        for each in _torch.ops.schema_of(func).arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return set(map(id, _torch.tensors.tree_leaves(written)))


class _Call:
    """Call of an operator, one of whose arguments is flat."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in _RESHAPES and tuple(args[0].shape) == tuple(args[1]):
            func, args = torch.ops.aten.alias.default, args[:1]
        if func in _NEW and isinstance(args[0], FlatDTensor) and args[0].shape == tuple(args[1]):
            func, args = _NEW[func], (args[0], *args[2:])
        name = _name_of(func)
        self._is_of_many = name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        self._by_line = (
            self._is_of_many
            or _is_elementwise(func)
            or (name in _OF_ALL and _sums_lines_up(name, _given(func, args, kwargs)))
        )
        if self._by_line:
            kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        self._func, self._args, self._kwargs = func, args, kwargs
        self._written = _written_ids(func, args, kwargs)
        self._originals: dict[int, Any] = {}  # arguments, by the id of what stands for them

    def run(self) -> Any:
        """Run the operator; return what it returns, flat where an argument was and nothing moved.

        Raises NotImplementedError as `__torch_dispatch__` does.
        """
        if not self._by_line:
            return self._run_on_wholes()
        likes = [self._like(together) for together in self._together()]
        args, kwargs = self._on_lines(self._args, likes), self._kwargs
        kwargs = {key: self._on_lines((value,), likes)[0] for key, value in kwargs.items()}
        result = self._func(*args, **kwargs)
        if isinstance(result, (list, tuple)):
            of_each = likes if self._is_of_many else likes * len(result)
            return type(result)(map(self._returned, result, of_each))
        return self._returned(result, likes[0] if likes else None)

    def _together(self) -> list[list[Tensor]]:
        """List the tensors that belong together: those at one place of lists, or else all."""
        everything = (*self._args, *self._kwargs.values())
        if not self._is_of_many:
            leaves = _torch.tensors.tree_leaves(everything)
            return [[leaf for leaf in leaves if isinstance(leaf, Tensor)]]
        lists = [each for each in everything if isinstance(each, (list, tuple))]
        longest = max(map(len, lists), default=0)
        return [
            [each[at] for each in lists if at < len(each) and isinstance(each[at], Tensor)]
            for at in range(longest)
        ]

    def _like(self, together: list[Tensor]) -> FlatDTensor | None:
        """Choose the flat tensor as which the others are cut.

        There is none where a tensor that is not flat is written to, or where the result has another
        size: then all are gathered. Raises NotImplementedError if one of these is written to.
        """
        flats = [each for each in together if isinstance(each, FlatDTensor)]
        ordinary = [each for each in together if not isinstance(each, FlatDTensor)]
        found = None
        if not any(id(each) in self._written and each.dim() for each in ordinary):
            size = torch.broadcast_shapes(*(each.shape for each in together))
            found = next((each for each in flats if each.shape == size), None)
        for each in flats:
            if id(each) in self._written and (found is None or _layout(each) != _layout(found)):
                raise _no_write(self._func, each)
        return found

    def _on_lines(self, args: tuple[Any, ...], likes: Sequence[FlatDTensor | None]) -> list[Any]:
        """Return `args` with lines, or gathered tensors, for what belongs to each of `likes`."""

        def replaced(leaf: Any, at: int) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            found = _on_line(leaf, likes[at])
            self._originals[id(found)] = leaf
            return found

        if not self._is_of_many:
            return [_torch.tensors.tree_map(lambda leaf: replaced(leaf, 0), arg) for arg in args]
        return [
            [replaced(each, at) for at, each in enumerate(arg)]
            if isinstance(arg, (list, tuple))
            else _without_partial(arg)
            for arg in args
        ]

    def _returned(self, value: Any, like: FlatDTensor | None) -> Any:
        """Return what the operator's `value` is to the caller."""
        if id(value) in self._originals:
            return self._originals[id(value)]
        if like is None or not isinstance(value, DTensor) or not value.dim():
            return value
        return _from_line(value, like)

    def _run_on_wholes(self) -> Any:
        leaves = _torch.tensors.tree_leaves((self._args, self._kwargs))
        flats = [leaf for leaf in leaves if isinstance(leaf, FlatDTensor)]
        for flat in flats:
            if id(flat) in self._written:
                raise _no_write(self._func, flat)
        wholes = {id(flat): _gather(flat) for flat in flats}
        args, kwargs = _torch.tensors.tree_map(
            lambda leaf: wholes.get(id(leaf), leaf), (self._args, self._kwargs)
        )
        return _as_views(self._func, self._func(*args, **kwargs))


def _sums_lines_up(name: str, given: Mapping[str, Any]) -> bool:
    """Tell whether a call of `name`, of `_OF_ALL`, is of all elements, and can be of a line's.

    Means of lines need ranks to have as many elements each, and extremes need some on each.
    """
    flat = given["self"]
    if given.get("dim") not in (None, [], ()) or given.get("keepdim"):
        return False
    others = [each for each in flat.placements if each not in (FlatShard(), Replicate())]
    world, _ = flat._place()
    is_empty_somewhere = first_row(math.prod(_box(flat)[0]), world, world - 1) == math.prod(
        _box(flat)[0]
    )
    return not (others and name == "mean") and not is_empty_somewhere


def _on_line(given: DTensor, like: FlatDTensor | None) -> DTensor:
    """Return what stands for `given`: the line of it, cut like `like`; or gathered, without one."""
    if like is None:
        return _gather(given) if isinstance(given, FlatDTensor) else given
    return _line(_cut_like(given, like)) if given.dim() else _without_partial(given)


def _without_partial(given: Any) -> Any:
    """Return `given`, summed up if it is a DTensor of which each rank has a part of a sum."""
    if not isinstance(given, DTensor) or not any(each.is_partial() for each in given.placements):
        return given
    placements = [Replicate() if each.is_partial() else each for each in given.placements]
    return given.redistribute(given.device_mesh, placements)


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
_torch.dtensor.distribute_also(FlatShard, cut)
