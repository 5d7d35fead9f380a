"""`autoshard trace` and `autoshard golden`, in a group that moves no data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models import Block
from torch import Tensor, nn

from autoshard.passes.plan import Plan
from autoshard.tools.cli import main

KINDS = ("forward", "backward")
pytestmark = pytest.mark.usefixtures("fake_world")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block(32, 128) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def arguments(command: str, *more: str) -> list[str]:
    model = "tests.unit.test_trace:Tower"
    return [command, "--model", model, "--seq", "16", "--ranks", "2", *more]


def test_plans_are_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = json.dumps({"topology": "h100", "bucketing": "per_unit"})
    out, dump = tmp_path / "out", tmp_path / "dump"
    where = ["--out", str(out), "--dump", str(dump), "--options", options]
    assert main(arguments("trace", *where)) == 0
    printed = capsys.readouterr().out
    assert "forward: 3 gathers, 0 reduces" in printed
    assert "backward: 2 gathers, 3 reduces" in printed
    plans = [Plan.from_json((out / f"{kind}.plan.json").read_text()) for kind in KINDS]
    assert all(plan.text() in printed for plan in plans)
    assert json.loads((out / "forward.trace.json").read_text())["traceEvents"]
    after = {path.name for path in dump.rglob("*.txt")}
    assert {"00_partition.txt", "plan.txt"} < after


def test_golden_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As they were; and what differs, once something does."""
    folder = ["--dir", str(tmp_path)]
    assert main(arguments("golden", *folder)) == 1  # there are none yet
    assert main(arguments("golden", *folder, "--accept")) == 0
    capsys.readouterr()
    assert main(arguments("golden", *folder)) == 0
    assert "3 files, as they were" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "backward.txt",
        "forward.txt",
        "plans.txt",
    ]
    other = ["--options", json.dumps({"strategy": "shard_grad_op"})]
    assert main(arguments("golden", *folder, *other)) == 1
    printed = capsys.readouterr().out
    assert "-backward: 2 gathers, 3 reduces" in printed
    assert "+backward: 0 gathers, 3 reduces" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--options", '{"bucket": "none"}'), "unknown option 'bucket'"),
        (("--dtype", "f31"), "--dtype 'f31': expected one of"),
        (("--ranks", "3"), "needs a process of its own"),
    ],
)
def test_what_cannot_be_traced(
    more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(arguments("trace", *more))
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err
