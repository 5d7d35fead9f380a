"""Strategies and meshes: that they train alike. `test_counts.py` has what they send."""

from __future__ import annotations

import copy
import functools
import os
import unittest.mock
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.issue import counts
from support.models import Net, SmallNet, net_loss
from support.ranks import on_ranks
from support.selection import each_value, part_of
from support.training import adamw, assert_same, in_both_forms, in_form, replicated, sgd, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import autoshard
from autoshard import _torch, fully_shard
from autoshard.runtime.comm import custom_comms, flights, transport
from autoshard.runtime.comm.packing import Division, division
from autoshard.runtime.sharding import materialize, shard

N = 4  # units with parameters: three blocks and the root


def hybrid(replicas: int, shards: int) -> DeviceMesh:
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)


def build() -> SmallNet:
    torch.manual_seed(0)
    return SmallNet(tied=False)


# Four ranks and more sum in an order of gloo's choosing.
MANY_RANKS_RTOL = 1e-5


@each_value(mesh=[(2, 2), (4, 1), (1, 4)], strategy=["hybrid_shard", "hybrid_shard_zero2"])
@on_ranks(4)
def test_hybrid_on_four_ranks(rank: int, strategy: str, mesh: tuple[int, int]) -> None:
    """A7, A52, A57, D-1: on every shape of mesh, also where one axis has size 1."""
    want, _ = replicated(SmallNet, net_loss)
    torch.manual_seed(rank)  # A25: the first rank's values, over both axes
    model = SmallNet()
    if rank == 0:
        torch.manual_seed(0)
        model = SmallNet()
    model.register_buffer("noise", torch.full((3,), float(rank)))
    model = autoshard.shard(model, strategy=strategy, mesh=hybrid(*mesh))
    assert model.noise.tolist() == [0.0] * 3
    train(model, net_loss, adamw(model))
    assert_same(model, want, rtol=MANY_RANKS_RTOL)
    assert model.head.weight.placements == (Replicate(), Shard(0))


@in_both_forms
@on_ranks(4)
def test_the_default_hybrid_mesh(rank: int, form: str) -> None:
    """A52: a replica on each node; each rank makes the two groups that it is in, once."""
    want, _ = replicated(SmallNet, net_loss)
    torch.manual_seed(0)
    with (
        unittest.mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}),
        unittest.mock.patch.object(dist, "new_group", wraps=dist.new_group) as made,
    ):
        model = in_form(autoshard.shard(SmallNet(), strategy="hybrid_shard"), form)
        again = autoshard.hybrid_mesh()
    assert made.call_count in (0, 2)  # 0 if an earlier test has made them
    assert model.head.weight.device_mesh is again
    assert again.mesh.tolist() == [[0, 1], [2, 3]]
    assert again.mesh_dim_names == ("replicate", "shard")
    assert again["shard"].get_local_rank() == rank % 2
    assert dist.get_process_group_ranks(again.get_group("replicate")) == [rank % 2, 2 + rank % 2]
    train(model, net_loss, adamw(model))
    assert_same(model, want, rtol=MANY_RANKS_RTOL)
    with pytest.raises(ValueError, match=r"shards=3.*4 ranks can't be divided"):
        autoshard.hybrid_mesh(3)
    dist.destroy_process_group(again.get_group("shard"))
    anew = autoshard.hybrid_mesh(2)
    everybody = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(everybody, torch.tensor(float(rank)), group=anew.get_group("shard"))
    assert everybody == [rank // 2 * 2, rank // 2 * 2 + 1]


@on_ranks(8, timeout=180)
def test_hybrid_on_eight_ranks(rank: int) -> None:
    """A52, D-3: two replicas of four shards, of which the last hold fewer rows, or none."""
    want, _ = replicated(SmallNet, net_loss)
    torch.manual_seed(0)
    model = autoshard.shard(SmallNet(), strategy="hybrid_shard", mesh=hybrid(2, 4))
    assert model.layers[0].norm.weight.to_local().numel() == (2, 2, 2, 0)[rank % 4]
    train(model, net_loss, adamw(model))
    assert_same(model, want, rtol=MANY_RANKS_RTOL)


@in_both_forms
@on_ranks(4)
def test_shards_over_fewer_ranks_after_forward(rank: int, form: str) -> None:
    """B.1: an int keeps shards over groups of two, from which backward gathers."""
    want, _ = replicated(SmallNet, net_loss)
    torch.manual_seed(0)
    model = SmallNet()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=2)
    in_form(fully_shard(model), form)
    groups = []
    with flights.observe(lambda issued: groups.append((issued.kind, issued.group))):
        value = net_loss(model, rank, 0)
        after_forward = len(groups)
        value.backward()
    gathers = [group for kind, group in groups if kind == "gather"]
    assert len(set(gathers[:after_forward])) == 1
    assert set(gathers[after_forward:]).isdisjoint(gathers[:after_forward])
    model.zero_grad()
    train(model, net_loss, adamw(model))
    assert_same(model, want, rtol=MANY_RANKS_RTOL)


