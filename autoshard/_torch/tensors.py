"""Tensors: fake ones, subclasses, memory, dispatch modes, and trees that have tensors as leaves.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

_T = TypeVar("_T", bound=torch.Tensor)

# FSDP2 packs by the same two.
copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat


def without_values(cls: type[_T], size: Sequence[int], dtype: torch.dtype) -> _T:
    """Make a tensor of a subclass, contiguous and on the CPU, that has no memory."""
    # The ignore: torch types it as a tensor.
    made: _T = torch.Tensor._make_wrapper_subclass(cls, tuple(size), dtype=dtype)  # type: ignore[assignment]
    return made


def storage_id(tensor: torch.Tensor) -> int:
    """Number of the storage that `tensor` is a view of, the same for all its views."""
    return int(tensor.untyped_storage()._cdata)


def without_torch_function() -> contextlib.AbstractContextManager[Any]:
    """Have subclasses of tensors be treated as plain tensors in this context."""
    context: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context
