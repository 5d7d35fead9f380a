"""`autoshard trace` and `autoshard golden`, in a group that moves no data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.models import Block
from torch import Tensor, nn

from autoshard.passes.ir.plan import Plan
from autoshard.tools.cli import main
from autoshard.tools.trace.golden import accept, differences

VERSION = ".".join(torch.__version__.split(".")[:2])
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


def other_init() -> nn.Module:
    """A Hugging Face model: its norms have no reset_parameters."""
    import transformers as hf

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=False, **sizes)
    )


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
    assert {"partition.txt", "plan.txt"} < after


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


@pytest.mark.skipif(VERSION == "2.11", reason="transformers' Llama is more than one graph there")
def test_a_model_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments("trace")
    given[given.index("--model") + 1] = "tests.unit.test_trace:other_init"
    assert main(given) == 0
    assert "forward: 3 gathers" in capsys.readouterr().out


def test_golden_files_of_graphs_that_are_no_more(tmp_path: Path) -> None:
    (tmp_path / "inference.txt").write_text("a graph\n")
    (tmp_path / "notes.txt").write_text("mine\n")
    assert list(differences({}, tmp_path))
    accept({}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert not list(differences({}, tmp_path))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--options", '{"strategy": "no_shard"}'),
            "a strategy of ['full_shard', 'shard_grad_op']",
        ),
        (("--options", '{"memory_budget": 0.5}'), "not ['memory_budget']"),
        (("--options", "[1]"), "--options '[1]': expected an object"),
        (("--options", "{1"), "--options '{1' is no JSON"),
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
