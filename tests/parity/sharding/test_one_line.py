"""A user's script under torchrun: five lines, and 20 steps equal to training by hand."""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import subprocess
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support import warm
from support.ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard

SCRIPT = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 33)
        block = lambda: nn.Sequential(nn.LayerNorm(33), nn.Linear(33, 33), nn.GELU())
        self.blocks = nn.Sequential(block())
        self.last = nn.Linear(33, 7)
    def forward(self, x):
        return self.last(self.blocks(self.first(x)))

def data(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 10, generator=generator), torch.randint(7, (16,), generator=generator)

def train_in_one_line(lowering):
    # the five lines
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = torch.compile(model, backend="autoshard", options={"lowering": lowering, "strict": True})
    for number in range(20):
        x, y = data(int(os.environ["RANK"]), number)
        functional.cross_entropy(step(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model

def train_by_hand():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(20):
        x, y = data(dist.get_rank(), number)
        functional.cross_entropy(model(x), y).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return model

sharded = {lowering: train_in_one_line(lowering) for lowering in ("eager", "inductor")}
plain = train_by_hand()
for lowering, model in sharded.items():
    worst = 0.0
    for (name, mine), (_, whole) in zip(model.named_parameters(), plain.named_parameters()):
        shard = mine.to_local()
        rows = -(-whole.shape[0] // 2)
        want = whole[dist.get_rank() * rows :][: shard.shape[0]]
        worst = max(worst, ((shard - want).abs().max() / want.abs().max()).item())
    dist.all_reduce(worst := torch.tensor(worst, dtype=torch.float64), op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(lowering, worst.item())
"""


def test_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            *(warm.python(), "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(script)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": warm.python()},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    worst = dict(line.split() for line in done.stdout.splitlines())
    assert float(worst["eager"]) == 0
    assert float(worst["inductor"]) <= 1e-5


@on_ranks(2)
def test_the_script_of_the_readme(rank: int) -> None:
    """It trains, and has sharded the model."""
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    (script,) = re.findall(r"```python\n(# train\.py\n.*?)```", readme, re.DOTALL)
    names: dict[str, Any] = {}
    exec(script, names)
    assert math.isfinite(names["loss"].item())
    assert all(isinstance(param, DTensor) for param in names["model"].parameters())


@on_ranks(2)
def test_arguments_do_not_keep_a_model(rank: int) -> None:
    """A policy that refers to the model is freed with it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = functools.partial(is_first, model)
    autoshard.shard(model, policy=policy)
    alive = weakref.ref(model)
    del model, policy
    gc.collect()
    assert alive() is None


def is_first(model: nn.Sequential, module: nn.Module) -> bool:
    return module is model[0]


SHARDED_BY = {
    "shard": ["ignored_params", "strategy"],
    "shard, the same": [],
    "a block": ["ignored_params", "strategy"],
    "another option": ["strategy"],
    "other parameters": ["ignored_params"],
    "the same": [],
}
"""Ways in which a model was sharded, each with the options that differ from it."""


@pytest.mark.parametrize("by", SHARDED_BY)
@on_ranks(2)
def test_options_for_a_model_that_is_sharded(rank: int, by: str) -> None:
    """Options that say how to shard it are an error, unless it was sharded by the same ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options: dict[str, Any] = {"lowering": "eager"}
    how: dict[str, Any] = {"strategy": "shard_grad_op", "ignored_params": [model[0].bias]}
    told = {**options, **how}
    first = {
        "another option": {**told, "strategy": "full_shard"},
        "other parameters": {**told, "ignored_params": [model[1].bias]},
        "the same": {**told, "ignored_params": [model[0].bias]},
    }
    if by == "shard":
        autoshard.shard(model)
    elif by == "shard, the same":
        autoshard.shard(model, **how, sync_module_states=False)
    elif by == "a block":
        autoshard.fully_shard(model[0])
    else:
        torch.compile(model, backend="autoshard", options=first[by])(torch.ones(2, 4))
    call = torch.compile(model, backend="autoshard", options=told)
    if not SHARDED_BY[by]:
        call(torch.ones(2, 4))
        return
    names = re.escape(str(SHARDED_BY[by]))
    with pytest.raises(ValueError, match=rf"sharded already, and options {names}"):
        call(torch.ones(2, 4))
    if by != "a block":  # whose root is not sharded, of which is warned
        torch.compile(model, backend="autoshard", options=options)(torch.ones(2, 4))
