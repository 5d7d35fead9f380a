"""Custom ops of autoshard's graphs: two markers, and the launches and waits that replace them.

    full  = unshard(shard, "f32[7,15]", group, keep, param)  marker: the unsharded parameter, here
    shard = reduce_grad(grad, "f32[7,15]", group, param)     marker: its reduced gradient, here
    _     = hold_grad(grad, "f32[7,15]", group, param)       its gradient waits, here
    part  = cut(full, "f32[7,15]", group)                    this rank's part, over fewer ranks
    [piece..] = before_gather(shard, "u8[4,15] f32[1]", metadata, param)   what to gather for it

    ticket   = launch_gather([shard, ...], "f32[7,15] f32[7]", group, bucket)
    [full..] = wait_gather(ticket, "f32[7,15] f32[7]", group, bucket)
    ticket   = pack_grads([grad, ...], "f32[7,15] f32[7]", group, bucket)
    ticket   = launch_reduce(ticket, "f32[7,15] f32[7]", group, bucket)
    ticket   = all_reduce(ticket, "f32[7,15] f32[7]", group, bucket)   over replicas, if any
    [shard.] = wait_reduce(ticket, "f32[7,15] f32[7]", group, bucket)

    shard = to_device(shard, device), to_host(shard)         where shards live on the host
    ticket = launch_load([shard, ...], device, bucket)       the same for a bucket, not waited for
    [shard.] = wait_load(ticket, [shard, ...], device, bucket)
    ticket = launch_store([shard, ...], bucket)              and so for gradients' shards
    [shard.] = wait_store(ticket, [shard, ...], bucket)

The markers say *what*; passes decide *how* by replacing them. Markers can also be run: each is one
collective that is waited for at once, the slowest correct form of a graph.

A member's dtype is that on the wire: a gather casts a shard to it where it is copied in, a reduce
casts a gradient to it there, and to the shard's ("bf16[7]->f32") where it is copied out. `group`
names process groups, see `groups.py`. `keep` says that the unsharded parameter is kept for backward
(`reshard_after_forward=False`). `reduce`, if not empty, is the member and the group of its
gradient's reduce, where these are not those of the gather. Flags come before them, which
`Unshard.of` reads:

    "hold"            its gradient is to wait
    "stay"            the runtime has the parameter unsharded, and keeps it so
    "cut:2"           backward is to gather it over the group "2"
    "again"           this is that gather
    "ask:7"           its shard says itself what is gathered for it: a `before_gather` asks it, and
                      each piece has a marker. 7 is the runtime's number for the parameter
    "from_host:cuda"  its shard lives on the host and is gathered on that device; its gradient is
                      to go there, too: "f32[7]^host"

`param` indexes the table of parameters of one compilation, -1 before the table is made. `bucket`
numbers the buckets of one graph. A ticket is a tensor of one byte: what is packed or in flight is
held by the runtime, where no compiler can reuse its memory. Packing is an op by itself, so that
gradients are freed before memory for their sum is allocated. A gather may send a shard that is an
input of the graph as it is; others it `copies`. A gather that is `grouped` sends each member by
itself, and copies none of them to or from a shared buffer, but for those that are too small for
that. The tensors that a copy reads are arguments of its wait, too. No argument depends on the rank.

Settings that a user may change between a graph's forward and its backward (sums that wait to be
added to a gradient, hooks, the divide factor) are no part of a graph. Reduces find them by `table`,
i64[1], an input of the graph: the runtime's number of its table of parameters.

Only a backward itself knows for which of forward's outputs it has a gradient. A gradient that comes
from some of them lists their numbers in `outputs`; a pack has one entry a member, "0,2 all". Where
none of these outputs has a gradient, the parameter has none, unless another rank has one for it.

`declare` gives an op its schema, with a function that makes outputs of the right sizes; what it
returns is the op as nodes call it. `runtime/compiled/kernels.py` has the implementations, one
function an op. `match.py` tells which op a node calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.passes.ir import groups
from autoshard.passes.ir.layout import Member, read_members

library = torch.library.Library("autoshard", "DEF")


def declare(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Declare an op of the decorated function's name, with `schema` for arguments and results.

    The function makes the op's outputs from fake tensors: it computes nothing. Returns the op.
    """

    def make(fake: Callable[..., Any]) -> Any:
        name = fake.__name__
        library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"autoshard::{name}", fake, lib=library)
        return getattr(torch.ops.autoshard, name).default

    return make


