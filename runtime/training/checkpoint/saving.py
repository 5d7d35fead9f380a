"""Beginning of an asynchronous save: what ranks do together before training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.training.checkpoint.folder import folder_aside, prepare, whose_aside
from autoshard.runtime.training.checkpoint.model_state import (
    OBJECTS,
    own_buffers,
    unchecked_state_of,
)
from autoshard.runtime.training.checkpoint.objects import copy_of, to_plain
from autoshard.runtime.training.checkpoint.on_ranks import is_everywhere, on_each_rank, this_rank
from autoshard.runtime.training.checkpoint.pending import PendingCheckpoint, start
from autoshard.runtime.training.checkpoint.planning import (
    copied,
    kept_of,
    plan_together,
    planner_of,
    signature_of,
)
from autoshard.runtime.training.checkpoint.rank_state import STATES, Stateful, own_state
from autoshard.runtime.training.checkpoint.writing import Task


def begin(
    root: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    mesh: DeviceMesh | None,
    *,
    step: int,
    states: Mapping[str, Stateful],
    keep: int,
) -> PendingCheckpoint:
    """Copy what is to be saved, and have a thread write it; all ranks call this together.

    mesh: of the model's ranks, None if no module of it is sharded. Others: as `save_checkpoint`.
    Raises CheckpointError on every rank if one has a state that could not be loaded, or rank 0
    can't make a folder in `root`.
    """
    what, kept, rank = f"checkpoint of step {step} in {root}", kept_of(model), this_rank()
    state = on_each_rank(lambda: unchecked_state_of(model, optimizer, kept.names), what)
    buffers = own_buffers(state, model, mesh)

    def prepared() -> tuple[DefaultSavePlanner, dict[str, Any], dict[str, Any], str]:
        """Do what may fail on one rank; return what to plan, copies of objects, own state, whose.

        whose: as of `Kept`, on rank 0; "" on others.
        """
        planner, own = planner_of(state), own_state(states, buffers)
        flat = planner.state_dict.items()
        objects = to_plain({name: it for name, it in flat if not isinstance(it, Tensor)})
        if states or buffers:
            own |= copy_of({each: own[each] for each in ("states", "buffers")}, STATES)
        whose = whose_aside(prepare(root, step)) if rank == 0 else ""
        return planner, copy_of(objects, OBJECTS), own, whose

    planner, objects, own, whose = on_each_rank(prepared, what)
    signature = signature_of(planner.state_dict)
    is_known = kept.plan is not None and signature == kept.signature
    if not is_everywhere(is_known and whose in ("", kept.whose)):
        kept.plan, kept.whose = plan_together(planner, whose, what)
        kept.signature = signature
    plan = kept.plan
    assert plan is not None
    tensors = on_each_rank(lambda: copied(planner.state_dict, plan.part, kept.copies), what)
    task = Task(
        rank=rank,
        root=root,
        aside=folder_aside(root, step, kept.whose),
        step=step,
        keep=keep,
        plan=plan,
        own=own,
        values={**objects, **tensors},
    )
    return start(task)
