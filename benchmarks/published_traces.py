"""Traced training steps of published workloads, in two processes, kept on disk if asked.

Workloads that differ in microbatch and checkpoints alone have one trace.

A trace depends neither on the cluster nor on constants.
"""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from published_rows import Workload

from autoshard.tools.plan.estimate import StepGraphs
from autoshard.tools.plan.steps import traced_steps

PROCESSES = 2


def traced(workloads: Iterable[Workload], folder: Path) -> dict[Workload, StepGraphs | str]:
    """Trace `workloads`, those that `folder` has not yet; or say why one can't be.

    folder: keeps traces, of this very version of the project alone: nothing in it is checked.
    """
    wanted = sorted(set(workloads), key=repr)
    groups: dict[Workload, list[Workload]] = {}
    for each in wanted:
        if not _path(folder, each).exists():
            like = dataclasses.replace(each, micro_batch=1, checkpointing="none")
            groups.setdefault(like, []).append(each)
    with multiprocessing.get_context("spawn").Pool(PROCESSES, _quieten) as pool:
        tasks = [(group, folder) for group in groups.values()]
        for _ in pool.imap_unordered(_trace, tasks):
            pass
    return {each: pickle.loads(_path(folder, each).read_bytes()) for each in wanted}


def _trace(task: tuple[Sequence[Workload], Path]) -> None:
    """Trace workloads that differ in microbatch and checkpoints alone, and keep what is found."""
    workloads, folder = task
    sizes = {each.micro_batch for each in workloads}
    ways = {each.checkpointing for each in workloads}
    steps: Mapping[tuple[int, str], StepGraphs] = {}
    why = ""
    try:
        steps = traced_steps(workloads[0].planned(), sizes, ways)
    except RuntimeError as error:
        why = f"can't be traced: {error}"
    for workload in workloads:
        found = why or steps[workload.micro_batch, workload.checkpointing]
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
