"""Names that fragments of docs/planning.md take for granted: a compiled model, and its profile."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch import nn
from torch.profiler import profile

import autoshard
from autoshard.passes.planner.topology import FOLDER


def names() -> dict[str, Any]:
    """Train a model for a step; write its profile and a calibration to the current folder."""
    model = autoshard.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    model.compile(backend="autoshard", options={"lowering": "eager"})
    with profile() as measured:
        model(torch.ones(2, 4)).sum().backward()
    if torch.distributed.get_rank() == 0:
        measured.export_chrome_trace("profile.json")
        shutil.copy(FOLDER / "gloo.json", "cluster.json")
    torch.distributed.barrier()
    return {"autoshard": autoshard, "model": model, "torch": torch}
