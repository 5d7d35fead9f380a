"""All-gather extensions in compiled graphs: the requests of a shard, written down for one graph.

    pieces = before_gather(shard, ...)       the user's method, at run time, found by the table
    gathered = unshard(piece), ...           markers, as of any parameter
    unsharded = ...                          the user's other method, traced: ops of the graph

The graph gets a stand-in for the shard, of its size, in the memory of one element: the first
method may do what can't be traced. The second is traced once, for one parameter: graphs with
extended parameters are shared by no two. It has to make a plain tensor out of its arguments;
what else it reads of its shard must stay as it was: simple attributes are compared at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard import _torch
from autoshard.passes.ir import ops
from autoshard.passes.ir.layout import DTYPE_NAMES, Member, read_members, show_members
from autoshard.runtime.unit import extensions
from autoshard.runtime.unit.extensions import Sent
from autoshard.runtime.unit.param import ShardedParam

_SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""Types whose values are known by their text."""


def stand_in(shard: Tensor) -> Tensor:
    """Make the tensor that a graph gets in place of `shard`: zeros, in one element's memory."""
    return torch.zeros((), dtype=shard.dtype, device=shard.device).expand(shard.shape)


def answer(owner: ShardedParam, pieces: str, metadata: str) -> list[Tensor]:
    """Ask the shard of `owner`, at run time, for what to gather; return copies of the tensors.

    These are the tensors to send, then those in the metadata.
    pieces, metadata: of its `Request` when the graph was compiled.
    Raises RuntimeError if its request is another one now; otherwise as `ask`.
    """
    request, tensors = ask(owner)
    if (request.pieces, request.metadata) != (pieces, metadata):
        raise RuntimeError(
            f"fsdp_pre_all_gather of {owner.name} returned {request.pieces} with "
            f"{request.metadata}; when the graph was compiled it was {pieces} with {metadata}: "
            "return the same sizes, dtypes and metadata at each call, with what changes in tensors"
        )
    # Copies: what an op returns is the graph's, to write to, and no part of the parameter.
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


class Request:
    """Request of a shard: what its `fsdp_pre_all_gather` returns, without the tensors' values.

    pieces:   dtypes and sizes of the tensors to send, then of tensors in the metadata.
    metadata: text of the metadata, without the values of tensors; and simple attributes of the
        shard, except private ones ("_...").
    Making one raises ValueError if it can't be written down so: for a tensor on another device, or
    of a dtype without a name, or other metadata than tensors and simple values.
    """

    def __init__(self, owner: ShardedParam, sent: Sent, tensors: list[Tensor]) -> None:
        """Write a request down as text, with simple attributes that the shard of `owner` has now.

        sent: what the shard sends; in its metadata a `_Tensor` stands for each tensor.
        tensors: those to send, each as it is sent, then those of the metadata; none is kept.
        Raises ValueError, naming `owner`, for a tensor on another device than the shard or of a
        dtype without a name, or metadata whose text doesn't tell its value.
        """
        unnamed = [x.dtype for x in tensors if x.dtype not in DTYPE_NAMES]
        elsewhere = [x.device for x in tensors if x.device != owner.shard.device]
        if unnamed or elsewhere:
            raise ValueError(
                f"fsdp_pre_all_gather of {owner.name} returns a tensor of {unnamed or elsewhere}, "
                "which isn't compiled yet"
            )
        self._inputs = [(x.shape, x.dtype) for x in sent.inputs]
        self.pieces = show_members(tuple(Member(x.dtype, tuple(x.shape)) for x in tensors))
        self._leaves, self._structure = _torch.tensors.tree_flatten(sent.metadata)
        shown = [_show(owner, leaf) for leaf in self._leaves]
        simple = {
            name: value
            for name, value in vars(owner.shard).items()
            if isinstance(value, _SIMPLE) and not name.startswith("_")  # Dynamo's own
        }
        told = str(_torch.tensors.tree_unflatten(shown, self._structure))
        self.metadata = f"{told} {simple}" if simple else told

    def sent(self, tensors: list[Tensor]) -> Sent:
        """Rebuild the request for `after_gather`: metadata with tensors, inputs on the meta device.

        tensors: those that `pieces` describes; the last of them go into the metadata.
        """
        beside = iter(tensors[len(self._inputs) :])
        leaves = [
            next(beside).view(leaf.shape) if isinstance(leaf, _Tensor) else leaf
            for leaf in self._leaves
        ]
        inputs = tuple(torch.empty(size, dtype=d, device="meta") for size, d in self._inputs)
        return Sent(inputs, _torch.tensors.tree_unflatten(leaves, self._structure))


