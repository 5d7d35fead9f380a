"""What `shard` does before it cuts: leave things out, move, materialise, synchronise."""

from __future__ import annotations

import sys
import types
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.issue import counts
from support.models import Net, net_loss
from support.ranks import on_ranks
from support.training import adamw, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.runtime.sharding import materialize


class Trunk(nn.Module):
    """A trunk, and a head that shares its last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head[1].weight = self.trunk[1].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def is_sharded(param: Tensor) -> bool:
    return isinstance(param, DTensor)


def differs_between_ranks(grad: Tensor) -> bool:
    both = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(both, grad.contiguous())
    return not torch.equal(both[0], both[1])


@on_ranks(2)
def test_ignored_modules(rank: int) -> None:
    """A4, A5: subtrees, with every alias of a shared parameter; no collective for them."""
    torch.manual_seed(0)
    model = Trunk()
    model = autoshard.shard(model, ignored_modules=iter([model.head]))
    sharded = {name for name, param in model.named_parameters() if is_sharded(param)}
    assert sharded == {"trunk.0.weight", "trunk.0.bias", "trunk.1.bias"}
    assert model.head[1].weight is model.trunk[1].weight
    model(torch.full((1, 4), float(rank + 1))).sum().backward()
    assert differs_between_ranks(model.head[0].weight.grad)
    assert differs_between_ranks(model.trunk[1].weight.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the user asked for it: nothing to tell of
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_ignored_params(rank: int) -> None:
    """A5."""
    model = Trunk()
    model = autoshard.shard(model, ignored_params=[model.trunk[0].bias])
    assert not is_sharded(model.trunk[0].bias)
    assert is_sharded(model.trunk[0].weight)


@pytest.mark.parametrize("what", ["modules", "params"])
@on_ranks(2)
def test_ignored_in_one_line(rank: int, what: str) -> None:
    """A4, A5: as options of the backend; what is left alone is told of by nobody."""

    def build() -> tuple[Trunk, dict[str, Any]]:
        torch.manual_seed(0)
        model = Trunk()
        ignored = [model.head[0]] if what == "modules" else [model.head[0].weight]
        return model, {f"ignored_{what}": ignored}

    model, arguments = build()
    want = autoshard.shard(model, **arguments)
    got, arguments = build()
    optimizer = torch.optim.SGD(got.parameters(), lr=0.1)
    options = {"lowering": "eager", "strict": True, **arguments}
    call = torch.compile(got, backend="autoshard", options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for each in (want, call):
            each(torch.full((1, 4), float(rank + 1))).sum().backward()
    assert not is_sharded(got.head[0].weight)
    assert is_sharded(got.trunk[0].weight)
    for (name, mine), theirs in zip(got.named_parameters(), want.parameters(), strict=True):
        assert is_sharded(mine) == is_sharded(theirs), name
        grads = (each.to_local() if is_sharded(each) else each for each in (mine.grad, theirs.grad))
        assert torch.equal(*grads), name
    optimizer.step()


@on_ranks(2)
def test_nested_units_in_ignored_modules_stay_sharded(rank: int) -> None:
    """A4."""
    model = Trunk()
    autoshard.fully_shard(model.head[0])
    model = autoshard.shard(model, ignored_modules=[model.head], policy=lambda module: False)
    assert is_sharded(model.head[0].weight)
    assert not is_sharded(model.head[1].bias)


@on_ranks(2)
def test_wrong_ignored(rank: int) -> None:
    """A4: the four errors, and a warning."""
    model = Trunk()
    with pytest.raises(TypeError, match=r"ignored_modules should be an iterable.*not Linear"):
        autoshard.shard(model, ignored_modules=model.trunk[0])
    with pytest.raises(TypeError, match=r"ignored_modules should be an iterable.*has one str"):
        autoshard.shard(model, ignored_modules=["trunk"])
    with pytest.raises(TypeError, match=r"ignored_params should be an iterable.*has one Linear"):
        autoshard.shard(model, ignored_params=[model.trunk[0]])
    autoshard.fully_shard(model.trunk[0])
    with pytest.raises(ValueError, match=r"ignored_modules has Linear, which is sharded already"):
        autoshard.shard(model, ignored_modules=[model.trunk[0]])
    model = Trunk()
    with pytest.warns(UserWarning, match="Trunk itself"):
        autoshard.shard(model, ignored_modules=[model])
    assert not any(map(is_sharded, model.parameters()))


@on_ranks(2)
def test_ranks_may_ignore_different_modules(rank: int) -> None:
    """A6: as long as what is managed agrees."""
    torch.manual_seed(0)
    model = Trunk()
    model.extra = nn.ModuleList([nn.Linear(2, 2) for _ in range(rank + 1)])
    model = autoshard.shard(model, ignored_modules=list(model.extra))
    model(torch.ones(1, 4)).sum().backward()
    assert not differs_between_ranks(model.trunk[0].weight.grad.full_tensor())


class Filled(nn.Module):
    """Parameters and buffers that depend on their sizes only, so that order makes no difference."""

    def __init__(self, rows: int, child: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, 3))
        self.register_buffer("buffer", torch.empty(rows))
        self.child = child
        self.calls = 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.calls += 1
        with torch.no_grad():
            self.weight.copy_(torch.arange(self.weight.numel()).view_as(self.weight))
            self.buffer.fill_(len(self.buffer))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight.t() @ self.weight + self.buffer.sum()
        return x if self.child is None else self.child(x)


class OnlyBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.steps.fill_(7.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.steps[0]


def nested() -> nn.Module:
    return nn.Sequential(Filled(5, Filled(4, Filled(3))), OnlyBuffers())


@on_ranks(2)
def test_meta(rank: int) -> None:
    """A17, A22, D-55: materialised unit by unit, each once; buffers alone too."""
    with torch.device("meta"):
        model = nested()
    want = nested()
    policy = autoshard.ModuleWrapPolicy([Filled])
    model = autoshard.shard(model, policy=policy)
    for (name, got), expected in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(got.full_tensor(), expected), name
    for got, expected in zip(model.buffers(), want.buffers(), strict=True):
        assert torch.equal(got, expected)
    assert [m.calls for m in model.modules() if isinstance(m, Filled)] == [2, 2, 2]  # 1: on meta
    x = torch.ones(1, 3)
    assert torch.equal(model(x), want(x))


@on_ranks(2)
def test_param_init_fn(rank: int) -> None:
    """A23: once a module, that is on meta, and nothing else is asked of it."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2)), nn.ReLU())
    seen = []

    def fill(module: nn.Module) -> None:
        seen.append(module)
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.fill_(len(seen))

    autoshard.shard(model, param_init_fn=fill)
    assert seen == [model[0], model[1][0]]
    assert model[1][0].bias.full_tensor().tolist() == [2.0, 2.0]
    autoshard.shard(nn.Linear(2, 2), param_init_fn="not asked")  # nothing is on meta
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="param_init_fn should be a function of a module, not str"):
        autoshard.shard(model, param_init_fn="fill")


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@on_ranks(2)
def test_meta_without_a_way_to_initialise(rank: int) -> None:
    """A22, D-55."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), NoReset())
    with pytest.raises(RuntimeError, match=r"1 \(NoReset\).*no reset_parameters.*param_init_fn"):
        autoshard.shard(model)


@on_ranks(2)
def test_meta_keeps_ties(rank: int) -> None:
    """D-55: a parameter that two modules share is one afterwards."""
    with torch.device("meta"):
        model = Net(tied=True)
    model = autoshard.shard(model)
    assert model.head.weight is model.embed.weight
    train(model, net_loss, adamw(model), steps=1)


class FilledByRank(nn.Module):
    """Each rank's own values, in a parameter and in buffers, one of which is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("saved", torch.empty(2))
        self.register_buffer("unsaved", torch.empty(2), persistent=False)

    def reset_parameters(self) -> None:
        for tensor in (self.weight.data, self.saved, self.unsaved):
            tensor.fill_(dist.get_rank() + 1)


