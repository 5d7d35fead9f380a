"""Ranks that do not do the same: routing by rank, orders that change, graphs on one rank only."""

from __future__ import annotations

import functools
import time
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import Block, Net, SmallNet, net_loss, tokens
from support.ranks import on_ranks, renew_group
from support.training import adamw, assert_same, in_form, replicated, sharded, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autoshard
from autoshard.runtime.comm.mesh import default_mesh
from autoshard.runtime.ranks import agreement, exchange, notices, order


class Experts(nn.Module):
    """Equal experts in one unit; each rank uses its own, and nobody the last."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.experts[dist.get_rank()](x).relu())


def experts_loss(model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 5, generator=generator)).square().sum()


@on_ranks(2)
def test_each_rank_has_gradients_of_its_own_experts(rank: int) -> None:
    """D-37."""
    want, want_losses = replicated(Experts, experts_loss)
    got, losses = sharded(Experts, experts_loss)
    assert losses == want_losses
    assert_same(got, want)
    experts_loss(got, rank, 9).backward()
    assert got.experts[1 - rank].weight.grad is not None
    assert got.experts[2].weight.grad is None


class Skipping(Net):
    """Leaves out the layer that `skips` says."""

    skips: int | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            if number != self.skips:
                x = layer(x)
        return self.head(x)


@on_ranks(2)
def test_the_order_may_change_on_all_ranks(rank: int) -> None:
    def loss(model: Any, rank: int, step: int) -> Tensor:
        model.skips = step % 4
        return net_loss(model, rank, step)

    want, _ = replicated(Skipping, loss, steps=6)
    got, _ = sharded(Skipping, loss, steps=6)
    assert_same(got, want)


@contextmanager
def short_mesh() -> Iterator[DeviceMesh]:
    """Both ranks, who wait for each other for two seconds."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))


@on_ranks(2)
def test_a_layer_left_out_by_one_rank(rank: int) -> None:
    """D-45. In the first step, of which ranks have compared what is expected."""
    says = r"rank 0 came to the gather of layers\.2", r"the gather of layers\.1\..* failed"
    with short_mesh() as mesh:
        model = autoshard.shard(Skipping(), mesh=mesh)
        model.skips = 1 if rank == 0 else None
        with pytest.raises(RuntimeError, match=says[rank]):
            net_loss(model, rank, 0).backward()


@on_ranks(2)
def test_another_layer_left_out_by_each_rank(rank: int) -> None:
    """Gathers of equal sizes, in steps after one that was alike."""
    with short_mesh() as mesh:
        model = autoshard.shard(Skipping(), mesh=mesh)
        net_loss(model, rank, 0).backward()
        model.skips = rank
        with pytest.raises(RuntimeError, match=r"to the gather of layers\.[01]"):
            net_loss(model, rank, 0).backward()


@on_ranks(2, timeout=60.0)
def test_ranks_that_wait_for_each_other_elsewhere(rank: int) -> None:
    """Both say so long before the ten minutes that a compilation may take, and can go on."""
    mesh = default_mesh()
    here, there = (f"model {number}" for number in (rank, 1 - rank))
    with pytest.raises(RuntimeError) as raised:
        agreement.share(here, "", mesh)
    assert f"rank {rank} waited for what the first rank planned for {here}" in str(raised.value)
    assert f"rank {1 - rank} waited for what the first rank planned for {there}" in str(
        raised.value
    )
    for topic in ("model 0", "model 1", "model 2"):  # the first two failed before
        assert agreement.share(topic, f"text {rank}", mesh) == "text 0"


@on_ranks(2, timeout=60.0)
def test_who_comes_while_another_is_about_to_leave(rank: int) -> None:
    """What that one found is still there, and of no account: the rank it tells of is here now."""
    mesh = default_mesh()
    give_up = notices._Looker.give_up

    def give_up_slowly(looker: Any) -> None:
        give_up(looker)
        time.sleep(1.0 - rank)

    slowly = unittest.mock.patch.object(notices._Looker, "give_up", give_up_slowly)
    with slowly, pytest.raises(RuntimeError, match="while others wait elsewhere"):
        agreement.share(f"slow {rank}", "", mesh)
    with unittest.mock.patch.object(notices, "PATIENCE_S", 0.1):
        assert agreement.share("slow 0", f"text {rank}", mesh) == "text 0"