# Schemas that two ops have.
_OF_A_GRADIENT = (
    "(Tensor grad, str members, str group, int param, *, Tensor? table=None, int[] outputs=[])"
    " -> Tensor"
)
_ON_WITH_A_TICKET = "(Tensor ticket, str members, str group, int bucket) -> Tensor"


# ---- markers


@declare("(Tensor shard, str members, str group, bool keep, int param, *, str reduce='') -> Tensor")
def unshard(
    shard: Tensor, members: str, group: str, keep: bool, param: int, *, reduce: str = ""
) -> Tensor:
    """Marker: the unsharded parameter, here."""
    (member,) = read_members(members)
    device = UnshardOptions.read(reduce).host_device or shard.device
    return shard.new_empty(member.size, dtype=member.dtype, device=device)


@declare(_OF_A_GRADIENT)
def reduce_grad(
    grad: Tensor,
    members: str,
    group: str,
    param: int,
    *,
    table: Tensor | None = None,
    outputs: Sequence[int] = (),
) -> Tensor:
    """Marker: this rank's part of the reduced gradient, here."""
    return _reduced(grad, members, group)[0]


@declare(_OF_A_GRADIENT)
def hold_grad(
    grad: Tensor,
    members: str,
    group: str,
    param: int,
    *,
    table: Tensor | None = None,
    outputs: Sequence[int] = (),
) -> Tensor:
    """Have the gradient wait for a later backward; gives a shard of zeros."""
    return nothing(grad, members, group)[0]


@declare("(Tensor whole, str members, str group) -> Tensor")
def cut(whole: Tensor, members: str, group: str) -> Tensor:
    """This rank's part of an unsharded parameter, over the ranks of `group`."""
    (member,) = read_members(members)
    return whole.new_empty(groups.local_size(member, group))


@declare("(Tensor shard, str pieces, str metadata, int param, *, Tensor? table=None) -> Tensor[]")
def before_gather(
    shard: Tensor, pieces: str, metadata: str, param: int, *, table: Tensor | None = None
) -> list[Tensor]:
    """Pieces that are gathered for a shard which says so itself."""
    return [shard.new_empty(piece.size, dtype=piece.dtype) for piece in read_members(pieces)]


# ---- collectives


@declare(
    "(Tensor[] shards, str members, str group, int bucket, bool copies=False, bool grouped=False)"
    " -> Tensor"
)
def launch_gather(
    shards: list[Tensor],
    members: str,
    group: str,
    bucket: int,
    copies: bool = False,
    grouped: bool = False,
) -> Tensor:
    """Ticket of an all-gather that has begun."""
    return _ticket(shards[0])


