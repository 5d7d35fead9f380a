"""State dict of a sharded model with plain tensors of their true sizes, as the unsharded one has.

shards --gathered, one parameter after the other--> plain tensors, on every rank or on rank 0
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.training.checkpoint.model_state import quiet
from autoshard.runtime.training.checkpoint.on_ranks import this_rank
from autoshard.runtime.weights.targets import check_together, targets_of


@torch.inference_mode(False)
@torch.no_grad()
def full_state_dict(
    model: nn.Module, *, cpu_offload: bool = False, rank0_only: bool = False
) -> dict[str, Any]:
    """Gather the state dict of `model`, with plain tensors of their true sizes; all ranks call it.

    It has the names, the order and the dtypes of the unsharded model's `state_dict()`, without
    prefixes of wrappers and of torch.compile; an unsharded one loads it as it is. Tensors are
    copies, which training does not change. A tied parameter is gathered once: its names share one
    tensor, as in any state dict (safetensors refuses that: `save_pretrained` writes such files).

    cpu_offload: copy each tensor to the CPU once it is gathered; else they stay on the device.
    rank0_only: only rank 0 keeps them, and the others get an empty dict; they hold one parameter
        at a time. With both, no rank needs memory for all parameters on its device.

    Raises RuntimeError, on all ranks, if some don't call it now, or if a parameter is on meta.
    """
    inner = _torch.dynamo.compiled_module(model) or model
    check_together(inner, f"full_state_dict(cpu_offload={cpu_offload}, rank0_only={rank0_only})")
    targets = targets_of(inner)
    meta = [name for name, target in targets.items() if target.tensor.is_meta]
    if meta:
        raise RuntimeError(
            f"rank {this_rank()}: parameters {meta[:8]} ({len(meta)} in all) are still on the meta "
            "device: load them, as by load_pretrained(), before full_state_dict()"
        )
    with quiet():
        state = _torch.checkpoint.state_of(model, {})
    keeps = not rank0_only or this_rank() == 0
    gathered: dict[int, Any] = {}
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            target = targets.get(name)
            key = id(target.tensor) if target is not None else id(value)
            if key not in gathered:
                whole = gather(value)
                gathered[key] = (whole.cpu() if cpu_offload else whole) if keeps else None
            value = gathered[key]
        if keeps:
            found[name] = value
    return found


def gather(tensor: Tensor) -> Tensor:
    """Return a plain copy of `tensor`, on its mesh's device; of a DTensor, all ranks call this."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    local = _torch.dtensor.local_tensor(tensor)
    if local.device.type != tensor.device_mesh.device_type:  # offloaded: it is sent from there
        local = local.to(tensor.device_mesh.device_type)
        tensor = _torch.dtensor.make(type(tensor), local, _torch.dtensor.spec_of(tensor))
    whole = tensor.full_tensor()
    is_same = _torch.tensors.storage_id(whole) == _torch.tensors.storage_id(local)
    return whole.clone() if is_same else whole
