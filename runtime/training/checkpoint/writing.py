"""Writing of a checkpoint: each rank its part, and rank 0 the index of all parts.

Nothing here needs other ranks, or a process group: it may run in a thread.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from autoshard.runtime.training.checkpoint.folder import publish
from autoshard.runtime.training.checkpoint.manifest import File, describe
from autoshard.runtime.training.checkpoint.on_ranks import CheckpointError
from autoshard.runtime.training.checkpoint.planning import Copies, Plan, own_plan, whole_index
from autoshard.runtime.training.checkpoint.rank_state import RANKS, own_bytes


@dataclass(frozen=True)
class Written:
    """Part of a checkpoint that a rank has written: where each tensor is, and its files by name.

    results: places of tensors, as torch says them.
    own: plan of its own state.
    """

    results: list[Any]
    own: SavePlan
    files: dict[str, File]


@dataclass(frozen=True)
class Task:
    """Part of a rank in a checkpoint that is to be written.

    rank: this one. root, step, keep: as of `save_checkpoint`. aside: the folder to write to.
    plan:   of what all have a part in. values: copies of it, by name.
    own:    copy of this rank's own state.
    failed: the error of copying; None if all is there.
    """

    rank: int
    root: Path
    aside: Path
    step: int
    keep: int
    plan: Plan
    values: dict[str, Any]
    own: Mapping[str, Any]
    failed: Exception | None = None

    def write(self) -> Written:
        """Write this rank's files, and flush them to the disk. Raises OSError, or `failed`."""
        if self.failed is not None:
            raise self.failed
        if not self.aside.is_dir():
            raise FileNotFoundError(f"{self.aside} is not there: do all ranks share {self.root}?")
        name, part, own = str(self.rank), self.plan.part, own_bytes(self.own)
        of_own = own_plan(name, own)
        plan = SavePlan([*part.items, *of_own.items], part.storage_data)
        copies = Copies({**self.values, f"{RANKS}.{name}": own})
        done = FileSystemWriter(self.aside, per_thread_copy_ahead=0).write_data(plan, copies)
        return Written(done.value(), of_own, written_here(self.aside, self.rank))

    def publish(self, all_written: list[Written]) -> str:
        """Write the index of what all ranks have written, publish it, and return its name."""
        assert self.plan.index is not None
        index = whole_index(self.plan.index, [each.own for each in all_written])
        FileSystemWriter(self.aside).finish(index, [each.results for each in all_written])
        files = {name: file for each in all_written for name, file in each.files.items()}
        world = len(all_written)
        return publish(self.root, self.aside, self.step, self.keep, files, world)


def written_here(aside: Path, rank: int) -> dict[str, File]:
    """Describe the files in `aside` that `rank`, which is this one, has written."""
    return {path.name: describe(path) for path in aside.glob(f"__{rank}_*")}


def if_full(root: Path) -> str:
    """Say that the disk of `root` is full, if it is: torch says where a file broke off."""
    try:
        free = shutil.disk_usage(root).free
    except OSError:  # it is gone
        return ""
    return f" (no space left on device: {free} bytes are free)" if free < _LITTLE else ""


_LITTLE = 1 << 20  # bytes, of which a part of a file would have been written


def not_written(rank: int, step: int, root: Path, why: str) -> CheckpointError:
    """Return the error of a checkpoint that could not be written, to raise."""
    return CheckpointError(
        f"rank {rank}: the checkpoint of step {step} could not be written to {root}: "
        f"{why}. What was complete before is still there; make room, or give a folder that all "
        "ranks can write to"
    )


def maybe_written(rank: int, step: int, root: Path, why: str) -> CheckpointError:
    """Return the error of a checkpoint of which this rank does not hear what came, to raise."""
    return CheckpointError(
        f"rank {rank}: the checkpoint of step {step} in {root} may be complete or not: {why}. "
        "What was complete before is still there; load_checkpoint() takes the last complete one"
    )
