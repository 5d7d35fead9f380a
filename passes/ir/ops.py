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
gradient's reduce, where these are not those of the gather. Flags come before them:

    "hold"            its gradient is to wait
    "stay"            the runtime has the parameter unsharded, and keeps it so
    "cut:2"           backward is to gather it over the group "2"
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

Schemas and shapes are here; `runtime/compiled/kernels.py` gives the implementations.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.passes.ir import groups
from autoshard.passes.ir.layout import Member, read_members

library = torch.library.Library("autoshard", "DEF")

library.define(
    "unshard(Tensor shard, str members, str group, bool keep, int param, *, str reduce='')"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "reduce_grad(Tensor grad, str members, str group, int param, *, Tensor? table=None,"
    " int[] outputs=[]) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "hold_grad(Tensor grad, str members, str group, int param, *, Tensor? table=None,"
    " int[] outputs=[]) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "cut(Tensor whole, str members, str group) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "before_gather(Tensor shard, str pieces, str metadata, int param, *, Tensor? table=None)"
    " -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "all_reduce(Tensor ticket, str members, str group, int bucket) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "launch_gather(Tensor[] shards, str members, str group, int bucket, bool copies=False,"
    " bool grouped=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "pack_grads(Tensor[] grads, str members, str group, int bucket, Tensor? table=None,"
    " int[] params=[], str outputs='') -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "launch_reduce(Tensor ticket, str members, str group, int bucket) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _schema in (
    "to_device(Tensor shard, str device) -> Tensor",
    "to_host(Tensor shard) -> Tensor",
    "launch_load(Tensor[] shards, str device, int bucket) -> Tensor",
    "wait_load(Tensor ticket, Tensor[] shards, str device, int bucket) -> Tensor[]",
    "launch_store(Tensor[] shards, int bucket) -> Tensor",
    "wait_store(Tensor ticket, Tensor[] shards, int bucket) -> Tensor[]",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
for _kind in ("gather", "reduce"):
    library.define(
        f"wait_{_kind}(Tensor ticket, str members, str group, int bucket) -> Tensor[]",
        tags=(torch.Tag.pt2_compliant_tag,),
    )


def _fake_unshard(
    shard: Tensor, members: str, group: str, keep: bool, param: int, *, reduce: str = ""
) -> Tensor:
    (member,) = read_members(members)
    device = flag(reduce, FROM_HOST) or shard.device
    return shard.new_empty(member.size, dtype=member.dtype, device=device)


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


FROM_HOST = "from_host:"


def flags(reduce: str) -> list[str]:
    """Flags in the `reduce` of an `unshard`: the words before member and group."""
    return reduce.split(" ")[:-2]


def flag(reduce: str, prefix: str) -> str:
    """Rest of the flag in `reduce` that begins with `prefix`; "" if there is none."""
    found = (each.removeprefix(prefix) for each in flags(reduce) if each.startswith(prefix))
    return next(found, "")


def _fake_reduce_grad(
    grad: Tensor,
    members: str,
    group: str,
    param: int,
    *,
    table: Tensor | None = None,
    outputs: Sequence[int] = (),
) -> Tensor:
    return _reduced(grad, members, group)[0]


def _fake_cut(whole: Tensor, members: str, group: str) -> Tensor:
    (member,) = read_members(members)
    return whole.new_empty(groups.local_size(member, group))


def _fake_before_gather(
    shard: Tensor, pieces: str, metadata: str, param: int, *, table: Tensor | None = None
) -> list[Tensor]:
    return [shard.new_empty(piece.size, dtype=piece.dtype) for piece in read_members(pieces)]


def _fake_hold_grad(
    grad: Tensor,
    members: str,
    group: str,
    param: int,
    *,
    table: Tensor | None = None,
    outputs: Sequence[int] = (),
) -> Tensor:
    return nothing(grad, members, group)[0]


def nothing(like: Tensor, members: str, group: str) -> list[Tensor]:
    """Shards of zeros that stand for missing gradients: on the device of `like`, or on the host for
    members there, each in the memory of one element."""
    return [
        like.new_zeros((), dtype=m.shard_dtype or m.dtype, device=_home(m, like)).expand(
            groups.local_size(m, group)
        )
        for m in read_members(members)
    ]


def _home(member: Member, like: Tensor) -> torch.device:
    return torch.device("cpu") if member.on_host else like.device


def _fake_launch(
    tensors: list[Tensor],
    members: str,
    group: str,
    bucket: int,
    *options: object,
) -> Tensor:
    return tensors[0].new_empty(1, dtype=torch.uint8)


def _fake_follow(ticket: Tensor, members: str, group: str, bucket: int) -> Tensor:
    return ticket.new_empty(1, dtype=torch.uint8)


def _fake_wait_gather(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    return [ticket.new_empty(m.size, dtype=m.dtype) for m in read_members(members)]


def _fake_wait_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    return _reduced(ticket, members, group)


def _reduced(like: Tensor, members: str, group: str) -> list[Tensor]:
    """Empty shards, of this rank's rows, on the device of `like` or, if `on_host`, on the host."""
    return [
        like.new_empty(
            groups.local_size(m, group), dtype=m.shard_dtype or m.dtype, device=_home(m, like)
        )
        for m in read_members(members)
    ]


def _fake_to_device(shard: Tensor, device: str) -> Tensor:
    return shard.new_empty(shard.shape, device=device)


def _fake_to_host(shard: Tensor) -> Tensor:
    return shard.new_empty(shard.shape, device="cpu")


def _fake_launch_load(shards: list[Tensor], device: str, bucket: int) -> Tensor:
    return shards[0].new_empty(1, dtype=torch.uint8, device="cpu")


def _fake_wait_load(ticket: Tensor, shards: list[Tensor], device: str, bucket: int) -> list[Tensor]:
    return [_fake_to_device(shard, device) for shard in shards]


def _fake_launch_store(shards: list[Tensor], bucket: int) -> Tensor:
    return shards[0].new_empty(1, dtype=torch.uint8, device="cpu")


def _fake_wait_store(ticket: Tensor, shards: list[Tensor], bucket: int) -> list[Tensor]:
    return list(map(_fake_to_host, shards))


for _name, _fake in (
    ("unshard", _fake_unshard),
    ("reduce_grad", _fake_reduce_grad),
    ("cut", _fake_cut),
    ("hold_grad", _fake_hold_grad),
    ("before_gather", _fake_before_gather),
    ("launch_gather", _fake_launch),
    ("pack_grads", _fake_launch),
    ("launch_reduce", _fake_follow),
    ("all_reduce", _fake_follow),
    ("wait_gather", _fake_wait_gather),
    ("wait_reduce", _fake_wait_reduce),
    ("to_device", _fake_to_device),
    ("to_host", _fake_to_host),
    ("launch_load", _fake_launch_load),
    ("wait_load", _fake_wait_load),
    ("launch_store", _fake_launch_store),
    ("wait_store", _fake_wait_store),
):
    torch.library.register_fake(f"autoshard::{_name}", _fake, lib=library)


def _save_for_unshard(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    _, members, group, _, param = inputs
    ctx.arguments = members, group, param, keyword_only_inputs["reduce"]


def _backward_of_unshard(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    return gradient(grad, *ctx.arguments), None, None, None, None


def gradient(grad: Tensor, members: str, group: str, param: int, reduce: str) -> Tensor:
    """Apply the marker to `grad`, the gradient of what an `unshard` with these arguments gave."""
    reduced, reduce_group = reduce.split(" ")[-2:] if reduce else (members, group)
    marker = hold_grad if "hold" in flags(reduce) else reduce_grad
    shard: Tensor = marker(grad, reduced, reduce_group, param)
    return shard


torch.library.register_autograd(
    "autoshard::unshard", _backward_of_unshard, setup_context=_save_for_unshard, lib=library
)

unshard = torch.ops.autoshard.unshard.default
reduce_grad = torch.ops.autoshard.reduce_grad.default
cut = torch.ops.autoshard.cut.default
before_gather = torch.ops.autoshard.before_gather.default
hold_grad = torch.ops.autoshard.hold_grad.default
launch_gather = torch.ops.autoshard.launch_gather.default
wait_gather = torch.ops.autoshard.wait_gather.default
pack_grads = torch.ops.autoshard.pack_grads.default
launch_reduce = torch.ops.autoshard.launch_reduce.default
all_reduce = torch.ops.autoshard.all_reduce.default
wait_reduce = torch.ops.autoshard.wait_reduce.default
to_device = torch.ops.autoshard.to_device.default
to_host = torch.ops.autoshard.to_host.default
launch_load = torch.ops.autoshard.launch_load.default
wait_load = torch.ops.autoshard.wait_load.default
launch_store = torch.ops.autoshard.launch_store.default
wait_store = torch.ops.autoshard.wait_store.default
