"""A signal to one rank: all save after the same step, and another run goes on as if nothing was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import preempted
from support.ranks import forks, free_port
from support.training import in_both_forms

LIMIT_S = 90.0


def run(folder: Path, form: str, phase: str) -> list[Any]:
    """What each of two ranks came to."""
    context, port = forks(), str(free_port())
    pipes, processes = [], []
    for rank in range(2):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        here, there = context.Pipe(duplex=False)
        arguments = (environment, str(folder), form, phase, there)
        process = context.Process(target=preempted.run, args=arguments, daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        assert all(pipe.poll(LIMIT_S) for pipe in pipes)
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.timeout(300)
@in_both_forms
def test_a_signal_to_one_rank(form: str, tmp_path: Path) -> None:
    wanted = run(tmp_path / "undisturbed", form, "")
    assert [step for step, *_ in wanted] == [preempted.STEPS] * 2
    for phase in preempted.PHASES if form == "eager" else ("backward",):
        folder = tmp_path / phase
        stopped = run(folder, form, phase)
        (step,) = {step for step, *_ in stopped}
        assert preempted.AT < step < preempted.AT + 5, phase
        assert run(folder, form, "") == wanted, phase
