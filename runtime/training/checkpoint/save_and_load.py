"""Saving and loading of checkpoints, as users call it."""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from autoshard.runtime.eager import access
from autoshard.runtime.ranks.ledger import Ledger
from autoshard.runtime.ranks.order import compare_event
from autoshard.runtime.training.checkpoint.folder import (
    choose,
    is_there,
    prepare,
    publish,
    step_of,
)
from autoshard.runtime.training.checkpoint.manifest import Manifest, check_files
from autoshard.runtime.training.checkpoint.model_state import (
    digests,
    load_own_buffers,
    load_state,
    match_groups,
    own_buffers,
    quiet,
    room_for,
    room_for_groups,
    rounded,
    saved_buffers,
    state_of,
)
from autoshard.runtime.training.checkpoint.objects import from_bytes
from autoshard.runtime.training.checkpoint.on_ranks import (
    CheckpointError,
    gathered,
    num_ranks,
    on_each_rank,
    on_each_rank_with,
    on_first_rank,
    reasons,
    this_rank,
)
from autoshard.runtime.training.checkpoint.pending import PendingCheckpoint, end_pending
from autoshard.runtime.training.checkpoint.rank_state import (
    RANKS,
    Stateful,
    check_states,
    load_states,
    own_bytes,
    own_state,
    room_for_own,
    set_generators,
)
from autoshard.runtime.training.checkpoint.reader import Reader, read_into
from autoshard.runtime.training.checkpoint.saving import begin
from autoshard.runtime.training.checkpoint.writing import if_full, not_written, written_here


@overload
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    states: Mapping[str, Stateful] | None = None,
    keep: int = 2,
    wait: Literal[True] = True,
) -> Path: ...


@overload
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    states: Mapping[str, Stateful] | None = None,
    keep: int = 2,
    wait: Literal[False],
) -> PendingCheckpoint: ...


