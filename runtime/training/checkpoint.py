"""Checkpoints that are either complete or not there.

    folder/step_00000040/         as torch.distributed.checkpoint writes it
        .metadata  __0_0.distcp   the model, the optimizer, and each rank's own states
        complete.json             written last: the files, their sizes, and the run they are of
    folder/.writing_00000045/     one that is being written, or whose writing was broken off

A checkpoint is written to a folder of its own, checked, and renamed. The one before is there until
then, so that at any time one of the two can be loaded. Loading runs no code: files are read as
weights only, and torch's pickled index may only have types that belong there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import re
import shutil
import sys
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.eager import access
from autoshard.runtime.ranks.agreement import course
from autoshard.runtime.training import optimizer_state

FORMAT = 1
COMPLETE = "complete.json"
_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_NAMED_IN_METADATA = {
    *("TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "MetadataIndex"),
    *("ChunkStorageMetadata", "Metadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
}
_runs: dict[Path, str] = {}  # by folder: which run this is; rank 0 alone knows
_OWN = "ranks"  # key of what each rank has of its own
_MODEL, _OPTIMIZER = "model.", "optimizer."  # keys begin so
_GROUPS = f"{_OPTIMIZER}param_groups."


class Stateful(Protocol):
    """Object with a state of its own: a data loader, a learning-rate schedule, a GradScaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> object: ...


class CheckpointError(RuntimeError):
    """Error of a checkpoint that could not be written or read; every rank raises it."""


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    states: Mapping[str, Stateful] | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint of `step`; all ranks call this, and `folder` is one that they share.

    states: other objects with a state, by name: this rank's, made of tensors, numbers, text, and
        lists and dicts of them. States of random number generators are saved, too.
    keep: how many complete checkpoints of this run stay, this one included; older ones are deleted.
        A run is one that began without loading from `folder`, and what was resumed from it.
    Returns its path. Raises CheckpointError on every rank if one can't write its part: what was
    complete before stays so. Raises ValueError for a wrong `step` or `keep`.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"expected step >= 0 and keep >= 1, got step={step}, keep={keep}")
    _meet(model, f"save_checkpoint(step={step})")
    root = Path(folder)
    aside = root / f".writing_{step:08d}"
    state = _on_each_rank(lambda: _state_of(model, optimizer), f"checkpoint of step {step}")
    own = _on_each_rank(lambda: _own_state(states or {}), f"states of step {step}")
    _on_first_rank(lambda: _make_room(root, aside), f"checkpoint of step {step} in {root}")
    state[_OWN] = {str(_rank()): own}
    try:
        with _quiet():
            save(state, checkpoint_id=aside)
    except CheckpointException as error:
        _on_first_rank(lambda: shutil.rmtree(aside, ignore_errors=True), f"removal of {aside}")
        raise CheckpointError(
            f"rank {_rank()}: the checkpoint of step {step} could not be written to {root}: "
            f"{_reasons(error)}. What was complete before is still there; make room, or give a "
            "folder that all ranks can write to"
        ) from None
    name: str = _on_first_rank(
        lambda: _publish(root, aside, step, keep), f"checkpoint of step {step} in {root}"
    )
    return root / name


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    states: Mapping[str, Stateful] | None = None,
) -> int | None:
    """Load the checkpoint that was saved last, or that of `step`; all ranks call this.

    The number of ranks, strategies and meshes may be others than those it was saved with. If the
    number of ranks is another, random number generators are left as they are, and `states` are
    given what rank 0 had of them, with a warning. Returns its step; None if there is none, which is
    an error if `step` was given. Raises CheckpointError on every rank, with the first parameter or
    state that does not fit, before anything is changed; `states` are loaded last, and what one of
    them raises is in it, too.
    """
    _meet(model, f"load_checkpoint(step={step})")
    root = Path(folder)
    chosen = _on_first_rank(lambda: _choose(root, step), f"checkpoint in {root}")
    if chosen is None:
        return None
    name, world = chosen
    path, source = root / name, str(_rank() if world == _world() else 0)
    what, reader = f"checkpoint in {path}", _Reader(path)
    room, rest = _on_each_rank(lambda: _room_for(reader, model, optimizer, source), what)
    _read(reader, rest)
    found = _on_each_rank(lambda: _check_read(room, rest, states or {}, world), what)
    _read(reader, {"model": room["model"], "optimizer": {"state": room["optimizer"]["state"]}})
    with _quiet():
        set_model_state_dict(model, room["model"])
    if optimizer is not None:
        optimizer_state.load_state(optimizer, room["optimizer"])
    _on_each_rank(lambda: _load_states(found["states"], states or {}), what)
    if world == _world():
        _set_generators(found)
    else:
        warnings.warn(
            f"{path} was saved by {world} ranks and is loaded by {_world()}: random number "
            f"generators are left as they are, and {sorted(states or {})} are as rank 0 had them",
            RuntimeWarning,
            stacklevel=2,
        )
    return _step_of(name)[0]