@on_ranks(2)
def test_backward_on_one_rank(rank: int) -> None:
    with short_mesh() as mesh:
        model = autoshard.shard(Skipping(), mesh=mesh)
        loss = net_loss(model, rank, 0)
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"the backward of root.*did not within"):
                loss.backward()


@pytest.mark.parametrize(
    ("form", "what", "says"),
    [
        ("eager", "no backward", "an eager forward of root, with no backward since"),
        ("compiled", "no backward", "the graph of .*, with no backward since"),
        ("eager", "evaluation", "an eager forward of root without gradients"),
        ("compiled", "evaluation", "compiled .* (did not within|while others wait elsewhere)"),
    ],
)
@on_ranks(2)
def test_one_rank_runs_another_forward(rank: int, form: str, what: str, says: str) -> None:
    """D-45: in the middle of steps that are alike, its next gathers would be taken for others."""

    def go_on(model: Any) -> None:
        if rank == 0:
            with torch.set_grad_enabled(what == "no backward"):
                net_loss(model, rank, 3)
        for step in (3, 4):
            net_loss(model, rank, step).backward()

    with short_mesh() as mesh:
        model = in_form(autoshard.shard(SmallNet(), mesh=mesh), form)
        for step in range(3):
            net_loss(model, rank, step).backward()
        with pytest.raises(Exception, match=says if rank == 0 else "(?i)failed|timed out|timeout"):
            go_on(model)


SETTINGS: dict[str, Callable[[Any], object]] = {
    "reshard_after_forward=False": lambda model: model.set_reshard_after_forward(False),
    "reshard_after_backward=False": lambda model: model.set_reshard_after_backward(False),
    "unshard_in_backward=False": lambda model: model.layers[0].set_unshard_in_backward(False),
    "the reduce of": lambda model: model.set_requires_gradient_sync(False),
    "gradient_divide_factor=4": lambda model: model.set_gradient_divide_factor(4.0),
    "forward prefetch of layers.1": lambda model: model.set_modules_to_forward_prefetch(
        [model.layers[1]]
    ),
    "backward prefetch of layers.0": lambda model: model.set_modules_to_backward_prefetch(
        [model.layers[0]]
    ),
}
"""What decides which collectives are launched, and what is in them, by what ranks say of it."""


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("form", ["eager", "compiled"])
@on_ranks(2)
def test_a_setting_on_one_rank(rank: int, form: str, setting: str) -> None:
    """Both say so before they gather: later, gloo would end one of them without a word, or all
    would go on with gradients that are divided by different numbers."""
    with short_mesh() as mesh:
        model = autoshard.shard(SmallNet(), mesh=mesh)
        if rank == 1:
            SETTINGS[setting](model)
        says = setting if form == "eager" else rf"{setting}|compiled other collectives"
        with pytest.raises(Exception, match=says):
            net_loss(in_form(model, form), rank, 0).backward()


@on_ranks(2)
def test_a_process_group_made_anew(rank: int) -> None:
    """Its meshes have the names of those before: what ranks ran over these says nothing of it."""
    with short_mesh() as mesh:
        model = in_form(autoshard.shard(SmallNet(), mesh=mesh), "compiled")
        for step in range(3):
            net_loss(model, rank, step).backward()
    renew_group(dist.PrefixStore("anew", dist.distributed_c10d._get_default_store()))
    torch._dynamo.reset()
    with short_mesh() as mesh:
        model = autoshard.shard(SmallNet(), mesh=mesh)
        if rank == 1:
            model.layers[0].set_unshard_in_backward(False)
        with pytest.raises(Exception, match="unshard_in_backward=False"):
            net_loss(in_form(model, "compiled"), rank, 0).backward()


@contextmanager
def agreements() -> Iterator[list[str]]:
    """Places at which this rank agrees with others."""
    real, places = exchange.meet, []

    def counted(party: Any, place: str, *args: Any, **kwargs: Any) -> Any:
        places.append(place)
        return real(party, place, *args, **kwargs)

    with unittest.mock.patch.object(exchange, "meet", counted):
        yield places


