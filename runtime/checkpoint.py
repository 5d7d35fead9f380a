"""Checkpoints that are complete, or not there.

    folder/step_00000040/         as torch.distributed.checkpoint writes it
        .metadata  __0_0.distcp   the model, the optimizer, and what each rank has of its own
        complete.json             written last: which files there are, and how large
    folder/.writing_00000045/     one that is being written, or that a rank was killed over

A checkpoint is written aside, checked, and renamed. The one before is there until then; so whatever
happens when, one of the two can be loaded. Nothing that is loaded can run code: files are read as
weights only, and of the pickle that torch has for the index only known types are made.
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
import warnings
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
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

FORMAT = 1
COMPLETE = "complete.json"
_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_NAMED_IN_METADATA = {
    *("TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "MetadataIndex"),
    *("ChunkStorageMetadata", "Metadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
}
_OWN = "ranks"  # key of what each rank has of its own


class Stateful(Protocol):
    """Has a state of its own: a data loader, a learning rate's schedule, a GradScaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> object: ...


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; every rank raises it."""


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

    states: by name, what else has a state: this rank's, made of tensors, numbers, text, and lists
        and dicts of them. States of random number generators are saved, too.
    keep: how many complete checkpoints stay, this one included; older ones are deleted.
    Returns where it is. Raises CheckpointError on every rank if one can't write its part: what was
    complete before stays so. Raises ValueError for a wrong `step` or `keep`.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"expected step >= 0 and keep >= 1, got step={step}, keep={keep}")
    root = Path(folder)
    aside = root / f".writing_{step:08d}"
    _on_first_rank(lambda: _make_room(root, aside), f"checkpoint of step {step} in {root}")
    state = _state_of(model, optimizer)
    own = _on_each_rank(lambda: _to_bytes(_own_state(states or {})), f"states of step {step}")
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

    The number of ranks, strategies and meshes may be others than those it was saved with. Then
    random number generators are left as they are, and `states` are given what rank 0 had of them,
    with a warning.
    Returns its step; None if there is none, which is an error if `step` was given. Raises
    CheckpointError on every rank, with the first parameter or state that does not fit, before
    anything is changed.
    """
    root = Path(folder)
    name = _on_first_rank(lambda: _choose(root, step), f"checkpoint in {root}")
    if not name:
        return None
    path = root / name
    world = json.loads((path / COMPLETE).read_text())["world"]
    source = str(_rank() if world == _world() else 0)
    state, reader = _state_of(model, optimizer), _Reader(path)
    own = _on_each_rank(lambda: _check_fits(reader, state, source), f"checkpoint in {path}")
    try:
        with _quiet():
            load({**state, _OWN: {source: own}}, storage_reader=reader, planner=_Planner())
    except CheckpointException as error:
        raise CheckpointError(
            f"rank {_rank()}: {path} could not be read: {_reasons(error)}. Delete it, or give "
            "`step` for another one"
        ) from None
    found = _on_each_rank(lambda: _read_own(own, states or {}), f"states in {path}")
    _load_state(model, optimizer, state)
    for key, each in (states or {}).items():
        each.load_state_dict(found["states"][key])
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
        if optimizer is None:
            return {"model": get_model_state_dict(model)}
        model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _load_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]
) -> None:
    with _quiet():
        if optimizer is None:
            set_model_state_dict(model, state["model"])
        else:
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )


def _own_state(states: Mapping[str, Stateful]) -> dict[str, Any]:
    own: dict[str, Any] = {
        "states": {name: each.state_dict() for name, each in states.items()},
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
    }
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        own["numpy"] = (kind, keys.tolist(), *rest)
    return own


def _read_own(saved: Tensor, states: Mapping[str, Stateful]) -> dict[str, Any]:
    own: dict[str, Any] = torch.load(io.BytesIO(saved.numpy().tobytes()), weights_only=True)
    missing = sorted(states.keys() - own["states"].keys())
    if missing:
        raise ValueError(
            f"there is no state of {missing}, but of {sorted(own['states'])}: give `states` as it "
            "was saved with"
        )
    return own


