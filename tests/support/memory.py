"""Peak memory of what runs, by the storages that are alive, on any device."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard import _torch
from autoshard.runtime.comm import flights, observed
from autoshard.runtime.compiled import kernels


class PeakMemory(TorchDispatchMode):
    """`peak`: the most bytes in storages that ops inside have seen, and that are alive, at any op.

    Storages that are resized count by what they have at the time. Ops of ours are looked into:
    what is in flight counts. Saved values on the host don't, though it be the device.

    at_peak: bytes of each storage at that time, by its number; roles: what ops of ours tell of
    storages, "gathered", "unreduced", "gradients" or "host".
    counts_backend: whether what gloo allocates for itself counts: a copy of all that it reduces,
        seen while compiled code waits for it.
    """

    supports_higher_order_operators = True  # of what is random, computed again

    def __init__(self, *, counts_backend: bool = True) -> None:
        super().__init__()
        self._looking = contextlib.nullcontext if counts_backend else _waits_unseen
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.peak = 0
        self.at_peak: dict[int, int] = {}
        self.roles_at_peak: dict[int, str] = {}
        self.roles: dict[int, str] = {}
        self._alive: dict[int, tuple[int, StorageWeakRef]] = {}
        self._numbers = itertools.count()
        self._role: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "autoshard" and func not in observed.OPS:
            name = func._schema.name.replace("autoshard::", "_")
            if name == "_pack_grads":
                for tensor in filter(_is_plain, tree_leaves(args)):
                    self.roles[self.number(tensor)] = "unreduced"
            self._role = ROLES.get(name)
            with self, self._looking():
                output = getattr(kernels, name)(*args, **(kwargs or {}))
            self._role = None
            if name == "_wait_reduce":  # between two ranks sums are added to what was packed
                self.roles.update({self.number(each): "gradients" for each in output})
        else:
            output = func(*args, **(kwargs or {}))
        for tensor in filter(_is_plain, tree_leaves((args, kwargs, output))):
            self.number(tensor)
        alive = self.alive()
        if sum(alive.values()) > self.peak:
            self.peak, self.at_peak = sum(alive.values()), alive
            self.roles_at_peak = {each: self.roles[each] for each in alive if each in self.roles}
        return output

    def number(self, tensor: Tensor) -> int:
        """That of the storage of `tensor`: its own for ever."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is None:
            number = next(self._numbers)
            self._alive[storage._cdata] = number, StorageWeakRef(storage)
            if self._role is not None:
                self.roles[number] = self._role
            return number
        return known[0]

    def alive(self) -> dict[int, int]:
        """Bytes of each storage that is alive, by its number."""
        found = {}
        for key, (number, ref) in list(self._alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._alive[key]
            elif self.roles.get(number) != "host":
                found[number] = storage.nbytes()
        return found


ROLES = {
    "_launch_gather": "gathered",
    "_wait_gather": "gathered",
    "_pack_grads": "unreduced",
    "_launch_reduce": "unreduced",
    "_wait_reduce": "gradients",
    "_launch_offload": "host",
}
"""What storages are that an op of ours makes."""


@contextlib.contextmanager
def _waits_unseen() -> Iterator[None]:
    """What a backend does in a wait is not looked into."""
    wait_for = flights.wait_for

    def unseen(works: list[dist.Work], *about: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            wait_for(works, *about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flights, "wait_for", unseen)
        yield


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta


class PeakOfGraphs:
    """The same of compiled code: Dynamo runs none inside of a dispatch mode, so that graphs of the
    plain lowering, which are compiled inside `compiling()`, enter it themselves.
    """

    def __init__(self, *, counts_backend: bool = True) -> None:
        self.mode = PeakMemory(counts_backend=counts_backend)
        self._is_on = False

    @property
    def peak(self) -> int:
        return self.mode.peak

    def reset(self) -> None:
        self.mode.reset()

    def __enter__(self) -> Any:
        self._is_on = True
        return self

    def __exit__(self, *error: object) -> None:
        self._is_on = False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        boxed = _torch.fx.boxed

        def looked_into(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
            run = boxed(gm)

            def call(args: list[Any]) -> Any:
                with self.mode if self._is_on else contextlib.nullcontext():
                    return run(args)

            call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd looks for it
            return call

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_torch.fx, "boxed", looked_into)
            yield


def train_measured(
    model: Any, loss: Callable[[], Tensor], *, steps: int = 3
) -> tuple[list[Tensor], float]:
    """Train a compiled model with the plain lowering: losses and state, and the last step's peak.

    The peak is NaN, which no comparison holds for, where nothing could be looked into: by Inductor,
    or what an earlier test has compiled; a test asks for `on_ranks(..., compiles=True)`.

    loss: of the next batch. The first call compiles.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory, values = PeakOfGraphs(counts_backend=False), []
    torch.manual_seed(7)
    with memory.compiling():
        for _ in range(steps):
            memory.reset()
            with memory:
                found = loss()
                found.backward()
            values.append(found.detach())
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict().values()
    values += [each.to_local() if isinstance(each, DTensor) else each for each in state]
    return values, sum(memory.mode.at_peak.values()) or math.nan
