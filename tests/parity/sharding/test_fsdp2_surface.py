"""What FSDP2 offers: each method and argument of it, compared with the replicated model."""

from __future__ import annotations

import copy
import unittest.mock
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import Net, SmallNet, net_loss
from support.ranks import on_ranks
from support.training import (
    adamw,
    assert_same,
    average_gradients,
    count,
    in_both_forms,
    in_form,
    issued,
    replicated,
    train,
)
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Shard

import autoshard
from autoshard import _torch, fully_shard
from autoshard.runtime.comm.flights import Issued, observe
from autoshard.runtime.eager.saved import Held
from autoshard.runtime.eager.unit_steps import steps_of


def whole_net() -> nn.Module:
    torch.manual_seed(0)
    return SmallNet(tied=False)


def build(**arguments: Any) -> Any:
    return autoshard.shard(whole_net(), **arguments)


@on_ranks(2)
def test_errors_are_also_those_of_fsdp2(rank: int) -> None:
    """Misuse for which it raises AssertionError or NotImplementedError raises that, too."""
    unnamed = init_device_mesh("cpu", (1, 2))
    with pytest.raises(AssertionError, match="without names"):
        fully_shard(nn.Linear(2, 2), mesh=unnamed)
    with pytest.raises(AssertionError, match="is sharded already"):
        fully_shard(fully_shard(nn.Linear(2, 2)))
    with pytest.raises(AssertionError, match="which has 2 dims"):
        fully_shard(nn.Linear(2, 2, bias=False), shard_placement_fn=lambda _: Shard(2))
    with pytest.raises(NotImplementedError, match="only dim 0 may be uneven"):
        fully_shard(nn.Linear(3, 2, bias=False), shard_placement_fn=lambda _: Shard(1))
    half = fully_shard(nn.Linear(2, 2, bias=False))
    half.weight._local_tensor.fsdp_pre_all_gather = None
    with pytest.raises(AssertionError, match="fsdp_pre_all_gather alone"):
        half(torch.ones(1, 2))
    with pytest.raises(AssertionError, match="can't be deep-copied"):
        copy.deepcopy(fully_shard(nn.Linear(2, 2)))


def most_in_flight(run: Callable[[], object]) -> int:
    """Of reduces, while `run` runs."""
    now = most = 0

    def launched(issued: Issued) -> None:
        nonlocal now, most
        now += issued.kind == "reduce"
        most = max(most, now)

    def waited(issued: Issued) -> None:
        nonlocal now
        now -= issued.kind == "reduce"

    with observe(launched, waited):
        run()
    return most


@in_both_forms
@on_ranks(2)
def test_reduces_in_flight(rank: int, form: str) -> None:
    """As many as asked for, eagerly; the values are the same, and compiled the plan decides."""
    want, _ = replicated(Net, net_loss)
    seen = []
    for number in (None, 1, 2, 99):
        torch.manual_seed(0)
        model = in_form(autoshard.shard(Net()), form, bucketing="per_unit")
        if number is not None:
            model.set_reduce_scatter_max_input_buffers(number)
        optimizer = adamw(model)
        seen.append(most_in_flight(lambda m=model, o=optimizer: train(m, net_loss, o)))
        assert_same(model, want)
    if form == "eager":
        assert seen == [1, 1, 2, 4]
    else:
        assert len(set(seen)) == 1
    model.set_reduce_scatter_max_input_buffers(3, recurse=False)
    assert model.layers[0]._autoshard_unit.reducer.in_flight == 99
    with pytest.raises(TypeError, match="should be an int, not bool"):
        model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="should be positive, not 0"):
        model.set_reduce_scatter_max_input_buffers(0)


def numel(model: Any) -> int:
    """Of whole parameters that this rank has memory of, through what `parameters()` gives."""
    return sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor))


