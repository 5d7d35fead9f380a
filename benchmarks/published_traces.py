"""Traced training steps of published workloads, each once, in two processes, kept on disk if asked.

A trace depends neither on the cluster nor on constants.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterable
from pathlib import Path

from published_rows import Workload

from autoshard.tools.plan.estimate import StepGraphs
from autoshard.tools.plan.planning import traced_step

PROCESSES = 2


def traced(workloads: Iterable[Workload], folder: Path) -> dict[Workload, StepGraphs | str]:
    """Trace `workloads`, those that `folder` has not yet; or say why one can't be.

    folder: keeps traces, of this very version of the project alone: nothing in it is checked.
    """
    wanted = sorted(set(workloads), key=repr)
    missing = [each for each in wanted if not _path(folder, each).exists()]
    with multiprocessing.get_context("spawn").Pool(PROCESSES, _quieten) as pool:
        tasks = [(each, folder) for each in missing]
        for _ in pool.imap_unordered(_trace, tasks):
            pass
    return {each: pickle.loads(_path(folder, each).read_bytes()) for each in wanted}


def _trace(task: tuple[Workload, Path]) -> None:
    workload, folder = task
    found: StepGraphs | str
    try:
        found = traced_step(workload.planned(), workload.micro_batch, workload.checkpointing)
    except RuntimeError as error:
        found = f"can't be traced: {error}"
    path = _path(folder, workload)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(pickle.dumps(found))
    partial.rename(path)


def _path(folder: Path, workload: Workload) -> Path:
    return folder / f"{hashlib.sha256(repr(workload).encode()).hexdigest()}.pickle"


def _quieten() -> None:
    """Keep a worker's BLAS from using more than its core."""
    os.environ["OMP_NUM_THREADS"] = "1"


def cpu_s() -> float:
    """CPU seconds of this process and of those that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def since(began: float) -> str:
    return f"{time.perf_counter() - began:.0f} s"
