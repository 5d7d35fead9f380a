"""Decisions of plans on what autograd saves, for the eager runtime to follow.

They are made for compiled code. Hooks on saved tensors (`saved.py`) act on them in uncompiled
forwards, inside of `follow` and `values_on_host`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.runtime.comm import copies
from autoshard.runtime.unit.param import ShardedParam

PARTS = 4  # of a memory, as queries, keys and values that a product makes at once; others stay


class _Now(threading.local):
    """State of a thread: the parameters that are kept in it, and the room on the host."""

    kept: Collection[ShardedParam] = frozenset()
    room: Room | None = None


_now = _Now()


@contextlib.contextmanager
def follow(kept: Collection[ShardedParam]) -> Iterator[None]:
    """Hold what forwards in this context save of `kept` until backward, though units reshard."""
    before, _now.kept = _now.kept, kept
    try:
        yield
    finally:
        _now.kept = before


def is_kept(param: ShardedParam) -> bool:
    """Tell whether memory of `param` that is saved now stays until backward."""
    return param in _now.kept


@contextlib.contextmanager
def values_on_host(room: Room) -> Iterator[None]:
    """Move what is saved in this context to the host, as far as there is room."""
    before, _now.room = _now.room, room
    try:
        yield
    finally:
        _now.room = before
        room.close()


def moved(tensor: Tensor) -> SavedOnHost | None:
    """Copy a tensor that is saved now to the host, if there is room; else return None."""
    return None if _now.room is None else _now.room.move(tensor)


class Room:
    """Room on the host for what a block saves in a forward; the last tensor may be too large."""

    def __init__(self, num_bytes: int, stay: Collection[Tensor]) -> None:
        """Make room for `num_bytes`; nothing is there.

        stay: tensors that are in memory whatever a block saves, and so are not moved.
        """
        self._num_bytes = self._left = num_bytes
        self._stay = {StorageWeakRef(each.untyped_storage()) for each in stay}
        self._moved: dict[tuple[StorageWeakRef, int], _HostMemory] = {}

    def empty(self) -> None:
        """Begin anew, as the block does: what is there is another forward's."""
        self._left = self._num_bytes

    def close(self) -> None:
        """Let go of what is there, which autograd holds."""
        self._moved.clear()

    def move(self, tensor: Tensor) -> SavedOnHost | None:
        """Copy the memory of `tensor`, all of it and once; None if it stays, or nothing is left.

        Nor is a small part of a large memory moved, which others may hold, or a view that
        conjugates or negates.
        """
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        memory = tensor.untyped_storage()
        storage = StorageWeakRef(memory)
        found = self._moved.get((storage, tensor._version))
        if found is None:
            is_part = memory.nbytes() > PARTS * tensor.nbytes
            if self._left <= 0 or is_part or storage in self._stay:
                return None
            found = self._moved[storage, tensor._version] = _HostMemory(tensor)
            self._left -= found.num_bytes
        return SavedOnHost(found, tensor)


class _HostMemory:
    """Copy of a tensor's whole memory, on the host: pinned if it comes from a device."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        whole = _bytes_of(tensor)
        self._host = copies.on_host(whole).copy_(whole, non_blocking=True)
        self._back: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return self._host.nbytes

    def back(self) -> Tensor:
        """Return the memory on its device again, as bytes.

        It stays there until autograd lets go of all tensors that it was saved for.
        """
        if self._back is None:
            self._back = self._host.to(self._device, non_blocking=True, copy=True)
        return self._back


class SavedOnHost:
    """Tensor whose memory lies on the host from forward to backward."""

    def __init__(self, memory: _HostMemory, tensor: Tensor) -> None:
        self._memory = memory
        self._like = tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())

    def unpack(self) -> Tensor:
        """Return the tensor, of memory on its device."""
        dtype, size, stride, offset = self._like
        whole = self._memory.back()
        made = torch.empty(0, dtype=dtype, device=whole.device)
        return made.set_(whole.untyped_storage(), offset, size, stride)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole memory that `tensor` is a view of, as bytes."""
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))
