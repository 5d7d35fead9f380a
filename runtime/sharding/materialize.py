"""Preparation of a model for sharding: parts that are left out, the device, the first values."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.comm.mesh import Axes
from autoshard.runtime.eager import access
from autoshard.runtime.ranks.agreement import compare_lines
from autoshard.runtime.training.checkpoint.on_ranks import this_rank
from autoshard.runtime.unit.param import find, is_ignored
from autoshard.runtime.weights import adapters, first_values

SYNC_BUCKET_BYTES = 250 << 20  # of one broadcast; FSDP1's PARAM_BROADCAST_BUCKET_SIZE


@dataclass(frozen=True)
class Ignored:
    """Modules and parameters that the user wants left alone.

    They are not sharded, moved or cast, and take part in no collective. `params` has those of
    `modules`, too.
    """

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()


def find_ignored(
    model: nn.Module, modules: Iterable[nn.Module] | None, params: Iterable[nn.Parameter] | None
) -> Ignored:
    """Collect what to ignore: `modules` with the modules inside, their parameters, and `params`.

    A parameter is ignored in all modules that have it. Modules inside that are sharded already
    are left out. Warns if `model`, which is to be sharded, is among `modules`.
    Raises TypeError for what is no iterable of modules or parameters, ValueError if one of
    `modules` heads a unit.
    """
    subtrees: dict[nn.Module, None] = {}
    for top in _iterate(modules, nn.Module, "ignored_modules"):
        if access.unit_of(top) is not None:
            raise ValueError(
                f"ignored_modules has {type(top).__name__}, which is sharded already: leave it "
                "out, or ignore it before it is sharded"
            )
        if top is model:
            warnings.warn(
                f"ignored_modules has {type(model).__name__} itself: nothing of it is sharded",
                UserWarning,
                stacklevel=3,
            )
        subtrees.update(dict.fromkeys(_subtree(top)))
    found = set(_iterate(params, nn.Parameter, "ignored_params"))
    for module in subtrees:
        found.update(p for p in module._parameters.values() if p is not None)
    return Ignored(frozenset(subtrees), frozenset(found))


def _subtree(top: nn.Module) -> Iterable[nn.Module]:
    """Yield `top` and the modules inside, without those that head units and what is below them."""
    yield top
    for child in top.children():
        if access.unit_of(child) is None:
            yield from _subtree(child)


def _iterate(given: Any, kind: type, what: str) -> list[Any]:
    """Return `given`, an iterable of `kind`, as a list; None gives an empty one.

    what: the argument's name. Raises TypeError for anything else, also a single one of `kind`, and
        for an item that is not of `kind`.
    """
    noun = f"torch.nn.{kind.__name__}s"
    if given is None:
        return []
    if not isinstance(given, Iterable) or isinstance(given, (nn.Module, Tensor)):
        raise TypeError(f"{what} should be an iterable of {noun}, not {type(given).__name__}")
    items = list(given)
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(
                f"{what} should be an iterable of {noun}, but has one {type(item).__name__}"
            )
    return items


def unsharded(
    modules: Iterable[nn.Module], ignored: Ignored = Ignored()
) -> dict[nn.Parameter, str]:
    """Map each parameter below `modules` that is neither sharded nor ignored to its first name.

    Names are paths from the module; for all but the first of `modules`, behind its number.
    """
    several: dict[nn.Parameter, str] = {}
    for number, module in enumerate(modules):
        for name, param in module.named_parameters():
            if find(param) is None and param not in ignored.params and not is_ignored(param):
                several.setdefault(param, name if number == 0 else f"{number}.{name}")
    return several


def check_parameters(modules: tuple[nn.Module, ...], ignored: Ignored, *, moves: bool) -> None:
    """Raise ValueError if parameters to shard are on several devices, or one has a gradient.

    moves: whether they are going to be moved to one device: then they may be on the CPU and on
        accelerators of one type. Some on meta and some elsewhere is an error in any case.
    """
    what = type(modules[0]).__name__
    devices: dict[torch.device, str] = {}
    for param, name in unsharded(modules, ignored).items():
        devices.setdefault(param.device, name)
        if param.grad is not None:
            raise ValueError(
                f"parameter {name} of {what} has a gradient from before sharding, which is this "
                "rank's own: call zero_grad() first"
            )
    kinds = {device.type for device in devices}
    if len(devices) > 1 and not (moves and "meta" not in kinds and len(kinds - {"cpu"}) <= 1):
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"the parameters of {what} are on several devices ({where}): move them to one, for "
            "example with module.to(device), before sharding, or pass device_id"
        )


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def check_embeddings(modules: tuple[nn.Module, ...], ignored: Ignored) -> None:
    """Raise an error for an embedding whose weight is to be sharded, and can't be.

    It is a ValueError for one that writes to its weight in forward (`max_norm`), a
    NotImplementedError for a trainable one whose gradient is sparse.
    """
    left = {id(param) for param in unsharded(modules, ignored)}
    for top in modules:
        for path, module in top.named_modules():
            if not isinstance(module, _EMBEDDINGS) or id(module.weight) not in left:
                continue
            where = f"{path or 'the module'} ({type(module).__name__})"
            if module.max_norm is not None:
                raise ValueError(
                    f"{where} has max_norm={module.max_norm}: it renormalises in forward the rows "
                    "that a rank has looked up, and ranks would drift apart; build it without, and "
                    "renormalise after the optimizer's step, inside model.full_params()"
                )
            if module.sparse and module.weight.requires_grad:
                raise NotImplementedError(
                    f"{where} has sparse=True: its gradient is sparse, which can't be reduced; "
                    "build it with sparse=False, or freeze its weight"
                )


def check_device_id(device_id: object) -> None:
    """Raise TypeError unless `device_id` is an int, a device, or None."""
    if device_id is None:
        return
    if isinstance(device_id, bool) or not isinstance(device_id, (int, torch.device)):
        raise TypeError(
            f"device_id should be an int or a torch.device, not {type(device_id).__name__}"
        )


def resolve_device(device_id: int | torch.device | None, mesh_device: torch.device) -> torch.device:
    """Return `mesh_device`, this rank's device on the mesh; `device_id`, if given, has to name it.

    An int is an index of the mesh's type; an accelerator without one stands for its current device,
    with a warning. Indices of the CPU don't matter.
    Raises ValueError if it names another, TypeError if it is neither an int nor a device.
    """
    check_device_id(device_id)
    if device_id is None:
        return mesh_device
    if isinstance(device_id, int):
        device = torch.device(mesh_device.type, device_id)
    elif device_id.index is None and device_id.type not in ("cpu", "meta"):
        warnings.warn(
            f"device_id {device_id} has no index: the current device, {mesh_device}, is used; "
            "call set_device() with this rank's, or pass an index",
            UserWarning,
            stacklevel=3,
        )
        device = torch.device(device_id.type, mesh_device.index)
    else:
        device = device_id
    if device != mesh_device and not (device.type == mesh_device.type == "cpu"):
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise ValueError(
            f"device_id {device} on rank {rank} is not its device on the mesh, {mesh_device}: pass "
            "that one, or a mesh of the other device"
        )
    return mesh_device


def move(modules: tuple[nn.Module, ...], device: torch.device, ignored: Ignored) -> None:
    """Move the plain parameters and buffers of `modules`, and of modules inside, to `device`.

    Tensors stay the same objects, with other data. What is ignored, sharded parameters, DTensors,
    and what is on meta stay where they are; buffers of units inside are moved, too.
    """
    for module in modules:
        tensors: list[Tensor] = [*unsharded((module,), ignored)]
        for each in module.modules():
            if each not in ignored.modules:
                tensors.extend(b for b in each._buffers.values() if b is not None)
        for tensor in tensors:
            if not (tensor.is_meta or isinstance(tensor, DTensor)) and tensor.device != device:
                tensor.data = tensor.data.to(device)


def materialize(
    model: nn.Module,
    device: torch.device,
    ignored: Ignored,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> None:
    """Allocate memory on `device` for parameters and buffers on meta, and give them first values.

    Each module that has some of its own is initialized by itself, ignored ones excepted: by
    `param_init_fn(module)`, which should fill that module's own tensors and not its children's,
    or else by its `reset_parameters()`; transformers' models as they initialize themselves.
    `param_init_fn` is first called while they are on meta; if it leaves some there, memory is
    allocated for them and it is called again.
    If torchdistX defers a parameter of the model, only `param_init_fn(model)`, or else torchdistX,
    is called. Does nothing in `left_on_meta()`.

    Raises TypeError if `param_init_fn` is needed and can't be called; RuntimeError, naming
    the module, if there is no way to initialize it, or the buffers that were not; ValueError for
    adapters of PEFT around weights on meta. Warns of a model that probably was to be loaded.
    """
    if _leaves_meta.get() or _materialize_deferred(model, ignored, param_init_fn):
        return
    if param_init_fn is not None:
        _fill_by(param_init_fn, model, device, ignored)
        return
    adapters.refuse_without_weights(model)
    theirs = {
        each for its in first_values.pretrained_models(model).values() for each in its.modules()
    }
    fresh: dict[Tensor, str] = {}
    for path, module in model.named_modules():
        if module in ignored.modules or not _has_own_meta(module, ignored):
            continue
        if module not in theirs and not first_values.is_there_a_way(module):
            raise RuntimeError(
                f"{path or 'the model'} ({type(module).__name__}) has parameters or buffers on the "
                "meta device and no reset_parameters(): pass param_init_fn, or call "
                "model.to_empty(device=...) and initialise them"
            )
        fresh.update(_make_empty(path, module, device, ignored))
    first_values.compute(model, fresh)
    _warn_of_random_values(model, fresh)


def _warn_of_random_values(model: nn.Module, fresh: Container[Tensor]) -> None:
    """Warn, on rank 0, if a model of transformers that a folder's config is of has got `fresh`."""
    if this_rank():
        return
    for its in first_values.pretrained_models(model).values():
        folder = getattr(its, "name_or_path", "")
        if folder and any(param in fresh for param in its.parameters()):
            warnings.warn(
                f"{type(its).__name__} was on the meta device and begins with random values, not "
                f"those of {folder}: to have these, call autoshard.load_pretrained(model, folder) "
                "before the model is sharded, prepared or called",
                UserWarning,
                stacklevel=3,
            )