@declare("(Tensor ticket, str members, str group, int bucket) -> Tensor[]")
def wait_gather(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    """Unsharded parameters of an all-gather, which has ended."""
    return [ticket.new_empty(m.size, dtype=m.dtype) for m in read_members(members)]


@declare(
    "(Tensor[] grads, str members, str group, int bucket, Tensor? table=None, int[] params=[],"
    " str outputs='') -> Tensor"
)
def pack_grads(
    grads: list[Tensor],
    members: str,
    group: str,
    bucket: int,
    table: Tensor | None = None,
    params: Sequence[int] = (),
    outputs: str = "",
) -> Tensor:
    """Ticket of unsharded gradients, copied to the buffer that is sent."""
    return _ticket(grads[0])


@declare(_ON_WITH_A_TICKET)
def launch_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> Tensor:
    """Ticket of a reduce-scatter that has begun."""
    return _ticket(ticket)


@declare(_ON_WITH_A_TICKET)
def all_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> Tensor:
    """Ticket of an all-reduce over replicas that has begun."""
    return _ticket(ticket)


@declare("(Tensor ticket, str members, str group, int bucket) -> Tensor[]")
def wait_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    """This rank's parts of the reduced gradients."""
    return _reduced(ticket, members, group)


# ---- copies of shards that live on the host


@declare("(Tensor shard, str device) -> Tensor")
def to_device(shard: Tensor, device: str) -> Tensor:
    """Copy of a shard on the device."""
    return shard.new_empty(shard.shape, device=device)


@declare("(Tensor shard) -> Tensor")
def to_host(shard: Tensor) -> Tensor:
    """Copy of a shard on the host."""
    return shard.new_empty(shard.shape, device="cpu")


@declare("(Tensor[] shards, str device, int bucket) -> Tensor")
def launch_load(shards: list[Tensor], device: str, bucket: int) -> Tensor:
    """Ticket of copies to the device that have begun."""
    return _ticket(shards[0], device="cpu")


@declare("(Tensor ticket, Tensor[] shards, str device, int bucket) -> Tensor[]")
def wait_load(ticket: Tensor, shards: list[Tensor], device: str, bucket: int) -> list[Tensor]:
    """Copies on the device, which compute waits for."""
    return [shard.new_empty(shard.shape, device=device) for shard in shards]


@declare("(Tensor[] shards, int bucket) -> Tensor")
def launch_store(shards: list[Tensor], bucket: int) -> Tensor:
    """Ticket of copies to the host that have begun."""
    return _ticket(shards[0], device="cpu")


@declare("(Tensor ticket, Tensor[] shards, int bucket) -> Tensor[]")
def wait_store(ticket: Tensor, shards: list[Tensor], bucket: int) -> list[Tensor]:
    """Copies on the host, which the host waits for."""
    return [shard.new_empty(shard.shape, device="cpu") for shard in shards]


# ---- what outputs look like


def _ticket(like: Tensor, *, device: str | None = None) -> Tensor:
    return like.new_empty(1, dtype=torch.uint8, device=device)


def nothing(like: Tensor, members: str, group: str) -> list[Tensor]:
    """Make shards of zeros that stand for missing gradients, each in the memory of one element.

    They are on the device of `like`, or on the host for members there.
    """
    return [
        like.new_zeros((), dtype=m.shard_dtype or m.dtype, device=_home(m, like)).expand(
            groups.local_size(m, group)
        )
        for m in read_members(members)
    ]


def _reduced(like: Tensor, members: str, group: str) -> list[Tensor]:
    """Empty shards, of this rank's rows, on the device of `like` or, if `on_host`, on the host."""
    return [
        like.new_empty(
            groups.local_size(m, group), dtype=m.shard_dtype or m.dtype, device=_home(m, like)
        )
        for m in read_members(members)
    ]


def _home(member: Member, like: Tensor) -> torch.device:
    return torch.device("cpu") if member.on_host else like.device


# ---- arguments that are text


@dataclass(frozen=True)
class UnshardOptions:
    """Options of an `unshard`, its `reduce`: flags, and how its gradient is reduced.

    asks: the runtime's number of a parameter whose shard says what is gathered for it; or "".
    host_device: the device on which a shard of the host is gathered; or "".
    stays: the runtime has the parameter unsharded, and keeps it so.
    waits: its gradient is to wait.
    smaller_group: over which backward is to gather it; or "".
    is_again: this is that gather.
    members, group: of its gradient's reduce; "" where they are those of the gather.
    """

    asks: str = ""
    host_device: str = ""
    stays: bool = False
    waits: bool = False
    smaller_group: str = ""
    is_again: bool = False
    members: str = ""
    group: str = ""

    def show(self) -> str:
        """Format as the `reduce` of an `unshard`, whose flags need a member and a group.

        >>> UnshardOptions(smaller_group="2", waits=True, members="f32[7]", group="4").show()
        'hold cut:2 f32[7] 4'
        """
        flags = (
            (f"ask:{self.asks}", self.asks),
            (f"from_host:{self.host_device}", self.host_device),
            ("stay", self.stays),
            ("hold", self.waits),
            (f"cut:{self.smaller_group}", self.smaller_group),
            ("again", self.is_again),
        )
        words = [flag for flag, is_set in flags if is_set]
        return " ".join([*words, self.members, self.group]) if self.members else ""

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def read(reduce: str) -> UnshardOptions:
        """Read text that `show` has written.

        >>> UnshardOptions.read("hold cut:2 f32[7] 4").smaller_group
        '2'
        """
        if not reduce:
            return UnshardOptions()
        *flags, members, group = reduce.split(" ")
        values = {name: value for name, _, value in (flag.partition(":") for flag in flags)}
        return UnshardOptions(
            asks=values.get("ask", ""),
            host_device=values.get("from_host", ""),
            stays="stay" in values,
            waits="hold" in values,
            smaller_group=values.get("cut", ""),
            is_again="again" in values,
            members=members,
            group=group,
        )


@dataclass(frozen=True)
class Unshard:
    """Arguments of an `unshard` node, each with its name.

    is_kept: the unsharded parameter is kept for backward.
    param: its number in the table of parameters.
    """

    members: str
    group: str
    is_kept: bool
    param: int
    options: UnshardOptions

    @classmethod
    def of(cls, node: fx.Node) -> Unshard:
        """Read the arguments of `node`."""
        _, members, group, keep, param = node.args
        assert isinstance(param, int)
        options = UnshardOptions.read(str(node.kwargs.get("reduce", "")))
        return cls(str(members), str(group), bool(keep), param, options)

    @property
    def can_be_kept(self) -> bool:
        """Tell whether backward would gather the parameter again as forward does."""
        options = self.options
        is_its_own = options.smaller_group or options.asks or options.host_device
        return not (self.is_kept or options.stays or is_its_own)


_ALL_OUTPUTS = "all"


def show_outputs(outputs: Iterable[Sequence[int]]) -> str:
    """Format the `outputs` of a `pack_grads` from those of its members; "all" for an empty one.

    >>> show_outputs([[0, 2], []])
    '0,2 all'
    """
    return " ".join(",".join(map(str, each)) or _ALL_OUTPUTS for each in outputs)


@functools.lru_cache(maxsize=1024)
def read_outputs(text: str) -> tuple[frozenset[int], ...]:
    """Read text that `show_outputs` has written; an empty set for a member that comes from all.

    >>> [sorted(each) for each in read_outputs("0,2 all")]
    [[0, 2], []]
    """
    parts = ("" if each == _ALL_OUTPUTS else each for each in text.split())
    return tuple(frozenset(map(int, filter(None, part.split(",")))) for part in parts)


# ---- the gradient of an unshard


def _save_for_unshard(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    _, members, group, _, param = inputs
    ctx.arguments = members, group, param, keyword_only_inputs["reduce"]


def _backward_of_unshard(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    return gradient(grad, *ctx.arguments), None, None, None, None


def gradient(grad: Tensor, members: str, group: str, param: int, reduce: str) -> Tensor:
    """Apply the marker to `grad`, the gradient of what an `unshard` with these arguments gave."""
    options = UnshardOptions.read(reduce)
    marker = hold_grad if options.waits else reduce_grad
    shard: Tensor = marker(grad, options.members or members, options.group or group, param)
    return shard


torch.library.register_autograd(
    "autoshard::unshard", _backward_of_unshard, setup_context=_save_for_unshard, lib=library
)
