"""What `autoshard plan` says of memory, beside the storages that a real step has at its peak."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from support import warm
from support.memory import PeakOfGraphs
from support.models import Block
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import autoshard

TOLERANCE = 0.01
LENGTH = 256  # activations are most: two moments with nearly the same sum have other categories


class Tower(nn.Module):
    """Gives its loss, so that its graph holds all that a step needs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 128)
        self.layers = nn.ModuleList(Block(128, 512) for _ in range(8))
        self.head = nn.Linear(128, 512)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def predicted(checkpointing: str) -> dict[str, int]:
    command = [
        *(warm.python(), "-m", "autoshard.tools.cli", "plan", "--json"),
        *("--model", "parity.tools.test_predicted_memory:Tower", "--micro-batch", "4"),
        *("--seq", str(LENGTH)),
        *("--gpus", "2", "--topology", "gloo", "--strategy", "full_shard"),
        *("--dtype", "f32", "--lowering", "eager", "--checkpointing", checkpointing),
    ]
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    tests = Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(tests.parent), str(tests)])
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=100
    )
    memory: dict[str, int] = json.loads(done.stdout)["memory"]
    return memory


def measured(checkpointing: str) -> Counter[str]:
    """By category, in the step that needs least: gloo's threads may hold what they sent."""
    torch.manual_seed(0)
    model = Tower()
    if checkpointing == "full":
        for layer in model.layers:
            again = functools.partial(checkpoint, layer.forward, use_reentrant=False)
            layer.forward = again  # type: ignore[method-assign]  # as users wrap a block's
    autoshard.shard(model)
    options = {"lowering": "eager", "topology": "gloo", "strict": True}
    call = torch.compile(model, backend="autoshard", options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    memory, steps = PeakOfGraphs(counts_backend=False), []  # a plan knows of no backend's own
    ids = torch.zeros(4, LENGTH, dtype=torch.long)
    with memory.compiling():
        for _ in range(5):
            memory.reset()
            roles, number = memory.mode.roles, memory.mode.number
            with memory:
                roles.update({number(p.to_local()): "parameters" for p in model.parameters()})
                loss = call(ids)
                for each in memory.mode.alive():
                    roles.setdefault(each, "activations")
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found = Counter[str]()
            for each, num_bytes in memory.mode.at_peak.items():
                then = memory.mode.roles_at_peak.get(each)  # gradients were unreduced before
                found[then or roles.get(each, "temporaries")] += num_bytes
            steps.append(found)
    states = (value for state in optimizer.state.values() for value in state.values())
    least = min(steps[1:], key=lambda found: found.total())
    least["optimizer"] = sum(each.to_local().nbytes for each in states if isinstance(each, DTensor))
    return least


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@on_ranks(2)
def test_by_category(rank: int, checkpointing: str) -> None:
    found = measured(checkpointing)
    if rank != 0:
        return
    want = predicted(checkpointing)
    print(f"{checkpointing}: predicted {want}, measured {dict(found)}, {found.total()} in all")
    assert abs(want.pop("peak_bytes") / found.total() - 1) <= TOLERANCE
    for category, num_bytes in want.items():
        assert abs(num_bytes - found[category]) <= TOLERANCE * num_bytes + 4096, category
