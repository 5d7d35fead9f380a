"""Optimizer states that live on the host between steps.

A step goes through its parameters a bucket at a time. While one is updated, states of the next are
copied to the device, and those of the one before to the host:

    load      0 | 1 | 2
    compute       0 | 1 | 2
    store             0 | 1 | 2

So the device has the states of three buckets at most. What is updated is a copy of the optimizer,
with a bucket's parameters alone (`local_step.py`).
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.comm.copies import Copies, launch_load, launch_store, on_host
from autoshard.runtime.comm.streams import is_captured
from autoshard.runtime.training.local_step import BY_ELEMENT, STEP, Group, stand_in_for
from autoshard.runtime.unit.param import ShardedParam, find
from autoshard.runtime.unit.policies import OptimizerOffloadPolicy

BY_PARAMETER = BY_ELEMENT | {optim.Adafactor, optim.Muon}
"""Optimizers of torch whose update of a parameter depends on no other parameter."""

_AHEAD = 1  # buckets that are copied to the device before they are updated


class HostState(dict[str, Any]):
    """State of one parameter in its optimizer, whose tensors of the shard's size lie on the host.

    Whoever reads values waits for copies that are under way. Copied or pickled, it is a plain dict.

    memory: where tensors are copied to, by key. stores: copies that were begun last; None: they are
    known to be there.
    """

    def __init__(self) -> None:
        """Begin with no state."""
        super().__init__()
        self.memory: dict[str, Tensor] = {}
        self.stores: Copies | None = None

    def replace(self, values: Mapping[str, Any], stores: Copies | None) -> None:
        """Have it map to `values`, which `stores` copies."""
        self.clear()
        self.update(values)
        self.stores = stores

    def wait(self) -> None:
        """Have the host wait for the copies that were begun last."""
        if self.stores is not None:
            self.stores.wait_on_host()
            self.stores = None

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """Pickle it, or copy it, as a dict."""
        return dict, (dict(self),)


def _waiting(name: str) -> Callable[..., Any]:
    """Return the method `name` of dict, after a wait."""
    method = getattr(dict, name)

    @functools.wraps(method)
    def call(state: HostState, *args: Any) -> Any:
        state.wait()
        return method(state, *args)

    return call


_READERS = (
    *("__eq__", "__getitem__", "__ior__", "__iter__", "__ne__", "__or__", "__repr__", "__ror__"),
    *("__setitem__", "copy", "get", "items", "pop", "popitem", "setdefault", "values"),
)
for _name in _READERS:  # with __iter__ among them, dict(state) comes to them, too
    setattr(HostState, _name, _waiting(_name))


def _unwaited(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a state maps to, without a wait if it is a `HostState`."""
    return dict(dict.items(state))


class _Loaded(dict[Tensor, Any]):
    """State of a bucket's parameters on the device, by parameter; tensors may be under way."""

    copies: Copies | None = None

    def wait_on_device(self) -> None:
        """Have the device's current stream wait for tensors that are under way."""
        if self.copies is not None:
            self.copies.wait_on_device()


@_torch.dynamo.disable
def params_from_host(optimizer: optim.Optimizer) -> dict[Tensor, ShardedParam]:
    """Map those parameters of `optimizer` whose states live on the host to what is known of them.

    If there are any, and `optimizer` is not known to update parameters one by one, RuntimeError is
    raised where the user has asked for it; where a plan has, their states stay with shards, and
    there is a warning, once.
    """
    known = ((param, find(param)) for group in optimizer.param_groups for param in group["params"])
    mine = {param: each for param, each in known if each is not None and each.states_offload}
    if not mine or type(optimizer) in BY_PARAMETER:
        return mine
    name = type(optimizer).__name__
    for sharded in mine.values():
        if not sharded.has_planned_states:
            raise RuntimeError(
                f"{name} may update several parameters together, and the optimizer states of "
                f"{sharded.name} live on the host, from where they are copied some at a time: "
                "train with an optimizer of torch.optim, or without OptimizerOffloadPolicy"
            )
    if optimizer not in _told:
        _told.add(optimizer)
        warnings.warn(
            f"{name} may update several parameters together, so its states stay on the device, "
            "where memory_budget has no room for them: train with an optimizer of torch.optim",
            RuntimeWarning,
            stacklevel=5,
        )
    return {}


_told: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()


@_torch.dynamo.disable
def step_from_host(
    optimizer: optim.Optimizer,
    mine: Mapping[Tensor, ShardedParam],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Group]:
    """Step parameters whose states live on the host; return groups of the others.

    States are on the host when copies that are begun here have ended, for which their readers wait.

    mine: what `params_from_host` returned. args, kwargs: of the step, without the optimizer.
    Raises RuntimeError while a CUDA graph is captured.
    """
    if is_captured():
        raise RuntimeError(
            f"{type(optimizer).__name__} has states on the host, which a CUDA graph would copy "
            "where nobody waits for them: capture forward and backward alone, or train without "
            "OptimizerOffloadPolicy"
        )
    stepped = [sharded for param, sharded in mine.items() if param.grad is not None]
    step, buckets = _torch.nn.unhooked_step(optimizer), _buckets(optimizer, stepped)
    loads: deque[_Loaded] = deque()
    stores: deque[Copies] = deque()
    try:
        for number, bucket in enumerate(buckets):
            for each in buckets[number + len(loads) : number + 1 + _AHEAD]:
                while len(stores) > _AHEAD:  # their memory is that of what is loaded next
                    stores.popleft().release()
                loads.append(_load(optimizer, each))
            loaded = loads[0]
            loaded.wait_on_device()
            try:
                groups = _groups(optimizer, loaded.__contains__)
                step(stand_in_for(optimizer, groups, loaded), *args, **kwargs)
            finally:  # an error leaves states as far as they had come, as on the device
                stores += _store(optimizer, bucket, loaded)
            loads.popleft()
    finally:
        for loaded in loads:
            loaded.wait_on_device()
        for copies in stores:
            copies.release()
    return _groups(optimizer, lambda param: param not in mine)


