"""A signal to one rank: all save after the same step, and another run goes on as if nothing was."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support import preempted
from support.ranks import in_processes
from support.training import in_both_forms


def run(folder: Path, form: str, phase: str) -> list[Any]:
    """What each of two ranks came to."""
    return in_processes(preempted.run, str(folder), form, phase)


@pytest.mark.timeout(300)
@in_both_forms
def test_a_signal_to_one_rank(form: str, tmp_path: Path) -> None:
    wanted = run(tmp_path / "undisturbed", form, "")
    assert [step for step, *_ in wanted] == [preempted.STEPS] * 2
    assert (tmp_path / "undisturbed" / "step_00000010").is_dir()
    assert run(tmp_path / "undisturbed", form, "") == wanted  # from there, saved asynchronously
    for phase in preempted.PHASES if form == "eager" else ("backward",):
        folder = tmp_path / phase
        stopped = run(folder, form, phase)
        (step,) = {step for step, *_ in stopped}
        assert preempted.AT < step < preempted.AT + 5, phase
        assert run(folder, form, "") == wanted, phase


def test_a_forked_process_is_ended() -> None:
    """As a worker of a DataLoader: the process that called notes signals, and no child does."""
    found = in_processes(preempted.fork, environments=[{}])
    assert found == [(b".", signal.SIGTERM, True)]