def _fill_by(
    param_init_fn: Callable[[nn.Module], None],
    model: nn.Module,
    device: torch.device,
    ignored: Ignored,
) -> None:
    """Call `param_init_fn` as `materialize` does, which raises as this does."""
    for path, module in model.named_modules():
        if module in ignored.modules or not _has_own_meta(module, ignored):
            continue
        if not callable(param_init_fn):
            raise TypeError(
                "param_init_fn should be a function of a module, not "
                f"{type(param_init_fn).__name__}"
            )
        param_init_fn(module)
        if _has_own_meta(module, ignored):
            _make_empty(path, module, device, ignored)
            param_init_fn(module)


_leaves_meta: ContextVar[bool] = ContextVar("_leaves_meta", default=False)


@contextlib.contextmanager
def left_on_meta() -> Iterator[None]:
    """Have `shard()` leave on meta what is there, in this context: values are going to be read."""
    token = _leaves_meta.set(True)
    try:
        yield
    finally:
        _leaves_meta.reset(token)


def _has_own_meta(module: nn.Module, ignored: Ignored) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(t is not None and t.is_meta and t not in ignored.params for t in own)


def _make_empty(
    path: str, module: nn.Module, device: torch.device, ignored: Ignored
) -> dict[Tensor, str]:
    """Allocate memory for the module's own meta tensors, without values; return them with names.

    Ties of parameters to other modules are kept; those of buffers are not.
    path: of the module in the model.
    """
    fresh: dict[Tensor, str] = {}
    for name, param in module._parameters.items():
        if param is not None and param.is_meta and param not in ignored.params:
            # Swapped in place, so that every module that has this parameter sees it.
            made = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
            torch.utils.swap_tensors(param, made)
            assert module._parameters[name] is param
            fresh[param] = f"{path}.{name}".removeprefix(".")
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = room = first_values.make_buffer(buffer, device)
            fresh[room] = f"{path}.{name}".removeprefix(".")
    return fresh


