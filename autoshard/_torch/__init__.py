"""Private names of torch that autoshard uses, and every patch of torch, all of them.

Everything else reaches them from here, as `_torch.autograd.in_backward()`, so that a torch upgrade
is a change to one folder. Each name was tried on torch 2.11.0, 2.13.0 and 2.15.0; a name that is
missing on some of them says so beside it.

    dynamo      the frame that is traced; compiled modules; tracing again
    aot         AOTAutograd: settings, cache, its node in autograd's graph
    inductor    compiling, settings, caches
    autograd    the running backward, its nodes, hooks; torch.func
    tensors     fake tensors, subclasses, memory, dispatch modes, trees
    dtensor     DTensors and meshes
    dist        process groups, their collectives, stores
    nn          modules and optimizers
    ddp         DistributedDataParallel around a module of ours
    fsdp        what FSDP2, DDP and pipelines look for on a module
    fsdp2       FSDP2's own state of modules
    checkpoint  torch.distributed.checkpoint
    ops         operators in graphs
    fx          graphs, symbolic sizes
    device      GPUs, the profiler

A function that patches torch says so in its docstring: what, why there is no public way, and the
test that fails when the patch is no longer needed. CONTRIBUTING.md lists them.
"""

from autoshard._torch import aot as aot
from autoshard._torch import autograd as autograd
from autoshard._torch import checkpoint as checkpoint
from autoshard._torch import ddp as ddp
from autoshard._torch import device as device
from autoshard._torch import dist as dist
from autoshard._torch import dtensor as dtensor
from autoshard._torch import dynamo as dynamo
from autoshard._torch import fsdp as fsdp
from autoshard._torch import fsdp2 as fsdp2
from autoshard._torch import fx as fx
from autoshard._torch import inductor as inductor
from autoshard._torch import nn as nn
from autoshard._torch import ops as ops
from autoshard._torch import tensors as tensors
