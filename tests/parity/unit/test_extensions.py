"""All-gather extensions: FSDP2's protocol for shards that say what is gathered for them."""

from __future__ import annotations

import types
import unittest.mock
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from support.models import SmallNet as Net
from support.models import net_loss
from support.ranks import on_ranks
from support.selection import each_value
from support.topologies import where_copies_cost_most
from support.training import adamw, assert_same, in_both_forms, in_form, issued, train
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._pytree import tree_map_only

import autoshard
from autoshard.passes.ir.layout import show_members

aten = torch.ops.aten
KEEPS_CLASS = {
    aten.as_strided.default,
    aten.clone.default,
    aten.detach.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.t.default,
    aten.view.default,
}
MATMULS = {aten.addmm.default, aten.mm.default}


class Bf16Weight(Tensor):
    """Kept in float32, gathered in bfloat16; products with it are computed in that.

    Pretends to be float32, whatever it holds.
    """

    data_: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, *_: Any) -> Bf16Weight:
        return Tensor._make_wrapper_subclass(
            cls, data.size(), data.stride(), data.storage_offset(), dtype=torch.float32
        )

    def __init__(self, data: Tensor, *_: Any) -> None:
        self.data_ = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Bf16Weight:
        return Bf16Weight(inner["data_"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain = tree_map_only(Bf16Weight, lambda weight: weight.data_, args)
        if func in MATMULS:
            plain = tree_map_only(Tensor, Tensor.bfloat16, plain)
            return func(*plain, **(kwargs or {})).float()
        out = func(*plain, **(kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        return tree_map_only(Tensor, Bf16Weight, out) if func in KEEPS_CLASS else out

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Linear)
        assert outer_size[1:] == self.shape[1:]
        return (self.data_.bfloat16(),), mesh.size()

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        assert metadata == 2
        (data,) = outputs
        if out is not None:
            return None
        return Bf16Weight(data), (data,)


def before(self: Tensor, mesh: Any) -> Any:
    """Of a plain local tensor: two tensors are sent, in two dtypes, neither its own."""
    return (self.double(), torch.tensor(3.0)), "metadata"


def after(self: Tensor, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    data, scales = outputs
    assert metadata == "metadata"
    whole = (data * scales.mean()).to(param_dtype)  # exact: each rank sends a 3
    return whole, (whole,)


def extend(param: Tensor, pre: Any = before, post: Any = after) -> None:
    for name, method in (("fsdp_pre_all_gather", pre), ("fsdp_post_all_gather", post)):
        if method is not None:
            setattr(param._local_tensor, name, types.MethodType(method, param._local_tensor))


class Layer(nn.Module):
    """A module of the user's: torch 2.11 does not compile one of its own in place."""

    def __init__(self, *sizes: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(*sizes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Low(Net):
    """Linear layers of blocks have a Bf16Weight."""

    def __init__(self, hidden: int, **arguments: Any) -> None:
        super().__init__(tied=False, **arguments)
        for layer in self.layers:
            layer.up, layer.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)
            for linear in (layer.up, layer.down):
                linear.weight = nn.Parameter(Bf16Weight(linear.weight.detach()))


def build(hidden: int = 8, **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    return Low(hidden, **arguments)


def shard_with(library: Any, model: nn.Module, reshard: bool) -> nn.Module:
    for layer in model.layers:
        library.fully_shard(layer, reshard_after_forward=reshard)
    return library.fully_shard(model)


def data(tensor: Tensor) -> Tensor:
    return tensor.data_ if isinstance(tensor, Bf16Weight) else tensor


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_subclass_equals_fsdp2(rank: int, reshard: bool) -> None:
    ours, theirs = (shard_with(library, build(), reshard) for library in (autoshard, fsdp))
    assert train(ours, net_loss, adamw(ours)) == train(theirs, net_loss, adamw(theirs))
    for (name, got), want in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(data(got.to_local()), data(want.to_local())), name


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant", "reentrant"])
# torch 2.11's Dynamo compiles frames of the subclass itself, and fails in them.
@pytest.mark.parametrize("compile", [False, True] if torch.__version__ >= "2.12" else [False])
@on_ranks(2)
def test_uneven_shards_equal_the_replicated_model(
    rank: int, compile: bool, checkpointing: str | None
) -> None:
    """FSDP2 asks subclasses to pad; here it is done for them. Where a subclass is made of what is
    gathered, compiled models run eagerly."""
    want = build(7)
    losses = train(want, net_loss, adamw(want), replicated=True)
    got = autoshard.shard(build(7, checkpointing=checkpointing))
    optimizer = adamw(got)
    call = torch.compile(got, backend="autoshard") if compile else got
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "autoshard could not compile a frame")  # once a process
        assert train(call, net_loss, optimizer) == losses
    for (name, ours), whole in zip(got.named_parameters(), want.parameters(), strict=True):
        rows = whole.shape[0] // 2 + whole.shape[0] % 2
        part = data(whole)[rows * rank : rows * (rank + 1)]
        assert torch.equal(data(ours.to_local()), part), name


@on_ranks(2)
def test_what_is_sent_and_what_is_kept(rank: int) -> None:
    """Weights travel in bfloat16, biases apart from them; none is whole between the passes."""
    whole = []
    after = Bf16Weight.fsdp_post_all_gather

    def spy(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        whole.append(StorageWeakRef(outputs[0].untyped_storage()))
        return after(self, outputs, *args, **kwargs)

    model = autoshard.shard(build())
    n = len(model.layers)
    losses: list[Tensor] = []
    with unittest.mock.patch.object(Bf16Weight, "fsdp_post_all_gather", spy):
        forward = issued(lambda: losses.append(net_loss(model, rank, 0)))
        assert len(whole) == 2 * n
        assert all(each.expired() for each in whole)
        backward = issued(losses[0].backward)
        assert len(whole) == 4 * n
        assert all(each.expired() for each in whole)
    sent = Counter(show_members(entry.members) for entry in forward)
    assert sent["bf16[8,6] bf16[6,8]"] == n
    assert Counter(entry.kind for entry in forward) == {"gather": 2 * n + 1}
    assert Counter(entry.kind for entry in backward) == {"gather": 2 * n, "reduce": n + 1}


@in_both_forms
@on_ranks(2)
def test_methods_put_on_a_local_tensor_after_sharding(rank: int, form: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(5, 3)
    torch.manual_seed(0)
    model = autoshard.fully_shard(Layer(5, 3))
    x = torch.ones(2, 5)
    assert torch.equal(model(x), plain(x))
    extend(model.linear.weight)
    in_form(model, form)
    assert torch.equal(model(x), functional.linear(x, plain.weight * 3, plain.bias))
    model(x).sum().backward()
    assert torch.equal(model.linear.weight.grad.full_tensor(), torch.full((3, 5), 2.0))


@in_both_forms
@on_ranks(1)
def test_a_world_of_one(rank: int, form: str) -> None:
    model = autoshard.fully_shard(Layer(5, 3, bias=False))
    x = torch.ones(2, 5)
    before = model(x)
    extend(model.linear.weight)
    torch.testing.assert_close(in_form(model, form)(x), before * 3)


@on_ranks(2)
def test_errors(rank: int) -> None:
    def forward(pre: Any, post: Any = after) -> None:
        model = autoshard.fully_shard(nn.Sequential(nn.Linear(5, 3)))
        extend(model[0].weight, pre, post)
        model(torch.ones(2, 5))

    with pytest.raises(TypeError, match=r"0\.weight.* has fsdp_pre_all_gather alone"):
        forward(before, None)
    with pytest.raises(TypeError, match=r"of 0\.weight takes 2 arguments: expected \(mesh\)"):
        forward(lambda self, mesh, size: None)
    with pytest.raises(TypeError, match=r"of 0\.weight should return \(tensors to gather"):
        forward(lambda self, mesh: (self, None))
    with pytest.raises(ValueError, match=r"0\.weight, whose 3 rows are cut unevenly over 2 ranks"):
        forward(lambda self, mesh: ((torch.ones(7),), None))


def quantised(self: Tensor, mesh: Any) -> Any:
    """Bytes, and this rank's scale; the metadata has a tensor, the same on every rank."""
    scale = self.abs().max().clamp(min=1e-3) / 100
    return ((self / scale).round().to(torch.int8), scale), {"unit": torch.ones(()), "ranks": 2}


def dequantised(self: Tensor, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
    values, scales = outputs
    parts = zip(values.chunk(metadata["ranks"]), scales, strict=True)
    whole = torch.cat([part.to(dtype) * scale for part, scale in parts]) * metadata["unit"]
    return whole, (whole,)


def with_bytes(strategy: str, checkpointing: str | None = None) -> Any:
    """Weights of linear layers travel as bytes, with a scale each, beside biases in float32."""
    torch.manual_seed(0)
    model = autoshard.shard(Net(checkpointing=checkpointing), strategy=strategy)
    for layer in model.layers:
        for linear in (layer.up, layer.down):
            extend(linear.weight, quantised, dequantised)
    return model


@each_value(
    strategy=["full_shard", "shard_grad_op"],
    checkpointing=[None, "non-reentrant"],
    accumulates=[False, True],
)
@on_ranks(2)
def test_compiled_equals_eager(
    rank: int, strategy: str, checkpointing: str | None, accumulates: bool
) -> None:
    """What is asked of shards, and what is made of it, is in the graph; so is every gather."""

    def loss(model: Any, rank: int, step: int) -> Tensor:
        if accumulates:
            with model.no_sync():
                net_loss(model, rank, step + 10).backward()
        return net_loss(model, rank, step)

    want = with_bytes(strategy, checkpointing)
    got = in_form(with_bytes(strategy, checkpointing), "compiled")
    losses = train(want, loss, adamw(want))
    assert train(got, loss, adamw(got)) == losses
    assert_same(got, want)
    with torch.no_grad():
        assert torch.equal(net_loss(got, rank, 9), net_loss(want, rank, 9))


@each_value(lowering=["eager", "inductor"])
@on_ranks(2)
def test_pieces_in_grouped_gathers(rank: int, lowering: str) -> None:
    """They are copied each by itself: their memory may be used again while they are sent."""
    made = []
    with where_copies_cost_most() as topology:
        for bucketing in ("per_unit", "auto"):
            torch._dynamo.reset()
            options = {"topology": topology, "bucketing": bucketing, "lowering": lowering}
            made.append(with_bytes("full_shard"))
            made[-1].compile(backend="autoshard", options={**options, "strict": True})
            train(made[-1], net_loss, adamw(made[-1]))
    assert_same(made[1], made[0])
    buckets = [bucket for plan in autoshard.plans(made[1]) for bucket in plan.buckets]
    assert any(each.layout == "grouped" and "u8[" in each.members for each in buckets)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_what_compiled_code_sends(rank: int, strategy: str) -> None:
    """A unit's pieces, as many bytes as eagerly, are launched together; scales with biases."""
    model = in_form(with_bytes(strategy), "compiled", bucketing="per_unit")
    losses: list[Tensor] = []
    forward = issued(lambda: losses.append(net_loss(model, rank, 0)))
    backward = issued(losses[0].backward)
    sent = Counter(show_members(each.members) for each in forward if each.kind == "gather")
    n = len(model.layers)
    assert sent["u8[8,6] u8[6,7]"] == n
    assert sent["f32[6] f32[6] f32[2] f32[7] f32[2] f32[6]"] == n
    gathers = Counter(each.kind for each in backward)["gather"]
    assert gathers == (2 * n if strategy == "full_shard" else 0)
    plan = next(plan for plan in autoshard.plans(model) if plan.graph == "forward")
    launched = {e.bucket: e.position for e in plan.schedule if e.what == "launch"}
    of_unit = [n for n, bucket in enumerate(plan.buckets) if bucket.unit == "layers.1"]
    assert len({launched[number] for number in of_unit}) == 1


@on_ranks(2)
def test_tied_and_read_twice(rank: int) -> None:
    """However often a parameter is read, its shard is asked once a graph."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(self.first(x))))

    def made(form: str) -> Any:
        torch.manual_seed(0)
        model = autoshard.fully_shard(Twice(), reshard_after_forward=True)
        extend(model.first.weight, asks, dequantised)
        return in_form(model, form)

    asked = 0

    def asks(self: Tensor, mesh: Any) -> Any:
        nonlocal asked
        asked += 1
        return quantised(self, mesh)

    x = torch.full((2, 6), 1.0 + rank)
    eager, compiled = made("eager"), made("compiled")
    compiled(x).sum().backward()
    asked = 0
    eager(x).sum().backward()
    assert asked == 2
    compiled.zero_grad()
    asked = 0
    compiled(x).sum().backward()
    assert asked == 2
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def scaled(self: Any, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
    return outputs[0] * self.factor, outputs


@on_ranks(2)
def test_blocks_that_are_alike_but_for_their_shards(rank: int) -> None:
    """What is made of the pieces is traced for each, though their code is one; what it reads of
    the shard is looked at in each step.
    """
    torch.manual_seed(0)
    model = Blocks()
    for number, block in enumerate(model.blocks):
        autoshard.fully_shard(block)
        extend(block.linear.weight, lambda self, mesh: ((self,), None), scaled)
        block.linear.weight._local_tensor.factor = 2.0 + number
    x = torch.full((2, 4), 1.0 + rank)
    want = model(x)
    for block in model.blocks:
        in_form(block, "compiled")
    assert torch.equal(model(x), want)
    model.blocks[1].linear.weight._local_tensor.factor = 7.0
    with pytest.raises(RuntimeError, match=r"'factor': 7\.0.* when .*'factor': 3\.0"):
        model(x)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@on_ranks(2)
def test_tensors_in_metadata_and_one_piece(rank: int, lowering: str) -> None:
    """Neither contiguous nor wanted for long: a compiler may write to what was sent."""

    def pre(self: Tensor, mesh: Any) -> Any:
        return (self * 2,), torch.arange(12.0).view(3, 4).t()

    def post(self: Tensor, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        assert not metadata.is_meta
        return outputs[0] / 2 + metadata.sum(1, keepdim=True), outputs

    torch.manual_seed(0)
    model = autoshard.fully_shard(Layer(6, 4, bias=False))
    extend(model.linear.weight, pre, post)
    x = torch.full((2, 6), 1.0 + rank)
    want = model(x)
    in_form(model, "compiled", lowering=lowering)
    torch.testing.assert_close(model(x), want)


@on_ranks(2)
def test_what_is_not_compiled(rank: int) -> None:
    def forward(model: nn.Module) -> None:
        in_form(model, "compiled")(torch.ones(2, 6))

    def extended(pre: Any, post: Any = dequantised) -> nn.Module:
        model = autoshard.fully_shard(Layer(6, 4))
        extend(model.linear.weight, pre, post)
        return model

    with pytest.raises(Exception, match=r"layers\.0.* returns a Bf16Weight, a tensor subclass"):
        net_loss(in_form(autoshard.shard(build()), "compiled"), rank, 0)
    with pytest.raises(Exception, match=r"metadata with a object, which isn't compiled yet"):
        forward(extended(lambda self, mesh: ((self,), object())))
    calls = iter(range(100))
    with pytest.raises(
        Exception, match=r"of linear\.weight returns other metadata at each call: 0, then"
    ):
        forward(extended(lambda self, mesh: ((self,), next(calls))))

    def wrong(self: Tensor, outputs: Any, metadata: Any, dtype: Any) -> Any:
        return outputs[0].double(), outputs

    with pytest.raises(Exception, match=r"of linear\.weight returns torch.float64: expected"):
        forward(extended(lambda self, mesh: ((self,), None), wrong))


@on_ranks(2)
def test_changes_after_compilation(rank: int) -> None:
    metadata = 0

    def same(self: Tensor, outputs: Any, metadata: Any, dtype: Any) -> Any:
        return outputs[0], outputs

    model = autoshard.fully_shard(Layer(6, 4))
    extend(model.linear.weight, lambda self, mesh: ((self,), metadata), same)
    in_form(model, "compiled")
    model(torch.ones(2, 6))
    metadata = 1
    with pytest.raises(
        RuntimeError, match=r"of linear\.weight returned f32\[2,6\] with 1; when .* with 0"
    ):
        model(torch.ones(2, 6))

    late = in_form(autoshard.fully_shard(Layer(6, 4)), "compiled")
    late(torch.ones(2, 6))
    extend(late.linear.weight, lambda self, mesh: ((self,), None), same)
    with pytest.raises(
        RuntimeError, match=r"linear\.weight was given fsdp_pre_all_gather, or lost it"
    ):
        late(torch.ones(2, 6))


@on_ranks(4)
def test_resharding_to_fewer_ranks_is_refused(rank: int) -> None:
    model = autoshard.fully_shard(nn.Linear(5, 4), reshard_after_forward=2)
    extend(model.weight)
    with pytest.raises(NotImplementedError, match=r"weight .* can't be resharded to 2 ranks"):
        model(torch.ones(2, 5))
