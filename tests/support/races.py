"""Race detector: the streams, events and memory of a device, without one.

A model on the meta device is trained under a `Detector`. Every op counts as an access to the
storages that it reads and writes, on the stream that is current; collectives run on the stream of
their group. Vector clocks say what happens before what (C. Fidge, 1988), and each of
these is a finding:

- two streams use a storage, at least one of them to write, and neither use comes before the other;
- a storage is freed while a stream other than the one it was allocated on may still use it. Its
  memory goes back to its own stream, as in torch's caching allocator: the other stream's use has to
  happen before whatever its own stream is given next;
- the host, which is a stream here, too, uses what it has not waited for.

Nothing is computed: a number that is read on the host is 0.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import CompileContext
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard.runtime.comm import copies, streams, transport
from autoshard.runtime.compiled import kernels
from autoshard.runtime.unit.unit import Unit

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = tuple(f"{ROOT / folder}/" for folder in ("autoshard", "passes", "runtime", "tools"))
META = torch.device("meta")
HOST = "host"
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality

Clock = dict[str, int]
"""Number of the last op of each stream that has happened."""

Place = tuple[tuple[CodeType, int], ...]
"""Frames, the innermost first: their code and line."""


def join(clock: Clock, other: Clock) -> None:
    for name, number in other.items():
        clock[name] = max(clock.get(name, 0), number)


class Event:
    """An event of a device. Made with a device, or none; recorded on the current stream."""

    def __init__(self, device: object = None) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or _running().current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        join((stream or _running().current).clock, self.clock)

    def synchronize(self) -> None:
        _running().wait_on_host(self.clock)


class Stream:
    """A stream of a device, or the host, whose ops run in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {}
        self._before: list[Stream] = []

    def __repr__(self) -> str:
        return self.name

    def wait_stream(self, other: Stream) -> None:
        join(self.clock, other.clock)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before.append(_running().current)
        _running().current = self
        return self

    def __exit__(self, *error: object) -> None:
        _running().current = self._before.pop()


@dataclass(frozen=True)
class Access:
    number: int
    place: Place


