"""Loading of weights from safetensors files: each rank reads its own rows of them.

    keys in files --names and conversions of transformers--> the model's tensors, not read yet
    this rank's part of each parameter --> parts of files --> its shard, on its device

All that can be wrong with names, sizes and files is found before the model is changed; then one
parameter after the other is read. What a rank holds meanwhile is its shards, and a piece of one.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.comm import flat_layout
from autoshard.runtime.eager import access
from autoshard.runtime.ranks.agreement import compare_lines
from autoshard.runtime.training.checkpoint.on_ranks import (
    on_each_rank,
    on_first_rank,
    this_rank,
)
from autoshard.runtime.unit.param import ShardedParam, find
from autoshard.runtime.weights import adapters, first_values, hugging_face
from autoshard.runtime.weights.files import Counter, Stored, find_stored
from autoshard.runtime.weights.full_state import gather
from autoshard.runtime.weights.lazy import Box, LazyTensor, read_box_into
from autoshard.runtime.weights.targets import Target, targets_of, unit_in


@dataclass(frozen=True)
class LoadedWeights:
    """Report of `load_pretrained` on this rank.

    num_bytes:  bytes that it has read, headers of files included.
    missing:    names of the model that the files lack, which were initialised.
    unexpected: names in the files that the model lacks.
    """

    num_bytes: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@torch.inference_mode(False)
@torch.no_grad()
def load_into(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool,
    key_mapping: Mapping[str, str] | None,
) -> LoadedWeights:
    """Load the files in `folder` into `model`, which is sharded, as `load_pretrained` says.

    All ranks call this. Warns on rank 0 of what is missing or unexpected, if not `strict`.
    """
    where = Path(folder).absolute()
    what = f"weights in {where}"
    plan = on_each_rank(lambda: _plan(model, where, key_mapping, strict), what)
    _compare(model, plan, what)
    on_each_rank(lambda: _fill(plan), what)
    _compute_the_rest(model, plan)
    _compute_magnitudes(model, plan)
    if hugging_face.is_pretrained(model) and not adapters.are_in(where):
        on_each_rank(lambda: hugging_face.end_loading(model, where, plan.converted), what)
    loaded = LoadedWeights(plan.counter.num_bytes, plan.unforeseen(model), tuple(plan.unexpected))
    if this_rank() == 0 and (loaded.missing or loaded.unexpected):
        warnings.warn(
            f"{where} lacks {list(loaded.missing)}, which were initialised, and has "
            f"{list(loaded.unexpected)}, which the model lacks",
            RuntimeWarning,
            stacklevel=4,
        )
    return loaded


@dataclass
class _Plan:
    """Tensors to be loaded, with what there is for each.

    targets:    by name; tied names share one.
    converted:  what there is for them.
    missing:    names of targets that nothing is there for, to be initialised.
    added:      of adapters, and without values: they have first values of their own.
    """

    device: torch.device
    counter: Counter
    lines: list[str]
    targets: dict[str, Target]
    converted: hugging_face.Converted
    missing: list[str]
    unexpected: list[str]
    added: list[Target]

    def found_for(self, target: Target) -> list[tuple[str, Tensor]]:
        """List what there is for `target`: by several of its names, or by one, or nothing."""
        found = self.converted.found
        return [(name, found[name]) for name in target.names if name in found]

    def unforeseen(self, model: nn.Module) -> tuple[str, ...]:
        """List what is missing without `model` saying that it may be."""
        if not hugging_face.is_pretrained(model):
            return tuple(self.missing)
        return tuple(sorted({*self.missing} - hugging_face.expected_to_miss(model, self.missing)))

    def each_target(self) -> Iterator[Target]:
        """Yield each target once."""
        yield from {id(target): target for target in self.targets.values()}.values()


def _plan(
    model: nn.Module, folder: Path, key_mapping: Mapping[str, str] | None, strict: bool
) -> _Plan:
    """Find what is to be read for which tensor; nothing is read but headers.

    Raises ValueError or OSError for all that `load_pretrained` raises before the model is changed.
    """
    hugging_face.refuse_quantized(folder)
    counter = Counter()
    stored = find_stored(folder, counter)
    split = adapters.split(model, targets_of(model))
    is_of_adapters = adapters.are_in(folder) and bool(split.added)
    targets = split.own
    if is_of_adapters:
        targets = adapters.by_names_in_files(model, folder, split, stored)
    waits = is_of_adapters or adapters.are_trained(model)
    added = [] if waits else split.to_initialise
    adapters.check(model, {target.tensor for target in added})
    tensors = {name: target.tensor for name, target in targets.items()}
    lazy: dict[str, Tensor] = {key: LazyTensor.of(node) for key, node in stored.items()}
    if hugging_face.is_pretrained(model) and not is_of_adapters:
        with first_values.set_aside(model):
            converted = hugging_face.convert(model, lazy, tensors, key_mapping)
    else:
        found = {key: tensor for key, tensor in lazy.items() if key in targets}
        converted = hugging_face.Converted(found, [key for key in lazy if key not in targets])
    plan = _Plan(
        device=_device_of(model),
        counter=counter,
        lines=[its.about for its in stored.values()],
        targets=targets,
        converted=converted,
        missing=[],
        unexpected=list(converted.unexpected),
        added=added,
    )
    for target in plan.each_target():
        if not plan.found_for(target):
            plan.missing.append(target.names[0])
    if hugging_face.is_pretrained(model):
        plan.unexpected = sorted(
            {*plan.unexpected} - hugging_face.expected_to_find(model, plan.unexpected)
        )
    _check_ties(model, plan)
    if strict:
        _check_names(model, plan, stored)
    _check_sizes(plan)
    return plan


def _device_of(model: nn.Module) -> torch.device:
    """Return this rank's device on the mesh that `model` is sharded over; else the CPU."""
    sharded = (find(param) for _, param in access.named_sharded(model))
    return next((each.device for each in sharded if each is not None), torch.device("cpu"))


