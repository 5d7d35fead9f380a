"""What benchmarks say of others' measurements."""

from __future__ import annotations

import importlib
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def test_measured_hybrid_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A53: all rows within 10 %, with one unknown found from the second."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    hsdp = importlib.import_module("hsdp")
    compute_ms = hsdp.fitted_compute_ms(hsdp.ROWS[1])
    for row in hsdp.ROWS:
        assert hsdp.step_ms(row, compute_ms) == pytest.approx(row.measured_ms, rel=0.1), row.name


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("on_gpu")


def test_what_a_gpu_is_for(
    on_gpu: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each part is of programs that are there, and takes no more than its minutes."""
    for name, commands in on_gpu.parts(tmp_path).items():
        assert sum(each.minutes for each in commands) <= on_gpu.LIMIT_MINUTES, name
        for each in commands:
            programs = [it for it in each.arguments if it.endswith(".py") or "tests/" in it]
            assert programs
            assert all((BENCHMARKS.parent / it).exists() for it in programs), each.title
    monkeypatch.setattr("sys.argv", ["on_gpu.py", "--list", "--part", "parity"])
    assert on_gpu.main() == 0
    listed = capsys.readouterr().out
    assert "overlap.py --check" in listed
    assert "tests/device" not in listed
    monkeypatch.setattr("sys.argv", ["on_gpu.py", "--part", "speed"])
    with pytest.raises(SystemExit, match="2"):
        on_gpu.main()
    assert "no part speed; expected some of tests, parity," in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["on_gpu.py", "--out", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        on_gpu.main()
    assert "there is no GPU" in capsys.readouterr().err


def test_a_bare_machine(on_gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch finds the backend without an installation, and nothing needs git."""
    found = on_gpu.announce(tmp_path / "site")
    env = on_gpu.environment(found)
    code = (
        "import importlib.metadata as m, sys; "
        "found = [e for d in m.distributions(path=[sys.argv[1]]) for e in d.entry_points]; "
        "print([e.load().__name__ for e in found if e.group == 'torch_dynamo_backends'])"
    )
    command = on_gpu.Command("it", "it is found", ("-c", code, str(found)), 1)
    text, is_done = on_gpu.run(command, env)
    assert is_done, text
    assert "['autoshard']" in text
    monkeypatch.setenv("PATH", str(tmp_path))
    assert on_gpu.source().startswith("commit unknown, source ")


def test_profiles_go_to_one_file(on_gpu: Any, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    on_gpu.pack(traces, tmp_path / "none.tar.gz")
    assert not (tmp_path / "none.tar.gz").exists()
    (traces / "a.json").write_text("{}")
    on_gpu.pack(traces, tmp_path / "traces.tar.gz")
    with tarfile.open(tmp_path / "traces.tar.gz") as archive:
        assert archive.getnames() == ["traces", "traces/a.json"]


def test_what_a_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans that overlap count once; between them the device is idle."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    one_gpu = importlib.import_module("one_gpu")
    spans = [(5_000.0, 6_000.0), (0.0, 2_000.0), (1_000.0, 3_000.0), (5_500.0, 5_600.0)]
    assert one_gpu.on_device(spans) == one_gpu.OnDevice(4.0, 2.0, 4)
    assert one_gpu.on_device([]) == one_gpu.OnDevice(0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("code", "end"),
    [("print(7)", "exit status 0"), ("raise SystemExit(3)", "exit status 3")],
)
def test_a_part_of_a_report(on_gpu: Any, code: str, end: str) -> None:
    text, is_done = on_gpu.run(on_gpu.Command("it", "7", ("-c", code), 1))
    assert is_done == (end == "exit status 0")
    assert "Wanted: 7." in text
    assert end in text


def test_a_part_that_hangs(on_gpu: Any) -> None:
    """It is ended, with what it started."""
    code = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '600'])"
    text, is_done = on_gpu.run(on_gpu.Command("it", "7", ("-c", code), 0.02))
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


def test_what_ranks_tell_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number and size are a rank's own, however many there are, by a virtual clock."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    control_plane = importlib.import_module("control_plane")
    few, many = control_plane.virtual(8), control_plane.virtual(128)
    for one, other in zip(few, many, strict=True):
        assert other.messages <= 1.1 * one.messages
        assert other.num_bytes <= 1.1 * one.num_bytes
        assert other.num_bytes <= 8_000


def test_signals_in_all_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have room to stop before the last step: they do so within five."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    preemption = importlib.import_module("preemption")
    found = preemption.signals(20, 0)
    assert found == preemption.signals(20, 0)
    assert {each.phase for each in found} == set(preemption.PHASES)
    assert all(each.step + 5 < preemption.STEPS for each in found)


def test_faults_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty of them have each kind, each phase, each form and each store, and each two of these."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    faults = importlib.import_module("faults")
    runs = faults.draw(60, 0)
    assert runs == faults.draw(60, 0)
    found = [(each.kind, each.phase, it.form, it.store) for it in runs for each in it.faults]
    assert len(found) == 60
    assert len({(kind, form, store) for kind, _, form, store in found}) == 4 * 3 * 2
    assert len({(phase, form, store) for _, phase, form, store in found}) == 9 * 3 * 2
    assert len({(kind, phase) for kind, phase, _, _ in found}) == 33  # of 36: few hang
    assert len(faults.draw(6, 0)) == 6


def test_kinds_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is made of products; what Inductor generates has the names of what it replaces."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu_kernels = importlib.import_module("gpu_kernels")
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN": "products",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_bf16>": "products",
        "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>": "attention",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
        "triton_red_fused__scaled_dot_product_flash_attention_mean_0": "others",
        "void at::native::vectorized_elementwise_kernel<4>": "others",
    }
    assert {name: gpu_kernels.kind_of(name) for name in names} == names
    table = gpu_kernels.table("a model", {"forward": 2.0}, {"forward": 3.0, "peak": 5.0})
    assert table.splitlines()[1].split() == ["forward", "2.00", "3.00", "1.50"]
    assert "5.00" in table
