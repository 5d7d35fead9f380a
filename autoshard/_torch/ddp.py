"""torch's DistributedDataParallel around a module that autoshard shards: it is made to let go.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def inside(module: nn.Module) -> nn.Module:
    """Return the module that `module` wraps, as DDP or as torch.compile does, else itself."""
    while isinstance(module, (DistributedDataParallel, torch._dynamo.OptimizedModule)):
        is_ddp = isinstance(module, DistributedDataParallel)
        found: Any = module.module if is_ddp else module._orig_mod
        module = found
    return module


def around(module: nn.Module) -> list[DistributedDataParallel]:
    """List the live DDP modules around `module`, directly or not, or in it."""
    kinds = {DistributedDataParallel, *DistributedDataParallel.__subclasses__()}
    # type(o), not isinstance: that asks o.__class__, and a dead weak proxy raises.
    found = [each for each in gc.get_objects() if type(each) in kinds]
    below = set(module.modules())
    return [each for each in found if each in below or module in set(each.modules())]


def let_go(ddp: DistributedDataParallel) -> None:
    """Have `ddp` call its module, and do nothing else: its gradients are averaged by others.

    Its buckets, and the parameters that it knows, are let go of. Hooks for its communication don't
    run any more, and buffers are not broadcast.

    Patched: `ddp`'s forward, reducer and logger.
    Why:     DDP has no way to end; its hooks wait for parameters that are no longer trained.
    Tests:   in tests/unit/test_patches.py `test_ddp_keeps_parameters`, needed; in
             tests/parity/sharding/test_ddp.py, works.
    """
    device_ids = ddp.device_ids

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Call the module, with arguments on its device if DDP has moved them."""
        if device_ids:
            device = torch.device(ddp.device_type, device_ids[0])
            moved, named = torch.distributed.utils._to_kwargs(args, kwargs, device, False)
            args, kwargs = moved[0], named[0]
        return ddp.module(*args, **kwargs)

    ddp.require_backward_grad_sync = False  # a forward that is running ends without it
    ddp.require_forward_param_sync = False
    ddp.__dict__["forward"] = forward
    ddp._module_parameters.clear()
    for name in ("reducer", "logger"):
        # Functions that torch.compile wraps around a module have copies of its attributes.
        held = ddp.__dict__.get(name)
        for holder in gc.get_referrers(held) if held is not None else ():
            if isinstance(holder, dict) and name in holder:
                holder[name] = None
    if DistributedDataParallel._active_ddp_module is ddp:  # Dynamo would cut graphs by its buckets
        DistributedDataParallel._active_ddp_module = None
