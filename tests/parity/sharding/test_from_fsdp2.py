"""Models that FSDP2 has sharded, and that are compiled with autoshard then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import SmallNet, net_loss
from support.ranks import on_ranks
from support.training import adamw, assert_same, replicated, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

import autoshard
from autoshard.runtime.eager.unit_steps import steps_of

OPTIONS = {"lowering": "eager", "strict": True}


def by_fsdp2(model: Any, **arguments: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


def by_ours(model: Any, **arguments: Any) -> Any:
    for layer in model.layers:
        autoshard.fully_shard(layer, **arguments)
    return autoshard.fully_shard(model, **arguments)


@pytest.mark.parametrize("steps", [0, 2], ids=["at once", "after steps"])
@on_ranks(2)
def test_fsdp2_then_compiled(rank: int, steps: int) -> None:
    """It goes on with the same shards, and the same state of the optimizer."""
    want, want_losses = replicated(SmallNet, net_loss, steps=4)
    torch.manual_seed(0)
    model = by_fsdp2(SmallNet())
    optimizer = adamw(model)
    losses = train(model, net_loss, optimizer, steps=steps)
    shards = [param.to_local().data_ptr() for param in model.parameters()]
    call = torch.compile(model, backend="autoshard", options=OPTIONS)
    for step in range(steps, 4):
        loss = net_loss(call, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == want_losses
    assert_same(model, want)
    assert [param.to_local().data_ptr() for param in model.parameters()] == shards
    assert isinstance(model, autoshard.ShardedModule)
    assert type(model).__name__ == "SmallNet"
    assert len(optimizer.state) == len(list(model.parameters()))
    assert model.head.weight is model.embed.weight


ARGUMENTS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "dtypes": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "columns": {
        "shard_placement_fn": lambda param: Shard(1) if tuple(param.shape) == (11, 6) else None
    },
}


@pytest.mark.parametrize("what", ARGUMENTS)
@on_ranks(2)
def test_settings_are_kept(rank: int, what: str) -> None:
    arguments = ARGUMENTS[what]
    losses = []
    for apply in (by_ours, by_fsdp2):
        torch.manual_seed(0)
        model = apply(SmallNet(), **arguments)
        model.compile(backend="autoshard", options=OPTIONS)
        losses.append(train(model, net_loss, adamw(model)))
        settings = [unit.settings for unit in units(model)]
        placements = [param.placements for param in model.parameters()]
        losses[-1] += [settings, placements]  # type: ignore[list-item]
    assert losses[0][:-2] == losses[1][:-2]
    assert str(losses[0][-2:]) == str(losses[1][-2:])


def units(model: nn.Module) -> list[Any]:
    from autoshard.runtime.unit.unit import unit_of

    found = (unit_of(module) for module in model.modules())
    return [unit for unit in found if unit is not None]


@on_ranks(2)
def test_a_divisor_is_kept(rank: int) -> None:
    """Gradients are divided by it, as FSDP2 would, and not by the number of ranks."""
    gradients = []
    for apply in (by_ours, by_fsdp2):
        torch.manual_seed(0)
        model = apply(SmallNet())
        for unit in (*model.layers, model):
            unit.set_gradient_divide_factor(8.0)
        model.compile(backend="autoshard", options=OPTIONS)
        net_loss(model, rank, 0).backward()
        gradients.append([param.grad.to_local() for param in model.parameters()])
    assert all(map(torch.equal, *gradients))


def tell_all(model: Any) -> None:
    """Tell some units what their defaults are not."""
    first, last = model.layers[0], model.layers[-1]
    model.set_modules_to_forward_prefetch([last])
    last.set_modules_to_backward_prefetch([first])
    first.set_unshard_in_backward(False)
    last.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False, recurse=False)
    first.set_requires_all_reduce(False, recurse=False)
    first.set_force_sum_reduction_for_comms(True)
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # since 2.13
        last.set_reduce_scatter_unused_params(True, recurse=False)
    model.set_is_last_backward(False)


@on_ranks(2)
def test_what_units_were_told_is_kept(rank: int) -> None:
    found = []
    for apply in (by_ours, by_fsdp2):
        torch.manual_seed(0)
        model = apply(SmallNet())
        tell_all(model)
        model.compile(backend="autoshard", options=OPTIONS)
        model(torch.randint(0, 11, (2, 6)))
        found.append([told(unit) for unit in units(model)])
    assert found[0] == found[1]
    assert len({str(each) for each in found[0]}) == len(found[0])


def told(unit: Any) -> list[Any]:
    reducer, settings = unit.reducer, unit.settings
    return [
        *(
            ahead and [each.name for each in ahead]
            for ahead in (settings.next_in_forward, settings.next_in_backward)
        ),
        (settings.unshard_in_backward, settings.reshard_after_backward),
        (reducer.syncs, reducer.all_reduces, reducer.only_sums, reducer.sends_unused),
        steps_of(unit).is_last_backward,
    ]


@on_ranks(2)
def test_a_microbatch_that_waits(rank: int) -> None:
    """What FSDP2 was told not to reduce, before the first call, waits; in a step it is summed."""
    losses = []
    for apply in (by_ours, by_fsdp2):
        torch.manual_seed(0)
        model = apply(SmallNet())
        optimizer = adamw(model)
        options = {**OPTIONS, "bucketing": "per_unit"}
        gradients = []
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            if microbatch == 0:
                model.compile(backend="autoshard", options=options)
            net_loss(model, rank, microbatch).backward()
            gradients.append([param.grad is None for param in model.parameters()])
        whole = [param.grad.to_local() for param in model.parameters()]
        optimizer.step()
        losses.append((gradients, whole))
    assert losses[0][0] == losses[1][0]
    assert all(map(torch.equal, losses[0][1], losses[1][1]))


@on_ranks(4)
def test_replicas(rank: int) -> None:
    """HSDP's mesh is taken over."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    want, want_losses = [], []
    for apply in (by_ours, by_fsdp2):
        torch.manual_seed(0)
        model = apply(SmallNet(), mesh=mesh)
        model.compile(backend="autoshard", options=OPTIONS)
        want_losses.append(train(model, net_loss, adamw(model)))
        want.append(autoshard.full_state_dict(model))
    assert want_losses[0] == want_losses[1]
    assert all(torch.equal(value, want[1][name]) for name, value in want[0].items())


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    """Before anything is changed."""
    model = by_fsdp2(SmallNet())
    call = torch.compile(model, backend="autoshard", options={"strategy": "shard_grad_op"})
    with pytest.raises(ValueError, match=r"torch's fully_shard, whose settings .*'strategy'"):
        net_loss(call, rank, 0)
    net_loss(model, rank, 0).backward()
    model.compile(backend="autoshard", options=OPTIONS)
    with pytest.raises(ValueError, match=r"has a gradient of FSDP2's on rank .: call zero_grad"):
        net_loss(model, rank, 0)
    model = SmallNet()
    fully_shard(model.layers[0])
    model.compile(backend="autoshard", options=OPTIONS)
    with pytest.raises(
        ValueError, match=r"and SmallNet itself was not: give it, too, or use autoshard"
    ):
        net_loss(model, rank, 0)
    model = by_fsdp2(SmallNet())
    model.set_all_reduce_hook(lambda gradient: None)
    model.compile(backend="autoshard", options=OPTIONS)
    with pytest.raises(ValueError, match=r"has set_all_reduce_hook\(\), which can't be taken over"):
        net_loss(model, rank, 0)
    assert isinstance(model.head.weight, DTensor)
