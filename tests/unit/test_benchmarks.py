"""What benchmarks say of others' measurements."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def test_measured_hybrid_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A53: all rows within 10 %, with one unknown found from the second."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    hsdp = importlib.import_module("hsdp")
    compute_ms = hsdp.fitted_compute_ms(hsdp.ROWS[1])
    for row in hsdp.ROWS:
        assert hsdp.step_ms(row, compute_ms) == pytest.approx(row.measured_ms, rel=0.1), row.name
