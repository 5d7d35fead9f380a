"""Logs and structured-trace artifacts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard import progress

SCRIPT = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
call = torch.compile(model, backend="autoshard", options={"lowering": "eager", "strict": True})
call(torch.ones(2, 3)).sum().backward()
"""


def run(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_torch_logs() -> None:
    logged = run(TORCH_LOGS="+autoshard")
    assert "forward: 1 gathers, 0 reduces" in logged
    assert "backward: 0 gathers, 1 reduces" in logged


def test_structured_trace(tmp_path: Path) -> None:
    run(TORCH_TRACE=str(tmp_path))
    (log,) = tmp_path.glob("*.log")
    text = log.read_text()
    for graph in ("forward", "backward"):
        for what in ("plan", "graph"):
            assert f'"name": "autoshard_0_{graph}_{what}"' in text
    assert "autoshard.launch_gather(" in text


@pytest.mark.usefixtures("fake_world")
def test_a_long_compilation_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.001)
    model = autoshard.fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    call = torch.compile(model, backend="autoshard", options={"lowering": "eager"})
    with caplog.at_level("WARNING", logger="autoshard"):
        call(torch.ones(2, 3))
    told = [record.getMessage() for record in caplog.records]
    line = r"compiling Sequential: (tracing, 0|forward, 1|backward, 2) of 2, \d+ s elapsed"
    assert told
    assert all(re.fullmatch(line, each) for each in told), told
