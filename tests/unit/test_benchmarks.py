"""What benchmarks say of others' measurements."""

from __future__ import annotations

import importlib
import sys
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


def test_what_a_gpu_is_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part is of a program that is there; without a GPU none is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    on_gpu = importlib.import_module("on_gpu")
    for part in on_gpu.parts(tmp_path):
        programs = [each for each in part.command[1:] if each.endswith(".py") or "tests/" in each]
        assert all((BENCHMARKS.parent / each).exists() for each in programs), part.title
    monkeypatch.setattr("sys.argv", ["on_gpu.py", "--list"])
    assert on_gpu.main() == 0
    assert "overlap.py --check" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "end"),
    [("print(7)", "exit status 0"), ("raise SystemExit(3)", "exit status 3")],
)
def test_a_part_of_a_report(code: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    on_gpu = importlib.import_module("on_gpu")
    text, is_done = on_gpu.run(on_gpu.Part("it", "7", (sys.executable, "-c", code), 1))
    assert is_done == (end == "exit status 0")
    assert "Wanted: 7." in text
    assert end in text


def test_a_part_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended, with what it started."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    on_gpu = importlib.import_module("on_gpu")
    code = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '600'])"
    text, is_done = on_gpu.run(on_gpu.Part("it", "7", (sys.executable, "-c", code), 0.02))
    assert not is_done
    assert "begun" in text
    assert "ended after 0.02 minutes" in text


def test_tables_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios are to the fastest of those that shard; beside them, how much memory who takes."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables = importlib.import_module("tabulate_steps")

    def entry(backward_ms: float, peak: int) -> dict[str, object]:
        return {
            "backward_ms": [backward_ms, backward_ms, backward_ms + 50.0],
            "optimizer_ms": [10.0, 10.0, 10.0],
            "first_s": 1.0,
            "kept": {"allocated": 10**5, "reserved": 0},
            "peak": {"allocated": peak, "reserved": 0},
        }

    ours = ["autoshard, compiled", "autoshard, kept"]
    names = ["unsharded, compiled", *tables.RIVALS, "FSDP2, kept", *ours]
    entries = {name: entry(100.0 + 10 * at, 10**6) for at, name in enumerate(names)}
    entries["FSDP1"] = entry(190.0, 2 * 10**6)
    entries["FSDP2, kept"] = entry(100.0, 10**6)
    entries["autoshard, kept"] = entry(80.0, 3 * 10**6)
    result = {"name": "m", "tokens": 13, "entries": entries, "collectives_ms": [50.0, 50.0]}
    results = tables.read([result])
    shown = "\n".join(tables.short(results))
    assert "| FSDP1 | 200 (200 to 250) |" in shown
    assert "| autoshard, compiled, of the fastest rival | **1.31** |" in shown  # 170 of 130
    assert "| autoshard, kept, of the fastest rival | **0.82** |" in shown  # 90 of 110
    assert "computation and collectives alone | 1.07 |" in shown
    assert "| autoshard, kept | 3 |" in shown
    assert "| m | FSDP1 | 200 | 200 to 250 | 200 to 250 | 90 | 65 | 2 | 1 |" in "\n".join(
        tables.long(results)
    )