@in_both_forms
@on_ranks(2)
def test_reshard_between_forward_and_backward(rank: int, form: str) -> None:
    """Frees what forward kept, which backward gathers again; compiled code keeps what it saved."""
    want, _ = replicated(SmallNet, net_loss)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(SmallNet()), form, bucketing="per_unit")
    model.set_reshard_after_forward(False)
    units = [each for each in model.modules() if isinstance(each, autoshard.ShardedModule)]
    optimizer = adamw(model)
    for step in range(4):
        loss = net_loss(model, rank, step)
        if step % 2:
            held = [part for unit in units for part in steps_of(unit._autoshard_unit).held]
            assert len(held) > 0 or form == "compiled"
            for each in units:
                each.reshard()
            assert not any(getattr(part, "memory", None) is not None for part in held)
        gathers, reduces = count(issued(loss.backward))
        # Of a unit whose parameters backward doesn't ask for, or that are still there, none.
        assert (gathers, reduces) == (len(units) * (step % 2) * (form == "eager"), len(units))
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, want)


@on_ranks(2)
def test_reshard_frees_memory(rank: int) -> None:
    """Between forward and backward nobody holds the whole parameters after it."""
    model = fully_shard(nn.Linear(4, 4, bias=False), reshard_after_forward=False)
    y = model(torch.ones(2, 4, requires_grad=True)).sum()
    (held,) = (each for each in steps_of(model._autoshard_unit).held if isinstance(each, Held))
    storage = weakref.ref(held.memory.untyped_storage())
    del held
    assert storage() is not None
    model.reshard()
    assert storage() is None
    assert count(issued(y.backward)) == (1, 1)
    assert model.weight.grad.full_tensor().tolist() == [[2.0] * 4] * 4


@on_ranks(2)
def test_writes_after_reshard_are_found(rank: int) -> None:
    """Backward would compute with other values than forward: eager RuntimeError either way."""
    for reshards in (True, False):
        model = fully_shard(nn.Linear(4, 4, bias=False), reshard_after_forward=False)
        y = model(torch.ones(2, 4, requires_grad=True)).sum()
        if reshards:
            model.reshard()
            with torch.no_grad():
                model.weight.zero_()
            match = "modified in place between forward and backward"
        else:
            with torch.no_grad():
                next(model.parameters()).zero_()
            match = "written to between forward and backward"
        with pytest.raises(RuntimeError, match=match):
            y.backward()
        model.reset_iter_state()


@in_both_forms
@on_ranks(2)
def test_parameters_follow_what_is_gathered(rank: int, form: str) -> None:
    """Whole from `unshard()` to `reshard()`, and where forward keeps them until backward."""
    model = in_form(build(), form, bucketing="per_unit")
    names = [name for name, _ in model.named_parameters()]
    own = {name: p.numel() for name, p in model.named_parameters() if "layers" not in name}
    assert numel(model) == 0
    assert model.unshard() is None
    assert numel(model) == sum(own.values())  # not of modules inside
    assert [name for name, _ in model.named_parameters()] == names
    assert not isinstance(model.head.weight, DTensor)
    model.reshard()
    assert numel(model) == 0
    with torch.no_grad():
        net_loss(model, rank, 0)
    assert numel(model) == 0
    torch.optim.SGD(model.parameters(), lr=0.1)  # after an evaluation
    loss = net_loss(model, rank, 0)
    assert numel(model) == 0  # the root keeps what backward needs, and nobody asked it to
    torch.autograd.grad(loss, list(model.parameters()))
    loss = net_loss(model, rank, 0)
    loss.backward()
    model.zero_grad()
    model.set_reshard_after_forward(False)
    loss = net_loss(model, rank, 0)
    whole = sum(p.numel() for p in model.parameters())
    assert numel(model) == (whole if form == "eager" else 0)
    assert isinstance(model.head.weight, DTensor)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    for each in model.modules():
        if isinstance(each, autoshard.ShardedModule):
            each.reshard()
    assert numel(model) == 0
    loss.backward()