@overload
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    states: Mapping[str, Stateful] | None = None,
    keep: int = 2,
    wait: bool,
) -> Path | PendingCheckpoint: ...


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    states: Mapping[str, Stateful] | None = None,
    keep: int = 2,
    wait: bool = True,
) -> Path | PendingCheckpoint:
    """Write a checkpoint of `step`; all ranks call this, and `folder` is one that they share.

    Ranks wait for each other; each writes its own part, and nothing is gathered. The same step may
    be saved again: the path ends in ".1", ".2" and so on then. `.writing_*` in `folder`, as killed
    ranks of this run leave, is deleted, and that of other runs after a day. Several runs may save
    to `folder` at a time; rank 0 warns if all complete checkpoints there are of another run.
    Where ranks have different buffers, as running statistics, each saves its own.

    states: other objects with a state, by name: each rank saves its own, made of tensors, numbers,
        text, and lists and dicts of them. Random number generators' states are saved, too.
    keep: how many complete checkpoints of this run stay, this one included; older ones are deleted.
        A run begins without loading from `folder`, and goes on in processes that load from it.
    wait: False to return once all is copied, to the CPU's memory, and have a thread write the files
        while training goes on. The checkpoint is there once all ranks have written. The next save
        or load waits for that, and so does Python as it exits; a process that is killed leaves what
        was complete before. The memory is kept for the next such save of `model`.
    Returns its absolute path; with `wait=False` a `PendingCheckpoint`, whose `wait()` returns it.
    Raises CheckpointError on every rank if a rank can't write its part, or has a state that could
    not be loaded: what was complete before stays so. With `wait=False` the next save or load, or
    `wait()`, raises it if files could not be written; at exit Python prints it. Raises ValueError
    for a wrong `step` or `keep`, RuntimeError if the model's ranks don't all save this step now.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"expected step >= 0 and keep >= 1, got step={step}, keep={keep}")
    end_pending()
    what = f"save_checkpoint(step={step}{'' if wait else ', wait=False'})"
    _check_together(model, what, compares_ledger=True)
    root, given = Path(folder).absolute(), states or {}  # a thread uses it later, too
    if not wait:
        return begin(root, model, optimizer, step=step, states=given, keep=keep)
    what = f"checkpoint of step {step} in {root}"
    state, own = _found(model, optimizer, given, f"checkpoint of step {step}")
    aside = on_first_rank(lambda: prepare(root, step), what)
    state[RANKS] = {str(this_rank()): own}
    try:
        with quiet():
            save(state, checkpoint_id=aside)
        files = on_each_rank(lambda: written_here(aside, this_rank()), what)
    except (CheckpointException, CheckpointError) as error:
        why = reasons(error) if isinstance(error, CheckpointException) else str(error)
        why += on_first_rank(lambda: if_full(root), f"disk of {root}")
        on_first_rank(lambda: shutil.rmtree(aside, ignore_errors=True), f"removal of {aside}")
        raise not_written(this_rank(), step, root, why) from None
    of_all = gathered(files) or []
    written = {name: file for each in of_all for name, file in each.items()}
    world = num_ranks()
    name: str = on_first_rank(lambda: publish(root, aside, step, keep, written, world), what)
    return root / name


def _found(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    states: Mapping[str, Stateful],
    what: str,
) -> tuple[dict[str, Any], Tensor]:
    """Find what is to be saved: (the state of model and optimizer, this rank's own as bytes).

    All ranks call this together. Raises CheckpointError on all if one has what can't be loaded.
    """

    def find() -> tuple[Any, tuple[int, int]]:
        state = state_of(model, optimizer)
        buffers = saved_buffers(state, model)
        return (state, own_state(states, {}), buffers), digests(buffers)

    (state, own, buffers), lowest = on_each_rank_with(find, what, 2)
    own["buffers"] = own_buffers(buffers, lowest)
    return state, on_each_rank(lambda: own_bytes(own), what)


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    states: Mapping[str, Stateful] | None = None,
) -> int | None:
    """Load the checkpoint that was saved last, or the last of `step`; all ranks call this.

    Ranks wait for each other, and for a checkpoint that is still being written. Files are compared
    with their digests first. Each rank's `states`, its buffers, and then its random number
    generators, are set as it had them. Strategies, meshes, dtypes and the number of ranks may be
    others than those it was saved with; a dtype that can't have all that was saved is warned of. If
    the number of ranks is another, random number generators are left as they are, and `states` and
    buffers are given what rank 0 had of them, with a warning. A checkpoint that another run deletes
    meanwhile is passed over. What this process saves to `folder` afterwards belongs to the run that
    it has loaded, whose old checkpoints `keep` counts.

    states: objects to load, by the names that they were saved with.
    Returns its step; None if there is no checkpoint and no `step` was given. Raises CheckpointError
    on every rank if there is none of `step`, if all that there are are incomplete, or, before
    anything is changed, with the first parameter or state that does not fit; also if a file can't
    be read, or if one of `states`, which are loaded last, raises: the model has changed then; and
    if a save before, with `wait=False`, has failed: nothing has changed then. RuntimeError if the
    model's ranks don't all load this step now.
    """
    end_pending()
    _check_together(model, f"load_checkpoint(step={step})")
    root = Path(folder).absolute()
    for _ in range(_TRIES):
        chosen = on_first_rank(lambda: choose(root, step), f"checkpoint in {root}")
        if chosen is None:
            return None
        name, manifest = chosen
        path = root / name
        try:
            return _load(path, manifest, model, optimizer, states or {})
        except CheckpointError:
            if on_first_rank(functools.partial(is_there, path), f"checkpoint in {path}"):
                raise
    raise CheckpointError(
        f"rank {this_rank()}: {_TRIES} checkpoints in {root} were deleted while they were read: "
        "give `keep` of the run that saves there a larger number"
    )


_TRIES = 5  # another run may delete a checkpoint, for newer ones, while it is read


def _load(
    path: Path,
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    states: Mapping[str, Stateful],
) -> int:
    """Load the checkpoint at `path`, and return its step, as `load_checkpoint`."""
    world = manifest.world
    source = str(this_rank() if world == num_ranks() else 0)
    what, reader = f"checkpoint in {path}", Reader(path)
    own_share = sorted(manifest.files)[this_rank() :: num_ranks()]
    on_each_rank(lambda: check_files(path, manifest, own_share), what)
    room, rest = on_each_rank(lambda: _make_room(reader, model, optimizer, source), what)
    with quiet():
        read_into(reader, rest)
    found = on_each_rank(lambda: _check_read(room, rest, states, world), what)
    states_of_params = {"state": room["optimizer"]["state"]}
    with quiet():
        read_into(reader, {"model": room["model"], "optimizer": states_of_params})
    on_each_rank(lambda: load_own_buffers(found.get("buffers", {}), room), what)
    on_each_rank(lambda: load_state(model, optimizer, room), what)
    on_each_rank(lambda: load_states(found["states"], states), what)
    _begin_anew(model)
    loss = rounded(reader.read_metadata().state_dict_metadata, room)
    if loss and this_rank() == 0:
        warnings.warn(f"{path} has {loss}: it is rounded", RuntimeWarning, stacklevel=3)
    if world == num_ranks():
        set_generators(found)
    else:
        warnings.warn(
            f"{path} was saved by {world} ranks and is loaded by {num_ranks()}: random number "
            f"generators are left as they are, and {sorted(states)} are as rank 0 had them",
            RuntimeWarning,
            stacklevel=3,
        )
    return step_of(path.name)[0]


def _begin_anew(model: nn.Module) -> None:
    """Have ranks compare what they do with `model` from now on, and not what they did before."""
    for module in model.modules():
        unit = access.unit_of(module)
        if unit is not None:
            unit.state(Ledger).begin_anew()


def _make_room(
    reader: Reader, model: nn.Module, optimizer: torch.optim.Optimizer | None, source: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make room to read a checkpoint into: (the model's and optimizer's state, the rest).

    The first is as `room_for` makes it; reading into it changes the model. The rest can be read
    before that: the optimizer's groups, by key, and a rank's own states.

    source: number of the rank whose own states are read, as text.
    Raises ValueError where names or sizes differ, or what is asked for was not saved, and as
    `Reader.read_metadata`.
    """
    known = reader.read_metadata().state_dict_metadata
    room = room_for(known, model, optimizer)
    rest: dict[str, Any] = {RANKS: {source: room_for_own(known, source)}}
    if optimizer is not None:
        rest.update(room_for_groups(known))
    return room, rest


def _check_read(
    room: dict[str, Any], rest: Mapping[str, Any], states: Mapping[str, Stateful], world: int
) -> dict[str, Any]:
    """Put the groups of `rest`, which was read, in `room`, and return the own states in `rest`.

    world: the number of ranks that saved them.
    Raises ValueError if groups don't match, or if one of `states` is missing or can't be loaded on
    this number of ranks.
    """
    (saved,) = rest[RANKS].values()
    own: dict[str, Any] = from_bytes(saved)
    match_groups(room, rest)
    check_states(own["states"], states, world)
    return own


def _check_together(model: nn.Module, what: str, *, compares_ledger: bool = False) -> None:
    """Raise RuntimeError unless all ranks of `model` are at `what`.

    They wait for each other: a rank that came here alone would meet another collective of its
    peers. Does nothing if no module of `model` is sharded.

    what: the call, with arguments that must be the same, as text.
    compares_ledger: whether ranks must have done the same before it.
    """
    units = (access.unit_of(module) for module in model.modules())
    unit = next((unit for unit in units if unit is not None), None)
    if unit is None:
        return
    what += f" after {unit.state(Ledger).said}" if compares_ledger else ""
    compare_event(what, unit.axes.mesh, hint="all ranks save and load, at the same step")
