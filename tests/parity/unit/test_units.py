"""fully_shard by hand: units of several modules, ties across units, uneven and empty shards."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.models import Net, net_loss, tokens
from support.ranks import on_ranks
from support.training import (
    adamw,
    assert_same,
    compiled,
    count,
    issued,
    replicated,
    sharded,
    train,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autoshard
from autoshard import fully_shard
from autoshard.runtime.eager.unit_steps import steps_of
from autoshard.runtime.unit.param import find


def by_hand(model: Net, **arguments: object) -> Net:
    for layer in model.layers:
        fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


def with_ties_across_units(model: Net) -> Net:
    fully_shard(model.embed)  # tied to the head, which the root has
    return by_hand(model)


def with_a_group(model: Net) -> Net:
    fully_shard([model.layers[0], model.layers[1]])
    fully_shard([model.layers[2], model.head])
    return fully_shard(model)


def on_a_mesh(model: Net) -> Net:
    return by_hand(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("data",)))


@pytest.mark.parametrize(
    "shard",
    [by_hand, with_ties_across_units, with_a_group, on_a_mesh, fully_shard],
    ids=lambda shard: shard.__name__,
)
@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_training(rank: int, shard: Callable[[Net], Net], compile: bool) -> None:
    want, want_losses = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = shard(Net())
    assert list(dict(model.named_parameters())) == list(dict(want.named_parameters()))
    if compile:
        model.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    losses = train(model, net_loss, adamw(model))
    assert losses == want_losses
    assert_same(model, want)


@on_ranks(2)
def test_a_unit_of_several_modules_is_gathered_once(rank: int) -> None:
    model = with_a_group(Net(tied=False))
    losses: list[Tensor] = []
    assert count(issued(lambda: losses.append(net_loss(model, rank, 0)))) == (3, 0)
    assert count(issued(losses[0].backward)) == (2, 3)


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_all_frozen_leaves_nothing_gathered(rank: int, compile: bool) -> None:
    """Gradients of the input alone: no reduce ends a unit's use in backward."""
    model = by_hand(Net(tied=False).requires_grad_(False))
    model.embed = nn.Identity()  # so that the input can require grad
    if compile:
        model.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    x = torch.ones(3, 6, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    units = {param.unit for param in map(find, model.parameters()) if param is not None}
    assert not any(
        steps_of(unit).last_step and steps_of(unit).last_step.num_gathered for unit in units
    )


@on_ranks(2)
def test_another_backend_runs_the_markers_as_they_are(rank: int) -> None:
    """One collective a parameter: the slowest correct form."""
    want, want_losses = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = by_hand(Net())
    losses = train(torch.compile(model, backend="aot_eager"), net_loss, adamw(model))
    assert losses == want_losses
    assert_same(model, want, rtol=1e-5)  # the tied parameter is reduced twice


@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(2)
def test_reshard_after_forward(rank: int, reshard: bool | None) -> None:
    model = by_hand(Net(), reshard_after_forward=reshard)
    losses: list[Tensor] = []
    forward = issued(lambda: losses.append(net_loss(model, rank, 0)))
    backward = issued(losses[0].backward)
    assert count(forward) == (4, 0)
    assert count(backward) == ({None: 3, True: 4, False: 0}[reshard], 4)


class Sizes(nn.Module):
    """Rows: fewer than ranks, as many, odd; a bias; two dtypes that never meet."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 1)
        self.one = nn.Linear(1, 1)
        self.two = nn.Linear(1, 2)
        self.three = nn.Linear(2, 3)
        self.five = nn.Linear(3, 5)
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))
        self.head = nn.Linear(5, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.five(self.three(self.two(self.one(self.embed(ids)))))
        x = (x.double() * self.scale + self.shift).float()
        return self.head(x)


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_uneven_and_empty_shards(rank: int, compile: bool) -> None:
    want, want_losses = replicated(Sizes, net_loss)
    torch.manual_seed(0)
    model = Sizes()
    fully_shard(model.five)
    fully_shard(model)
    one = model._parameters.get("shift")
    assert isinstance(one, DTensor)
    assert one.shape == (1,)
    assert one.placements == (Shard(0),)
    assert one.to_local().shape == (1 - rank,)
    assert not isinstance(model.scale, DTensor)
    if compile:
        model.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    losses = train(model, net_loss, adamw(model))
    assert losses == want_losses
    assert_same(model, want)


@on_ranks(2)
def test_class_and_attributes_stay_sane(rank: int) -> None:
    """A80, D-10."""
    model = by_hand(Net())
    layer = model.layers[0]
    assert isinstance(model, Net)
    assert isinstance(layer, autoshard.ShardedModule)
    assert not isinstance(layer.up, autoshard.ShardedModule)
    assert type(layer).__name__ == "Block"
    assert isinstance(layer.up.weight, DTensor)
    assert layer.up.weight is dict(model.named_parameters())["layers.0.up.weight"]
    assert model.head.weight is model.embed.weight
    assert not hasattr(layer.up, "nothing")
    with pytest.raises(TypeError, match="state_dict"):
        torch.save(model, "/dev/null")
    import copy

    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(model)


@on_ranks(2)
def test_functional_call(rank: int) -> None:
    torch.manual_seed(0)
    whole = {name: p.detach().clone() for name, p in Net().named_parameters()}
    torch.manual_seed(0)
    plain, model = Net(), by_hand(Net())
    doubled = {name: 2 * value for name, value in whole.items()}
    ids = tokens(rank, 0)
    want = torch.func.functional_call(plain, doubled, (ids,))
    assert torch.equal(torch.func.functional_call(model, doubled, (ids,)), want)


@on_ranks(2)
def test_two_policies_for_one_class(rank: int) -> None:
    """Two modules of one class, sharded differently, keep their own settings."""
    first, second = Net(), Net()
    by_hand(first, reshard_after_forward=True)
    by_hand(second, reshard_after_forward=False)
    for model, gathers in ((first, 4), (second, 0)):
        loss = net_loss(model, rank, 0)
        assert count(issued(loss.backward)) == (gathers, 4)


@on_ranks(2)
def test_weights_changed_between_forward_and_backward(rank: int) -> None:
    for match, parts in (
        (r"layers\.2\.\w+\.weight was modified in place", lambda model: model.layers),
        (r"\.weight.* were written to between", lambda model: model),  # whole ones, of the root
    ):
        model = by_hand(Net())
        model.set_reshard_after_forward(False, recurse=False)
        loss = net_loss(model, rank, 0)
        with torch.no_grad():
            for param in parts(model).parameters():
                param.add_(1.0)
        with pytest.raises(RuntimeError, match=match):
            loss.backward()
        model.reset_iter_state()


def test_one_process_needs_no_collective() -> None:
    """A7, D-32: No torchrun, no group: a world of one."""
    import os
    import subprocess

    from support import warm

    script = """
import torch, autoshard
from autoshard.runtime.comm.flights import observe
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
plain, eager, model = build(), autoshard.shard(build()), build()
call = torch.compile(model, backend="autoshard", options={"lowering": "eager", "strict": True})
x = torch.ones(4, 3)
log = []
with observe(log.append):
    for m, run in ((plain, plain), (eager, eager), (model, call)):
        opt = torch.optim.AdamW(m.parameters())
        for _ in range(3):
            run(x).square().sum().backward()
            opt.step(); opt.zero_grad()
assert not log, log
for p, q, r in zip(plain.parameters(), eager.parameters(), model.parameters()):
    assert torch.equal(p, q.full_tensor()) and torch.equal(p, r.full_tensor())
assert torch.distributed.get_world_size() == 1
"""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [warm.python(), "-c", script], env=kept, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))


@pytest.mark.parametrize("form", ["eager", "compiled"])
@on_ranks(2)
def test_running_statistics_are_each_ranks_own(rank: int, form: str) -> None:
    """D-54: as in the replicated model, where parameters agree and they don't."""
    want, want_losses = replicated(Normed, net_loss)
    got, losses = (sharded if form == "eager" else compiled)(Normed, net_loss)
    assert losses == want_losses
    assert_same(got, want)
    for (name, mine), expected in zip(got.named_buffers(), want.buffers(), strict=True):
        assert torch.equal(mine, expected), name
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(*both) == (name == "norm.num_batches_tracked"), name
