"""Beginning of an asynchronous save: what ranks do together before training goes on."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.runtime.training.checkpoint.folder import folder_aside, prepare, whose_aside
from autoshard.runtime.training.checkpoint.model_state import (
    OBJECTS,
    digests,
    own_buffers,
    saved_buffers,
    unchecked_state_of,
)
from autoshard.runtime.training.checkpoint.objects import copy_of, to_plain
from autoshard.runtime.training.checkpoint.on_ranks import (
    CheckpointError,
    begin_on_each_rank,
    this_rank,
)
from autoshard.runtime.training.checkpoint.pending import PendingCheckpoint, start
from autoshard.runtime.training.checkpoint.planning import (
    Kept,
    copied,
    flat,
    kept_of,
    plan_together,
    signature_of,
)
from autoshard.runtime.training.checkpoint.rank_state import STATES, Stateful, own_state
from autoshard.runtime.training.checkpoint.writing import Task


def begin(
    root: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    step: int,
    states: Mapping[str, Stateful],
    keep: int,
) -> PendingCheckpoint:
    """Copy what is to be saved, and have a thread write it; all ranks call this together.

    Arguments are those of `save_checkpoint`.
    Raises CheckpointError on every rank if one has a state that could not be loaded, or rank 0
    can't make a folder in `root`. That one can't copy is told as that it can't write.
    """
    what, kept, rank = f"checkpoint of step {step} in {root}", kept_of(model), this_rank()
    made: list[Path] = []  # by rank 0, the folder to write to

    def prepare_all() -> tuple[_Prepared, tuple[int, ...]]:
        """Do all that may fail on one rank, but for copying."""
        found = _prepare(model, optimizer, states, kept)
        if rank == 0:
            made.append(prepare(root, step))
        whose = whose_aside(made[0]) if made else ""
        is_known = kept.plan is not None and found.signature == kept.signature
        found = dataclasses.replace(
            found, whose=whose, is_known=is_known and whose in ("", kept.whose)
        )
        return found, (int(found.is_known), *digests(found.buffers))

    found, lowest_of_all = begin_on_each_rank(prepare_all, what, 3)
    try:
        copies = _copied(found, kept) if found is not None and found.is_known else None
        is_known, *lowest = lowest_of_all()  # the others have copied as well meanwhile
        if not is_known:
            kept.plan, kept.whose = plan_together(found.state, found.whose, what)
            kept.signature = found.signature
            copies = _copied(found, kept)
    except CheckpointError:
        for aside in made:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    assert kept.plan is not None
    assert copies is not None
    tensors, failed = copies
    own = {**found.own, "buffers": own_buffers(found.buffers, lowest)}
    task = Task(
        rank=rank,
        root=root,
        aside=folder_aside(root, step, kept.whose),
        step=step,
        keep=keep,
        plan=kept.plan,
        values={**found.objects, **tensors},
        own=own,
        failed=failed,
    )
    return start(task)


@dataclass(frozen=True)
class _Prepared:
    """State that a rank has found to save.

    state:     as it is, nested. values: likewise, by dotted names.
    objects:   copies of what is no tensor, by dotted names.
    own:       copy of the rank's own state, without buffers.
    buffers:   copies of the model's, by name.
    signature: of `values`.
    whose:     as of `Kept`, on rank 0; "" on others.
    is_known:  whether the plan in `Kept` is of such a state, as far as this rank knows.
    """

    state: dict[str, Any]
    values: dict[str, Any]
    objects: dict[str, Any]
    own: dict[str, Any]
    buffers: dict[str, Tensor]
    signature: list[Any]
    whose: str = ""
    is_known: bool = False


def _prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    states: Mapping[str, Stateful],
    kept: Kept,
) -> _Prepared:
    """Find what this rank has to save. Raises ValueError for what could not be loaded."""
    state = unchecked_state_of(model, optimizer, kept.names)
    values, own = flat(state), own_state(states, {})
    objects = to_plain({name: it for name, it in values.items() if not isinstance(it, Tensor)})
    if states:
        own["states"] = copy_of(own["states"], STATES)
    buffers = {name: buffer.clone() for name, buffer in saved_buffers(state, model).items()}
    return _Prepared(state, values, copy_of(objects, OBJECTS), own, buffers, signature_of(values))


def _copied(found: _Prepared, kept: Kept) -> tuple[dict[str, Tensor], Exception | None]:
    """Copy what the plan in `kept` has of `found`: (copies by dotted names, why that failed).

    Other ranks do not wait for a rank that can't copy: its thread reports it.
    """
    assert kept.plan is not None
    try:
        return copied(found.values, kept.plan.part, kept.copies), None
    except Exception as error:
        return {}, error
