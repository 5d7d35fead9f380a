"""Graph breaks, eager blocks in compiled models and the reverse, modes in between."""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import Block, Net, SmallNet, net_loss, tokens
from support.ranks import on_ranks
from support.selection import each_value
from support.training import (
    adamw,
    assert_same,
    compiled,
    in_form,
    issued,
    replicated,
    sgd,
    sharded,
    train,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import autoshard


class Broken(SmallNet):
    """A graph break at the place that `where` names."""

    def __init__(self, where: str, *, tied: bool = False) -> None:
        super().__init__(tied=tied)
        self.where = where

    def forward(self, ids: Tensor) -> Tensor:
        if self.where == "start":
            torch._dynamo.graph_break()
        x = self.embed(ids)
        if self.where == "middle":
            torch._dynamo.graph_break()
        for number, layer in enumerate(self.layers):
            if self.where == "loop" and number == 1:
                torch._dynamo.graph_break()
            x = layer(x)
        if self.where == "read":
            # computed eagerly, between two graphs, from a parameter of the root's
            x = x * eager_scale(self)
        return self.head(x)


@torch.compiler.disable
def eager_scale(model: nn.Module) -> Tensor:
    return 1 + model.embed.weight.mean()


@each_value(
    where=["start", "middle", "loop", "read"], route=["torch.compile", "model.compile", "function"]
)
@on_ranks(2)
def test_graph_break(rank: int, where: str, route: str) -> None:
    """D-59."""
    build = functools.partial(Broken, where)
    want, want_losses = replicated(build, net_loss)
    torch.manual_seed(0)
    model = build()
    optimizer = adamw(model)
    options = {"lowering": "eager", "strict": True}
    call: object = model
    if route == "model.compile":
        model.compile(backend="autoshard", options=options)
    elif route == "function":

        @torch.compile(backend="autoshard", options=options)
        def call(ids: Tensor) -> Tensor:
            return model(ids)

    else:
        call = torch.compile(model, backend="autoshard", options=options)
    losses = train(call, net_loss, optimizer)
    if where == "read":
        # One use of the embedding is in a graph, one is eager, and each is reduced by itself.
        assert_same(model, want, rtol=1e-5)
    else:
        assert losses == want_losses
        assert_same(model, want)


@on_ranks(2)
def test_tied_across_a_graph_break(rank: int) -> None:
    """Each graph reduces its own part of the gradient: another order of summation."""
    build = functools.partial(Broken, "middle", tied=True)
    want, _ = replicated(build, net_loss)
    got, _ = compiled(build, net_loss)
    assert_same(got, want, rtol=1e-5)


@on_ranks(2)
def test_graph_break_is_logged(rank: int) -> None:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("autoshard"), Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        call = torch.compile(Broken("middle"), backend="autoshard", options={"lowering": "eager"})
        net_loss(call, rank, 0).backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    breaks = [message for message in messages if "graph break at" in message]
    assert len(breaks) == 1
    assert "test_mixes.py:" in breaks[0]


class WithEagerBlock(SmallNet):
    def __init__(self) -> None:
        super().__init__(tied=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = eagerly(layer, x) if number == 1 else layer(x)
        return self.head(x)


@torch.compiler.disable
def eagerly(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_eager_block_in_a_compiled_model(rank: int, strategy: str) -> None:
    want, want_losses = replicated(WithEagerBlock, net_loss)
    got, losses = compiled(WithEagerBlock, net_loss, strategy=strategy)
    assert losses == want_losses
    assert_same(got, want)


@each_value(checkpointing=[None, "non-reentrant", "reentrant"], lowering=["eager", "inductor"])
@on_ranks(2)
def test_compiled_blocks_in_an_eager_model(
    rank: int, checkpointing: str | None, lowering: str
) -> None:
    build = functools.partial(SmallNet, checkpointing=checkpointing)
    want, want_losses = replicated(build, net_loss)
    torch.manual_seed(0)
    model = autoshard.shard(build())
    for layer in model.layers:
        layer.compile(backend="autoshard", options={"lowering": lowering, "strict": True})
    losses = train(model, net_loss, adamw(model))
    if lowering == "eager":
        assert losses == want_losses
    assert_same(model, want, rtol=0.0 if lowering == "eager" else 1e-5)


@on_ranks(2)
def test_compiled_part_of_a_unit(rank: int) -> None:
    """What is compiled belongs to a unit and heads none: it is not sharded a second time."""
    want, want_losses = replicated(SmallNet, net_loss)
    torch.manual_seed(0)
    model = autoshard.shard(SmallNet())
    for part in (model.head, model.layers[1].up):
        options = {"lowering": "eager", "strict": True}
        # `part.compile()` captures nothing: Dynamo skips the code of torch's own modules.
        part.forward = torch.compile(part.forward, backend="autoshard", options=options)
    losses = train(model, net_loss, adamw(model))
    assert losses[0] == want_losses[0]
    assert len({plan.graph for plan in autoshard.plans(model)}) == 2
    # The tied parameter is read by a graph and eagerly, and reduced for each.
    assert_same(model, want, rtol=1e-5)


@on_ranks(2)
def test_blocks_compiled_before_they_are_sharded(rank: int) -> None:
    want, want_losses = replicated(SmallNet, net_loss)
    torch.manual_seed(0)
    model = SmallNet()
    for layer in model.layers:
        layer.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    autoshard.shard(model)
    losses = train(model, net_loss, adamw(model))
    assert losses == want_losses
    assert_same(model, want)


@on_ranks(2)
def test_parameters_left_unsharded_are_told_of(rank: int) -> None:
    """Only the blocks are compiled: embedding and head would drift apart, but not in silence."""
    model = SmallNet()
    for layer in model.layers:
        layer.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    net_loss(model, rank, 0).backward()
    with pytest.warns(RuntimeWarning, match="not averaged over ranks"):
        adamw(model).step()


@on_ranks(2)
def test_blocks_of_one_kind_are_compiled_once(rank: int) -> None:
    """Regional compilation: no constant in a block's graph tells it from its neighbours."""
    model = autoshard.shard(SmallNet(layers=12))
    for layer in model.layers:
        layer.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    torch._dynamo.utils.counters.clear()
    net_loss(model, rank, 0).backward()
    assert len(autoshard.plans(model)) == 2  # one forward, one backward


class Twice(nn.Module):
    """One block used twice; a parameter that is read and not used; one that is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = Block()
        self.other = nn.ModuleList(Block() for _ in range(2))
        self.idle = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        assert self.idle.shape == (3,)
        x = self.block(self.embed(ids))
        x = self.other[0](x)
        return self.head(self.block(x))


POLICY = autoshard.ModuleWrapPolicy({Block})


@on_ranks(2)
def test_module_used_twice(rank: int) -> None:
    want, want_losses = replicated(Twice, net_loss)
    got, losses = sharded(Twice, net_loss, policy=POLICY)
    assert losses == want_losses
    assert_same(got, want)
    got, losses = compiled(Twice, net_loss, policy=POLICY, bucketing="per_unit")
    assert losses == want_losses
    assert_same(got, want)
    reduces = next(plan for plan in autoshard.plans(got) if plan.graph == "backward").buckets
    assert sorted(b.unit for b in reduces if b.kind == "reduce") == ["block", "other.0", "root"]


def frozen(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1" not in name and not name.endswith("up.weight"))
    return model


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant", "reentrant"])
@on_ranks(2)
def test_frozen(rank: int, checkpointing: str | None) -> None:
    build = functools.partial(frozen, functools.partial(SmallNet, checkpointing=checkpointing))
    want, want_losses = replicated(build, net_loss)
    got, losses = sharded(build, net_loss)
    assert losses == want_losses
    assert_same(got, want)
    assert [p.requires_grad for p in got.parameters()] == [
        p.requires_grad for p in want.parameters()
    ]
    if checkpointing != "reentrant":
        got, losses = compiled(build, net_loss)
        assert losses == want_losses
        assert_same(got, want)


@on_ranks(2)
def test_eval_in_between(rank: int) -> None:
    """D-43."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            model(tokens(rank, step + 50))
        with torch.inference_mode():
            model(tokens(rank, step + 60))
        model.train()
        return net_loss(model, rank, step)

    want, want_losses = replicated(SmallNet, loss)
    for got, losses in (sharded(SmallNet, loss), compiled(SmallNet, loss)):
        assert losses == want_losses
        assert_same(got, want)
    # Without gradients Inductor goes other ways; the planned order holds all the same (strict).
    _, losses = compiled(SmallNet, loss, steps=2, lowering="inductor")
    torch.testing.assert_close(losses, want_losses[:2])


@on_ranks(2)
def test_two_forwards_before_one_backward(rank: int) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return net_loss(model, rank, step) + net_loss(model, rank, step + 50)

    # Tied, the weight is used twice in each forward: a forward's gradients are summed first, and
    # the replicated model sums all of them as they come.
    want, _ = replicated(SmallNet, loss)
    eager, eager_losses = sharded(SmallNet, loss)
    got, losses = compiled(SmallNet, loss)
    assert losses == eager_losses
    assert_same(got, eager)
    assert_same(eager, want, rtol=1e-5)


@on_ranks(2)
def test_accumulation(rank: int) -> None:
    """Two backwards before one step: every one reduces, the shards add up."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        net_loss(model, rank, step + 50).backward()
        return net_loss(model, rank, step)

    eager, eager_losses = sharded(SmallNet, loss)
    got, losses = compiled(SmallNet, loss)
    assert losses == eager_losses
    assert_same(got, eager)


class WithLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2)
        self.scales = nn.ParameterList([torch.ones(5), torch.ones(5)])
        self.head = nn.Linear(5, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.lstm(self.embed(ids))
        return self.head(x * self.scales[0] + self.scales[1])


@on_ranks(2)
def test_modules_that_cache_parameters(rank: int) -> None:
    want, want_losses = replicated(WithLSTM, net_loss)
    got, losses = sharded(WithLSTM, net_loss)
    assert losses == want_losses
    assert_same(got, want)
    with warnings.catch_warnings():  # torch 2.15 compiles what is around it
        warnings.filterwarnings("ignore", message="Dynamo captured no graph of WithLSTM")
        got, losses = compiled(WithLSTM, net_loss)
    # AOTAutograd decomposes an LSTM otherwise than eager torch runs it, sharded or not.
    assert_same(got, want, rtol=1e-4)
    torch._dynamo.reset()  # else it skips what it has skipped
    with torch._dynamo.config.patch(allow_rnn=True):
        got, losses = compiled(WithLSTM, net_loss)
    assert_same(got, want, rtol=1e-4)


class Scaling(nn.Module):
    """Layer with buffers that forward overwrites, of which backward needs what they held."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("scale", torch.ones(12))
        self.register_buffer("queue", torch.linspace(-1, 1, 60).view(10, 6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.2)
        y = self.down((hidden * self.scale).sin())
        past = self.queue.clone()  # eager torch refuses to read what is written to later
        y = y + (y @ past.t()).softmax(1) @ past
        with torch.no_grad():
            self.queue.copy_(torch.cat([y.detach(), self.queue])[:10])
        return self.norm(x + y)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.Sequential(Scaling(), Scaling())
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)))


@pytest.mark.parametrize("budget", [None, 7_000])
@on_ranks(2)
def test_backward_needs_what_buffers_held(rank: int, budget: int | None) -> None:
    want, want_losses = replicated(Scaled, net_loss)
    got, losses = sharded(Scaled, net_loss)
    assert losses == want_losses
    assert_same(got, want)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*memory_budget")  # it can't be met
        got, losses = compiled(Scaled, net_loss, topology="h100", memory_budget=budget)
    assert losses == want_losses
    assert_same(got, want)


@on_ranks(2)
def test_inductor_needs_what_buffers_held(rank: int) -> None:
    """Within rounding; what was overwritten would be off by a tenth."""
    want, _ = replicated(Scaled, net_loss, make=sgd)
    got, _ = compiled(Scaled, net_loss, make=sgd, lowering="inductor")
    assert_same(got, want, rtol=1e-4)


@on_ranks(2)
def test_dynamic_batch(rank: int) -> None:
    """Lengths that change, and that differ by rank: no rank waits for another's recompile."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        ids = tokens(rank, step, length=5 + 2 * step + rank)
        return nn.functional.cross_entropy(model(ids), ids.roll(-1))

    want, want_losses = replicated(SmallNet, loss, steps=6)
    got, losses = compiled(SmallNet, loss, steps=6)
    assert losses == want_losses
    assert_same(got, want)


class Decay(torch.autograd.Function):
    """w * w / 2: the gradient is the weight itself, gathered and not computed with."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


class WithDecay(SmallNet):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + Decay.apply(self.layers[1].up.weight)


@on_ranks(2)
def test_weight_that_is_its_own_gradient(rank: int) -> None:
    want, want_losses = replicated(WithDecay, net_loss)
    for run in (sharded, compiled):
        got, losses = run(WithDecay, net_loss)
        assert losses == want_losses
        assert_same(got, want)


def doubled(grad: Tensor) -> Tensor:
    return grad * 2


class Hooked(SmallNet):
    """The gradient of what each checkpointed block returns is doubled by a hook."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
            x.register_hook(doubled)
        return self.head(x)


@on_ranks(2)
def test_hooks_on_what_checkpoints_return(rank: int) -> None:
    """D-68: not a circle of recomputing for the hook and the hook for recomputing."""
    want, want_losses = replicated(Hooked, net_loss)
    for run in (sharded, compiled):
        got, losses = run(Hooked, net_loss)
        assert losses == want_losses
        assert_same(got, want)
    plain, _ = replicated(SmallNet, net_loss, steps=1)
    hooked, _ = replicated(Hooked, net_loss, steps=1)
    assert not torch.equal(plain.embed.weight, hooked.embed.weight)


class Drops(SmallNet):
    """Half of what each block returns is dropped, inside a checkpoint or without one."""

    def __init__(self, checkpointing: str | None) -> None:
        super().__init__(checkpointing=checkpointing)
        self.layers = nn.ModuleList(DropsHalf() for _ in range(3))


class DropsHalf(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), training=self.training)


def drops_loss(model: Any, rank: int, step: int) -> Tensor:
    """Other masks for each rank and step, and the same whatever runs the model."""
    torch.manual_seed(100 * step + rank)
    loss = net_loss(model, rank, step)
    torch.rand(1)  # what others draw between forward and backward
    return loss


@each_value(checkpointing=[None, "non-reentrant", "reentrant"], form=["compiled", "eager"])
@on_ranks(2)
def test_dropout(rank: int, checkpointing: str | None, form: str) -> None:
    """D-74: forward draws the masks of the replicated model, and recomputing draws them again."""
    build = functools.partial(Drops, checkpointing)
    want, want_losses = replicated(build, drops_loss)
    got, losses = (sharded if form == "eager" else compiled)(build, drops_loss)
    assert losses == want_losses
    assert_same(got, want)
    assert len(set(losses)) == len(losses)


def changing(change: Callable[[nn.Module, int], None]) -> Callable[[Any, int, int], Tensor]:
    """A loss before which `change(model, step)` is done to the model."""

    def loss(model: Any, rank: int, step: int) -> Tensor:
        change(model, step)
        return net_loss(model, rank, step)

    return loss


def freeze_in_turns(model: nn.Module, step: int) -> None:
    """All trained, a block and the head frozen, only those two trained, all trained."""
    for name, param in model.named_parameters():
        is_picked = "layers.1." in name or "head" in name  # a compiled module's have a prefix
        param.requires_grad_([True, not is_picked, is_picked, True][step])


def take_away(model: nn.Module, step: int) -> None:
    if step in (1, 3):
        del model.layers[1]


@pytest.mark.parametrize("change", [freeze_in_turns, take_away])
@pytest.mark.parametrize("form", ["eager", "compiled"])
@on_ranks(2)
def test_models_that_change_between_steps(rank: int, form: str, change: Any) -> None:
    """D-77, A64: a graph that was made for what the model was is not used again."""
    build = functools.partial(Net, tied=False)
    want, want_losses = replicated(build, changing(change))
    got, losses = (sharded if form == "eager" else compiled)(build, changing(change))
    assert losses == want_losses
    assert_same(got, want)


@each_value(options=[{}, {"topology": "gloo"}, {"topology": "gloo", "memory_budget": 10**6}])
@on_ranks(2)
def test_second_run_comes_from_the_cache(rank: int, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2,))  # whose group has the same name in both
    losses = []
    for _ in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        _, each = compiled(SmallNet, net_loss, steps=1, lowering="inductor", mesh=mesh, **options)
        losses.append(each)
    counted = torch._dynamo.utils.counters["inductor"]
    assert counted["fxgraph_cache_hit"] == 2, counted  # forward and backward
    assert losses[0] == losses[1]


class OneUneven(nn.Module):
    """Only a parameter that backward does not gather has other sizes on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


@on_ranks(2)
def test_ranks_with_other_sizes_do_not_share_graphs(rank: int) -> None:
    """Those whose inputs have the same sizes on each rank, but whose results have not."""
    mesh = init_device_mesh("cpu", (2,))

    def loss(model: Any, rank: int, step: int) -> Tensor:
        return model(torch.arange(4) + (rank + step) % 2).square().mean()

    want, want_losses = replicated(OneUneven, loss)
    for _ in range(2):
        torch._dynamo.reset()
        got, losses = compiled(OneUneven, loss, lowering="inductor", mesh=mesh)
        assert losses == pytest.approx(want_losses, rel=1e-5)
        assert_same(got, want, rtol=1e-5)


class Traced(nn.Linear):
    """Layer whose code is no part of torch: Dynamo skips that where it begins."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@on_ranks(2)
def test_backward_begins_in_a_compiled_block(rank: int) -> None:
    """It tells the step, which gathers ahead what eager blocks before it will need."""
    model: Any = nn.Sequential(nn.Linear(4, 6), Traced(6, 4), nn.Identity())
    for layer in model[:2]:
        autoshard.fully_shard(layer, reshard_after_forward=True)
    autoshard.fully_shard(model)
    in_form(model[1], "compiled")
    for _ in range(2):  # the first step learns the order
        output = model(torch.ones(2, 4, requires_grad=True)).sum()
        log = issued(output.backward)
    whose = [(each.kind, each.members[0].size) for each in log]
    assert whose.index(("gather", (6, 4))) < whose.index(("reduce", (4, 6)))