def _check_ties(model: nn.Module, plan: _Plan) -> None:
    """Raise ValueError where a name is missing that the model says is tied, and that is not."""
    tied = hugging_face.tied_names(model)
    for name in plan.missing:
        other = tied.get(name)
        if other is not None and plan.targets.get(other) is not plan.targets[name]:
            raise ValueError(
                f"{name!r} is in no file, as the model's config ties it to {other!r}, but in the "
                "model they are two parameters: call model.tie_weights() before it is sharded"
            )


def _check_names(model: nn.Module, plan: _Plan, stored: Mapping[str, Stored]) -> None:
    """Raise ValueError, naming them, if names are missing or unexpected."""
    missing = list(plan.unforeseen(model))
    problems = []
    if missing:
        problems.append(f"no file has {_some(missing)} of the model")
    if plan.unexpected:
        problems.append(f"the model has no {_some(plan.unexpected)} of the files")
    if problems:
        raise ValueError(
            f"{' and '.join(problems)} (the files have {_some(list(stored))}): load them into the "
            "model that they are of, give key_mapping, or pass strict=False, which initialises "
            "what is missing and leaves the rest out"
        )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{names[:4]}{rest}"


def _check_sizes(plan: _Plan) -> None:
    """Raise ValueError, naming it, if what is there for a target has another size or kind."""
    for target in plan.each_target():
        wanted = target.tensor
        for name, tensor in plan.found_for(target):
            if tuple(tensor.shape) != tuple(wanted.shape):
                raise ValueError(
                    f"{name!r} has size {list(tensor.shape)} in the files, and "
                    f"{list(wanted.shape)} in the model: build the model with the config that is "
                    "beside them"
                )
            hugging_face.check_kind(name, tensor.dtype, wanted.dtype)


def _compare(model: nn.Module, plan: _Plan, what: str) -> None:
    """Raise RuntimeError, naming the first that differs, unless all ranks have found the same."""
    unit = unit_in(model)
    if unit is not None:
        compare_lines("weights", what, plan.lines, unit.axes.mesh)


def _fill(plan: _Plan) -> None:
    """Read this rank's part of all targets. Raises ValueError, OSError."""
    for target in plan.each_target():
        found = plan.found_for(target)
        if not found:
            continue
        name, tensor = found[0]
        for copy in target.copies:
            _read(*_room_for(copy, plan.device), tensor)
        local, parts = _room_for(target, plan.device)
        _read(local, parts, tensor)
        for other, value in found[1:]:
            again = torch.empty_like(local)
            _read(again, parts, value)
            if not torch.equal(local, again):
                raise ValueError(
                    f"{name!r} and {other!r} are one parameter in the model, and differ in the "
                    "files: build the model with tie_word_embeddings=False, or untie them before "
                    "it is sharded"
                )


_Parts = list[tuple[Box, int]]
"""Parts of a tensor that are on this rank, each with the place of its first element there."""


def _read(local: Tensor, parts: _Parts, tensor: Tensor) -> None:
    """Read the `parts` of `tensor` into their places in `local`."""
    for box, first in parts:
        sizes = [stop - start for start, stop in box]
        whole = list(local.shape) == sizes
        into = local if whole else local.view(-1)[first : first + math.prod(sizes)].view(sizes)
        read_box_into(into, tensor, box)