def _set_generators(own: Mapping[str, Any]) -> None:
    torch.set_rng_state(own["torch"])
    random.setstate(own["random"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    if "numpy" in own and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(own["numpy"])


def _to_bytes(own: dict[str, Any]) -> Tensor:
    """As one tensor, which can be read as weights only."""
    file = io.BytesIO()
    torch.save(own, file)
    try:
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "`states` have objects that could not be loaded as weights only "
            f"({_found_in(error)}): expected tensors, numbers, text, and lists and dicts of them"
        ) from None
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _found_in(error: pickle.UnpicklingError) -> str:
    named = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
    return named[1] if named else str(error).splitlines()[0]


def _check_fits(reader: _Reader, state: Mapping[str, Any], source: str) -> Tensor:
    """Before anything is loaded: names and sizes of the model, and that an optimizer is there.
    Returns room for what the rank `source` had of its own."""
    known = reader.read_metadata().state_dict_metadata
    for name, value in state["model"].items():
        if not isinstance(value, Tensor):
            continue
        found = known.get(f"model.{name}")
        if not isinstance(found, TensorStorageMetadata):
            others = [key.removeprefix("model.") for key in known if key.startswith("model.")]
            raise ValueError(
                f"there is no parameter or buffer {name!r}, but {others[:8]}: it is of another "
                "model"
            )
        if found.size != value.size():
            raise ValueError(
                f"{name!r} has size {list(found.size)} there, and {list(value.size())} in the "
                "model: it is of another model"
            )
    if "optimizer" in state and not any(key.startswith("optimizer.") for key in known):
        raise ValueError("there is no optimizer's state: load the model alone")
    for name, values in state.get("optimizer", {}).get("state", {}).items():
        for key in values:
            if f"optimizer.state.{name}.{key}" not in known:
                raise ValueError(
                    f"there is no {key!r} in the optimizer's state of {name!r}: give an optimizer "
                    "of the type that was saved, or load the model alone"
                )
    own = known.get(f"{_OWN}.{source}")
    if not isinstance(own, TensorStorageMetadata):
        raise ValueError(f"there is nothing of rank {source}'s own: it was not saved by autoshard")
    return torch.empty(own.size, dtype=torch.uint8)


# ---- where it is


def _make_room(root: Path, aside: Path) -> str:
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".writing_*"):  # by ranks that were killed
        shutil.rmtree(left)
    aside.mkdir()
    return ""


def _publish(root: Path, aside: Path, step: int, keep: int) -> str:
    """Check what was written, name it, delete what is older; returns its name."""
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
    manifest = {
        "format": FORMAT,
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
    for old in [*saved, name][:-keep]:
        shutil.rmtree(root / old)
    return name


def _choose(root: Path, step: int | None) -> str:
    """The name of the one that was saved last, of `step` if that is given; "" for none."""
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
    return found[-1] if found else ""


def _complete(root: Path) -> dict[str, int]:
    """Names, in the order in which they were saved, and their numbers in it: a run may have gone
    back to an earlier step."""
    numbers = {name: _number(root / name) for name in _names(root)}
    return dict(sorted(((k, v) for k, v in numbers.items() if v), key=lambda each: each[1]))


def _names(root: Path) -> list[str]:
    found = (path.name for path in root.glob("step_*")) if root.is_dir() else ()
    return sorted(name for name in found if _NAME.fullmatch(name))


def _step_of(name: str) -> tuple[int, int]:
    """And which attempt at it: a step is saved again by a run that was resumed before it."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _number(path: Path) -> int:
    """Of a complete checkpoint, from 1; 0 for none."""
    try:
        manifest = json.loads((path / COMPLETE).read_text())
        sizes = manifest["files"].items()
        is_there = all((path / name).stat().st_size == size for name, size in sizes)
        is_known = manifest["format"] == FORMAT and isinstance(manifest["world"], int)
        return int(manifest["number"]) if is_known and is_there else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _sync(folder: Path) -> None:
    """A rename is on the disk once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading without running code


class _Index(pickle.Unpickler):
    """Of a checkpoint: makes the types that one has in it, and nothing else."""

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
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Index(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(metadata).__name__} is no checkpoint's index")
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise pickle.UnpicklingError(f"{stored.relative_path} is outside of the checkpoint")
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """torch would load it whole: it is given what could be loaded as weights only, anew."""
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)


# ---- ranks


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _on_first_rank(work: Callable[[], Any], what: str) -> Any:
    """The result of `work`, which only rank 0 does. Raises CheckpointError on all if it can't."""
    said: list[Any] = [_attempt(work) if _rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(said, src=0)
    result, error = said[0]
    if error is not None:
        raise CheckpointError(f"rank {_rank()}: {what}: on rank 0, {error}")
    return result


def _on_each_rank(work: Callable[[], Any], what: str) -> Any:
    """The result of `work`. Raises CheckpointError on all if one of them can't do it."""
    result, error = _attempt(work)
    errors = [error] * _world()
    if dist.is_initialized():
        dist.all_gather_object(errors, error)
    for rank, each in enumerate(errors):
        if each is not None:
            raise CheckpointError(f"rank {_rank()}: {what}: on rank {rank}, {each}")
    return result


def _attempt(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """Its result, or what is wrong."""
    try:
        return work(), None
    except Exception as error:  # whatever it is, the others wait for an answer
        return None, f"{type(error).__name__}: {error}"


def _reasons(error: CheckpointException) -> str:
    """The first rank's of those that failed."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    return f"on rank {rank}, {type(cause).__name__}: {cause}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of its own deprecated calls in here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=FutureWarning)
        warnings.simplefilter("ignore", category=UserWarning)
        yield
