"""A rank of two hosts with two each, until something ends it.

Under torchrun, `one_of_two_hosts.py FOLDER WHAT`: "steps" of HSDP, after a look at its parity, or
"notes", which ranks compare. Writes to FOLDER/RANK: "parity" and the report, "stepping" when it has
begun, and in the end the error.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from support.models import SmallNet, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autoshard
from autoshard.passes.planner.topology import FOLDER
from autoshard.runtime.ranks.order import compare_event

TIMEOUT_S = 15


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = SmallNet()

    def forward(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(ids), ids.roll(-1))


def two_axes(rank: int) -> DeviceMesh:
    """Replicas across hosts, shards inside; groups of a mesh of torch's own wait for 30 minutes."""
    timeout = timedelta(seconds=TIMEOUT_S)
    groups = {}
    for ranks in ((0, 2), (1, 3), (0, 1), (2, 3)):
        groups[ranks] = dist.new_group(ranks, timeout=timeout)
    own = [group for ranks, group in groups.items() if rank in ranks]
    names = ("replicate", "shard")
    return DeviceMesh.from_group(own, "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=names)


def main(folder: Path, what: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()

    def say(text: str) -> None:
        with (folder / str(rank)).open("a") as file:
            file.write(text + "\n")

    try:
        {"steps": step_on, "notes": compare_on}[what](rank, two_axes(rank), folder, say)
    except Exception as error:
        say(f"{type(error).__name__}: {' '.join(str(error).split())}")
    os._exit(0)  # without waiting for threads of groups whose ranks are gone


def step_on(rank: int, mesh: DeviceMesh, folder: Path, say: Callable[[str], None]) -> None:
    topology = json.loads((FOLDER / "gloo.json").read_text())
    path = folder / f"topology_{rank}.json"
    path.write_text(json.dumps({**topology, "ranks_per_node": 2, "network_gb_per_s": 0.1}))
    report = autoshard.parity(
        Losses,
        [{"ids": tokens(rank, step)} for step in range(3)],
        options={"topology": str(path)},
        rtol=1e-5,  # sums within a host first, then over hosts: another order than replicated
        strategy="hybrid_shard",
        mesh=mesh,
    )
    say(f"parity {'ok' if report.ok else 'not ok'}: {report.text()}")
    torch.manual_seed(0)
    model = autoshard.shard(Losses(), strategy="hybrid_shard", mesh=mesh)
    for step in itertools.count():
        model(tokens(rank, step)).backward()
        if step == 2:
            say("stepping")


def compare_on(rank: int, mesh: DeviceMesh, folder: Path, say: Callable[[str], None]) -> None:
    for number in itertools.count():
        compare_event(f"note {number}", mesh, hint="")
        if number == 2:
            say("stepping")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
