"""Peak memory of what runs, by the storages that are alive, on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard import _torch
from autoshard.runtime import kernels


class PeakMemory(TorchDispatchMode):
    """`peak`: the most bytes in storages that ops inside have seen, and that are alive, at any op.

    Storages that are resized count by what they have at the time. Ops of ours are looked into:
    what is in flight counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.peak = 0
        self._alive: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "autoshard":
            kernel = getattr(kernels, func._schema.name.replace("autoshard::", "_"))
            with self:
                output = kernel(*args, **(kwargs or {}))
        else:
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


class PeakOfGraphs:
    """The same of compiled code: Dynamo runs none inside of a dispatch mode, so that graphs of the
    plain lowering, which are compiled inside `compiling()`, enter it themselves.
    """

    def __init__(self) -> None:
        self._mode = PeakMemory()
        self._is_on = False

    @property
    def peak(self) -> int:
        return self._mode.peak

    def reset(self) -> None:
        self._mode.reset()

    def __enter__(self) -> Any:
        self._is_on = True
        return self

    def __exit__(self, *error: object) -> None:
        self._is_on = False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        boxed = _torch.boxed

        def looked_into(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
            run = boxed(gm)

            def call(args: list[Any]) -> Any:
                with self._mode if self._is_on else contextlib.nullcontext():
                    return run(args)

            call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd looks for it
            return call

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_torch, "boxed", looked_into)
            yield
