"""Flat placements, and the choice of one: parameters with fewer rows than ranks."""

from __future__ import annotations

import copy
import io
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.models import SmallNet, net_loss
from support.ranks import on_ranks
from support.selection import each_value
from support.training import (
    FORMS,
    adamw,
    assert_same,
    average_gradients,
    by_hand,
    in_both_forms,
    in_form,
    replicated,
    train,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autoshard
from autoshard import FlatShard, _torch, fully_shard
from autoshard.runtime.comm.flat_shard import FlatDTensor, cut

needs_subclasses = pytest.mark.skipif(
    not _torch.dtensor.SUBCLASSES_DISPATCH, reason="flat placements need torch 2.12"
)

# Four ranks sum in an order of gloo's choosing.
MANY_RANKS_RTOL = 1e-5


class Experts(nn.Module):
    """Three stacked experts, as Mixtral has them, between two layers whose rows are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 41)
        self.experts = nn.Parameter(torch.randn(3, 41, 17) / 6)
        self.down = nn.Linear(17, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bi,eij->ebj", torch.relu(self.up(x)), self.experts)
        return self.down(hidden.square().sum(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), Experts()])
        self.between = nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.between(self.layers[0](x)))


def experts_loss(model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 10, generator=generator)).square().mean()


def flat(_: nn.Parameter) -> FlatShard:
    return FlatShard()


def build(**arguments: Any) -> Any:
    """All parameters with two dims or more are flat, unless `arguments` say something else."""
    torch.manual_seed(0)
    return by_hand(fully_shard, **{"shard_placement_fn": flat, **arguments})(Model())


@needs_subclasses
@each_value(form=FORMS, reshards=[True, False])
@on_ranks(2)
def test_two_ranks(rank: int, form: str, reshards: bool) -> None:
    """Bit for bit the replicated model, with AdamW."""
    want, _ = replicated(Model, experts_loss)
    model = in_form(build(reshard_after_forward=reshards), form)
    weight = model.layers[0].experts
    assert isinstance(weight, DTensor)
    assert (weight.placements, weight.shape) == ((FlatShard(),), (3, 41, 17))
    assert weight.to_local().shape == ((3 * 41 * 17 + 1) // 2 - rank,)
    assert model.layers[0].up.bias.placements == (Shard(0),)  # of one dim: its rows
    train(model, experts_loss, adamw(model))
    assert_same(model, want)


@needs_subclasses
@in_both_forms
@on_ranks(2)
def test_clipping(rank: int, form: str) -> None:
    """The norm is summed by shards, so that its last bit may differ from the replicated model's."""
    want, model = replicated(Model, experts_loss, steps=0)[0], in_form(build(), form)
    own, theirs = adamw(model), adamw(want)
    for step in range(3):
        experts_loss(model, rank, step).backward()
        experts_loss(want, rank, step).backward()
        average_gradients(want)
        norm = model.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(want.parameters(), 0.1))
        for optimizer in (own, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, want, rtol=1e-5)


