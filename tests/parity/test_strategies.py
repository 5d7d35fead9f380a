"""Strategies and meshes: what they send, in which order, and that they train alike."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.issue import counts, kinds
from support.models import Net, net_loss
from support.ranks import on_ranks
from support.training import adamw, assert_same, replicated, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard import fully_shard
from autoshard.runtime import collectives

N = 4  # units with parameters: three blocks and the root


def hybrid(replicas: int, shards: int) -> DeviceMesh:
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)


def build() -> Net:
    torch.manual_seed(0)
    return Net(tied=False)


def all_reshard(model: Net) -> Net:
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=True)


COUNTS = {
    "full_shard": (lambda: autoshard.shard(build()), (N, N - 1, N, 0)),
    "reshard everywhere": (lambda: all_reshard(build()), (N, N, N, 0)),
    "shard_grad_op": (lambda: autoshard.shard(build(), strategy="shard_grad_op"), (N, 0, N, 0)),
    "no_shard": (lambda: autoshard.shard(build(), strategy="no_shard"), (0, 0, 0, N)),
    "hybrid 1x2": (
        lambda: autoshard.shard(build(), strategy="hybrid_shard", mesh=hybrid(1, 2)),
        (N, N - 1, N, 0),
    ),
    "hybrid 2x1": (
        lambda: autoshard.shard(build(), strategy="hybrid_shard", mesh=hybrid(2, 1)),
        (0, 0, 0, N),
    ),
}


@pytest.mark.parametrize("case", COUNTS)
@on_ranks(2)
def test_collectives_of_a_step(rank: int, case: str) -> None:
    """A.3.2, A68."""
    make, expected = COUNTS[case]
    model = make()
    for step in range(2):
        assert counts(model, lambda step=step: net_loss(model, rank, step)) == expected


@on_ranks(4)
def test_hybrid_collectives(rank: int) -> None:
    """A52, A57, A.3.2: one reduce-scatter and one all-reduce a unit, the latter optional."""
    model = autoshard.shard(build(), strategy="hybrid_shard", mesh=hybrid(2, 2))
    loss = functools.partial(net_loss, model, rank, 0)
    assert counts(model, loss) == (N, N - 1, N, N)
    model.set_requires_all_reduce(False)
    assert counts(model, loss) == (N, N - 1, N, 0)
    model.set_requires_all_reduce(True)
    # An all-reduce is launched before the next unit's reduce-scatter, and waited for after.
    value = loss()
    assert [kind for kind in kinds(value.backward) if kind != "gather"] == [
        "reduce",
        "all_reduce",
    ] * N


@on_ranks(2)
def test_no_sync_counts(rank: int) -> None:
    """A.3.2: nothing is reduced; with ZeRO-2, parameters then stay gathered."""
    model = autoshard.shard(build())
    with model.no_sync():
        assert counts(model, lambda: net_loss(model, rank, 0)) == (N, N - 1, 0, 0)
    model = autoshard.shard(build(), strategy="shard_grad_op")
    with model.no_sync():
        assert counts(model, lambda: net_loss(model, rank, 0)) == (N, 0, 0, 0)
        assert counts(model, lambda: net_loss(model, rank, 0)) == (0, 0, 0, 0)
    assert counts(model, lambda: net_loss(model, rank, 0)) == (0, 0, N, 0)


# Four ranks sum four numbers in an order of gloo's choosing, and divide before and after.
FOUR_RANKS_RTOL = 1e-5


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
@on_ranks(4)
def test_hybrid_on_four_ranks(rank: int, strategy: str, mesh: tuple[int, int]) -> None:
    """A7, A52, A57, D-1: on every shape of mesh, also where one axis has size 1."""
    want, _ = replicated(Net, net_loss)
    torch.manual_seed(rank)  # A25: the first rank's values, over both axes
    model = Net()
    if rank == 0:
        torch.manual_seed(0)
        model = Net()
    model.register_buffer("noise", torch.full((3,), float(rank)))
    model = autoshard.shard(model, strategy=strategy, mesh=hybrid(*mesh))
    assert model.noise.tolist() == [0.0] * 3
    train(model, net_loss, adamw(model))
    assert_same(model, want, rtol=FOUR_RANKS_RTOL)
    assert model.head.weight.placements == (Replicate(), Shard(0))


@on_ranks(4)
def test_shards_over_fewer_ranks_after_forward(rank: int) -> None:
    """B.1: an int keeps shards over groups of two, from which backward gathers."""
    want, _ = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    groups = []
    with collectives.observe(lambda issued: groups.append((issued.kind, issued.group))):
        value = net_loss(model, rank, 0)
        after_forward = len(groups)
        value.backward()
    gathers = [group for kind, group in groups if kind == "gather"]
    assert len(set(gathers[:after_forward])) == 1
    assert set(gathers[after_forward:]).isdisjoint(gathers[:after_forward])
    model.zero_grad()
    train(model, net_loss, adamw(model))
    assert_same(model, want, rtol=FOUR_RANKS_RTOL)


@pytest.mark.parametrize("reshard", [3, 0, -1, 1.5])
@on_ranks(2)
def test_wrong_int_reshard(rank: int, reshard: Any) -> None:
    with pytest.raises(ValueError, match=r"reshard_after_forward"):
        fully_shard(Net(), reshard_after_forward=reshard)


def other_dims(rank: int, *, rtol: float) -> None:
    """B.1, D-3: `shard_placement_fn` cuts along the dim it names."""
    want, _ = replicated(Wide, wide_loss)
    torch.manual_seed(0)
    model = Wide()
    fully_shard(model[0], shard_placement_fn=lambda p: Shard(p.dim() - 1))
    fully_shard(model, shard_placement_fn=lambda p: Shard(-1) if p.dim() == 2 else None)
    assert model[0].weight.placements == (Shard(1),)
    assert model[2].weight.placements == (Shard(1),)
    assert model[2].bias.placements == (Shard(0),)
    train(model, wide_loss, adamw(model))
    assert_same(model, want, rtol=rtol)


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5))


def wide_loss(model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 8, generator=generator)).square().sum()


@on_ranks(2)
def test_other_dims_on_two_ranks(rank: int) -> None:
    other_dims(rank, rtol=0.0)


@on_ranks(4)
def test_other_dims_on_four_ranks(rank: int) -> None:
    other_dims(rank, rtol=FOUR_RANKS_RTOL)


@on_ranks(2)
def test_wrong_placements(rank: int) -> None:
    with pytest.raises(ValueError, match=r"weight of size \[4, 3\].*dim 1 over 2 ranks"):
        fully_shard(nn.Linear(3, 4), shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)
    with pytest.raises(ValueError, match=r"Shard\(dim=2\).*weight, which has 2 dims"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(2))
    with pytest.raises(ValueError, match=r"Replicate\(\).*expected Shard"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Replicate())


def test_division_factors() -> None:
    """A56, D-31: a power of two near the root first, the rest after."""
    factors = {n: collectives.division(float(n)) for n in (1, 2, 3, 4, 5, 8, 16, 24)}
    assert {n: (d.before, d.after) for n, d in factors.items()} == {
        1: (1, 1),
        2: (2, 1),
        3: (2, 1.5),
        4: (2, 2),
        5: (2, 2.5),
        8: (4, 2),
        16: (4, 4),
        24: (8, 3),
    }


@on_ranks(2)
def test_large_and_small_half_precision_gradients(rank: int) -> None:
    """A56: neither the sum of large gradients overflows, nor do small ones vanish."""
    model = nn.Linear(2, 2, bias=False).half()
    fully_shard(model)
    for value in (60000.0, 2.0**-22):
        (model(torch.ones(1, 2).half()) * value).sum().backward()
        assert model.weight.grad.full_tensor().tolist() == [[value, value]] * 2
        model.zero_grad()


@on_ranks(2)
def test_divide_factor(rank: int) -> None:
    """B.2, D-33: the unit's own, also one that gloo has no operation for."""
    model = autoshard.shard(build())
    net_loss(model, 0, 0).backward()  # the same data on both ranks: the mean is each one's
    want = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    model.zero_grad()
    model.layers[1].set_gradient_divide_factor(4.0)
    net_loss(model, 0, 0).backward()
    for name, param in model.named_parameters():
        factor = 2.0 if name.startswith("layers.1.") else 1.0
        torch.testing.assert_close(param.grad.full_tensor() * factor, want[name])
    with pytest.raises(ValueError, match="positive, not 0"):
        model.set_gradient_divide_factor(0)


