"""Parity of two ranks that share one GPU, with gloo between them: NCCL wants a GPU for each.

    python benchmarks/two_ranks.py [--samples 25] [--seed 0]    # on a CPU where there is no GPU

It is `autoshard parity --matrix`, small models in random combinations of options: on streams and
with an allocator as on a cluster, and with values that really come from another rank. Exits with 1
if a sample fails.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard.tools.cli import main
from autoshard.tools.ranks import launch, leave

RANKS = 2


def run() -> int:
    """Start the ranks, or, on a rank, try the samples; return the exit status."""
    if "RANK" not in os.environ:
        return launch(sys.argv[1:], RANKS, program=(str(Path(__file__).resolve()),))
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU", flush=True)
    return leave(main(["parity", "--matrix", *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(run())
