"""One rank of several, with torch's Flight Recorder on: `python recorded.py FORM`.

Prints the names of the Python functions that each collective was called from, a line for each.
"""

from __future__ import annotations

import os
import pickle
import sys

import torch
import torch.distributed as dist
from support.models import Net, net_loss
from support.training import by_hand, in_form

import autoshard


def main(form: str) -> None:
    dist.init_process_group("gloo")
    model = in_form(by_hand(autoshard.fully_shard)(Net()), form)
    for step in range(2):
        net_loss(model, dist.get_rank(), step).backward()
    dist.barrier()
    trace = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    for entry in trace.get("entries", []):
        print(" < ".join(frame["name"] for frame in entry["frames"]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