def _room_for(target: Target, device: torch.device) -> tuple[Tensor, _Parts]:
    """Return this rank's part of `target`, in use in the model, and what of the tensor it is.

    Allocated now if it is on meta.
    """
    sharded = target.sharded
    if sharded is None:
        if target.tensor.is_meta:
            _allocate(target, device)
        return target.tensor.data, [(tuple((0, of) for of in target.tensor.shape), 0)]
    if sharded.shard.is_meta:
        _allocate_shard(sharded)
    return sharded.shard, _parts_of(sharded.param)


def _allocate(target: Target, device: torch.device) -> None:
    """Allocate memory for a buffer, or a parameter that is not sharded, in all of its places."""
    made: Tensor = torch.empty_like(target.tensor, device=device)
    if isinstance(target.tensor, nn.Parameter):
        # In place, so that whoever has this parameter sees it.
        torch.utils.swap_tensors(
            target.tensor, nn.Parameter(made, requires_grad=target.tensor.requires_grad)
        )
        return
    target.tensor = made
    for module, attribute in target.places:
        module._buffers[attribute] = made


def _allocate_shard(sharded: ShardedParam) -> None:
    """Allocate memory for a shard on meta, where its unit keeps shards, in place."""
    policy = sharded.unit.settings.offload
    shard = sharded.shard
    device = torch.device("cpu") if sharded.unit.settings.is_offloaded else sharded.device
    pins = sharded.unit.settings.is_offloaded and getattr(policy, "pin_memory", False)
    made = torch.empty_like(shard, device=device, pin_memory=pins and sharded.device.type != "cpu")
    torch.utils.swap_tensors(
        sharded.param,
        nn.Parameter(sharded.layout.dtensor(made), requires_grad=sharded.param.requires_grad),
    )
    sharded.refresh()


def _parts_of(param: Tensor) -> _Parts:
    """List the parts of the DTensor `param` that this rank has."""
    value = param.data
    assert isinstance(value, DTensor)
    if flat_layout.is_flat(value):
        return [(_box(at, of), first) for at, of, first in flat_layout.boxes(value)]
    sizes, offsets = _torch.dtensor.local_box(
        tuple(value.shape), value.device_mesh, value.placements
    )
    return [(_box(offsets, sizes), 0)]


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    return tuple((at, at + of) for at, of in zip(offsets, sizes, strict=True))


def _compute_the_rest(model: nn.Module, plan: _Plan) -> None:
    """Compute buffers that no file has, and initialise parameters that are missing."""
    fresh: dict[Tensor, str] = {}
    for path, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[attribute] = made = first_values.make_buffer(buffer, plan.device)
                fresh[made] = f"{path}.{attribute}".removeprefix(".")
    if plan.missing or plan.added:
        _initialise_missing(model, plan, fresh)
    elif fresh:
        first_values.compute(model, fresh)


def _initialise_missing(model: nn.Module, plan: _Plan, fresh: dict[Tensor, str]) -> None:
    """Initialise what no file has, whole, by rank 0's generator, and keep this rank's part of it.

    fresh: buffers that are to be computed, too.
    """
    later = {each.param for each in adapters.magnitudes(model)}
    whole: list[tuple[Target, Tensor]] = []
    for target in (*(plan.targets[name] for name in plan.missing), *plan.added):
        if target.tensor in later:
            continue
        made: Tensor
        if isinstance(target.tensor, nn.Parameter):  # maybe a DTensor, the whole is not
            plain = torch.empty(target.tensor.shape, dtype=target.tensor.dtype)
            made = nn.Parameter(plain, target.tensor.requires_grad)
        else:
            made = first_values.make_buffer(target.tensor, torch.device("cpu"))
        fresh[made] = target.names[0]
        whole.append((target, made))
    state = on_first_rank(torch.get_rng_state, "random numbers of rank 0")
    with contextlib.ExitStack() as stack:
        if this_rank():
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.set_rng_state(state)
        for target, made in whole:
            stack.enter_context(_put(target, made))
        first_values.compute(model, fresh)
    for target, made in whole:
        for each in (target, *target.copies):
            _read(*_room_for(each, plan.device), made.detach())


def _compute_magnitudes(model: nn.Module, plan: _Plan) -> None:
    """Compute DoRA's magnitudes that are on meta; all ranks gather a weight at a time."""
    added = {target.tensor: target for target in plan.added}
    for each in adapters.magnitudes(model):
        if each.param in added:
            values = each.compute(gather(each.weight))
            _read(*_room_for(added[each.param], plan.device), values)


@contextlib.contextmanager
def _put(target: Target, made: Tensor) -> Iterator[None]:
    """Put `made` in all places of `target`, in this context."""

    def put(tensor: Tensor) -> None:
        for module, attribute in target.places:
            is_parameter = attribute in module._parameters
            place: dict[str, Any] = module._parameters if is_parameter else module._buffers
            place[attribute] = tensor

    put(made)
    try:
        yield
    finally:
        put(target.tensor)
