"""Checkpoints whose files are written by a thread, while training goes on.

    call              copies all that is saved; ranks wait for each other, as in any save
    thread            writes this rank's files, and reports that in the store
    rank 0's thread   publishes once all have reported, and answers

The threads use no collectives, and questions to the store that nobody else waits for, so that it
does not matter when they run. The next save or load waits for the one before, and so does Python as
it exits.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from autoshard.runtime.comm.at_exit import at_exit
from autoshard.runtime.training.checkpoint.reports import Outcome, Report, Reports, new_reports
from autoshard.runtime.training.checkpoint.writing import (
    Task,
    if_full,
    maybe_written,
    not_written,
)

HEAD_START_S = 0.02  # of the caller: it would wait for the thread to let go of the interpreter
GRACE_S = 10.0  # for others to have written, at the end of a process that an exception ends


class PendingCheckpoint:
    """Checkpoint that is being written while training goes on (`save_checkpoint(wait=False)`).

    It is there, complete, once all ranks have written their parts. The next save or load waits for
    that and tells of errors, as the end of the process does; so nobody else has to wait.
    """

    def __init__(self, task: Task) -> None:
        """Start a thread that does `task`; all ranks call this together."""
        self._task, self._reports = task, new_reports()
        self._outcome: Outcome | None = None
        self._has_written = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoshard checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> Path:
        """Wait until all ranks have written, and return the path; all ranks call this, or none.

        Raises CheckpointError on every rank if one of them could not write its part, or has not
        done so within the timeout of the process group: what was complete before is still there.
        If rank 0 is gone, which publishes, others can't know; their error says so.
        """
        return self._end(self._reports.limit_s if self._reports is not None else 0.0)

    def done(self) -> bool:
        """Tell, without waiting, whether the checkpoint is complete, or has failed."""
        if self._task.rank == 0 or self._reports is None or self._outcome is not None:
            return not self._thread.is_alive()
        return self._reports.is_answered()

    def _end(self, limit_s: float) -> Path:
        """Wait as `wait`, no longer than `limit_s` for other ranks."""
        if self._reports is not None:
            self._reports.until = time.monotonic() + limit_s
        self._thread.join()
        if self._outcome is None:
            assert self._reports is not None
            try:
                self._outcome = self._reports.heard()
            except dist.DistError as error:
                self._outcome = self._without_store(error)
        if self in _pending:
            _pending.remove(self)
        task = self._task
        if self._outcome.error:
            raise not_written(task.rank, task.step, task.root, self._outcome.error)
        if self._outcome.doubt:
            raise maybe_written(task.rank, task.step, task.root, self._outcome.doubt)
        return task.root / self._outcome.name

    def _end_at_exit(self) -> None:
        """Wait as `wait`; if an exception ends this process, others may be gone: not for long."""
        began = time.monotonic()
        self._has_written.wait()
        if self._reports is not None:
            self._reports.hurry()
        if self._reports is None or getattr(sys, "last_value", None) is None:
            self.wait()
        else:
            self._end(max(GRACE_S, time.monotonic() - began))

    def _run(self) -> None:
        """Write this rank's part, and as rank 0 publish those of all: the thread's work."""
        time.sleep(HEAD_START_S)
        task, reports, report = self._task, self._reports, self._report()
        task.values.clear()
        self._has_written.set()
        if reports is None:
            self._outcome = self._published([report])
            return
        try:
            reports.add(report)
            if task.rank == 0:
                self._outcome = self._published(reports.all())
                reports.answer(self._outcome)
        except dist.DistError as error:
            self._outcome = self._outcome or self._without_store(error)

    def _without_store(self, error: dist.DistError) -> Outcome:
        """Return what is known once the store is lost: rank 0, which publishes, has not."""
        why = f"the store can't be reached ({error})"
        return Outcome(error=why) if self._task.rank == 0 else Outcome(doubt=why)

    def _report(self) -> Report:
        """Write this rank's part; return what was written, or why it could not be."""
        try:
            return self._task.write()
        except Exception as error:  # whatever it is, rank 0 waits for a report
            return f"{type(error).__name__}: {error}{if_full(self._task.root)}"

    def _published(self, reports: list[Report]) -> Outcome:
        """Publish what ranks have written, by rank, or remove it if one could not; say which."""
        written, errors = [], []
        for rank, each in enumerate(reports):
            if isinstance(each, str):
                errors.append(f"on rank {rank}, {each}")
            else:
                written.append(each)
        if not errors:
            try:
                return Outcome(name=self._task.publish(written))
            except Exception as error:  # all ranks are told
                errors.append(f"on rank 0, {type(error).__name__}: {error}")
        shutil.rmtree(self._task.aside, ignore_errors=True)
        return Outcome(error=errors[0])


_pending: list[PendingCheckpoint] = []  # one, or none: it has not been waited for
_reports: list[Reports] = []  # likewise, of the latest


def start(task: Task) -> PendingCheckpoint:
    """Have `task` done by a thread; all ranks call this together, after `end_pending`."""
    found = PendingCheckpoint(task)
    _pending.append(found)
    if task.rank == 0 and found._reports is not None:
        while _reports:
            _reports.pop().forget()
        _reports.append(found._reports)
    at_exit(_end_last)  # which is before the end of a process group that was made before this
    return found


def end_pending() -> None:
    """Wait for the checkpoint that is being written, if there is one. Raises as its `wait`."""
    if _pending:
        _pending[0].wait()


def _end_last() -> None:
    """Wait for what is being written, and for others to have heard of it; raises for Python."""
    try:
        if _pending:
            _pending[0]._end_at_exit()
    finally:
        if _reports:
            _reports[0].linger()