class Reversed(Net):
    """Runs its layers in another order than that in which they are registered."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(("make", "first"), [(Net, 4), (Reversed, 4 + 12)])
@on_ranks(2)
def test_agreements_of_eager_steps(rank: int, make: type[Net], first: int) -> None:
    """The first step is compared in one piece, and what was not expected of it by itself."""
    model = autoshard.shard(make(12))
    for limit in (first, 1, 0):
        with agreements() as compared:
            net_loss(model, rank, 0).backward()
        assert len(compared) <= limit, compared


@pytest.mark.parametrize("form", ["eager", "compiled"])
@on_ranks(2)
def test_forwards_that_repeat(rank: int, form: str) -> None:
    """Ranks compare nothing before them, whatever their units were told."""
    options = {"lowering": "eager"} if form == "compiled" else None
    model = autoshard.shard(SmallNet())
    model.set_reshard_after_forward(False)
    call = torch.compile(model, backend="autoshard", options=options) if options else model
    with agreements() as compared:
        for step in range(6):
            net_loss(call, rank, step).backward()
            if step == 2:
                compared.clear()
    assert compared == []


@contextmanager
def recompile_limit(limit: int) -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield


def lengths_loss(model: Any, rank: int, step: int) -> Tensor:
    ids = tokens(rank, step, length=4 + step)
    return torch.nn.functional.cross_entropy(model(ids), ids.roll(-1))


@on_ranks(2)
def test_past_the_recompile_limit_together(rank: int) -> None:
    """Dynamo gives a frame up without asking anybody: it runs eagerly, on all ranks."""
    want, _ = replicated(SmallNet, lengths_loss, steps=5)
    torch.manual_seed(0)
    model = SmallNet()
    optimizer = adamw(model)
    options = {"lowering": "eager"}
    call = torch.compile(model, backend="autoshard", options=options, dynamic=False)
    with recompile_limit(2):
        train(call, lengths_loss, optimizer, steps=5)
    assert_same(model, want)


@on_ranks(2)
def test_past_the_recompile_limit_alone(rank: int) -> None:
    """D-45: one rank would gather eagerly what the other gathers in a graph."""
    with short_mesh() as mesh, recompile_limit(2):
        options = {"lowering": "eager", "mesh": mesh}
        call = torch.compile(SmallNet(), backend="autoshard", options=options, dynamic=False)

        def run() -> None:
            for step in range(5):
                lengths_loss(call, rank, step if rank == 0 else 0).backward()

        # Rank 1 is left in its collective, which the group's timeout ends.
        with pytest.raises(RuntimeError, match=r"(?i)recompile_limit|timed out|timeout"):
            run()


def a_gradient_of(model: nn.Module) -> Callable[[Tensor], Any]:
    return lambda loss: torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("form", ["eager", "compiled"])
@on_ranks(2)
def test_autograd_grad(rank: int, form: str) -> None:
    """Gradients handed out are sharded means, and `.grad` is left alone."""
    torch.manual_seed(0)
    whole = SmallNet()
    want = a_gradient_of(whole)(net_loss(whole, rank, 0))
    torch.manual_seed(0)
    model = SmallNet()
    call = (
        autoshard.shard(model)
        if form == "eager"
        else torch.compile(model, backend="autoshard", options={"lowering": "eager"})
    )
    loss = net_loss(call, rank, 0)
    got = a_gradient_of(model)(loss)
    for mine, theirs in zip(got, want, strict=True):
        dist.all_reduce(theirs)
        assert torch.equal(mine.full_tensor(), theirs / 2)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("form", ["eager", "compiled"])
@on_ranks(2)
def test_backward_of_some_inputs(rank: int, form: str) -> None:
    torch.manual_seed(0)
    model = SmallNet()
    call = (
        autoshard.shard(model)
        if form == "eager"
        else torch.compile(model, backend="autoshard", options={"lowering": "eager"})
    )
    loss = net_loss(call, rank, 0)
    loss.backward(inputs=[model.layers[1].up.weight, model.embed.weight])
    filled = [name for name, param in model.named_parameters() if param.grad is not None]
    assert filled == ["embed.weight", "layers.1.up.weight"]


class OwnHead(nn.Module):
    """A head outside of the sharded model."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(ids) * self.scale