@in_both_forms
@on_ranks(2)
def test_gradients_through_parameters(rank: int, form: str) -> None:
    """Those of what is computed from whole ones reach the shards, once and averaged."""
    torch.manual_seed(0)
    want = SmallNet(tied=False)
    (net_loss(want, rank, 0) + sum(p.pow(2).sum() for p in want.parameters())).backward()
    average_gradients(want)
    model = in_form(build(), form, bucketing="per_unit")
    model.set_reshard_after_forward(False)
    units = [each for each in model.modules() if isinstance(each, autoshard.ShardedModule)]
    if form == "compiled":
        for each in units:
            each.unshard()
    loss = net_loss(model, rank, 0)
    total = loss + sum(p.pow(2).sum() for p in model.parameters())
    assert numel(model) > 0
    total.backward()
    for each in units:
        each.reshard()
    for got, expected in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), expected.grad)


@in_both_forms
@on_ranks(2)
def test_whole_parameters_in_the_wrong_hands(rank: int, form: str) -> None:
    """Optimizers refuse them; zeroing, freezing, norms and states are of the sharded ones, which
    also `parameters()` gives where there are gradients that nobody should miss."""
    model = in_form(build(), form, bucketing="per_unit")
    net_loss(model, rank, 0).backward()
    model.unshard()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor() > 0
    assert model.clip_grad_norm_(1.0) > 0
    model.zero_grad()
    with pytest.raises(ValueError, match="non-leaf"):
        torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"a gathered copy of parameter embed\.weight"):
        optimizer.step()
    model.reshard()
    assert all(p.grad is None for p in model.parameters())
    model.unshard()
    model.requires_grad_(False)
    model.reshard()
    assert not any(p.requires_grad for p in model.parameters())
    model.requires_grad_(True)
    if form == "eager":
        model.set_reshard_after_forward(False)
        inputs = list(model.parameters())
        loss = net_loss(model, rank, 0)
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(loss, list(model.parameters()))
        loss.backward(inputs=inputs)
        assert all(p.grad is not None for p in inputs)
        model.zero_grad()
        loss = net_loss(model, rank, 0)
        with torch.no_grad():
            next(model.parameters()).zero_()
        with pytest.raises(RuntimeError, match=r"embed\.weight.*written to between"):
            loss.backward()


@in_both_forms
@on_ranks(2)
def test_gathered_copies_as_inputs_of_backward(rank: int, form: str) -> None:
    """No gradient comes to the shards, so the optimizer says it; those of before do work. Compiled,
    these are what `parameters()` gives at all times."""
    torch.manual_seed(0)
    model = in_form(fully_shard(SmallNet(tied=False), reshard_after_forward=False), form)
    optimizer = adamw(model)
    before = list(model.parameters())
    loss = net_loss(model, rank, 0)
    copies = list(model.parameters())
    loss.backward(inputs=copies)
    if form == "eager":
        with pytest.raises(RuntimeError, match=r"a gathered copy of parameter embed\.weight"):
            optimizer.step()
    del copies
    optimizer.zero_grad()
    net_loss(model, rank, 0).backward(inputs=before)
    assert all(param.grad is not None for param in before)
    optimizer.step()


