"""All-gather extensions in compiled graphs: what a shard says, written down for one graph.

    pieces = before_gather(shard, ...)       the user's method, at run time, found by the table
    whole pieces = unshard(piece), ...       markers, as of any parameter
    whole = ...                              the user's other method, traced: ops of the graph

The graph gets a stand-in for the shard, of its size, in the memory of one element: what it
says may not be traceable, what is made of the gathered pieces has to be, and a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from autoshard import _torch
from autoshard.passes import ops
from autoshard.passes.layout import Member, read_members, show_members
from autoshard.runtime import extensions
from autoshard.runtime.extensions import Sent
from autoshard.runtime.param import ShardedParam


def stand_in(shard: Tensor) -> Tensor:
    """What the graph gets for `shard`."""
    return torch.zeros((), dtype=shard.dtype, device=shard.device).expand(shard.shape)


def ask(owner: ShardedParam, pieces: str, metadata: str) -> list[Tensor]:
    """What the shard of `owner` says at run time: see `Spoken.pieces`.

    Raises RuntimeError if it is not what it said when the graph was compiled.
    """
    spoken = Spoken(owner)
    if (spoken.pieces, spoken.metadata) != (pieces, metadata):
        raise RuntimeError(
            f"fsdp_pre_all_gather of {owner.name} returned {spoken.pieces} with {spoken.metadata}; "
            f"when the graph was compiled it was {pieces} with {metadata}: return the same sizes, "
            "dtypes and metadata at each call, with what changes in tensors"
        )
    # Copies: what an op returns is the graph's, to write to, and no part of the parameter.
    return [tensor.clone() for tensor in spoken.tensors]


class _Tensor:
    """Stands in the text of metadata for a tensor."""

    def __repr__(self) -> str:
        return "Tensor"


class Spoken:
    """What a shard says is to be gathered for it.

    tensors:  to be gathered, as they are on the wire, then those in the metadata.
    pieces:   their dtypes and sizes.
    metadata: as text, with what there is in it beside tensors.
    """

    def __init__(self, owner: ShardedParam) -> None:
        with torch.no_grad():
            sent = extensions.before_gather(owner, owner.unit, owner.shard)
            leaves, self.structure = pytree.tree_flatten(sent.metadata)
            self.sent = sent
            wire = [tensor for _, tensor in sent.pieces(1)]
            beside = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        self.leaves = leaves
        self.tensors = [*wire, *beside]
        self.pieces = show_members(tuple(Member(x.dtype, tuple(x.shape)) for x in self.tensors))
        static = [_Tensor() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.metadata = repr(pytree.tree_unflatten(static, self.structure))

    def with_metadata(self, tensors: list[Tensor]) -> Sent:
        """What it said, with `tensors` in the metadata."""
        of = iter(tensors)
        leaves = [next(of) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return Sent(self.sent.inputs, pytree.tree_unflatten(leaves, self.structure))


def spell_out(
    owner: ShardedParam, members: str, group: str, keep: bool, number: int, reduce: str
) -> Callable[[Tensor], Tensor]:
    """What a graph calls in place of an `unshard` marker with these arguments, for `owner`.

    Raises ValueError if it can't be compiled: the shard is on the host, it says something else
    each time, or a tensor subclass is made of what is gathered.
    """
    if owner.unit.is_offloaded:
        raise ValueError(
            f"{owner.name} is offloaded and has fsdp_pre_all_gather, which isn't compiled yet"
        )
    spoken, again = Spoken(owner), Spoken(owner)
    if (spoken.pieces, spoken.metadata) != (again.pieces, again.metadata):
        raise ValueError(
            f"fsdp_pre_all_gather of {owner.name} returns other metadata at each call: "
            f"{spoken.metadata}, then {again.metadata}"
        )
    (member,) = read_members(members)
    _check_result(owner, again, member)
    wire = [piece for piece, _ in spoken.sent.pieces(owner.world)]

    def gather(shard: Tensor) -> Tensor:
        asked = ops.before_gather(shard, spoken.pieces, spoken.metadata, number)
        whole = [
            ops.unshard(piece, show_members((each,)), group, keep, number)
            for piece, each in zip(asked, wire, strict=False)
        ]
        sent = spoken.with_metadata(asked[len(wire) :])
        return extensions.after_gather(owner, sent, whole, member.dtype)[0]

    def gather_with_gradient(shard: Tensor) -> Tensor:
        whole: Tensor = _torch.apply(_Gather, shard, gather, (members, group, number, reduce))
        return whole

    return gather_with_gradient


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, gather: Callable[[Tensor], Tensor], arguments: tuple[Any, ...]
    ) -> Tensor:
        ctx.arguments = arguments
        return gather(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ops.gradient(grad, *ctx.arguments), None, None


def _check_result(owner: ShardedParam, spoken: Spoken, member: Member) -> None:
    """Try on what this rank alone has: the values differ, the type is that of all."""
    with torch.no_grad():
        pieces = [torch.cat([x] * owner.world) for _, x in spoken.sent.pieces(1)]
        whole, _ = extensions.after_gather(owner, spoken.sent, pieces, member.dtype)
    if type(whole) is not Tensor:
        raise ValueError(
            f"fsdp_post_all_gather of {owner.name} returns a {type(whole).__name__}, a tensor "
            "subclass, which isn't compiled yet"
        )
    if whole.dtype != member.dtype:
        raise ValueError(
            f"fsdp_post_all_gather of {owner.name} returns {whole.dtype}: expected {member.dtype}, "
            "as its third argument says"
        )