def _materialize_deferred(
    model: nn.Module, ignored: Ignored, param_init_fn: Callable[[nn.Module], None] | None
) -> bool:
    """Materialize a model with parameters that torchdistX defers, by `param_init_fn` or by it.

    Returns whether there are any; not if torchdistX is not installed.
    """
    try:
        # Optional, and mostly not there, mypy's environment included.
        from torchdistx import deferred_init, fake  # type: ignore[import-not-found]
    except ImportError:
        return False
    if not any(fake.is_fake(param) for param in unsharded((model,), ignored)):
        return False
    if param_init_fn is not None:
        param_init_fn(model)
    else:
        deferred_init.materialize_module(
            model, check_fn=lambda module: access.unit_of(module) is None
        )
    return True


def sync_from_first_rank(model: nn.Module, axes: Axes, ignored: Ignored) -> None:
    """Overwrite every rank's parameters and buffers by those of the mesh's first rank.

    Leaves out what is sharded, ignored or on meta. All ranks of the mesh call this, and wait for
    each other: they compare names, dtypes and sizes first. Then there is one broadcast a bucket, of
    one dtype and up to SYNC_BUCKET_BYTES (or of one larger tensor), over the replicate axis and
    then over the shard axis. Of a DTensor its local tensor is sent. A tied tensor is sent once.
    Raises RuntimeError, naming the first that differs, if names, dtypes or sizes of the tensors
    are not the same on all ranks, or if some ranks don't come in time.
    """
    buffers = [b for m in model.modules() if m not in ignored.modules for b in m.buffers(False)]
    found = dict.fromkeys((*unsharded((model,), ignored), *buffers))
    local = {each: _torch.dtensor.local_of(each) for each in found}
    sent = {t: _unexpanded(its.detach()) for t, its in local.items() if not its.is_meta}
    sent = {t: its for t, its in sent.items() if its.numel()}
    names = {
        tensor: f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }
    about = [f"{names[t]} {its.dtype} {list(its.shape)}" for t, its in sent.items()]
    compare_lines("model", "the model to shard", about, axes.mesh)
    tensors = list(sent.values())
    for axis in (axes.replicate, axes.shard):
        if axis is None or axis.size() == 1:
            continue
        group = axis.get_group()
        source = dist.get_global_rank(group, 0)
        for bucket in _sync_buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.broadcast(flat, src=source, group=group)
            pieces = flat.split([tensor.numel() for tensor in bucket])
            for tensor, piece in zip(bucket, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` in which each expanded dim has only its first element."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _sync_buckets(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Yield `tensors` in lists of one dtype, of up to SYNC_BUCKET_BYTES or of one larger tensor."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.nbytes > SYNC_BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        if bucket:
            yield bucket
