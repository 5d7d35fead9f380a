"""Run the functions of a file in this folder on the ranks of torchrun: `run.py ddp_before`."""

import importlib
import os
import sys

import torch
import torch.distributed as dist
from common import run

if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    name, *only = sys.argv[1:]
    is_done = run(importlib.import_module(name), only)
    dist.destroy_process_group()
    sys.exit(not is_done)