@on_ranks(4)
def test_buffers_from_meta_are_synchronised_over_both_axes(rank: int) -> None:
    """A25, D-52: the second broadcast leaves out nothing that the first has sent."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = nn.Sequential(FilledByRank(), nn.Sequential(FilledByRank()))
    policy = autoshard.ModuleWrapPolicy([FilledByRank])
    model = autoshard.shard(model, strategy="hybrid_shard", mesh=mesh, policy=policy)
    for name, buffer in model.named_buffers():
        assert buffer.tolist() == [1.0, 1.0], name
    for name, param in model.named_parameters():
        assert param.full_tensor().tolist() == [1.0] * 3, name


@on_ranks(2)
def test_torchdistx(rank: int) -> None:
    """A24: used if it is there and has deferred a parameter, and not missed otherwise."""
    calls: list[Any] = []
    package = types.ModuleType("torchdistx")
    package.fake = types.SimpleNamespace(is_fake=lambda param: param.shape[0] == 3)
    package.deferred_init = types.SimpleNamespace(
        materialize_module=lambda module, check_fn: calls.append((module, check_fn(module)))
    )
    sys.modules["torchdistx"] = package
    try:
        autoshard.shard(nn.Linear(2, 2))
        assert calls == []
        model = nn.Linear(3, 3)
        autoshard.shard(model)
        assert calls == [(model, True)]
    finally:
        del sys.modules["torchdistx"]


@on_ranks(2)
def test_device_id(rank: int) -> None:
    """A16, A20, A21."""
    for device in (None, torch.device("cpu")):
        model = autoshard.shard(Net(), device_id=device)
        assert model.head.weight.device.type == "cpu"
    for wrong in ("cpu", True, 1.5):
        with pytest.raises(TypeError, match=r"device_id should be an int or a torch\.device"):
            autoshard.shard(Net(), device_id=wrong)
    with pytest.raises(ValueError, match=rf"device_id cuda:0 on rank {rank}.*cpu"):
        autoshard.shard(nn.ReLU(), device_id=torch.device("cuda", 0))
    mixed = Net()
    mixed.head.to("meta")
    with pytest.raises(ValueError, match=r"several devices.*meta"):
        autoshard.shard(mixed, device_id=torch.device("cpu"))


def test_devices_are_checked_without_ignored_parameters() -> None:
    """A20."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to("meta"))
    ignored = materialize.find_ignored(model, [model[1]], None)
    materialize.check_parameters((model,), ignored, moves=False)
    with pytest.raises(ValueError, match="several devices"):
        materialize.check_parameters((model,), materialize.Ignored(), moves=False)


