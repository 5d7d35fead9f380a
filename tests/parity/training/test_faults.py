"""`benchmarks/faults.py`, small: what befalls a rank, and runs that come to the same state."""

from __future__ import annotations

from pathlib import Path

import faults
from faulty_ranks import Fault

STEPS = 24
PLANNED = (
    Fault("kill", rank=1, phase="backward", step=3, delay_s=0.001),
    Fault("stop", rank=0, phase="optimizer", step=4, delay_s=0.0),
    Fault("kill", rank=0, phase="save", step=8, delay_s=0.01),
    Fault("terminate", rank=1, phase="forward", step=14, delay_s=0.0),
)


def test_runs_go_on(tmp_path: Path) -> None:
    with faults.serving() as command:
        undisturbed = faults.Run("eager", "default store", ())
        assert faults.run(tmp_path / "whole", undisturbed, STEPS, command) == [0]
        disturbed = faults.Run("eager", "own store", PLANNED)
        resumed = faults.run(tmp_path / "faults", disturbed, STEPS, command)
    assert resumed[0] == 0
    assert resumed[1] in (0, 3)
    assert resumed[2] in (6, 9, 12)
    assert resumed[3] in range(15, 21)
    assert faults.difference(tmp_path / "whole", tmp_path / "faults") == ""