@pytest.mark.parametrize("form", ["eager", "compiled"])
@on_ranks(2)
def test_a_parameter_left_out_is_told_of(rank: int, form: str) -> None:
    torch.manual_seed(0)
    body = SmallNet()
    optimizer = adamw(body)
    if form == "eager":
        body = autoshard.shard(body)
        optimizer = adamw(body)
        call: Any = body
    else:
        call = torch.compile(body, backend="autoshard", options={"lowering": "eager"})
    model = OwnHead(call)
    own = torch.optim.SGD([model.scale], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            net_loss(model, rank, step).backward()
            for each in (optimizer, own):
                each.step()
                each.zero_grad()
    ours = [str(w.message) for w in caught if "is not sharded" in str(w.message)]
    assert len(ours) == 1, ours
    assert "size [1]" in ours[0]


class ReadsEarly(SmallNet):
    """Reads a parameter under no_grad and uses it outside."""

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            weight = self.layers[0].up.weight
        return super().forward(ids) * weight.mean()


@pytest.mark.parametrize("form", ["eager", "compiled"])
@on_ranks(2)
def test_read_without_grad_used_with_it(rank: int, form: str) -> None:
    build = functools.partial(ReadsEarly, tied=False)
    want, _ = replicated(build, net_loss)
    if form == "eager":
        got, _ = sharded(build, net_loss)
        assert_same(got, want)
        return
    torch.manual_seed(0)
    got = build()
    optimizer = adamw(got)
    call = torch.compile(got, backend="autoshard", options={"lowering": "eager"})
    with pytest.warns(RuntimeWarning, match=r"layers\.0\.up\.weight is read under torch\.no_grad"):
        train(call, net_loss, optimizer)
    # Blocks are compiled one by one then: the two uses are reduced in another order.
    assert_same(got, want, rtol=1e-5)


@on_ranks(2)
def test_kinds_of_backward_that_take_turns(rank: int) -> None:
    """As those of a GAN do: ranks compare notes once a step, where the kinds part."""
    model = autoshard.shard(nn.Sequential(*(Block() for _ in range(4))))
    compared: list[str] = []

    def step(kind: str) -> None:
        x = torch.ones(2, 6, requires_grad=True)
        loss = model(x).sum()
        if kind == "of the input":
            torch.autograd.grad(loss, x)
        else:
            loss.backward()

    real = order._compare

    def compare(key: str, topic: str, event: str, *args: Any, **kwargs: Any) -> None:
        compared.append(event)
        real(key, topic, event, *args, **kwargs)

    with unittest.mock.patch.object(order, "_compare", compare):
        for kind in ("of the input", "of all") * 2:
            compared.clear()
            step(kind)
    assert compared == ["the reduce of 3"]


@on_ranks(2)
def test_models_that_differ_are_not_sharded(rank: int) -> None:
    """Of a dtype that only one rank has: told before anything is sent."""
    model = SmallNet()
    if rank == 1:
        model.layers[1].double()
    want = r"number \d+ is layers\.1\.\S+ torch\.float(32|64) .* on rank [01], and layers\.1"
    with pytest.raises(RuntimeError, match=want):
        autoshard.shard(model)


@on_ranks(2)
@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ("frozen", r"Collective number \d+ is the backward's packed reduce of .*layers\.1"),
        (
            "strategy",
            r"Collective number \d+ is the backward's \w+ .* of layers\.2 .*, and the",
        ),
        ("bucketing", r"bucketing='(none|auto)'.*give every rank the same"),
        ("topology", r"topology=(None|'h100').*give every rank the same"),
        ("memory_budget", r"while others wait elsewhere.*Give every rank the same model and opt"),
    ],
)
def test_graphs_that_differ(rank: int, differs: str, message: str) -> None:
    """All ranks say in what, before either launches a collective."""
    model = Net()
    options: dict[str, Any] = {"lowering": "eager", "strict": True}
    if differs in ("frozen", "strategy"):
        options["bucketing"] = "per_unit"
    if rank == 1 and differs == "frozen":
        model.layers[1].requires_grad_(False)
    elif rank == 1:
        others = {"bucketing": "none", "topology": "h100", "memory_budget": 2**30}
        options[differs] = {"strategy": "shard_grad_op", **others}[differs]
    call = torch.compile(model, backend="autoshard", options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        net_loss(call, rank, 0)


@on_ranks(4)
def test_meshes_are_told_apart_by_their_ranks(rank: int) -> None:
    """Of one shape, and with the same first rank: what is exchanged over them is not mixed up."""
    names = [
        exchange.mesh_name(DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")))
        for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    ]
    assert names[0] != names[1]
    everyones: list[Any] = [None] * 4
    dist.all_gather_object(everyones, names)
    assert everyones == [names] * 4
