"""What the guide on artefacts takes for granted: one, for two ranks, in the folder at hand."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import warm
from torch import Tensor

import autoshard

FILES = Path(__file__).resolve().parents[2] / "files"


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Return a scalar to differentiate."""
    return model(batch).square().mean()


def names() -> dict[str, Any]:
    """Make the artefact, in a process that rank 0 starts, and import the model's module."""
    if dist.get_rank() == 0:
        subprocess.run(
            [
                *(warm.python(), "-m", "autoshard.tools.cli", "compile", "--accumulate"),
                *("--model", "my_model:build", "--batch", "my_model:batch", "--gpus", "2"),
                *("--options", '{"lowering": "eager"}', "--out", "compiled"),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FILES), *sys.path])},
            check=True,
        )
    dist.barrier()
    sys.path.insert(0, str(FILES))
    try:
        my_model = importlib.import_module("my_model")
    finally:
        sys.path.remove(str(FILES))
    return {
        "autoshard": autoshard,
        "torch": torch,
        "my_model": my_model,
        "loss_of": loss_of,
        "rank": dist.get_rank(),
    }