@in_both_forms
@on_ranks(2)
def test_fsdp_module(rank: int, form: str) -> None:
    """Sharded modules are `FSDPModule`s; parts of a sharded container are not."""
    model = in_form(build(), form)
    assert isinstance(model, fsdp.FSDPModule)
    assert isinstance(model, Net)
    assert all(isinstance(each, fsdp.FSDPModule) for each in model.layers)
    assert not isinstance(model.head, fsdp.FSDPModule)
    net_loss(model, rank, 0).backward()
    assert isinstance(model.unshard(async_op=True), fsdp.UnshardHandle)
    model.reshard()
    chain = fully_shard(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert type(chain[:2]) is nn.Sequential
    assert chain[:2][0] is chain[0]
    with pytest.raises(NotImplementedError, match="keeps none of the state that FSDP2 keeps"):
        model._set_unshard_async_op(True)


@in_both_forms
@on_ranks(2)
def test_data_that_is_assigned(rank: int, form: str) -> None:
    """It is written to this rank's part, which torch's DTensors leave as it was, or refused."""
    model, want = in_form(build(), form), whole_net()
    net_loss(model, rank, 0).backward()  # what is gathered from now on has the new values
    model.zero_grad()
    for ours, theirs in zip(model.parameters(), want.parameters(), strict=True):
        ours.data = 2 * ours.data + 1
        theirs.data = 2 * theirs.data + 1
    for ours, theirs in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
        ours.data = DTensor.from_local(theirs.detach(), ours.device_mesh)  # replicated
        assert torch.equal(ours.full_tensor(), theirs)
    assert torch.equal(net_loss(model, rank, 0), net_loss(want, rank, 0))
    param = model.head.weight
    with pytest.raises(RuntimeError, match=r"head\.weight\.data was assigned DTensor .*bfloat16"):
        param.data = param.data.bfloat16()
    with pytest.raises(RuntimeError, match=r"was assigned Tensor \[2\].*inside full_params"):
        param.data = torch.zeros(2)


@in_both_forms
@on_ranks(2)
def test_backward_finalized_by_hand(rank: int, form: str) -> None:
    """Gradients wait in all backwards, and are reduced outside of one."""
    want, _ = replicated(Net, net_loss, steps=2)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Net()), form, bucketing="per_unit")
    optimizer = adamw(model)
    for step in range(2):
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        loss = net_loss(model, rank, step) / 2
        assert count(issued(loss.backward))[1] == 0
        again = net_loss(model, rank, step) / 2
        assert count(issued(again.backward))[1] == 0
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        assert count(issued(lambda: model.finalize_backward(async_op=True).wait())) == (0, 4)
        assert all(each._autoshard_unit.kept is None for each in (model, *model.layers))
        model.set_manual_backward_finalization(False)
        assert model.finalize_backward() is None  # nothing is left
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, want, rtol=1e-6)  # two halves are added, of which the sum is rounded
    with pytest.raises(RuntimeError, match=r"root module, not on 'layers\.0'"):
        model.layers[0].finalize_backward()
    with pytest.raises(RuntimeError, match=r"root module, not on 'layers\.0'"):
        model.layers[0].set_manual_backward_finalization(True)


def stages(rank: int, form: str, schedule: str) -> None:
    """Train a pipeline of two stages, each cut over two ranks, against one model without either."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    index, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    part: Any = nn.Sequential(*copy.deepcopy(whole)[2 * index : 2 * index + 2])
    for each in part:
        fully_shard(each, mesh=mesh["dp"])
    in_form(fully_shard(part, mesh=mesh["dp"]), form)
    group = mesh.get_group("pp")
    x = torch.arange(16.0).view(4, 4) / 16 + replica
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=group)
    make = getattr(torch.distributed.pipelining, schedule)
    stages = [stage] if "Interleaved" in schedule else stage
    run = make(stages, 2, loss_fn=lambda y, target: (y - target).pow(2).sum(), scale_grads=False)
    for _ in range(2):
        if index == 0:
            run.step(x)
        else:
            run.step(target=torch.ones(4, 4))
        ((whole(x) - 1).pow(2).sum()).backward()
    own = whole[2 * index : 2 * index + 2]
    for got, want in zip(part.parameters(), own.parameters(), strict=True):
        torch.distributed.all_reduce(want.grad, group=mesh.get_group("dp"))
        torch.testing.assert_close(got.grad.full_tensor(), want.grad / 2)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
@in_both_forms
@on_ranks(4)
def test_stages_of_a_pipeline(rank: int, form: str, schedule: str) -> None:
    """torch.distributed.pipelining, which tells them what it tells FSDP2's."""
    stages(rank, form, schedule)