@needs_subclasses
@in_both_forms
@on_ranks(4)
def test_fewer_rows_than_ranks(rank: int, form: str) -> None:
    """Three experts on four ranks, chosen by "auto"."""
    want, _ = replicated(Model, experts_loss)
    model = in_form(build(shard_placement_fn="auto"), form)
    layer = model.layers[0]
    assert layer.experts.placements == (FlatShard(),)
    assert layer.up.weight.placements == (Shard(0),)  # 44 rows for 41, of 10: not worth it
    assert layer.experts.to_local().numel() in (3 * 41 * 17 // 4, 3 * 41 * 17 // 4 + 1)
    train(model, experts_loss, adamw(model))
    assert_same(model, want, rtol=MANY_RANKS_RTOL)


@needs_subclasses
@in_both_forms
@on_ranks(2)
def test_any_model(rank: int, form: str) -> None:
    """Ties, a module used twice, frozen parameters, buffers: as with rows."""
    want, _ = replicated(SmallNet, net_loss)
    torch.manual_seed(0)
    model = in_form(by_hand(fully_shard, shard_placement_fn=flat)(SmallNet()), form)
    train(model, net_loss, adamw(model))
    assert_same(model, want)


@needs_subclasses
@in_both_forms
@on_ranks(4)
def test_replicas(rank: int, form: str) -> None:
    """HSDP: flat over one axis, replicated over the other."""
    want, _ = replicated(Model, experts_loss)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = in_form(build(mesh=mesh), form)
    assert model.layers[0].experts.placements == (Replicate(), FlatShard())
    train(model, experts_loss, adamw(model))
    assert_same(model, want, rtol=MANY_RANKS_RTOL)


@needs_subclasses
@in_both_forms
@on_ranks(4)
def test_smaller_groups(rank: int, form: str) -> None:
    """`reshard_after_forward=2`: forward cuts again, for two ranks."""
    want, _ = replicated(Model, experts_loss)
    model = in_form(build(reshard_after_forward=2), form)
    train(model, experts_loss, adamw(model))
    assert_same(model, want, rtol=MANY_RANKS_RTOL)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(30, 6)
        self.down = nn.Linear(6, 30)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@needs_subclasses
@in_both_forms
@on_ranks(4)
def test_tensor_parallel(rank: int, form: str) -> None:
    """What tensor parallelism left of a parameter is cut flat over the other axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = Wide()
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"], shard_placement_fn=flat)
    in_form(model, form)
    assert model.up.weight.placements == (FlatShard(), Shard(0))
    assert model.down.weight.placements == (FlatShard(), Shard(1))
    torch.manual_seed(0)
    want = Wide()
    assert torch.equal(model.down.weight.full_tensor(), want.down.weight)
    own, theirs = (torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (model, want))
    for step in range(3):
        inputs = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(step))
        model(inputs[mesh.get_local_rank("data")]).square().sum().backward()
        ((want(inputs[0]).square().sum() + want(inputs[1]).square().sum()) / 2).backward()
        norms = model.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(want.parameters(), 1.0)
        torch.testing.assert_close(*norms)
        for optimizer in (own, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for got, expected in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), expected)
    state = {"model": get_model_state_dict(model)}
    folder = shared_folder(rank)
    dcp.save(state, checkpoint_id=folder)
    before = [param.full_tensor().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    dcp.load(state, checkpoint_id=folder)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), value)


def shared_folder(rank: int) -> str:
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    return folder[0]


@needs_subclasses
@each_value(form=FORMS, then=[None, "auto", flat], wait=[True, False])
@on_ranks(2)
def test_checkpoints(rank: int, form: str, then: Any, wait: bool) -> None:
    """2 + 2 steps are 4, also if parameters are cut in another way after a load."""
    folder = shared_folder(rank)
    want, _ = replicated(Model, experts_loss)
    model = in_form(build(), form)
    optimizer = adamw(model)
    train(model, experts_loss, optimizer, steps=2)
    autoshard.save_checkpoint(folder, model, optimizer, step=2, wait=wait)
    again = in_form(build(shard_placement_fn=then), form)
    optimizer = adamw(again)
    autoshard.load_checkpoint(folder, again, optimizer)
    go_on(again, rank, optimizer)
    assert_same(again, want)


def go_on(model: Any, rank: int, optimizer: torch.optim.Optimizer) -> None:
    """Steps 2 and 3."""
    for step in (2, 3):
        experts_loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@needs_subclasses
@on_ranks(4)
def test_checkpoint_of_other_ranks(rank: int) -> None:
    """What was cut over two ranks by rows is loaded by four, flat, and by two again."""
    folder = shared_folder(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build(mesh=mesh, shard_placement_fn=None)
    optimizer = adamw(model)
    train(model, experts_loss, optimizer, steps=2)
    autoshard.save_checkpoint(folder, model, optimizer, step=2)
    for arguments in ({}, {"mesh": mesh}):
        again = build(**arguments)
        moments = adamw(again)
        autoshard.load_checkpoint(folder, again, moments)
        autoshard.save_checkpoint(folder, again, moments, step=2)
        for got, want in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(got.full_tensor(), want.full_tensor())
            for key, value in optimizer.state[want].items():
                assert torch.equal(whole(moments.state[got][key]), whole(value)), key


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@needs_subclasses
@in_both_forms
@on_ranks(2)
def test_state_dicts_of_torch(rank: int, form: str) -> None:
    """Full state dicts, of the model and of moments; into a model on meta, too; and torch's DCP."""
    want, _ = replicated(Model, experts_loss, steps=2)
    model = in_form(build(), form)
    optimizer = adamw(model)
    train(model, experts_loss, optimizer, steps=2)
    full = StateDictOptions(full_state_dict=True)
    saved, states = (
        get_model_state_dict(model, options=full),
        get_optimizer_state_dict(model, optimizer, options=full),
    )
    for name, value in want.state_dict().items():
        assert torch.equal(saved[name], value), name
    with torch.device("meta"):
        empty = by_hand(fully_shard, shard_placement_fn=flat)(Model())
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(empty, dict(saved) if rank == 0 else {}, options=broadcast)
    assert_same(empty, want)
    for options, given in ((full, states), (broadcast, states if rank == 0 else {})):
        set_model_state_dict(empty, dict(saved), options=full)
        other = adamw(empty)
        set_optimizer_state_dict(empty, other, copy.deepcopy(given), options=options)
        go_on(empty, rank, other)
        assert_same(empty, replicated(Model, experts_loss)[0])
    folder = shared_folder(rank)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    by_rows = build(shard_placement_fn=None)
    state = {"model": get_model_state_dict(by_rows)}
    dcp.load(state, checkpoint_id=folder)
    assert_same(by_rows, want)


@needs_subclasses
@on_ranks(2)
def test_saved_and_copied(rank: int) -> None:
    """torch.save, torch.load as weights only, deepcopy, full_params, other dtypes."""
    model = build()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded["layers.0.experts"], FlatDTensor)
    model.load_state_dict(loaded)
    before = copy.deepcopy(model.layers[0].experts)
    assert torch.equal(before, model.layers[0].experts)
    with model.full_params():
        assert model.layers[0].experts.shape == (3, 41, 17)
        with torch.no_grad():
            model.layers[0].experts.mul_(2)
    assert torch.equal(model.layers[0].experts.to_local(), 2 * before.to_local())
    model.to(torch.float64)
    assert model.layers[0].experts.to_local().dtype == torch.float64
    assert experts_loss(model.float(), rank, 0).isfinite()


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True, momentum=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-3),
}