@on_ranks(4)
def test_each_rank_makes_its_own_smaller_group(rank: int) -> None:
    """One for all units, with the timeout of the group that it is a part of."""
    group = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=77))
    mesh = DeviceMesh.from_group(group, "cpu")
    with unittest.mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        model = SmallNet()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    assert made.call_count == 1
    assert made.call_args.args == ([0, 1] if rank < 2 else [2, 3],)
    assert made.call_args.kwargs["timeout"] == timedelta(seconds=77)
    net_loss(fully_shard(model, mesh=mesh), rank, 0).backward()


@pytest.mark.parametrize("reshard", [3, 0, -1, 1.5])
@on_ranks(2)
def test_wrong_int_reshard(rank: int, reshard: Any) -> None:
    with pytest.raises(ValueError, match=r"reshard_after_forward"):
        fully_shard(SmallNet(), reshard_after_forward=reshard)


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
    other_dims(rank, rtol=MANY_RANKS_RTOL)


@on_ranks(2)
def test_wrong_placements(rank: int) -> None:
    with pytest.raises(ValueError, match=r"weight of size \[4, 3\].*dim 1 over 2 ranks"):
        fully_shard(nn.Linear(3, 4), shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)
    with pytest.raises(ValueError, match=r"Shard\(dim=2\).*weight, which has 2 dims"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(2))
    with pytest.raises(ValueError, match=r"Replicate\(\).*expected Shard"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Replicate())


def test_division_factors() -> None:
    """A56, D-31: of float16, a power of two near the root first, the rest after."""
    factors = {n: division(float(n), torch.float16) for n in (1, 2, 3, 4, 5, 8, 16, 24)}
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
    for dtype in (torch.float32, torch.bfloat16):
        assert division(24.0, dtype) == Division(1.0, 24.0)


def reduce_to_means(
    receive: torch.Tensor, send: torch.Tensor, group: dist.ProcessGroup, *, is_mean: bool
) -> transport.Work:
    """What NCCL's average gives: gloo has none."""
    _torch.dist.reduce_scatter_flat(receive, send, group=group)
    receive.div_(group.size() if is_mean else 1)
    return custom_comms.Done()


def all_reduce_to_means(
    sums: torch.Tensor, group: dist.ProcessGroup, *, is_mean: bool
) -> transport.Work:
    dist.all_reduce(sums, group=group)
    sums.div_(group.size() if is_mean else 1)
    return custom_comms.Done()