class Calls:
    """A buffer for each size, used again and again, and what was done with them."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, ...], Tensor] = {}
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.buffers.setdefault(tuple(size), torch.empty(size, dtype=dtype, device=device))


class MyGather(Calls):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        assert output_tensor is self.buffers[tuple(output_tensor.shape)]
        start = group.rank() * input_tensor.numel()
        assert input_tensor.data_ptr() == output_tensor[start:].data_ptr()
        return dist.all_gather_into_tensor(output_tensor, input_tensor.clone(), group, async_op)


class MyReduceScatter(Calls):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.calls += 1
        assert input_tensor is not output_tensor
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)


@in_both_forms
@on_ranks(2)
def test_custom_communication(rank: int, form: str) -> None:
    """Gathers and reduces of a unit by the user's own objects, in the user's own buffers."""
    want, _ = replicated(SmallNet, net_loss)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(SmallNet()), form, bucketing="per_unit")
    gathers, reduces = [MyGather() for _ in range(2)], [MyReduceScatter() for _ in range(2)]
    for each, gather, reduce in zip((model, model.layers[1]), gathers, reduces, strict=True):
        each.set_custom_all_gather(gather)
        each.set_custom_reduce_scatter(reduce)
    train(model, net_loss, adamw(model))
    assert_same(model, want)
    # The root keeps its parameters; so does compiled code those that it can't gather itself.
    assert [each.calls for each in gathers] == [4, 8 if form == "eager" else 4]
    assert [each.calls for each in reduces] == [4, 4]
    model.set_custom_all_gather(None)
    model.set_custom_reduce_scatter(None)
    train(model, net_loss, adamw(model), steps=1)
    assert (gathers[0].calls, reduces[0].calls) == (4, 4)
    other = model.layers[1]
    with pytest.raises(TypeError, match="a custom all-gather should be callable and have"):
        other.set_custom_all_gather(Calls())
    with pytest.raises(TypeError, match="a custom reduce-scatter should be callable and have"):
        other.set_custom_reduce_scatter(print)
    with pytest.raises(AssertionError, match="has communication of its own, a MyGather"):
        other.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(AssertionError, match="has communication of its own, a MyGather"):
        other.set_symm_mem_for_comm()


@on_ranks(4)
def test_sums_that_wait_in_a_buffer_that_is_used_again(rank: int) -> None:
    """Reduce-scattered gradients stay until they are all-reduced, in a later backward, though the
    unit's buffer has received others by then."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    grads = []
    for make in (lambda: None, MyReduceScatter):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        for each in (*model, model):
            fully_shard(each, mesh=mesh)
            each.set_custom_reduce_scatter(make())
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            inputs = torch.Generator().manual_seed(10 * micro + rank)
            model(torch.randn(2, 4, generator=inputs)).square().sum().backward()
        grads.append([param.grad.to_local() for param in model.parameters()])
    for ours, own in zip(*grads, strict=True):
        assert torch.equal(ours, own)


@on_ranks(2)
def test_custom_communication_of_single_parameters(rank: int) -> None:
    """A buffer that is used again is copied out of, also where a unit has but one parameter."""
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    model = copy.deepcopy(whole)
    gather, reduce = MyGather(), MyReduceScatter()
    for each in (*model, model):
        fully_shard(each, reshard_after_forward=False)
        each.set_custom_all_gather(gather)
        each.set_custom_reduce_scatter(reduce)
    x = torch.ones(2, 4)
    assert torch.equal(model(x), whole(x))
    model(x).pow(2).sum().backward()
    whole(x).pow(2).sum().backward()
    for got, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), expected.grad)
    assert len(gather.buffers) == 1


@in_both_forms
@on_ranks(2)
def test_memory_of_the_process_group(rank: int, form: str) -> None:
    """gloo has none to give, which changes nothing; what a backend gives is used."""
    want, _ = replicated(SmallNet, net_loss, steps=2)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(SmallNet()), form, bucketing="per_unit")
    model.set_allocate_memory_from_process_group_for_comm(True)
    assert model._autoshard_unit.settings.all_gather is None
    given = []

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        given.append(torch.empty(numel, dtype=dtype, device=device))
        return given[-1]

    with unittest.mock.patch.object(_torch.dist, "group_allocator", return_value=allocate):
        model.set_allocate_memory_from_process_group_for_comm(True)
        model.set_allocate_memory_from_process_group_for_comm(True)
    train(model, net_loss, adamw(model), steps=2)
    assert_same(model, want)
    assert len(given) == 2 * 3  # of the root: one to gather, two to reduce
    model.set_allocate_memory_from_process_group_for_comm(False)
    assert model._autoshard_unit.reducer.reduce_scatter is None
    with pytest.raises(ValueError, match="only NCCL has some, for meshes of CUDA devices"):
        model.set_symm_mem_for_comm()