@needs_subclasses
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_operators_of_optimizers(rank: int, name: str) -> None:
    """With a closure an optimizer computes with the DTensors themselves."""
    model, want = build(), copy.deepcopy(replicated(Model, experts_loss, steps=0)[0])
    own, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](want.parameters())
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            loss = experts_loss(model, rank, step)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        own.zero_grad()
        own.step(closure)
        theirs.zero_grad()
        experts_loss(want, rank, step).backward()
        average_gradients(want)
        nn.utils.clip_grad_norm_(want.parameters(), 1.0)
        theirs.step()
    # Norms are sums of squares by rank: the last bit of the clipping factor may differ.
    assert_same(model, want, rtol=1e-5)


@needs_subclasses
@on_ranks(2)
def test_operators(rank: int) -> None:
    """What is no optimizer: sums, views, matrix products, gradients, other operands."""
    torch.manual_seed(3)
    whole = torch.randn(3, 50)
    layer = nn.Linear(50, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(whole)
    fully_shard(layer, shard_placement_fn=flat)
    weight = layer.weight
    mesh = weight.device_mesh
    assert isinstance(weight, FlatDTensor)

    def same(got: Any, want: Tensor) -> None:
        torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, want)

    same(weight.sum(), whole.sum())
    same(weight.norm(), whole.norm())
    same(torch.linalg.vector_norm(weight, 1), whole.abs().sum())
    same(weight.abs().max(), whole.abs().max())
    same(weight.sum(0), whole.sum(0))
    same(weight.max(0).values, whole.max(0).values)
    same(weight.min(dim=0).indices, whole.min(dim=0).indices)
    same(weight.norm(dim=0), whole.norm(dim=0))
    same((weight > 0).any(0), (whole > 0).any(0))
    same(torch.linalg.vector_norm(weight, dim=0), torch.linalg.vector_norm(whole, dim=0))
    same(weight.T @ weight, whole.T @ whole)
    same(weight.view(-1)[7], whole.view(-1)[7])
    same(weight[1], whole[1])
    same(weight * 2 + weight.detach().clone(), whole * 3)
    assert isinstance(weight * 2, FlatDTensor)
    rows = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    same(weight + rows, 2 * whole)
    same(rows + weight, 2 * whole)
    scale = distribute_tensor(torch.arange(3.0)[:, None], mesh, [Replicate()], src_data_rank=None)
    same(weight * scale, whole * torch.arange(3.0)[:, None])
    many = distribute_tensor(torch.ones(2, 3, 1), mesh, [Replicate()], src_data_rank=None)
    same(weight + many, whole + torch.ones(2, 3, 1))
    row = cut(whole[:1].clone(), mesh, [FlatShard()])
    same(weight * row, whole * whole[:1])
    same(row * weight, whole * whole[:1])
    same(weight * weight.sum(), whole * whole.sum())
    same(weight.sum() * weight, whole * whole.sum())
    same(torch._foreach_mul([weight.detach()], [weight.detach().sum()])[0], whole * whole.sum())
    same(torch._foreach_mul([weight.detach()], weight.detach().sum())[0], whole * whole.sum())
    single = cut(torch.full((1, 1), 3.0), mesh, [FlatShard()])  # the second rank has none of it
    for got in (single.max(), single.min(), single.mean(), torch.linalg.vector_norm(single, 4)):
        same(got, torch.tensor(3.0))
    same(torch.linalg.vector_norm(single, float("inf")), torch.tensor(3.0))
    most = torch._foreach_norm([single.detach(), weight.detach()], float("inf"))
    same(most[0], torch.tensor(3.0))
    same(most[1], whole.abs().max())
    same(weight.new_zeros(weight.shape), torch.zeros(3, 50))
    assert isinstance(weight.new_empty(weight.size(), device="cpu"), FlatDTensor)
    rows.add_(weight.detach())
    same(rows, 2 * whole)
    assert rows.placements == (Shard(0),)
    same(weight.redistribute(placements=[Shard(1)]), whole)
    assert torch.equal(weight.detach(), weight.detach())
    node = torch.autograd.graph.get_gradient_edge(weight).node  # by `view_as`: nothing is gathered
    assert node is weight.expand_as(weight).grad_fn.next_functions[0][0]
    assert isinstance(weight.view_as(weight), FlatDTensor)
    (weight.square().sum() + (weight.T @ weight).sum()).backward()
    reference = whole.clone().requires_grad_()
    (reference.square().sum() + (reference.T @ reference).sum()).backward()
    assert isinstance(weight.grad, DTensor)
    same(weight.grad, reference.grad)
    weight.grad = None
    (weight.norm() + (weight / weight.norm()).abs().sum()).backward()
    weight.to_local().sum().backward()
    reference.grad = None
    (reference.norm() + (reference / reference.norm()).abs().sum() + reference.sum()).backward()
    same(weight.grad, reference.grad)
    weight.grad.mul_(2)
    cubed = (weight.full_tensor() ** 3).sum(), (reference**3).sum()
    (first,), (wanted,) = (
        torch.autograd.grad(each, of, create_graph=True)
        for each, of in zip(cubed, (weight, reference), strict=True)
    )
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    same(second, torch.autograd.grad(wanted.square().sum(), reference)[0])
    with torch.no_grad():
        weight.clamp_(-0.5, 0.5)
        same(weight, whole.clamp(-0.5, 0.5))
        weight.abs_().masked_fill_(weight > 0.4, 0.0)
        clamped = whole.clamp(-0.5, 0.5).abs()
        same(weight, clamped.masked_fill(clamped > 0.4, 0.0))
        for view in (weight.T, weight[:, 0], weight[0], weight.unsqueeze(0), weight.view(-1)):
            with pytest.raises(NotImplementedError, match=r"or a view of one, .*full_params"):
                view.zero_()
        same(weight.T[3] + 1, weight.full_tensor().T[3] + 1)
        nn.init.uniform_(weight, 2.0, 3.0)
        assert weight.to_local().min() >= 2.0
        with pytest.raises(NotImplementedError, match=r"of size \[3, 50\], .*full_params"):
            weight.index_fill_(0, torch.tensor([0]), 0.0)
    with pytest.raises(ValueError, match="can only be placed alike"):
        weight.to_local(grad_placements=[Shard(0)])


