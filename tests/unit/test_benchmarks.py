"""What benchmarks say of others' measurements."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from autoshard.passes.planner.per_unit import per_unit
from autoshard.passes.planner.search import search

LAYERS = 32  # enough for a backward with an idle link to gather far ahead
BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.mark.parametrize("layout", ["packed", "grouped"])
@pytest.mark.parametrize("regime", ["compute-bound", "balanced", "link-bound"])
@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_plans_keep_to_the_memory_of_one_bucket_a_unit(
    graph: str, regime: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    planner = importlib.import_module("planner")
    problem = planner.make_problem(
        planner.MODELS["8b"], planner.REGIMES[regime], graph, layers=LAYERS
    )
    unit = per_unit(problem)
    only = {"gather": (layout,), "reduce": (layout,)}
    found = search(problem, budget_bytes=unit.peak_bytes, layouts=only, steps=100).timeline
    assert found.peak_bytes <= unit.peak_bytes
    assert found.time_us <= unit.time_us


def test_measured_hybrid_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A53: all rows within 10 %, with one unknown found from the second."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    hsdp = importlib.import_module("hsdp")
    compute_ms = hsdp.fitted_compute_ms(hsdp.ROWS[1])
    for row in hsdp.ROWS:
        assert hsdp.step_ms(row, compute_ms) == pytest.approx(row.measured_ms, rel=0.1), row.name
