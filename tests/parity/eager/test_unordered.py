"""`strict_order=False`: ranks may run other parts of a model in each step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.architectures import ARCHITECTURES, architecture_loss, without_dropout
from support.issue import kinds
from support.models import Net, tokens
from support.ranks import on_ranks
from support.selection import each_value
from support.training import (
    adamw,
    assert_same,
    average_gradients,
    in_both_forms,
    in_form,
    replicated,
    train,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.wrap import ModuleWrapPolicy


class Branches(Net):
    """Layers that are left out, and a head for each task: which, a step and a rank by itself.

    Nobody uses the last head.
    """

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__(tied=False, checkpointing=checkpointing)
        self.heads = nn.ModuleList(nn.Linear(11, 3) for _ in range(3))
        self.runs: tuple[int, ...] = (0, 1, 2)
        self.task = 0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            if number not in self.runs:
                continue
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        return self.heads[self.task](self.head(x))


def branches_loss(model: Any, rank: int, step: int) -> Tensor:
    choose = random.Random(100 * step + rank)
    model.runs = tuple(n for n in range(3) if choose.random() < 0.6)
    model.task = choose.randrange(2)
    ids = tokens(rank, step)
    return functional.cross_entropy(model(ids), ids.roll(-1) % 3)


def twice(model: Any, rank: int, step: int) -> Tensor:
    return branches_loss(model, rank, step) + branches_loss(model, rank, step + 40)


def trained(
    model: Any, rank: int, *, loss: Callable[..., Tensor], is_replicated: bool = False
) -> list[set[str]]:
    """Which parameters had a gradient, in each step; with an evaluation in between."""
    optimizer = adamw(model)
    found = []
    for step in range(6):
        loss(model, rank, step).backward()
        if is_replicated:
            average_gradients(model)
        found.append({n for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                branches_loss(model, rank, 77)
    return found


def arguments_of(strategy: str) -> dict[str, Any]:
    if not strategy.startswith("hybrid"):
        return {"strategy": strategy}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    return {"strategy": strategy, "mesh": mesh}


@each_value(
    strategy=["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"],
    form=["eager", "compiled", "inductor"],
    checkpointing=[None, "non-reentrant", "reentrant"],
    loss=[branches_loss, twice],
)
@on_ranks(2)
def test_branches_that_differ(
    rank: int, strategy: str, form: str, checkpointing: str | None, loss: Callable[..., Tensor]
) -> None:
    if checkpointing == "reentrant" and form != "eager":
        checkpointing = "non-reentrant"  # Dynamo breaks the graph at the other
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    want = Branches(checkpointing)
    had = trained(want, rank, loss=loss, is_replicated=True)
    torch.manual_seed(0)
    model = autoshard.shard(Branches(checkpointing), strict_order=False, **arguments_of(strategy))
    if form != "eager":
        in_form(model, "compiled", lowering="eager" if form == "compiled" else "inductor")
    assert trained(model, rank, loss=loss) == had
    assert not any(name.startswith("heads.2") for names in had for name in names)
    assert_same(model, want, rtol=1e-5 if form == "inductor" else 0.0)


@in_both_forms
@on_ranks(2)
def test_in_one_line_and_with_micro_batches(rank: int, form: str) -> None:
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    want = Branches()
    torch.manual_seed(0)
    model = Branches()
    options = {"lowering": "eager", "strict": True, "strict_order": False}
    call: Any = model
    if form == "eager":
        for layer in model.layers:
            autoshard.fully_shard(layer)
        autoshard.fully_shard(model)
        model.set_strict_order(False)
    else:
        call = torch.compile(model, backend="autoshard", options=options)
    for each in (want, call):
        optimizer = adamw(want if each is want else model)
        for step in range(4):
            if each is want:
                branches_loss(each, rank, 10 + step).backward()
            else:
                with call.no_sync():
                    branches_loss(each, rank, 10 + step).backward()
            branches_loss(each, rank, 20 + step).backward()
            if each is want:
                average_gradients(want)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, want)


@in_both_forms
@on_ranks(2)
def test_what_is_sent(rank: int, form: str) -> None:
    """Each unit is gathered once, at the beginning, and reduced once, at the end, on every rank."""
    model: Any = in_form(autoshard.shard(Branches(), strict_order=False), form)
    model.runs, model.task = ((0,), 0) if rank else ((1, 2), 1)
    losses: list[Tensor] = []
    assert kinds(lambda: losses.append(model(tokens(rank, 0)).sum())) == ["gather"] * 4
    assert kinds(losses[0].backward) == ["reduce"] * 4
    unit = model.layers[0].__dict__["_autoshard_unit"]
    assert unit.kept is None  # nothing stays whole after backward


def dropping() -> nn.Module:
    """A model of Hugging Face's whose encoder and decoder leave out layers, as by default."""
    torch.manual_seed(0)
    line = ARCHITECTURES["time_series_transformer"]
    config = transformers.TimeSeriesTransformerConfig(**line.config)
    assert config.encoder_layerdrop == config.decoder_layerdrop == 0.1
    return without_dropout(transformers.TimeSeriesTransformerForPrediction(config)).train()


def forecast_loss(model: Any, rank: int, step: int) -> Tensor:
    torch.manual_seed(60 + 10 * step + rank)  # from which layers are drawn
    return architecture_loss(model, "time_series_transformer", rank, step)