@needs_subclasses
@on_ranks(2)
def test_moments_that_lie_otherwise(rank: int) -> None:
    """A fused step would write to flat parameters and to moments by rows: an error, not a loss."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    experts_loss(model, rank, 0).backward()
    optimizer.step()
    before = [param.full_tensor() for param in model.parameters()]
    for param, state in optimizer.state.items():
        mesh = param.device_mesh
        for key in ("exp_avg", "exp_avg_sq"):
            whole = state[key].full_tensor()
            state[key] = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    # It names the op, and what to use instead.
    with pytest.raises(NotImplementedError, match=r"fused_adamw.*full_params"):
        optimizer.step(lambda: experts_loss(model, rank, 1))
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), value)


@needs_subclasses
@on_ranks(2)
def test_values_of_the_first_rank(rank: int) -> None:
    """`distribute_tensor` sends those of rank 0 by default, flat ones, too."""
    mesh = init_device_mesh("cpu", (2,))
    flat_one = torch.distributed.tensor.distribute_tensor(
        torch.full((3, 5), float(rank)), mesh, [FlatShard()]
    )
    assert flat_one.to_local().sum() == 0.0
    with pytest.raises(ValueError, match="to have names"):
        cut(torch.ones(3, 5), init_device_mesh("cpu", (2, 1)), [FlatShard(), Replicate()])


@needs_subclasses
@on_ranks(4)
def test_operators_beside_another_axis(rank: int) -> None:
    """Uneven over both axes: means and what is made of them are those of the whole tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for placements in ([FlatShard(), Shard(0)], [Shard(0), FlatShard()]):
        flat_one = cut(whole, mesh, placements)
        for got, want in (
            (flat_one.mean(), whole.mean()),
            (flat_one - flat_one.mean(), whole - whole.mean()),
            (flat_one * flat_one.sum(), whole * whole.sum()),
            (flat_one.norm(), whole.norm()),
        ):
            torch.testing.assert_close(got.full_tensor(), want)