# ---- replicate


@on_ranks(2)
def test_replicate(rank: int) -> None:
    """A70, A77, A79, A80, A82: whole parameters, one all-reduce a unit, names kept."""
    want, want_losses = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = Net()
    names = list(model.state_dict())
    for layer in model.layers:
        autoshard.replicate(layer)
    assert autoshard.replicate(model) is model
    assert list(model.state_dict()) == names
    assert isinstance(model, autoshard.ShardedModule)
    assert isinstance(model, Net)
    assert model.head.weight.placements == (Replicate(),)
    assert counts(model, lambda: net_loss(model, rank, 9)) == (0, 0, 0, N)
    model.zero_grad()
    assert train(model, net_loss, adamw(model)) == want_losses
    assert_same(model, want)
    with pytest.raises(TypeError, match="deep-copied"):
        __import__("copy").deepcopy(model)


@on_ranks(2)
def test_replicate_meshes(rank: int) -> None:
    """A70: 1-D, or the seed's 2-D mesh with a shard axis of size 1."""
    for mesh in (init_device_mesh("cpu", (2,)), hybrid(2, 1)):
        model = autoshard.replicate(build(), mesh=mesh)
        assert counts(model, lambda model=model: net_loss(model, rank, 0)) == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="replicate expects a 1D DeviceMesh"):
        autoshard.replicate(build(), mesh=hybrid(1, 2))