@on_ranks(2)
def test_former_names(rank: int) -> None:
    """Warn, and do what the new ones do."""
    model = build()
    with pytest.warns(FutureWarning, match="call set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(4.0)
    assert model._autoshard_unit.reducer.divide_by == 4.0


@in_both_forms
@on_ranks(2)
def test_separate_group_for_reduces(rank: int, form: str) -> None:
    """Reduces go over another group of the same ranks, and back; the values are the same."""
    torch.manual_seed(0)
    want = SmallNet()
    torch.manual_seed(0)
    model = in_form(autoshard.shard(SmallNet()), form)
    optimizer, theirs = adamw(model), adamw(want)
    seen: dict[str, set[str]] = {}
    for enabled in (None, True, False):
        if enabled is not None:
            model.set_separate_reduce_scatter_group(enabled)
        log = issued(lambda: train(model, net_loss, optimizer, steps=2))
        of = {kind: {each.group for each in log if each.kind == kind} for kind in KINDS}
        assert of["gather"] == (seen or of)["gather"]
        assert (of["reduce"] == of["gather"]) is (enabled is not True)
        assert len(of["reduce"]) == 1
        seen = seen or of
    model.set_separate_reduce_scatter_group(recurse=False)
    log = issued(lambda: train(model, net_loss, optimizer, steps=2))
    assert len({each.group for each in log if each.kind == "reduce"}) == 2
    for _ in range(4):
        train(want, net_loss, theirs, steps=2, replicated=True)
    assert_same(model, want)


KINDS = ("gather", "reduce")


@on_ranks(2, timeout=60.0)
def test_separate_group_where_ranks_have_other_groups(rank: int) -> None:
    """A group of which one rank alone is a member doesn't keep it from finding the other."""
    mine = dist.new_group([1])
    group = dist.new_group([0, 1])  # of which nothing is known from before
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    model = autoshard.shard(SmallNet(), mesh=mesh)
    model.set_separate_reduce_scatter_group()
    log = issued(lambda: train(model, net_loss, adamw(model)))
    assert len({each.group for each in log}) == 2
    if rank == 1:
        dist.destroy_process_group(mine)


@in_both_forms
@on_ranks(4)
def test_separate_groups_beside_replicas(rank: int, form: str) -> None:
    """Each row of a mesh has its own; the all-reduce over replicas stays where it was."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    want, _ = replicated(SmallNet, net_loss)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(SmallNet(), strategy="hybrid_shard", mesh=mesh), form)
    model.set_separate_reduce_scatter_group()
    log = issued(lambda: train(model, net_loss, adamw(model)))
    names = [{e.group for e in log if e.kind == kind} for kind in (*KINDS, "all_reduce")]
    assert [len(each) for each in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3
    # Sums of four numbers, in another order than the replicated model's.
    assert_same(model, want, rtol=1e-4)


@on_ranks(2)
def test_shared_streams(rank: int) -> None:
    """Nothing is to be done, but what is given is checked."""
    autoshard.share_comm_ctx([])
    autoshard.share_comm_ctx([build(), build()])
    with pytest.raises(ValueError, match="expected modules that head units but got Linear"):
        autoshard.share_comm_ctx([build(), nn.Linear(2, 2)])


@on_ranks(2)
def test_one_full_graph(rank: int) -> None:
    """`fullgraph=True` around a model of several units."""
    want, _ = replicated(SmallNet, net_loss, steps=2)
    torch.manual_seed(0)
    model = autoshard.shard(SmallNet())
    call = torch.compile(
        model, backend="autoshard", fullgraph=True, options={"lowering": "eager", "strict": True}
    )
    train(call, net_loss, adamw(model), steps=2)
    assert_same(model, want)
    assert [plan.graph for plan in autoshard.plans(model)] == ["forward", "backward"]
