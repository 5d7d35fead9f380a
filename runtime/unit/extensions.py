"""All-gather extensions: shards with methods that say what is gathered for them.

    shard --fsdp_pre_all_gather--> inputs --gathers--> outputs --fsdp_post_all_gather--> whole

A shard with these two methods, of a tensor subclass (float8, quantised weights), or put on
the local tensor after sharding, sends what it likes: fewer bytes, several tensors, scales.
The protocol is that of FSDP2, so that subclasses written for it work unchanged: see
`torch/distributed/fsdp/_fully_shard/_fsdp_api.py` and `_fsdp_param.py`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from autoshard.errors import UsageError, UsageTypeError
from autoshard.passes.ir.layout import Member

if TYPE_CHECKING:
    from autoshard.runtime.unit.param import ShardedParam
    from autoshard.runtime.unit.unit import Unit

_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"


@dataclass(frozen=True)
class Sent:
    """Tensors that a rank sends for one extended parameter.

    inputs: the same sizes and dtypes on every rank.
    metadata: the subclass's own, handed back to it.
    """

    inputs: tuple[Tensor, ...]
    metadata: Any

    def pieces(self, world: int) -> list[tuple[Member, Tensor]]:
        """Pair each input, as it is sent, with the `Member` to gather it as.

        A member's rows are those of all ranks' inputs, one after another.
        """
        tensors = [_on_the_wire(each) for each in self.inputs]
        return [(Member(x.dtype, (world * x.shape[0], *x.shape[1:])), x) for x in tensors]


def has_methods(shard: Tensor) -> bool:
    """Tell whether `shard` has a method of an all-gather extension."""
    if type(shard) is Tensor and not shard.__dict__:
        return False
    return hasattr(shard, _BEFORE) or hasattr(shard, _AFTER)


def is_extended(name: str, shard: Tensor) -> bool:
    """Tell whether `shard`, of the parameter `name`, has both methods of an all-gather extension.

    Raises TypeError if it has one of them.
    """
    has = [hasattr(shard, method) for method in (_BEFORE, _AFTER)]
    if has[0] != has[1]:
        raise UsageTypeError(
            f"the local tensor of {name}, a {type(shard).__name__}, has "
            f"{_BEFORE if has[0] else _AFTER} alone: define both {_BEFORE} and {_AFTER}"
        )
    return has[0]


def before_gather(param: ShardedParam, unit: Unit, shard: Tensor) -> Sent:
    """Ask `shard`, on the device, what to send for it: call its `fsdp_pre_all_gather`.

    Where shards are uneven, the tensors to send are padded to equal rows, but for scalars.
    unit: of `param`. A method of one argument is given its mesh; one of five the mesh, the
        unsharded size and stride, the first module that has `param`, and the mixed-precision
        policy.
    Raises TypeError if the method takes another number of arguments, or its first result is no
    tuple or list of tensors, ValueError if shards are uneven and a tensor has neither the rows of
    this rank's shard nor those of a full one, and NotImplementedError if the unit reshards to fewer
    ranks after forward.
    """
    smaller = unit.settings.smaller
    if smaller is not None:
        raise NotImplementedError(
            f"{param.name} has {_BEFORE}: it can't be resharded to {smaller.shard_world} ranks; "
            "set reshard_after_forward to True or False"
        )
    method = getattr(shard, _BEFORE)
    given: tuple[Any, ...] = (unit.axes.shard,)
    wanted = len(inspect.signature(method).parameters)
    if wanted == 5:
        size = torch.Size(param.member.size)
        stride = torch.empty(size, device="meta").stride()
        module = param.registrations[0][0]
        given = (*given, size, stride, module, unit.settings.mp)
    elif wanted != 1:
        raise UsageTypeError(
            f"{_BEFORE} of {param.name} takes {wanted} arguments: expected (mesh), or (mesh, "
            "outer_size, outer_stride, module, mp_policy)"
        )
    inputs, metadata = method(*given)
    if not isinstance(inputs, (tuple, list)) or not all(isinstance(x, Tensor) for x in inputs):
        raise TypeError(
            f"{_BEFORE} of {param.name} should return (tensors to gather, metadata), the former a "
            f"tuple, not {type(inputs).__name__}"
        )
    return Sent(tuple(_padded(param, each) for each in inputs), metadata)


def after_gather(
    param: ShardedParam, sent: Sent, gathered: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Make the unsharded parameter from `gathered`, by the shard's `fsdp_post_all_gather`.

    sent: what `before_gather` returned.
    gathered: one tensor for each input of `sent`.
    dtype: in which forward computes with the parameter.
    Returns the parameter, and the tensors whose memory it occupies. If the method gives another
    size than the true one (padded, or flat), the parameter is a contiguous view of its beginning.
    """
    outputs = tuple(
        each.view(source.dtype).view(-1, *source.shape[1:])
        for each, source in zip(gathered, sent.inputs, strict=True)
    )
    whole, memory = getattr(param.shard, _AFTER)(outputs, sent.metadata, dtype)
    if tuple(whole.shape) != param.member.size:  # padded, or flat
        stride = torch.empty(param.member.size, device="meta").stride()
        whole = torch.as_strided(whole, param.member.size, stride, 0)
    return whole, tuple(memory)


def _padded(param: ShardedParam, sent: Tensor) -> Tensor:
    """Pad `sent` to the rows of a full chunk; return it as it is for even shards, or a scalar.

    Raises ValueError if it has neither the rows of this rank's shard nor those of a full chunk.
    """
    world, rank = param.axes.shard_world, param.axes.shard_rank
    expected = param.member.chunk_rows(world)
    if param.member.rows == expected * world or not sent.dim():
        return sent
    own = param.member.local_rows(world, rank)
    if sent.shape[0] not in (own, expected):
        raise UsageError(
            f"{_BEFORE} of {param.name}, whose {param.member.rows} rows are cut unevenly over "
            f"{world} ranks, returned a tensor of size {list(sent.shape)}: expected the "
            f"{own} rows of rank {rank}, or {expected} with padding, or a scalar"
        )
    padding = expected - sent.shape[0]
    return functional.pad(sent, (0, 0) * (sent.dim() - 1) + (0, padding)) if padding else sent


def _on_the_wire(tensor: Tensor) -> Tensor:
    """Return `tensor` as it is sent: contiguous, a scalar as one row, a one-byte dtype as uint8.

    Not every backend sends every dtype of one byte.
    """
    tensor = tensor.detach().contiguous().reshape(tensor.shape or (1,))
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