@on_ranks(2)
def test_replicate_device_id(rank: int) -> None:
    """A71."""
    with pytest.raises(TypeError, match=r"device_id should be an int or a torch\.device, not str"):
        autoshard.replicate(build(), device_id="cpu")
    with pytest.raises(ValueError, match=rf"device_id cuda:0 on rank {rank}"):
        autoshard.replicate(build(), device_id=torch.device("cuda", 0))


@on_ranks(2)
def test_orders_of_composition(rank: int) -> None:
    """A72, A74: each kind on units of its own, under a root of either; twice is an error."""
    want, _ = replicated(functools.partial(Net, tied=False), net_loss)
    for root in (fully_shard, autoshard.replicate):
        model = build()
        autoshard.replicate(model.layers[0])
        fully_shard(model.layers[1])
        root(model)
        train(model, net_loss, adamw(model))
        assert_same(model, want)
    for first, second in (
        (fully_shard, autoshard.replicate),
        (autoshard.replicate, fully_shard),
        (autoshard.replicate, autoshard.replicate),
        (fully_shard, fully_shard),
    ):
        how = "sharded" if first is fully_shard else "replicated"
        with pytest.raises(ValueError, match=rf"Linear \(unit 'root'\) is {how} already"):
            second(first(nn.Linear(3, 3)))


@on_ranks(2)
def test_replicate_containers(rank: int) -> None:
    """A73: a list of modules is never called, unless its class says how."""

    class Chain(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for each in self:
                x = each(x)
            return x

    with pytest.raises(ValueError, match="replicate can't take a ModuleList"):
        autoshard.replicate(nn.ModuleList([nn.Linear(3, 3)]))
    model = autoshard.replicate(Chain([nn.Linear(3, 3)]))
    model(torch.ones(1, 3)).sum().backward()
    assert model[0].weight.grad is not None


@on_ranks(2)
def test_replicate_ignores_parameters(rank: int) -> None:
    """A75: an ignored parameter stays what it is, with a gradient of this rank's own."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    autoshard.replicate(model, ignored_params={model[0].bias})
    assert type(model[0].bias) is nn.Parameter
    (model(torch.ones(1, 3)) * (rank + 1)).sum().backward()
    mine = torch.tensor([float(model[0].bias.grad.abs().sum())])
    both = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(both, mine)
    torch.testing.assert_close(both[1], 2 * both[0])


@on_ranks(2)
def test_a_child_alone_then_the_root(rank: int) -> None:
    """A78, A81, D-30: whoever is called first may be the root of that step."""
    model = autoshard.shard(build())
    want = build()
    x = torch.ones(2, 6)
    with torch.no_grad():
        assert torch.equal(model.layers[0](x), want.layers[0](x))
    assert counts(model, lambda: net_loss(model, rank, 0)) == (N, N - 1, N, 0)
    assert torch.equal(model.layers[0](x), want.layers[0](x))