@in_both_forms
@on_ranks(2)
def test_layers_that_are_dropped_by_default(rank: int, form: str) -> None:
    """Of 24 layers and steps rank 0 leaves out four, rank 1 seven; two are left out by both."""
    torch._dynamo.config.recompile_limit = 64
    # AOTAutograd rounds some of its gradients otherwise than eager torch.
    backend = None if form == "eager" else "aot_eager"
    want, _ = replicated(dropping, forecast_loss, steps=6, backend=backend)
    model: Any = in_form(autoshard.shard(dropping(), strict_order=False), form, strict=False)
    train(model, forecast_loss, adamw(model), steps=6)
    assert_same(model, want)


@in_both_forms
@on_ranks(2)
def test_a_backward_finalized_by_hand(rank: int, form: str) -> None:
    """As pipelines do it: what this rank did not run is reduced then, too."""
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    want = Branches()
    torch.manual_seed(0)
    model: Any = in_form(autoshard.shard(Branches(), strict_order=False), form)
    optimizers = adamw(want), adamw(model)
    for step in range(3):
        branches_loss(want, rank, step).backward()
        average_gradients(want)
        model.set_requires_gradient_sync(False)
        branches_loss(model, rank, step).backward()
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, want)


@on_ranks(2)
def test_only_the_root_has_an_order(rank: int) -> None:
    model: Any = autoshard.shard(Branches())
    with pytest.raises(RuntimeError, match=r"on the root module, not on 'layers\.0'"):
        model.layers[0].set_strict_order(False)
    with pytest.raises(ValueError, match="strict_order should be a bool"):
        model.set_strict_order(1)


class Optional(nn.Module):
    """Blocks between a stem and a head, any of which a rank may leave out."""

    def __init__(self, *, has_ends: bool, checkpointing: str | None = None) -> None:
        super().__init__()
        self.stem: nn.Module = nn.Linear(6, 6) if has_ends else nn.Identity()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head: nn.Module = nn.Linear(6, 3) if has_ends else nn.Identity()
        self.runs: tuple[int, ...] = (0, 1, 2)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in self.runs:
            block = self.blocks[number]
            if self.checkpointing is None:
                x = x + block(x)
            else:
                again = self.checkpointing == "reentrant"
                x = x + checkpoint(block, x, use_reentrant=again)
        return self.head(x)


RUNS = [[(0, 1), (2,)], [(1,), (0, 2)], [(), (0,)], [(2,), (1,)]]  # by step and rank


def optional(**options: Any) -> tuple[Any, Any]:
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        pair.append(Optional(**options))
    return pair[0], pair[1]


def shard_blocks(model: Any) -> Any:
    policy = ModuleWrapPolicy({nn.Sequential})
    return autoshard.shard(model, policy=policy, strict_order=False)


def assert_trained_alike(
    model: Any, want: Any, rank: int, between: Callable[[], None] = lambda: None
) -> None:
    """Train both for some steps, `between` being called from forward to backward of `model`."""
    for each in (want, model):
        optimizer = adamw(each)
        for step in range(len(RUNS)):
            loss = optional_loss(each, rank, step)
            if each is model:
                between()
            loss.backward()
            if each is want:
                average_gradients(want)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, want)


def optional_loss(model: Any, rank: int, step: int) -> Tensor:
    model.runs = RUNS[step][rank]
    random = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, 6, generator=random, requires_grad=True)
    loss: Tensor = model(x).square().mean()
    return loss


@in_both_forms
@pytest.mark.parametrize("case", ["no parameters around", "frozen around", "reentrant"])
@on_ranks(2)
def test_a_rank_that_reaches_nothing(rank: int, case: str, form: str) -> None:
    """It gathers and reduces what others do, though no parameter of its own is read, or trained."""
    checkpointing = "reentrant" if case == "reentrant" else None
    want, model = optional(has_ends=case == "frozen around", checkpointing=checkpointing)
    for each in (want, model):
        each.stem.requires_grad_(False)
        each.head.requires_grad_(False)
    model = in_form(shard_blocks(model), form)
    assert_trained_alike(model, want, rank)


@in_both_forms
@on_ranks(2)
def test_resharded_in_between(rank: int, form: str) -> None:
    """Backward gathers the same again on all ranks, whatever each has reached."""
    want, model = optional(has_ends=True)
    model = in_form(shard_blocks(model), form)

    def reshard() -> None:
        for block in model.blocks:
            block.reshard()

    assert_trained_alike(model, want, rank, between=reshard)


@in_both_forms
@on_ranks(2)
def test_gradients_are_not_returned(rank: int, form: str) -> None:
    """Not all ranks reach a parameter whose gradient one of them asks for."""
    _, model = optional(has_ends=True)
    model = in_form(shard_blocks(model), form)
    params = list(model.parameters())
    with pytest.raises(NotImplementedError, match=r"autograd\.grad.*strict_order=False.*backward"):
        torch.autograd.grad(optional_loss(model, rank, 0), params, allow_unused=True)


@on_ranks(2)
def test_an_optimizer_in_backward(rank: int) -> None:
    want, model = optional(has_ends=True)
    shard_blocks(model)
    for param in model.parameters():
        own = torch.optim.SGD([param], lr=0.1)

        def update(param: Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        param.register_post_accumulate_grad_hook(update)
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    for step in range(len(RUNS)):
        optional_loss(model, rank, step).backward()
        optional_loss(want, rank, step).backward()
        average_gradients(want)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, want)