@dataclass
class Storage:
    """A storage: who may still use it.

    accesses, writes: the last of each stream.
    """

    alive: StorageWeakRef
    stream: str
    made: Place
    accesses: dict[str, Access] = field(default_factory=dict)
    writes: dict[str, Access] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Detector(TorchDispatchMode):
    """What was found of the code that ran in it. To be made by `detecting`.

    fails_at: name of an op, as "sigmoid": the next one raises MemoryError.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[str, Stream] = {}
        self.current = self.stream("compute")
        self.host = self.stream(HOST)
        self.findings: Counter[Finding] = Counter()
        self.num_ops = 0
        self.fails_at: str | None = None
        self._storages: dict[int, Storage] = {}
        self._freed: list[Storage] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """For torch: frames are compiled as if this mode were not there."""
        return True

    def stream(self, name: str) -> Stream:
        return self.streams.setdefault(name, Stream(name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "autoshard":
            # Seen op by op; and with autograd, which a mode is beneath and our kernels are not.
            with torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False), self:
                return getattr(kernels, f"_{func._opname}")(*args, **kwargs)
        self.num_ops += 1
        if self.fails_at == func._opname:
            self.fails_at = None
            raise MemoryError(func._opname)
        result = _without_data(func, args, kwargs)
        self._note_accesses(func, args, kwargs, result)
        if _holds_the_host(func, args, kwargs):
            self.wait_on_host(self.current.clock)
        return result

    def _note_accesses(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        returns = func._schema.returns
        is_view = any(each.alias_info and not each.alias_info.is_write for each in returns)
        if is_view or func.namespace == "c10d" or _only_allocates(func):
            for tensor in _tensors(result):
                self._storage(tensor)
            return
        with self._as_of(args, result):
            self.tick()
            for position, argument in enumerate(func._schema.arguments):
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in _tensors(value):
                    self.access(tensor, writes=writes)
            for tensor in _tensors(result):
                self.access(tensor, writes=True)

    @contextlib.contextmanager
    def _as_of(self, args: Any, result: Any) -> Iterator[None]:
        """Have the host be the current stream for an op that touches its memory alone."""
        tensors = [*_tensors(args), *_tensors(result)]
        if any(tensor.device.type == "meta" for tensor in tensors):
            yield
        else:
            with self.host:
                yield

    def tick(self, stream: Stream | None = None) -> None:
        """Begin an op: it comes after what the host had waited for when it was launched."""
        stream = stream or self.current
        join(stream.clock, self.host.clock)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1

    def access(self, tensor: Tensor, *, writes: bool, stream: Stream | None = None) -> None:
        storage, stream = self._storage(tensor), stream or self.current
        if storage is None:
            return
        before = storage.accesses if writes else storage.writes
        for name, last in before.items():
            if name != stream.name and stream.clock.get(name, 0) < last.number:
                verb, other = ("writes", "uses") if writes else ("reads", "writes")
                self._find(
                    "race", f"{stream} {verb} what {name} {other}", here=_place(), there=last.place
                )
        access = Access(stream.clock.get(stream.name, 0), _place())
        storage.accesses[stream.name] = access
        if writes:
            storage.writes[stream.name] = access

    def wait_on_host(self, clock: Clock) -> None:
        join(self.host.clock, clock)

    def collective(
        self, group: dist.ProcessGroup, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> Work:
        stream = self.stream(f"group {group.group_name}")
        stream.wait_stream(self.current)
        self.tick(stream)
        for tensor in reads:
            self.access(tensor, writes=False, stream=stream)
        for tensor in writes:
            self.access(tensor, writes=True, stream=stream)
        return Work(stream.record_event(), [*reads, *writes])

    def _storage(self, tensor: Tensor) -> Storage | None:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if tensor.numel() == 0:
            return None
        untyped = tensor.untyped_storage()
        storage = self._storages.get(untyped._cdata)
        if storage is None or storage.alive.expired():
            self._note_freed()
            self._check_reuse()
            owner = self.current if tensor.device.type == "meta" else self.host
            storage = Storage(StorageWeakRef(untyped), owner.name, _place())
            # Its memory may have been freed by what its stream was given just before.
            given = Access(owner.clock.get(owner.name, 0), storage.made)
            storage.accesses[owner.name] = storage.writes[owner.name] = given
            self._storages[untyped._cdata] = storage
        return storage

    def _note_freed(self) -> None:
        for key, storage in list(self._storages.items()):
            if storage.alive.expired():
                del self._storages[key]
                if any(name != storage.stream for name in storage.accesses):
                    self._freed.append(storage)

    def _check_reuse(self) -> None:
        """The current stream is given memory: it may be what was freed of its own."""
        own, left = self.current, []
        for storage in self._freed:
            if storage.stream != own.name:
                left.append(storage)
                continue
            clock = dict(own.clock)
            join(clock, self.host.clock)
            for name, last in storage.accesses.items():
                if name != own.name and clock.get(name, 0) < last.number:
                    text = f"{name} may still use it when {own} is given its memory"
                    self._find("freed in use", text, used=last.place, made=storage.made)
        self._freed = left

    def _find(self, kind: str, text: str, **places: Place) -> None:
        told = "".join(f"\n    {what:5} {_told(place)}" for what, place in places.items())
        self.findings[Finding(kind, text + told)] += 1


_detector: Detector | None = None


def _running() -> Detector:
    assert _detector is not None
    return _detector


@contextlib.contextmanager
def detecting() -> Iterator[Detector]:
    """Detect races of what this thread runs in this context.

    The runtime's streams, events and collectives are those of this file there.
    """
    global _detector
    assert _detector is None
    _detector = Detector()
    try:
        with _seams(_detector), _detector:
            yield _detector
    finally:
        _detector = None


class Work:
    """A collective in flight. It holds its tensors until it is waited for, as NCCL's do."""

    def __init__(self, done: Event, tensors: list[Tensor]) -> None:
        self._done, self._tensors = done, tensors

    def wait(self) -> None:
        if _detector is None:  # dropped afterwards
            return
        self._done.wait()
        self._tensors = []


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _only_allocates(func: Any) -> bool:
    return func._opname.startswith(("empty", "new_empty", "detach"))


