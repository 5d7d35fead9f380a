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

    ticket = launch_offload(value, copy)                     a value that forward saves, to the host
    value  = wait_offload(ticket, value, copy)
    ticket = launch_reload(value, device, copy)              and back, for backward
    value  = wait_reload(ticket, value, device, copy)

The markers say *what*; passes decide *how* by replacing them. Markers can also be run: each is one
collective that is waited for at once, the slowest correct form of a graph.

A member's dtype is the one on the wire. A gather casts a shard to it where it is copied in; a
reduce casts a gradient to it where it is copied in, and to the shard's dtype ("bf16[7]->f32") where
it is copied out. `group` names process groups, see `groups.py`. `keep` says that the unsharded
parameter is kept for backward (`reshard_after_forward=False`). `reduce` is empty if there are no
flags, and the gradient is reduced with the member and the group of the gather. Else it has flags,
which `Unshard.of` reads, then the member and the group of the gradient's reduce:

    "hold"            the gradient is not reduced here but waits: `hold_grad`
    "stay"            the runtime has the parameter unsharded, and keeps it unsharded
    "cut:2"           backward is to gather the parameter over the group "2"
    "again"           this marker is that gather of backward's
    "ask:7"           an all-gather extension: a `before_gather` asks the shard what to gather
                      instead, and each piece has a marker. 7 is the runtime's number for the
                      parameter
    "from_host:cuda"  the shard lives on the host and is gathered on device "cuda"; the gradient's
                      shard goes to the host: "f32[7]^host"

`param` indexes the table of parameters of one compilation, -1 before the table is made. `bucket`
numbers the buckets of one graph, and `copy` the values that it copies. A ticket is a tensor of one
byte: what is packed or in flight is held by the runtime, where no compiler can reuse its memory.
Packing is an op by itself, so that gradients are freed before memory for their sum is allocated. A
gather may send a shard that is an input of the graph as it is; with `copies` it copies all shards
first, as the graph has made some. A `grouped` gather sends each member by itself, and copies none
to or from a shared buffer, except members too small for that. The tensors that a copy reads are
arguments of its wait, too. No argument depends on the rank.

Settings that a user may change between a graph's forward and its backward (sums that wait to be
added to a gradient, hooks, the divide factor) are no part of a graph. Reduces find them by `table`,
i64[1], an input of the graph: the runtime's number of its table of parameters.

Only a backward itself knows for which of forward's outputs it has a gradient. If a parameter's
gradient comes from some of the outputs, not all, its marker lists their numbers in `outputs`; a
pack has one entry a member, "0,2 all". Where none of the listed outputs has a gradient, the
parameter has none, unless another rank has one for it.

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
    """Declare the op `autoshard::<name>`, `name` being that of the decorated function.

    The function becomes the op's fake implementation: it makes outputs of the right size, dtype and
    device, and computes nothing. The decorated name then stands for the op, an `OpOverload`, whose
    kernel is in `runtime/compiled/kernels.py`.

    schema: of its arguments and results, without the name.
    """

    def make(fake: Callable[..., Any]) -> Any:
        """Define the op in `library`, with `fake` as its fake implementation, and return the op."""
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
    """Make the fake output of the op that gathers a parameter, and waits for the gather.

    The op is a marker: passes replace it by a launch and a wait. The output is uninitialized, of
    the member's dtype and size, on the device on which `reduce` has a host shard gathered, else on
    the shard's own.

    members: one member: the parameter's dtype on the wire and unsharded size, "f32[7,15]".
    keep: whether the unsharded parameter is kept from forward to backward.
    param: its number in the compilation's table, -1 before there is one.
    reduce: how its gradient is reduced, and flags; see `UnshardOptions`.
    """
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
    """Make the fake output of the op that reduces a gradient, and waits for the reduce.

    The op is a marker: passes replace it by a launch and a wait. The output is this rank's shard of
    the gradient, uninitialized, in the member's `shard_dtype` if it has one, and on the host if it
    is `on_host`.

    grad: unsharded.
    table: the runtime's number of its table of parameters; without it, no user's setting applies.
    outputs: numbers of the forward's outputs that `grad` comes from; empty for all.
    """
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
    """Make the fake output of the op that has a gradient wait for a later backward: zeros.

    The op reduces nothing: it keeps `grad` until a later backward or the end of this one, and gives
    zeros for this rank's shard, expanded from one element. If `torch.autograd.grad` asks for this
    gradient, it does not wait: it is reduced, and its shard given. Arguments: see `reduce_grad`.
    """
    return nothing(grad, members, group)[0]


@declare("(Tensor whole, str members, str group) -> Tensor")
def cut(whole: Tensor, members: str, group: str) -> Tensor:
    """Make the fake output of the op that copies this rank's shard out of an unsharded parameter.

    whole: the parameter; the shard is uninitialized, of its dtype and on its device.
    group: over which it is cut.
    """
    (member,) = read_members(members)
    return whole.new_empty(groups.local_size(member, group))


