"""Peak memory of what runs, by the storages that are alive, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """`peak`: the most bytes in storages that ops inside have seen, and that are alive, at any op.

    Storages that are resized count by what they have at the time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, output)):
            if _is_plain(tensor):
                storage = tensor.untyped_storage()
                self._alive.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self._bytes())
        return output

    def _bytes(self) -> int:
        total = 0
        for key, ref in list(self._alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._alive[key]
            else:
                total += storage.nbytes()
        return total


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta
