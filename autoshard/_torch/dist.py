"""Process groups: by name, their backends, collectives under the names of each version, stores.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

# The ignores: torch has these two at run time, and its type information has not.
default_store: Callable[[], Any] = _c10d._get_default_store
default_group: Callable[[], dist.ProcessGroup] = _c10d._get_default_group
resolve_group: Callable[[Any], dist.ProcessGroup] = _c10d._resolve_process_group  # type: ignore[attr-defined]
# The ignores: torch.distributed has these, and its types don't say so.
HashStore: Callable[[], Any] = dist.HashStore  # type: ignore[attr-defined]
TCPStore: Callable[..., Any] = dist.TCPStore  # type: ignore[attr-defined]

# 2.13 renamed both and left the old spellings as deprecated wrappers; 2.11 has only the old ones.
all_gather_flat: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_flat: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def object_device() -> torch.device:
    """Device of the tensors that the default group sends objects as."""
    return torch.device(_c10d._get_object_coll_device(_c10d._get_default_group()))


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether collectives of `group` on `device` are gloo's."""
    return isinstance(group._get_backend(device), dist.ProcessGroupGloo)


def all_gather_grouped(
    receive: list[torch.Tensor], send: list[torch.Tensor], group: Any
) -> list[dist.Work]:
    """Begin to gather each tensor of `send` into its counterpart in `receive`, in one call.

    gloo has such a call on CPUs only: on other devices there is one call a tensor. Returns the
    works, all of which have to be waited for.
    """
    device = receive[0].device
    if device.type != "cpu" and is_gloo(group, device):
        pairs = zip(receive, send, strict=True)
        return [all_gather_flat(*pair, group=group, async_op=True) for pair in pairs]
    # 2.13 renamed it; 2.11 has the old name alone.
    found = getattr(group, "all_gather_single_coalesced", None)
    return [(found or group.allgather_into_tensor_coalesced)(receive, send)]