# ---- what is in one


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    with _quiet():
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        if optimizer is not None:
            state["optimizer"] = _plain(optimizer_state.state_of(model, optimizer))
    objects = [leaf for leaf in _torch.tensors.tree_leaves(state) if not isinstance(leaf, Tensor)]
    _to_bytes(objects, "the optimizer's groups, or the model's extra state,")
    return state


def _plain(state: Any) -> Any:
    """Replace NumPy's numbers, which a schedule may have calculated with, by Python's."""
    return _torch.tensors.tree_map(
        lambda leaf: leaf.item() if _is_numpy_number(leaf) else leaf, state
    )


def _is_numpy_number(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic)


def _own_state(states: Mapping[str, Stateful]) -> Tensor:
    own: dict[str, Any] = {
        "states": {name: _plain(each.state_dict()) for name, each in states.items()},
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
    }
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        own["numpy"] = (kind, keys.tolist(), *rest)
    return _to_bytes(own, "`states`")


def _check_read(
    room: dict[str, Any], rest: Mapping[str, Any], states: Mapping[str, Stateful], world: int
) -> dict[str, Any]:
    """Match groups of `rest` with those of `room`; returns this rank's own states.

    Raises ValueError if they don't match, or if a state is missing or can't be loaded on so many
    ranks.
    """
    (saved,) = rest[_OWN].values()
    own: dict[str, Any] = torch.load(io.BytesIO(saved.numpy().tobytes()), weights_only=True)
    if "param_groups" in room["optimizer"]:
        groups: dict[int, dict[str, Any]] = defaultdict(dict)
        for key, value in rest.items():
            if key != _OWN:
                number, name = key.removeprefix(_GROUPS).split(".", 1)
                groups[int(number)][name] = value
        room["optimizer"]["param_groups"] = optimizer_state.match_groups(
            room["optimizer"]["param_groups"], [groups[number] for number in sorted(groups)]
        )
    missing = sorted(states.keys() - own["states"].keys())
    if missing:
        raise ValueError(
            f"there is no state of {missing}, but of {sorted(own['states'])}: give `states` as it "
            "was saved with"
        )
    for name in states if world != _world() else ():
        if any(
            isinstance(leaf, DTensor) for leaf in _torch.tensors.tree_leaves(own["states"][name])
        ):
            raise ValueError(
                f"the state of {name!r} has shards of tensors, as {world} ranks had them: load it "
                "on as many, or have it save whole tensors"
            )
    return own


def _load_states(saved: Mapping[str, Any], states: Mapping[str, Stateful]) -> None:
    for name, each in states.items():
        try:
            each.load_state_dict(saved[name])
        except Exception as error:
            raise RuntimeError(f"the state of {name!r}: {type(error).__name__}: {error}") from error