def _holds_the_host(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether the host waits for `func`: it reads a number, or copies in a blocking way."""
    aten = torch.ops.aten
    if func is aten._local_scalar_dense.default:
        return args[0].device.type == "meta"
    if func is aten.copy_.default:
        is_blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return is_blocking and args[0].device.type != args[1].device.type
    if func is aten._to_copy.default:
        device = torch.device(kwargs.get("device") or args[0].device)
        return not kwargs.get("non_blocking") and device.type != args[0].device.type
    return False


def _without_data(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `func`; what the meta device can't do, a copy to the host or a number, is made up."""
    aten = torch.ops.aten
    if func is aten._local_scalar_dense.default and args[0].device.type == "meta":
        return 0
    if func is aten.copy_.default and args[0].device.type == "cpu" != args[1].device.type:
        return args[0]
    to_host = torch.device(kwargs.get("device") or META).type == "cpu"
    if func is aten._to_copy.default and to_host and args[0].device.type != "cpu":
        dtype = kwargs.get("dtype") or args[0].dtype
        return torch.zeros(args[0].shape, dtype=dtype)
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    return func(*args, **kwargs)


def _place(depth: int = 5) -> Place:
    """Where in the package the running code is: its innermost frames first."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < depth:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _told(place: Place) -> str:
    lines = [f"{Path(code.co_filename).name}:{line} {code.co_name}" for code, line in place]
    return " < ".join(lines) or "the test"


@contextlib.contextmanager
def _seams(detector: Detector) -> Iterator[None]:
    """Put this file's streams, events and collectives where the runtime looks for the device's."""

    def gather(receive: Sequence[Tensor], send: Sequence[Tensor], group: Any) -> list[Work]:
        return [detector.collective(group, send, receive)]

    def reduce(receive: Tensor, send: Tensor, group: Any, *, is_mean: bool = False) -> Work:
        return detector.collective(group, [send], [receive])

    def all_reduce(sums: Tensor, group: Any, *, is_mean: bool = False) -> Work:
        return detector.collective(group, [], [sums])

    def of_a_copy(device: torch.device, direction: str) -> Stream:
        return detector.stream(direction)

    real_stream = torch.accelerator.current_stream

    def current_stream(device: Any = None) -> Any:
        # Where there is a GPU, Dynamo asks, too, while it compiles.
        return detector.current if CompileContext.try_get() is None else real_stream(device)

    def make_ready(unit: Unit) -> None:
        for param in unit.params:
            param.refresh()

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (transport, "averages", lambda group, device: device.type != "cpu"),
        (transport, "gather", gather),
        (transport, "reduce", reduce),
        (transport, "all_reduce", all_reduce),
        (streams, "all_reduce_stream", lambda device: detector.stream("all-reduce")),
        (copies, "copy_stream", of_a_copy),
        (torch.accelerator, "current_stream", current_stream),
        (Unit, "make_ready", make_ready),  # which refuses the meta device
        (torch, "Event", Event),
        (Tensor, "pin_memory", lambda tensor, *_: tensor),  # which needs a device
        (kernels, "_ticket", _ticket),
        (kernels, "_take", lambda ticket: kernels._in_flight.pop(id(ticket)).flight),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def _ticket(flight: Any, like: Tensor, keep: Any = None) -> Tensor:
    """A ticket known by its identity: those on the meta device have no address."""
    ticket = like.new_empty(1, dtype=torch.uint8)
    key, is_on_host = id(ticket), ticket.device.type == "cpu"
    dropped = weakref.ref(ticket, lambda _: kernels._drop(key, is_on_host=is_on_host))
    kernels._in_flight[key] = kernels._Entry(dropped, flight, keep)
    return ticket
