"""Operators on tensors that are cut flat, run on DTensors that torch's operators know.

- What works element by element, as optimizers do, or sums up everything, as norms do, runs on the
  tensors' lines, and gives flat tensors and sums.
- All else runs on gathered tensors, and gives ordinary DTensors; views of these are for reading
  only (`GatheredView`).

Lines and gathered tensors: `flat_layout`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autoshard import _torch
from autoshard.runtime.comm.flat_layout import (
    FlatShard,
    cut_like,
    from_line,
    gather,
    has_empty_runs,
    is_flat,
    layout,
    line,
)


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


class Call:
    """Call of an operator, one of whose arguments is flat."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in _RESHAPES and tuple(args[0].shape) == tuple(args[1]):
            func, args = torch.ops.aten.alias.default, args[:1]
        if func in _NEW and is_flat(args[0]) and args[0].shape == tuple(args[1]):
            func, args = _NEW[func], (args[0], *args[2:])
        name = _name_of(func)
        given = _given(func, args, kwargs)
        self._is_mean, self._is_extreme = name == "mean", _is_extreme(name, given)
        self._is_of_many = name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        self._by_line = (
            self._is_of_many or _is_elementwise(func) or (name in _OF_ALL and _is_of_all(given))
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

    def _like(self, together: list[Tensor]) -> DTensor | None:
        """Choose the flat tensor as which the others are cut.

        There is none where a tensor that is not flat is written to, where the result has another
        size, or for what lines have no answer to: then all are gathered. Raises NotImplementedError
        if one of these is written to.
        """
        flats = [each for each in together if is_flat(each)]
        ordinary = [each for each in together if not is_flat(each)]
        found = None
        if not any(id(each) in self._written and each.dim() for each in ordinary):
            size = torch.broadcast_shapes(*(each.shape for each in together))
            found = next((each for each in flats if each.shape == size), None)
        if found is not None and self._fails_on_line(found):
            found = None
        for each in flats:
            if id(each) in self._written and (found is None or layout(each) != layout(found)):
                raise _no_write(self._func, each)
        return found

    def _fails_on_line(self, flat: DTensor) -> bool:
        """Tell whether the line of `flat` has no answer, or a wrong one."""
        if self._is_mean:  # of means of ranks, which are to have as many elements each
            return any(each not in (FlatShard(), Replicate()) for each in flat.placements)
        return self._is_extreme and has_empty_runs(flat)

    def _on_lines(self, args: tuple[Any, ...], likes: Sequence[DTensor | None]) -> list[Any]:
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

    def _returned(self, value: Any, like: DTensor | None) -> Any:
        """Return what the operator's `value` is to the caller."""
        if id(value) in self._originals:
            return self._originals[id(value)]
        if like is None or not isinstance(value, DTensor) or not value.dim():
            return value
        return from_line(value, like)

    def _run_on_wholes(self) -> Any:
        leaves = _torch.tensors.tree_leaves((self._args, self._kwargs))
        flats = [leaf for leaf in leaves if is_flat(leaf)]
        for flat in flats:
            if id(flat) in self._written:
                raise _no_write(self._func, flat)
        wholes = {id(flat): gather(flat) for flat in flats}
        args, kwargs = _torch.tensors.tree_map(
            lambda leaf: wholes.get(id(leaf), leaf), (self._args, self._kwargs)
        )
        return _as_views(self._func, self._func(*args, **kwargs))


def _is_of_all(given: Mapping[str, Any]) -> bool:
    """Tell whether an operator of `_OF_ALL` with arguments `given` is of all elements."""
    return given.get("dim") in (None, [], ()) and not given.get("keepdim")


def _is_extreme(name: str, given: Mapping[str, Any]) -> bool:
    """Tell whether a call of `name` is of what torch doesn't compute of no element."""
    order = given.get("ord", given.get("p"))
    return name in ("max", "min") or (isinstance(order, float) and math.isinf(order))


def _on_line(given: DTensor, like: DTensor | None) -> DTensor:
    """Return what stands for `given`: the line of it, cut like `like`; or gathered, without one."""
    if like is None:
        return gather(given) if is_flat(given) else given
    return line(cut_like(given, like)) if given.dim() else _without_partial(given)


def _without_partial(given: Any) -> Any:
    """Return `given`, summed up if it is a DTensor of which each rank has a part of a sum."""
    if not isinstance(given, DTensor) or not any(each.is_partial() for each in given.placements):
        return given
    placements = [Replicate() if each.is_partial() else each for each in given.placements]
    return given.redistribute(given.device_mesh, placements)