class _Tensor:
    """Placeholder for a tensor in metadata."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    def __repr__(self) -> str:
        return f"Tensor{list(self.shape)}"


def _show(owner: ShardedParam, leaf: Any) -> Any:
    """Return `leaf`, of metadata, as it is. Raises ValueError if its text doesn't tell its value.

    owner: for the message.
    """
    if isinstance(leaf, (*_SIMPLE, _Tensor)):
        return leaf
    raise ValueError(
        f"fsdp_pre_all_gather of {owner.name} returns metadata with a {type(leaf).__name__}, which "
        "isn't compiled yet: numbers, texts, dtypes, sizes, devices and tensors are"
    )


def ask(owner: ShardedParam) -> tuple[Request, list[Tensor]]:
    """Ask the shard of `owner` what to gather, by its `fsdp_pre_all_gather`.

    Returns the request, and the tensors that its `pieces` describes. Raises ValueError as `Request`
    does, and as `extensions.before_gather` does.
    """
    with torch.no_grad():
        sent = extensions.before_gather(owner, owner.unit, owner.shard)
        beside: list[Tensor] = []

        def take(leaf: Any) -> Any:
            """Return `leaf`, of the metadata; of a tensor a placeholder, and put it in `beside`."""
            if not isinstance(leaf, Tensor):
                return leaf
            beside.append(leaf.detach().reshape(leaf.shape or (1,)))  # a member has dims
            return _Tensor(leaf.shape)

        metadata = _torch.tensors.tree_map(take, sent.metadata)
        tensors = [*(tensor for _, tensor in sent.pieces(1)), *beside]
        return Request(owner, Sent(sent.inputs, metadata), tensors), tensors


def spell_out(
    owner: ShardedParam, members: str, group: str, keep: bool, number: int, reduce: str
) -> Callable[[Tensor], Tensor]:
    """Make the function that a graph calls for `owner` in place of an `unshard` marker.

    It takes the stand-in of the shard, and gives the unsharded parameter, with the backward of the
    marker. To see whether that can be compiled, the user's `fsdp_pre_all_gather` is called here
    twice, and `fsdp_post_all_gather` once.

    members, group, keep, reduce: arguments of the marker.
    number: of `owner` in the table of parameters.
    Raises ValueError if it can't be compiled: the shard is offloaded to the host, its request is
    another one each time or can't be written down, or what is made of the gathered tensors is a
    tensor subclass, or of another dtype than the marker's. Otherwise raises as `ask`.
    """
    if owner.unit.settings.is_offloaded:
        raise ValueError(
            f"{owner.name} is offloaded and has fsdp_pre_all_gather, which isn't compiled yet"
        )
    (request, tensors), (again, _) = ask(owner), ask(owner)
    if (request.pieces, request.metadata) != (again.pieces, again.metadata):
        raise ValueError(
            f"fsdp_pre_all_gather of {owner.name} returns other metadata at each call: "
            f"{request.metadata}, then {again.metadata}"
        )
    (member,) = read_members(members)
    _try(owner, request, tensors, member)
    wire = [piece for piece, _ in request.sent(tensors).pieces(owner.world)]

    def gather(shard: Tensor) -> Tensor:
        """Ask for what to send, gather it by markers, and make the unsharded parameter of it."""
        asked = ops.before_gather(shard, request.pieces, request.metadata, number)
        whole = [
            ops.unshard(piece, show_members((each,)), group, keep, number)
            for piece, each in zip(asked, wire, strict=False)
        ]
        return extensions.after_gather(owner, request.sent(asked), whole, member.dtype)[0]

    def gather_with_gradient(shard: Tensor) -> Tensor:
        """Call `gather`, with the backward of an `unshard` marker in place of its own."""
        whole: Tensor = _torch.autograd.apply(
            _Gather, shard, gather, (members, group, number, reduce)
        )
        return whole

    return gather_with_gradient


class _Gather(torch.autograd.Function):
    """Autograd function that calls `gather`, and whose backward is that of an `unshard` marker."""

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


def _try(owner: ShardedParam, request: Request, tensors: list[Tensor], member: Member) -> None:
    """Raise ValueError unless `owner`'s extension makes a plain tensor of `member`'s dtype.

    It is called with this rank's pieces in place of all ranks': values are wrong, the type is not.
    """
    with torch.no_grad():
        sent = request.sent(tensors)
        pieces = [torch.cat([each] * owner.world) for each in tensors[: len(sent.inputs)]]
        whole, _ = extensions.after_gather(owner, sent, pieces, member.dtype)
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