def pretend_ranks(world_size: int) -> None:
    """Make a default process group of `world_size` ranks, of which only this one, rank 0, exists.

    Collectives over it are done at once and change nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def is_member(name: str) -> bool:
    """Tell whether this rank is in a process group registered under `name`."""
    try:
        return bool(resolve_group(name).size())
    except (RuntimeError, LookupError):
        return False


def group_size(name: str) -> int:
    """World size of the process group that c10d registered under `name`."""
    return int(resolve_group(name).size())


def group_rank(name: str) -> int:
    """Rank of this process in the process group registered under `name`."""
    return int(resolve_group(name).rank())


def group_ranks(name: str) -> list[int]:
    """Global ranks of the process group registered under `name`."""
    return dist.get_process_group_ranks(resolve_group(name))


def group_of_the_same_ranks(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """Make another process group over the ranks of `group`, as `group_within` does."""
    return group_within(group, dist.get_process_group_ranks(group), purpose)


_num_made: Counter[tuple[int, str]] = Counter()  # by rank, as ranks may be threads, and first name


def group_within(group: dist.ProcessGroup, ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
    """Make another process group of some `ranks` of `group`; only those ranks call it, together.

    The same one is returned later, until it is destroyed. Its name is that of `group` and
    `purpose`, and no group after it has that name; its timeout is that of `group`, its backend the
    default one; NCCL's streams have the priority that they have in `group`. `new_group` without the
    other ranks would name it by how many groups a rank has (up to torch 2.14), or has made, and
    ranks where that differs wait for each other under different names.
    ranks: global ones, this rank's among them. Groups for one purpose have no rank in common.
    """
    first_name = f"{group.group_name}/{purpose}"
    if len(ranks) < group.size():
        first_name += f"/{ranks[0]}"  # they meet at the store under this name
    key = group.rank(), first_name
    name = f"{first_name}#{_num_made[key]}"
    if is_member(name):
        return resolve_group(name)
    _num_made[key] += 1
    name = f"{first_name}#{_num_made[key]}"
    with unittest.mock.patch.object(_c10d, "_process_group_name", return_value=name):
        made = dist.new_group(
            list(ranks),
            timeout=group_timeout(group),
            use_local_synchronization=True,
            pg_options=_nccl_options_of(group),
        )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _nccl_options_of(group: dist.ProcessGroup) -> Any:
    """Options for a group whose NCCL streams have the priority of those of `group`; None if none.

    The priority is one that `init_process_group` was given by `pg_options`. That of the environment
    (TORCH_NCCL_HIGH_PRIORITY) needs nothing.
    """
    cuda = torch.device("cuda")
    if cuda not in group._device_types:
        return None
    given = getattr(group._get_backend(cuda), "options", None)
    if not getattr(given, "is_high_priority_stream", False):
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Timeout of collectives of `group`; torch's default if its backend doesn't have one."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return _c10d.default_pg_timeout


def group_allocator(
    name: str, device: torch.device
) -> Callable[[int, torch.dtype, torch.device], torch.Tensor] | None:
    """Return a function that allocates a tensor in memory of a process group's backend.

    Its arguments are the number of elements, the dtype and the device. None if the backend has no
    such memory on `device`.
    name: under which c10d registered the group.
    """
    backend = resolve_group(name)._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    return lambda numel, dtype, device: backend.allocate_tensor(numel, dtype=dtype, device=device)


def symmetric_memory(
    name: str, backend: str
) -> tuple[
    Callable[[int, torch.dtype, torch.device], torch.Tensor], Callable[[torch.Tensor, Any], object]
]:
    """Return two functions for symmetric memory over the process group registered under `name`.

    The first allocates: its arguments are the number of elements, the dtype and the device. The
    second has to be called with each buffer, and the group, before the buffer is used. All ranks of
    the group call all three; this one waits for them.
    backend: "NCCL" for instance; set for all symmetric memory of this process.
    """
    import torch.distributed._symmetric_memory as symmetric

    # torch types the names that it knows; ours come from the user.
    set_backend: Callable[[str], None] = symmetric.set_backend  # type: ignore[assignment]
    set_backend(backend)
    dist.barrier(group=resolve_group(name))  # its communicator has to be there

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            return torch.empty(numel, dtype=dtype, device=device)

    return allocate, lambda tensor, group: symmetric.rendezvous(tensor, group=group.group_name)


def count_as_collectives(ops: Iterable[Any]) -> None:
    """Have `CommDebugMode` count `ops`, packets of `torch.ops`, as collectives.

    It counts those of a set of torch's, which they are added to.
    """
    from torch.distributed.tensor.debug import _comm_mode

    _comm_mode.c10d_collective_ops.update(ops)


def num_issued(group: dist.ProcessGroup) -> int:
    """Count the collectives and messages that this rank has begun over `group`, whoever called.

    Those of `has_left` are left out. 0 if the group's backend doesn't count them.
    """
    if _uncounted and any(known() is group for known in _uncounted):
        return 0
    try:
        # The ignore: torch's type information lacks it.
        count = int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
        return count - len(_pending.get(group, ()))
    except RuntimeError:
        _uncounted.append(weakref.ref(group))
        return 0


_uncounted: list[weakref.ref[dist.ProcessGroup]] = []


def groups_by_name() -> dict[str, dist.ProcessGroup]:
    """Return the process groups that this rank is in, by name."""
    return {name: group for group, name in list(_c10d._world.pg_names.items()) if is_member(name)}


def break_messages(group: dist.ProcessGroup) -> None:
    """Have all that waits over `group` on this rank raise RuntimeError, and whatever comes later.

    For gloo: a receive that nobody sends to, given up at once, closes its connections, so that
    other ranks of the group hear of it, too. Nothing is done for other backends.
    """
    device = torch.device("cpu")
    if device not in group._device_types or not is_gloo(group, device) or group.size() < 2:
        return
    peer = (group.rank() + 1) % group.size()
    for tag in range(_LAST_TAG, _LAST_TAG - _MOST_DEVICES, -1):  # a network device for each
        with contextlib.suppress(RuntimeError):
            wait_for_work(group.recv([torch.empty(1)], peer, tag), timedelta(milliseconds=1))


def has_left(rank: int) -> bool:
    """Tell whether `rank`, a global one, has closed its connection in the default group.

    It has if its process has ended, or its group. False where that can't be told, as without gloo.
    """
    device, group = torch.device("cpu"), default_group()
    if device not in group._device_types or not is_gloo(group, device) or rank == group.rank():
        return False
    try:
        # Nobody sends to it: kept, as its tensor has to live for as long as the group.
        received = torch.empty(1)
        work = group.recv([received], rank, _LAST_TAG - _MOST_DEVICES)
        _pending.setdefault(group, []).append((received, work))
    except RuntimeError:
        return True
    return False


_LAST_TAG, _MOST_DEVICES = (1 << 30) - 1, 4
_pending: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()

wait_for_work: Callable[..., Any] = dist.Work.wait
"""Wait for a work, as torch does, whether `watch_waits` was called or not."""


@functools.cache
def watch_waits(watched: Callable[..., Any]) -> None:
    """Have waits for collectives that other code has launched go through `watched`, from now on.

    Patched: `Work.wait` of torch.distributed, and `wait_tensor` of its functional collectives.
    Why:     no public hook tells what a thread waits for, or sees the error of a wait; looked at in
             torch 2.13 only.
    Tests:   in tests/unit/test_patches.py `test_torch_names_no_rank`, needed; in
             tests/parity/ranks/test_stalls.py, works.

    watched: called with the collective in words, a function that waits, whose result it is to
        return, and `is_message`, whether it is a message between two ranks.
    """
    from torch.distributed import _functional_collectives as functional

    def wait(work: dist.Work, *arguments: Any, **named: Any) -> Any:
        kind = _kind(work)
        waits = functools.partial(wait_for_work, work, *arguments, **named)
        what = f"{_KINDS.get(kind, 'a collective')} of torch's"
        return watched(what, waits, is_message=kind in _MESSAGES)

    wait_tensor: Callable[[torch.Tensor], Any] = functional.wait_tensor

    def wait_watched(tensor: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return wait_tensor(tensor)
        waits = functools.partial(wait_tensor, tensor)
        return watched("a functional collective of torch's", waits, is_message=False)

    # The ignore: a patch, of a method whose arguments are passed on as they come.
    dist.Work.wait = wait  # type: ignore[method-assign, assignment]
    functional.wait_tensor = wait_watched


def _kind(work: dist.Work) -> int:
    """Number of torch's OpType that `work` has; -1 if it is not known."""
    try:
        # The ignore: torch's type information lacks it.
        return int(work._get_op_type())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # of a backend in Python
        return -1


_MESSAGES = (12, 13, 14)
_KINDS = {  # torch's OpType
    0: "a broadcast",
    1: "an all-reduce",
    2: "an all-reduce",
    3: "a reduce",
    4: "an all-gather",
    5: "an all-gather",
    6: "an all-gather",
    7: "a gather",
    8: "a scatter",
    9: "a reduce-scatter",
    10: "an all-to-all",
    11: "an all-to-all",
    12: "a send",
    13: "a receive",
    14: "a receive",
    15: "a barrier",
}