@on_ranks(2)
def test_sync_in_buckets(rank: int) -> None:
    """A25: the first rank's values, one broadcast a dtype and so many bytes."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(rank + 1)
    model.register_buffer("count", torch.tensor([rank + 1]))
    sizes = []
    broadcast = dist.broadcast

    def counting(tensor: Tensor, **arguments: Any) -> Any:
        sizes.append(tensor.nbytes)
        return broadcast(tensor, **arguments)

    limit = materialize.SYNC_BUCKET_BYTES
    materialize.SYNC_BUCKET_BYTES, dist.broadcast = 600, counting
    try:
        model = autoshard.shard(model)
    finally:
        materialize.SYNC_BUCKET_BYTES, dist.broadcast = limit, broadcast
    assert limit == 250 * 2**20
    assert sum(sizes) == 4 * (64 + 8) * 4 + 8
    assert max(sizes) <= 600
    assert len(sizes) == 3  # two layers at a time; the buffer has another dtype
    assert all((p.full_tensor() == 1).all() for p in model.parameters())
    assert model.count.tolist() == [1]
    other = autoshard.shard(nn.Linear(2, 2), sync_module_states=False)
    assert other.weight.shape == (2, 2)


@on_ranks(2)
def test_units_without_parameters(rank: int) -> None:
    """A15, A62, D-15: a root that has none of its own, and a unit that has none at all."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    for child in model:
        autoshard.fully_shard(child)
    autoshard.fully_shard(model)
    x = torch.ones(2, 3)
    # The root has nothing, and so what is "kept" after forward is the last unit's no more.
    assert counts(model, lambda: model(x).sum())[2] == 2
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_sharding_sends_nothing(rank: int) -> None:
    """A61: with a mesh of the user's, no collective is issued, but for values to agree on."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    if rank == 0:  # so the other rank need not even take part
        for shard in (autoshard.fully_shard, partial(autoshard.shard, sync_module_states=False)):
            model = shard(nn.Linear(3, 3), mesh=mesh)
            assert model.weight.device_mesh == mesh  # torch takes one for the other


@on_ranks(2)
def test_a_group_of_its_own(rank: int) -> None:
    """A3, A66: sizes and ranks are those of the mesh, not of the world."""
    from torch.distributed.device_mesh import DeviceMesh

    groups = [dist.new_group([0]), dist.new_group([1])]
    mesh = DeviceMesh.from_group(groups[rank], "cpu", mesh_dim_names=("shard",))
    model = autoshard.shard(Net(), mesh=mesh)
    assert counts(model, lambda: net_loss(model, rank, 0)) == (0, 0, 0, 0)
    assert {id(p.device_mesh) for p in model.parameters()} == {id(mesh)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"forward_prefetch": "yes"}, "forward_prefetch is 'yes'"),
        ({"backward_prefetch": "now"}, "backward_prefetch is 'now'"),
        ({"mp_policy": "bf16"}, "mp_policy should be a MixedPrecisionPolicy, not str"),
        ({"offload_policy": True}, "offload_policy should be an OffloadPolicy, not bool"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], words: str) -> None:
    """A50."""
    with pytest.raises((ValueError, TypeError), match=words):
        autoshard.shard(Net(), **arguments)


@on_ranks(2)
def test_wrong_mesh_for_a_strategy(rank: int) -> None:
    """A50."""
    from torch.distributed.device_mesh import init_device_mesh

    flat = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="'hybrid_shard' expects a 2D mesh but got a 1D"):
        autoshard.shard(Net(), strategy="hybrid_shard", mesh=flat)
    with pytest.raises(ValueError, match="'full_shard' expects a 1D mesh but got a 2D"):
        autoshard.shard(Net(), strategy="full_shard", mesh=square)
    with pytest.raises(ValueError, match="without names"):
        autoshard.fully_shard(Net(), mesh=init_device_mesh("cpu", (2, 1)))
