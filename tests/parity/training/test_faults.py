"""`benchmarks/faults.py`, small: a rank is killed, torchrun starts all anew, nothing is lost."""

from __future__ import annotations

from pathlib import Path

import faults
import pytest
import torch

STEPS = 12


@pytest.mark.timeout(240)
def test_killed_ranks(tmp_path: Path) -> None:
    planned = [
        faults.Kill(rank=1, step=3, phase="backward", delay_s=0.001),
        faults.Kill(rank=0, step=9, phase="save", delay_s=0.01),
    ]
    faults.run(tmp_path / "whole", "eager", [], STEPS)
    resumed = faults.run(tmp_path / "killed", "eager", planned, STEPS)
    assert resumed[:2] == [0, 0]
    assert resumed[2] in (5, 10)
    want, got = (torch.load(tmp_path / name / "final.pt") for name in ("whole", "killed"))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