@each_value(
    waits=["no batch", "no_sync", "no all-reduce"],
    mesh=[(2, 2), (1, 4)],
    form=["compiled", "eager"],
)
@on_ranks(4)
def test_collectives_that_divide(rank: int, form: str, mesh: tuple[int, int], waits: str) -> None:
    """As on a GPU: sums come divided, and eagerly gradients are parts of one buffer. Bit for bit
    what dividing afterwards gives, as the divisors are powers of two."""

    def trained() -> Any:
        torch.manual_seed(0)
        model: Any = autoshard.shard(SmallNet(), strategy="hybrid_shard", mesh=hybrid(*mesh))
        model = in_form(model, form)
        optimizer = adamw(model)
        for step in range(4):
            is_last = waits == "no batch" or step % 2 == 1
            model.set_requires_gradient_sync(is_last or waits != "no_sync")
            model.set_requires_all_reduce(is_last or waits != "no all-reduce")
            net_loss(model, rank, step).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        return model

    want = trained()
    patch = unittest.mock.patch.object
    with (
        patch(transport, "averages", lambda group, device: True),
        patch(transport, "reduce", reduce_to_means),
        patch(transport, "all_reduce", all_reduce_to_means),
    ):
        assert_same(trained(), want)


@in_both_forms
@on_ranks(4)
def test_sums_that_collectives_do_not_divide(rank: int, form: str) -> None:
    """Of float16, which has to be divided in two, and where the user says so; others they divide,
    if they can."""
    asked: list[bool] = []

    def reduce(receive: torch.Tensor, send: torch.Tensor, group: Any, *, is_mean: bool) -> Any:
        asked.append(is_mean)
        return reduce_to_means(receive, send, group, is_mean=is_mean)

    patch = unittest.mock.patch.object
    with (
        patch(transport, "averages", lambda group, device: True),
        patch(transport, "reduce", reduce),
    ):
        for dtype, is_told, divides in (
            (torch.float32, False, True),
            (torch.float32, True, False),
            (torch.float16, False, False),
        ):
            torch._dynamo.reset()
            model: Any = in_form(fully_shard(nn.Linear(4, 4).to(dtype)), form)
            model.set_force_sum_reduction_for_comms(is_told)
            asked.clear()
            model(torch.ones(2, 4, dtype=dtype)).sum().backward()
            assert asked == [divides], (dtype, is_told)


@in_both_forms
@on_ranks(2)
def test_large_and_small_half_precision_gradients(rank: int, form: str) -> None:
    """A56, D-31: neither the sum of large gradients overflows, nor do small ones vanish."""
    model = nn.Linear(2, 2, bias=False).half()
    in_form(fully_shard(model), form)
    for value in (60000.0, 2.0**-22):
        (model(torch.ones(1, 2).half()) * value).sum().backward()
        assert model.weight.grad.full_tensor().tolist() == [[value, value]] * 2
        model.zero_grad()


@in_both_forms
@on_ranks(2)
def test_divide_factor(rank: int, form: str) -> None:
    """B.2, D-33: the unit's own, also one that gloo has no operation for."""
    model = in_form(autoshard.shard(build()), form)
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