def _set_generators(own: Mapping[str, Any]) -> None:
    torch.set_rng_state(own["torch"])
    random.setstate(own["random"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    if "numpy" in own and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(own["numpy"])


def _to_bytes(objects: Any, whose: str) -> Tensor:
    """Serialise `objects` to one tensor of bytes.

    whose: the beginning of the error. Raises ValueError for what can't be read as weights only.
    """
    file = io.BytesIO()
    torch.save(objects, file)
    try:
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{whose} have objects that could not be loaded as weights only "
            f"({_found_in(error)}): expected tensors, numbers, text, and lists and dicts of them"
        ) from None
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _found_in(error: pickle.UnpicklingError) -> str:
    named = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
    return named[1] if named else str(error).splitlines()[0]


def _room_for(
    reader: _Reader, model: nn.Module, optimizer: torch.optim.Optimizer | None, source: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make room to read a checkpoint into: the model's state and the optimizer's; and the rest.

    The rest is read before anything is changed: the optimizer's groups, by key, and what the rank
    `source` had of its own.
    Raises ValueError where names or sizes differ.
    """
    known = reader.read_metadata().state_dict_metadata
    with _quiet():
        state = get_model_state_dict(model)
        _check_fits(known, state)
        room: dict[str, Any] = {"model": state, "optimizer": {"state": {}}}
        if optimizer is not None:
            below = [key.removeprefix(_OPTIMIZER) for key in known if key.startswith(_OPTIMIZER)]
            if not below:
                raise ValueError("there is no optimizer's state: load the model alone")
            room["optimizer"] = optimizer_state.room_for(model, optimizer, _beginnings(below))
    own = known.get(f"{_OWN}.{source}")
    if not isinstance(own, TensorStorageMetadata):
        raise ValueError(f"there is nothing of rank {source}'s own: it was not saved by autoshard")
    rest: dict[str, Any] = {_OWN: {source: _new_tensor(own)}}
    if optimizer is not None:
        for key, kind in known.items():
            if key.startswith(_GROUPS):
                rest[key] = _new_tensor(kind) if isinstance(kind, TensorStorageMetadata) else None
    return room, rest


def _new_tensor(saved: TensorStorageMetadata) -> Tensor:
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _check_fits(known: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise ValueError unless the model that was saved has the names and sizes of `state`."""
    tensors = {
        key.removeprefix(_MODEL): kind
        for key, kind in known.items()
        if key.startswith(_MODEL) and isinstance(kind, TensorStorageMetadata)
    }
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        found = tensors.get(name)
        if found is None:
            raise ValueError(
                f"there is no parameter or buffer {name!r}, but {list(tensors)[:8]}: it is of "
                "another model"
            )
        if found.size != value.size():
            raise ValueError(
                f"{name!r} has size {list(found.size)} there, and {list(value.size())} in the "
                "model: it is of another model"
            )
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    for name in sorted(tensors.keys() - state.keys()):
        if not any(name.startswith(f"{other}.") for other in others):
            raise ValueError(f"there is {name!r}, which the model has not: it is of another model")


def _beginnings(keys: list[str]) -> set[str]:
    """Prefixes of dotted `keys`: of "state.w.step" they are that, "state.w" and "state"."""
    parts = [key.split(".") for key in keys]
    return {".".join(each[:end]) for each in parts for end in range(1, len(each) + 1)}


def _read(reader: _Reader, state: dict[str, Any]) -> None:
    """Read into the tensors of `state`, and replace its other values. Raises CheckpointError."""
    try:
        with _quiet():
            load(state, storage_reader=reader, planner=_Planner())
    except CheckpointException as error:
        raise CheckpointError(
            f"rank {_rank()}: {reader.path} could not be read: {_reasons(error)}. If it "
            "is spoiled, move it away, or give `step` for another one"
        ) from None


# ---- where it is


def _make_room(root: Path, aside: Path) -> str:
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".writing_*"):  # by ranks that were killed
        shutil.rmtree(left)
    aside.mkdir()
    return ""


def _publish(root: Path, aside: Path, step: int, keep: int) -> str:
    """Check what was written, rename it, and delete older checkpoints; returns its name.

    Raises OSError if a file is missing or too short.
    """
    metadata = _Reader(aside).read_metadata()
    sizes: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        path = aside / stored.relative_path
        end = stored.offset + stored.length
        if not path.exists() or path.stat().st_size < end:
            raise OSError(f"{path.name} is missing or too short: do all ranks share {root}?")
        sizes[path.name] = path.stat().st_size
    sizes[".metadata"] = (aside / ".metadata").stat().st_size
    saved = _complete(root)
    run = _runs.setdefault(root.resolve(), uuid.uuid4().hex)
    others = [name for name in saved if _manifest(root / name).get("run", run) != run]
    if others and len(others) == len(saved):
        warnings.warn(
            f"{root} has checkpoints of another run, which stay: {others}. Give each run a folder "
            "of its own, or load from this one to go on",
            RuntimeWarning,
            stacklevel=5,
        )
    manifest = {
        "format": FORMAT,
        "run": run,
        "number": 1 + max(saved.values(), default=0),
        "step": step,
        "world": _world(),
        "files": sizes,
    }
    with (aside / COMPLETE).open("w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    attempts = [attempt for other, attempt in map(_step_of, _names(root)) if other == step]
    name = f"step_{step:08d}" + (f".{max(attempts) + 1}" if attempts else "")
    aside.rename(root / name)
    _sync(root)
    for old in [*(name for name in saved if name not in others), name][:-keep]:
        shutil.rmtree(root / old)
    return name


def _choose(root: Path, step: int | None) -> tuple[str, int] | None:
    """Choose the checkpoint saved last, or the last of `step` if that is given.

    Returns its name, and the number of ranks that saved it; None if there is none. Raises OSError
    if there is none of `step`, or none is complete any more.
    """
    saved = _complete(root)
    broken = [name for name in _names(root) if name not in saved]
    if broken and not saved:
        raise OSError(
            f"{broken}, which were complete once, are no more, and there is no other checkpoint: "
            "delete them to begin anew"
        )
    if broken:
        warnings.warn(f"{broken} in {root} are not complete", RuntimeWarning, stacklevel=5)
    found = [name for name in saved if step is None or _step_of(name)[0] == step]
    if step is not None and not found:
        raise OSError(f"there is no complete checkpoint of step {step}, but {list(saved)}")
    if not found:
        return None
    manifest = _manifest(root / found[-1])
    _runs[root.resolve()] = manifest.get("run", uuid.uuid4().hex)
    return found[-1], int(manifest["world"])


def _complete(root: Path) -> dict[str, int]:
    """Names of complete checkpoints, in the order in which they were saved, and their numbers.

    Their steps may be in another order: a run may have gone back to an earlier step.
    """
    numbers = {name: _number(root / name) for name in _names(root)}
    return dict(sorted(((k, v) for k, v in numbers.items() if v), key=lambda each: each[1]))


def _names(root: Path) -> list[str]:
    found = (path.name for path in root.glob("step_*")) if root.is_dir() else ()
    return sorted(name for name in found if _NAME.fullmatch(name))


def _step_of(name: str) -> tuple[int, int]:
    """Step of a checkpoint by its name, and the number of the attempt at that step.

    A step is saved again by a run that was resumed before it.
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _number(path: Path) -> int:
    """Number of a complete checkpoint in the order of saving, from 1; 0 if it is not complete."""
    try:
        manifest = _manifest(path)
        sizes = manifest["files"].items()
        is_there = all((path / name).stat().st_size == size for name, size in sizes)
        is_known = manifest["format"] == FORMAT and isinstance(manifest["world"], int)
        return int(manifest["number"]) if is_known and is_there else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / COMPLETE).read_text())
    return manifest


def _sync(folder: Path) -> None:
    """Have a rename in `folder` on the disk, by writing out the folder itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading without running code


class _Index(pickle.Unpickler):
    """Unpickler of a checkpoint's index: makes the types that belong there, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(torch, name)
        if (
            (module == "torch.distributed.checkpoint.metadata" and name in _NAMED_IN_METADATA)
            or (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
            or (module, name) == ("torch.serialization", "_get_layout")
            or (module == "pathlib" and name in ("PosixPath", "PurePosixPath"))
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with open(Path(self.path) / ".metadata", "rb") as file:
                metadata = _Index(file).load()
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.path} is not there: do all ranks share it?") from None
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(metadata).__name__} is no checkpoint's index")
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise pickle.UnpicklingError(f"{stored.relative_path} is outside of the checkpoint")
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load `value` as weights only, and give torch, which would load anything, a copy."""
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)


# ---- ranks


def _meet(model: nn.Module, what: str) -> None:
    """Raise RuntimeError unless all ranks of `model` are at `what`.

    A rank that came here alone would meet another collective of its peers.
    """
    units = (access.unit_of(module) for module in model.modules())
    unit = next((unit for unit in units if unit is not None), None)
    if unit is not None:
        course.meet(what, unit.axes.mesh, hint="all ranks save and load, at the same step")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _on_first_rank(work: Callable[[], Any], what: str) -> Any:
    """Return the result of `work`, which rank 0 does. Raises CheckpointError on all if it can't."""
    said: list[Any] = [_attempt(work) if _rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(said, src=0)
    result, error = said[0]
    if error is not None:
        raise CheckpointError(f"rank {_rank()}: {what}: on rank 0, {error}")
    return result


def _on_each_rank(work: Callable[[], Any], what: str) -> Any:
    """Return the result of `work` here. Raises CheckpointError on all ranks if one fails."""
    result, error = _attempt(work)
    errors = [error] * _world()
    if dist.is_initialized():
        dist.all_gather_object(errors, error)
    for rank, each in enumerate(errors):
        if each is not None:
            raise CheckpointError(f"rank {_rank()}: {what}: on rank {rank}, {each}")
    return result


def _attempt(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """Do `work`; returns its result and None, or None and the error in words."""
    try:
        return work(), None
    except Exception as error:  # whatever it is, the others wait for an answer
        return None, f"{type(error).__name__}: {error}"


def _reasons(error: CheckpointException) -> str:
    """Describe the error of the first of those ranks that failed."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    return f"on rank {rank}, {type(cause).__name__}: {cause}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ignore torch's warnings of its own deprecated calls, and have it find sharded parameters."""
    with warnings.catch_warnings(), access.as_sharded():
        warnings.simplefilter("ignore", category=FutureWarning)
        warnings.simplefilter("ignore", category=UserWarning)
        yield
