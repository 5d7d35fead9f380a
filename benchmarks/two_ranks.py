"""Parity of two ranks that share one GPU, with gloo between them: NCCL wants a GPU for each.

    python benchmarks/two_ranks.py [--samples 25] [--seed 0]    # on a CPU where there is no GPU

Small models in random combinations of options, as `autoshard parity --matrix`, on streams and with
an allocator as on a cluster, and with values that really come from another rank. Exits with 1 if a
sample fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard.tools.parity.matrix import try_case
from autoshard.tools.ranks import leave

RANKS = 2


def main() -> int:
    """Start the ranks, or, on a rank, try the samples; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0, help="of the first sample")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return _start(sys.argv[1:])
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    failed = 0
    for seed in range(options.seed, options.seed + options.samples):
        outcome = try_case(seed)
        failed += outcome.problem is not None
        if outcome.problem is not None and dist.get_rank() == 0:
            print(f"seed {seed}: {outcome.problem}\n    {outcome.text}", flush=True)
    if dist.get_rank() == 0:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
        passed = options.samples - failed
        print(f"{device}: {passed} of {options.samples} samples pass, from seed {options.seed}")
    return leave(1 if failed else 0)


def _start(arguments: list[str]) -> int:
    """Run this file on `RANKS` processes, under torchrun; return its exit status."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(RANKS), str(Path(__file__).resolve())),
        *arguments,
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