def test_what_is_moved_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A76: parameters and buffers, but what is ignored, or on meta. There is no such device here:
    this tells what is asked to go there."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, device="meta"))
    device, asked = torch.device("cuda", 0), set()

    def to(tensor: Tensor, where: torch.device) -> Tensor:
        assert where == device
        asked.add(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(Tensor, "to", to)
    materialize.move((model,), device, materialize.Ignored(params=frozenset({model[0].bias})))
    tensors = model.state_dict(keep_vars=True)
    moved = {name for name, tensor in tensors.items() if tensor.data_ptr() in asked}
    assert set(tensors) - moved == {"0.bias", "2.weight", "2.bias"}


@on_ranks(2)
def test_replicate_moves_to_the_device_of_its_mesh(rank: int) -> None:
    """A76."""
    model = nn.Linear(3, 3)
    moved: list[Any] = []
    move, materialize.move = materialize.move, lambda *arguments: moved.append(arguments[:2])
    try:
        autoshard.replicate(model)
    finally:
        materialize.move = move
    assert moved == [((model,), torch.device("cpu"))]
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    assert autoshard.replicate(model).weight.is_meta


@on_ranks(2)
def test_replicate_of_parameters_on_another_kind_of_device(rank: int) -> None:
    """A76: a DTensor is not moved, so its mesh has to be of that kind."""
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    other = copy.copy(init_device_mesh("cpu", (2,)))
    other._device_type = "cuda"
    device, shard.mesh_device = shard.mesh_device, lambda mesh: torch.device("cpu")
    try:
        with pytest.raises(ValueError, match=r"weight is a DTensor on .*no mesh of cuda"):
            autoshard.replicate(model, mesh=other)
    finally:
        shard.mesh_device = device


@on_ranks(2)
def test_orders_of_composition(rank: int) -> None:
    """A72, A74: each kind on units of its own, under a root of either; twice is an error."""
    want, _ = replicated(functools.partial(SmallNet, tied=False), net_loss)
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


@in_both_forms
@on_ranks(2)
def test_a_child_alone_then_the_root(rank: int, form: str) -> None:
    """A78, A81, D-30: whoever is called first may be the root of that step."""
    model = in_form(autoshard.shard(build()), form, bucketing="per_unit")
    want = build()
    x = torch.ones(2, 6)
    with torch.no_grad():
        assert torch.equal(model.layers[0](x), want.layers[0](x))
    n = 1 + len(model.layers)
    assert counts(model, lambda: net_loss(model, rank, 0)) == (n, n - 1, n, 0)
    assert torch.equal(model.layers[0](x), want.layers[0](x))


def assert_compiled_equals_eager(rank: int, lowering: str, **arguments: Any) -> None:
    """Bit for bit with the plain lowering, and with the very collectives."""

    def build() -> Any:
        torch.manual_seed(0)
        return autoshard.shard(SmallNet(), **arguments)

    want, got = build(), build()
    optimizer, make = sgd(got), sgd(want)
    torch._dynamo.reset()
    options = {"lowering": lowering, "bucketing": "per_unit", "strict": True}
    call = torch.compile(got, backend="autoshard", options=options)
    losses = train(call, net_loss, optimizer)
    assert losses == train(want, net_loss, make) or lowering == "inductor"
    # Inductor fuses, and rounds otherwise in the last bits.
    assert_same(got, want, rtol=0.0 if lowering == "eager" else 1e-5)
    assert counts(call, lambda: net_loss(call, rank, 9)) == counts(
        want, lambda: net_loss(want, rank, 9)
    )


@pytest.mark.parametrize(
    ("strategy", "lowering"),
    [
        ("no_shard", "eager"),
        ("hybrid_shard 2x1", "eager"),
        ("hybrid_shard 1x2", "eager"),
        ("hybrid_shard_zero2 2x1", "eager"),
        ("hybrid_shard 2x1", "inductor"),
    ],
)
@on_ranks(2)
def test_compiled(rank: int, strategy: str, lowering: str) -> None:
    """A7, A68, D-1."""
    name, _, size = strategy.partition(" ")
    mesh = hybrid(*map(int, size.split("x"))) if size else None
    assert_compiled_equals_eager(rank, lowering, strategy=name, mesh=mesh)


@pytest.mark.parametrize("lowering", part_of(["eager", "inductor"], every=2))
@on_ranks(4)
def test_compiled_on_four_ranks(rank: int, lowering: str) -> None:
    """A52, A57: pairs of pairs are summed in the same order."""
    assert_compiled_equals_eager(rank, lowering, strategy="hybrid_shard", mesh=hybrid(2, 2))


@on_ranks(2)
def test_compiled_replicate(rank: int) -> None:
    """A70, A77: with a part that `fully_shard` has."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = SmallNet(tied=False)
        fully_shard(model.layers[1])
        autoshard.replicate(model.layers[0])
        models.append(autoshard.replicate(model))
    want, got = models
    torch._dynamo.reset()
    got.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    assert train(got, net_loss, adamw(got)) == train(want, net_loss, adamw(want))
    assert_same(got, want)