@needs_subclasses
@on_ranks(2)
def test_asynchronous_saves_of_torch(rank: int) -> None:
    folder = shared_folder(rank)
    model = build()
    saved = [param.full_tensor() for param in model.parameters()]
    group = dist.new_group(backend="gloo")
    dcp.async_save(
        {"model": get_model_state_dict(model)}, checkpoint_id=folder, process_group=group
    ).result()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    for param, value in zip(model.parameters(), saved, strict=True):
        assert torch.equal(param.full_tensor(), value)


@needs_subclasses
@in_both_forms
@on_ranks(2)
def test_precision_and_offload(rank: int, form: str) -> None:
    """bf16 parameters on the host: as with rows, bit for bit."""
    models = []
    for how in (None, flat):
        arguments: dict[str, Any] = {
            "mp_policy": autoshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "offload_policy": autoshard.CPUOffloadPolicy(),
        }
        model = in_form(build(shard_placement_fn=how, **arguments), form)
        train(model, experts_loss, adamw(model))
        models.append(model)
    for by_rows, by_runs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(by_rows.full_tensor(), by_runs.full_tensor())


@needs_subclasses
@on_ranks(2)
def test_chosen_by_default(rank: int) -> None:
    """`shard` and the one-line form choose; `fully_shard` cuts rows, as FSDP2 does."""
    torch.manual_seed(0)
    assert fully_shard(Model()).layers[0].experts.placements == (Shard(0),)
    assert autoshard.shard(Model()).layers[0].experts.placements == (FlatShard(),)
    assert autoshard.shard(SmallNet()).head.weight.placements == (Shard(0),)
    model = Model()
    torch.compile(model, backend="autoshard")(torch.randn(2, 10)).sum().backward()
    assert model.layers[0].experts.placements == (FlatShard(),)


@on_ranks(2)
def test_before_torch_2_12(rank: int) -> None:
    """The first dim that ranks share evenly, if there is one; and an error for a flat one."""
    with mock.patch.object(_torch.dtensor, "SUBCLASSES_DISPATCH", new=False):
        model = fully_shard(nn.Linear(200, 3), shard_placement_fn="auto")
        assert model.weight.placements == (Shard(1),)
        assert fully_shard(nn.Linear(201, 3), shard_placement_fn="auto").weight.placements == (
            Shard(0),
        )
        with pytest.raises(NotImplementedError, match=r"weight, .* before 2.12: return Shard"):
            fully_shard(nn.Linear(200, 3), shard_placement_fn=flat)


class WithExtension(Tensor):
    """Tensor that says what is gathered for it."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any: ...

    def fsdp_post_all_gather(self, *given: Any, out: Any = None) -> Any: ...


@needs_subclasses
@on_ranks(2)
def test_extensions_work_by_rows(rank: int) -> None:
    """A shard that says what is gathered for it is never chosen to be flat."""
    layer = nn.Linear(200, 3)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(WithExtension))
    with pytest.raises(NotImplementedError, match=r"weight, whose all-gather extension works by"):
        fully_shard(layer, shard_placement_fn=flat)
    assert fully_shard(layer, shard_placement_fn="auto").weight.placements == (Shard(1),)


def test_wrong_words() -> None:
    with pytest.raises(ValueError, match='expected a function or "auto"'):
        fully_shard(nn.Linear(2, 2), shard_placement_fn="flat")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match='or "auto", not Shard'):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=Shard(0))  # type: ignore[arg-type]