def _groups(optimizer: optim.Optimizer, holds: Callable[[Tensor], bool]) -> list[Group]:
    """Return groups of the parameters for which `holds` is true, but for empty ones."""
    kept = [
        {**group, "params": list(filter(holds, group["params"]))}
        for group in optimizer.param_groups
    ]
    return [group for group in kept if group["params"]]


def _policy(sharded: ShardedParam) -> OptimizerOffloadPolicy:
    """Return the policy of a parameter whose states live on the host."""
    policy = sharded.states_offload
    assert policy is not None
    return policy


def move_to_host(optimizer: optim.Optimizer, params: Sequence[ShardedParam]) -> None:
    """Move states of `params`, which live on the host, and are on the device now."""
    for bucket in _buckets(optimizer, params):
        loaded = _load(optimizer, bucket)
        loaded.wait_on_device()
        for copies in _store(optimizer, bucket, loaded):
            copies.release()


def _buckets(
    optimizer: optim.Optimizer, params: Sequence[ShardedParam]
) -> list[list[ShardedParam]]:
    """Divide parameters into buckets, in order; each of one device."""
    found: list[list[ShardedParam]] = []
    room = 0
    for sharded in params:
        if room <= 0 or found[-1][-1].device != sharded.device:
            found.append([])
            room = _policy(sharded).bucket_bytes
        found[-1].append(sharded)
        room -= _bytes(optimizer, sharded)
    return found


def _bytes(optimizer: optim.Optimizer, sharded: ShardedParam) -> int:
    """Bytes of the states of a parameter; before its first step, of two."""
    known = optimizer.state.get(sharded.param)
    if not known:
        return 2 * sharded.shard.nbytes
    return sum(each.nbytes for _, each in shards_in(_unwaited(known), sharded))


def shards_in(values: dict[str, Any], sharded: ShardedParam) -> Iterator[tuple[str, Tensor]]:
    """Yield the keys of what of a state is laid out as its parameter is, with local tensors.

    Scalars stay on the device: torch's optimizers look at theirs.
    """
    for key, value in values.items():
        if key != STEP and isinstance(value, DTensor) and value.dim():
            local = _torch.dtensor.local_tensor(value)
            if local.shape == sharded.shard.shape:
                yield key, local


def _load(optimizer: optim.Optimizer, bucket: Sequence[ShardedParam]) -> _Loaded:
    """Begin to copy states of a bucket to the device; the host waits for nothing.

    What is there already, as after `load_state_dict()`, stays.
    """
    loaded, places, tensors = _Loaded(), [], []
    for sharded in bucket:
        known = optimizer.state.get(sharded.param, {})
        is_ours = isinstance(known, HostState)
        values = loaded[sharded.param] = _unwaited(known)
        for key, local in shards_in(values, sharded):
            if is_ours or local.device != sharded.device:
                places.append((sharded, key))
                tensors.append(local)
    if tensors:
        loaded.copies = launch_load(tensors, bucket[0].device)
        for (sharded, key), result in zip(places, loaded.copies.results, strict=True):
            loaded[sharded.param][key] = sharded.grad_from(result)
    return loaded


def _store(
    optimizer: optim.Optimizer, bucket: Sequence[ShardedParam], loaded: _Loaded
) -> list[Copies]:
    """Begin to copy states of a bucket to the host, and make them the optimizer's own.

    Returns the copies, if there are any. Where there is no memory left on the host, states stay on
    the device, and the error is raised.
    """
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    states: list[tuple[ShardedParam, HostState, dict[str, Any]]] = []
    try:
        for sharded in bucket:
            known = optimizer.state.get(sharded.param)
            state = known if isinstance(known, HostState) else HostState()
            values = loaded[sharded.param]
            if values:
                states.append((sharded, state, dict(values)))
            for key, local in shards_in(values, sharded):
                sources.append(local)
                targets.append(_memory(state, key, local, sharded))
                states[-1][-1][key] = sharded.grad_from(targets[-1])
        copies = launch_store(sources, targets) if sources else None
    except Exception:
        optimizer.state.update(loaded)
        raise
    for sharded, state, values in states:
        optimizer.state[sharded.param] = state
        state.replace(values, replace(copies, sources=[]) if copies is not None else None)
    return [copies] if copies is not None else []


def _memory(state: HostState, key: str, local: Tensor, sharded: ShardedParam) -> Tensor:
    """Return host memory of `state` for `local`, which is allocated if there is none like it."""
    known = state.memory.get(key)
    if known is None or (known.dtype, known.shape) != (local.dtype, local.shape):
        known = state.memory[key] = room_for(local, sharded)
    return known


def room_for(local: Tensor, sharded: ShardedParam) -> Tensor:
    """Return new host memory for a tensor of a parameter's state, which lives there."""
    return on_host(local, pin_memory=_policy(sharded).pin_memory)