@declare("(Tensor shard, str pieces, str metadata, int param, *, Tensor? table=None) -> Tensor[]")
def before_gather(
    shard: Tensor, pieces: str, metadata: str, param: int, *, table: Tensor | None = None
) -> list[Tensor]:
    """Make the fake outputs of the op that calls a shard's `fsdp_pre_all_gather`: one a piece.

    The op gives copies of the tensors to gather in place of the shard, then of those in its
    metadata. It raises RuntimeError if their dtypes and sizes, or the metadata, are not those
    given. The outputs here are uninitialized, on the shard's device.

    pieces: their dtypes and sizes, as when the graph was compiled.
    metadata: its other values, as text.
    """
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
    """Make the fake ticket of the op that launches the all-gather of a bucket: u8[1].

    The ticket is on the device of the first shard.

    bucket: its number in the graph's plan.
    copies: whether shards that could be sent as they are get copied first.
    grouped: whether each member is sent by itself, not packed into one buffer.
    """
    return _ticket(shards[0])


@declare("(Tensor ticket, str members, str group, int bucket) -> Tensor[]")
def wait_gather(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    """Make the fake outputs of the op that waits for an all-gather: the unsharded parameters."""
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
    """Make the fake ticket of the op that copies gradients to the buffer to be sent: u8[1].

    Where a unit's settings ask for more than a plain reduce, the op launches the reduces, too.

    grads: unsharded. The ticket, on the device of the first, is what `launch_reduce` takes.
    table, params: the runtime's table and the numbers of the parameters in it, by which the user's
        settings are found.
    outputs: one entry a gradient, see `show_outputs`; "" if all come from all outputs.
    """
    return _ticket(grads[0])


@declare(_ON_WITH_A_TICKET)
def launch_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> Tensor:
    """Make the fake ticket of the op that launches a reduce-scatter: u8[1].

    ticket: of the pack of the gradients to be reduced.
    """
    return _ticket(ticket)


@declare(_ON_WITH_A_TICKET)
def all_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> Tensor:
    """Make the fake ticket of the op that launches an all-reduce over replicas: u8[1].

    ticket: of the reduce-scatter, for which the op waits, and whose result it reduces.
    """
    return _ticket(ticket)


@declare("(Tensor ticket, str members, str group, int bucket) -> Tensor[]")
def wait_reduce(ticket: Tensor, members: str, group: str, bucket: int) -> list[Tensor]:
    """Make the fake outputs of the op that waits for a reduce: this rank's shards of the gradients.

    ticket: of the all-reduce if the group has replicas, else of the reduce-scatter.
    """
    return _reduced(ticket, members, group)


# ---- copies of shards that live on the host


@declare("(Tensor shard, str device) -> Tensor")
def to_device(shard: Tensor, device: str) -> Tensor:
    """Make the fake output of the op that copies a shard from the host to `device`.

    Only what is computed there next waits for the copy, not the host.
    """
    return shard.new_empty(shard.shape, device=device)


@declare("(Tensor shard) -> Tensor")
def to_host(shard: Tensor) -> Tensor:
    """Make the fake output of the op that copies a gradient's shard to the host; the host waits."""
    return shard.new_empty(shard.shape, device="cpu")


@declare("(Tensor[] shards, str device, int bucket) -> Tensor")
def launch_load(shards: list[Tensor], device: str, bucket: int) -> Tensor:
    """Make the fake ticket, on the host, of the op that launches copies of shards to `device`."""
    return _ticket(shards[0], device="cpu")


@declare("(Tensor ticket, Tensor[] shards, str device, int bucket) -> Tensor[]")
def wait_load(ticket: Tensor, shards: list[Tensor], device: str, bucket: int) -> list[Tensor]:
    """Make the fake outputs of the op that has compute on `device` wait for a bucket's copies.

    The op gives the copies; the host does not wait.
    shards: those that the launch copies.
    """
    return [shard.new_empty(shard.shape, device=device) for shard in shards]


@declare("(Tensor[] shards, int bucket) -> Tensor")
def launch_store(shards: list[Tensor], bucket: int) -> Tensor:
    """Make the fake ticket, on the host, of the op that launches gradients' copies to it."""
    return _ticket(shards[0], device="cpu")


@declare("(Tensor ticket, Tensor[] shards, int bucket) -> Tensor[]")
def wait_store(ticket: Tensor, shards: list[Tensor], bucket: int) -> list[Tensor]:
    """Make the fake outputs of the op that has the host wait for a bucket's copies, and gives them.

    shards: those that the launch copies.
    """
    return [shard.new_empty(shard.shape, device="cpu") for shard in shards]


# ---- copies of values that forward saves


@declare("(Tensor value, int copy) -> Tensor")
def launch_offload(value: Tensor, copy: int) -> Tensor:
    """Make the fake ticket, on the host, of the op that launches a copy of `value` to the host.

    copy: its number in the graph.
    """
    return _ticket(value, device="cpu")


@declare("(Tensor ticket, Tensor value, int copy) -> Tensor")
def wait_offload(ticket: Tensor, value: Tensor, copy: int) -> Tensor:
    """Make the fake output of the op that has compute wait for a copy: the value, on the host.

    The host waits only if a user's saved-tensor hooks are to read the copy. From then on the memory
    of `value`, the one that the launch copies, may be used again.
    """
    return torch.empty_like(value, device="cpu")


@declare("(Tensor value, str device, int copy) -> Tensor")
def launch_reload(value: Tensor, device: str, copy: int) -> Tensor:
    """Make the fake ticket, on the host, of the op that launches a copy of `value` to `device`.

    value: that a `wait_offload` gave.
    """
    return _ticket(value, device="cpu")


@declare("(Tensor ticket, Tensor value, str device, int copy) -> Tensor")
def wait_reload(ticket: Tensor, value: Tensor, device: str, copy: int) -> Tensor:
    """Make the fake output of the op that has compute on `device` wait for a copy, and gives it."""
    return torch.empty_like(value, device=device)


# ---- what outputs look like


def _ticket(like: Tensor, *, device: str | None = None) -> Tensor:
    return like.new_empty(1, dtype=torch.uint8, device=device)


def nothing(like: Tensor, members: str, group: str) -> list[Tensor]:
    """Make shards of zeros that stand for missing gradients, each in the memory of one element.

    They have this rank's rows and the dtype of a reduce's result, and are on the device of `like`,
    or on the host if `on_host`.
    """
    return [
        like.new_zeros((), dtype=m.shard_dtype or m.dtype, device=_home(m, like)).expand(
            groups.local_size(m, group)
        )
        for m in read_members(members)
    ]


def _reduced(like: Tensor, members: str, group: str) -> list[Tensor]:
    """Make uninitialized shards of this rank's rows, one a member of `members`.

    They have the dtype of a reduce's result, and are on the device of `like`, or on the host if
    `on_host`.
    """
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

    asks: the runtime's number of a parameter with an all-gather extension; else "".
    host_device: the device on which a shard that lives on the host is gathered; else "".
    stays: the runtime has the parameter unsharded, and keeps it unsharded.
    waits: its gradient is not reduced where it is computed, but waits (`hold_grad`).
    smaller_group: the group over which backward is to gather it, if not the gather's; else "".
    is_again: this marker is backward's gather over the smaller group.
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
        """Format as the `reduce` of an `unshard`: flags, member, group.

        Returns "" without `members`, even if flags are set: set `members` and `group` with them.

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
        """Read text that `show` has written; "" gives the defaults.

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

    is_kept: its argument `keep`: the unsharded parameter is kept for backward.
    param: its number in the table of parameters.
    options: its argument `reduce`.
    """

    members: str
    group: str
    is_kept: bool
    param: int
    options: UnshardOptions

    @classmethod
    def of(cls, node: fx.Node) -> Unshard:
        """Read the arguments of `node`, which calls `unshard`."""
        _, members, group, keep, param = node.args
        assert isinstance(param, int)
        options = UnshardOptions.read(str(node.kwargs.get("reduce", "")))
        return cls(str(members), str(group), bool(keep), param, options)

    @property
    def can_be_kept(self) -> bool:
        """Tell whether `keep` may be set: backward would gather the parameter as forward does.

        False for a parameter that is kept already, that the runtime keeps unsharded, or that is
        gathered over a smaller group in backward, by an extension, or from the host.
        """
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
    """Keep on `ctx` what `gradient` takes besides the gradient; no tensor is saved."""
    _, members, group, _, param = inputs
    ctx.arguments = members, group, param, keyword_only_inputs["reduce"]


def _backward_of_unshard(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    """Return the gradient of the shard, by `gradient`, and None for the other arguments."""
    return gradient(grad, *ctx.arguments), None, None, None, None


def gradient(grad: Tensor, members: str, group: str, param: int, reduce: str) -> Tensor:
    """Reduce `grad`, the gradient of an `unshard`, and return the shard that the reduce gives.

    It calls the op `reduce_grad`, or `hold_grad`, which gives zeros, if `reduce` has the flag
    "hold".
    members, group: of the `unshard`; those in `reduce`, if any, are used instead.
    param, reduce: of the `unshard`.
    """
    options = UnshardOptions.read(reduce)
    marker = hold_grad if options.waits else reduce_grad
    shard: Tensor = marker(grad, options.members or members, options.group or group, param)
    return shard


torch.library.register_autograd(
    "autoshard::unshard", _backward_of_unshard, setup_context=_save_for_unshard, lib=library
)
