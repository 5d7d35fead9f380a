"""autoshard.wrap: whichever modules are units, the model trains as the replicated one does."""

from functools import partial
from typing import Any

import pytest
import torch
from support.models import Block, Net, net_loss
from support.ranks import on_ranks
from support.selection import part_of
from support.training import adamw, assert_same, compiled, replicated, sharded, train
from torch import Tensor, nn

import autoshard
from autoshard import fully_shard
from autoshard.runtime.unit.param import find
from autoshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)


def kept_or_freed(module: nn.Module) -> bool | dict[str, Any]:
    if isinstance(module, nn.Embedding):
        return {"reshard_after_forward": False}
    return isinstance(module, Block)


BLOCKS = ["layers.0", "layers.1", "layers.2"]
INSIDE = [f"{block}.{name}" for block in BLOCKS for name in ("down", "norm", "up")]

POLICIES: dict[str, tuple[Any, list[str]]] = {
    "always": (always_wrap_policy, ["embed", "head", *BLOCKS, *INSIDE]),
    "classes": (ModuleWrapPolicy({nn.Linear}), ["head", *(n for n in INSIDE if "norm" not in n)]),
    "custom": (CustomPolicy(kept_or_freed), ["embed", *BLOCKS]),
    "function": (lambda module: isinstance(module, Block), BLOCKS),
    "lambda": (
        partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)),
        [f"{block}.norm" for block in BLOCKS],
    ),
    "size": (
        partial(size_based_auto_wrap_policy, min_num_params=49),
        ["embed", "head", *BLOCKS, *(f"{block}.up" for block in BLOCKS)],
    ),
    "transformer": (
        partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        BLOCKS,
    ),
}


# Compiled, a policy makes no difference but by the units it gives.
@pytest.mark.parametrize(
    ("name", "compile"),
    [*((name, False) for name in POLICIES), *((name, True) for name in part_of([*POLICIES], 6))],
)
@on_ranks(2)
def test_policies(rank: int, name: str, compile: bool) -> None:
    """Rows A31 to A38, with a tied parameter that two units read."""
    policy, units = POLICIES[name]
    want, want_losses = replicated(Net, net_loss)
    got, losses = (compiled if compile else sharded)(Net, net_loss, policy=policy)
    assert sharded_modules(got) == sorted(["", *units])
    assert losses == want_losses
    assert_same(got, want)


def sharded_modules(model: nn.Module) -> list[str]:
    return sorted(
        path for path, each in model.named_modules() if isinstance(each, autoshard.ShardedModule)
    )


class Wrapping(Net):
    """Names its units itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(wrap(Block()) for _ in range(2))
        self.head = wrap(nn.Linear(6, 11), reshard_after_forward=False)


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_a39_units_named_while_the_model_is_built(rank: int, compile: bool) -> None:
    want, want_losses = replicated(Wrapping, net_loss)
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=fully_shard, reshard_after_forward=True):
        model = wrap(Wrapping())
    assert sharded_modules(model) == ["", "head", "layers.0", "layers.1"]
    if compile:
        model.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    losses = train(model, net_loss, adamw(model))
    assert losses == want_losses
    assert_same(model, want)


class Around(nn.Module):
    """Calls a block that its parent calls too."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.own = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.block(x))


class InTwoPlaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = Block()
        self.around = Around(self.first)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.around(self.first(self.embed(ids))))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("policy", [ModuleWrapPolicy({Block, Around}), always_wrap_policy])
@on_ranks(2)
def test_a28_module_of_two_parents_one_of_them_a_unit(
    rank: int, policy: Any, compile: bool
) -> None:
    want, want_losses = replicated(InTwoPlaces, net_loss)
    got, losses = (compiled if compile else sharded)(InTwoPlaces, net_loss, policy=policy)
    assert {param.unit.name for param in params_of(got.first)} <= set(sharded_modules(got))
    assert "around" not in {param.unit.name for param in params_of(got.first)}
    assert losses == want_losses
    assert_same(got, want)


def params_of(module: nn.Module) -> list[Any]:
    found = [find(param) for param in module.parameters()]
    assert None not in found
    return found


class Attending(nn.Module):
    """`out_proj` is a unit that is never called: attention reads its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_a31_unit_that_is_never_called(rank: int, compile: bool) -> None:
    want, want_losses = replicated(Attending, net_loss)
    run = compiled if compile else sharded
    got, losses = run(Attending, net_loss, policy=always_wrap_policy)
    assert "attention.out_proj" in sharded_modules(got)
    assert losses == want_losses
    assert_same(got, want)


class Adapted(Net):
    """Frozen, but for a low-rank path in each block, as LoRA's."""

    def __init__(self) -> None:
        super().__init__(2, tied=False)
        self.requires_grad_(False)
        for layer in self.layers:
            layer.up = Adapter(layer.up)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_a40_frozen_and_trainable_parameters_in_one_unit(rank: int, compile: bool) -> None:
    want, want_losses = replicated(Adapted, net_loss)
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    got, losses = (compiled if compile else sharded)(Adapted, net_loss, policy=policy)
    assert losses == want_losses
    assert_same(got, want)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))


@on_ranks(2)
def test_a30_a_unit_without_parameters(rank: int) -> None:
    """`override_mixed_precision` makes them: norms that have buffers only."""
    want, want_losses = replicated(Normed, net_loss)
    torch.manual_seed(0)
    model = Normed()
    fully_shard(model.norm)
    fully_shard(model)
    assert train(model, net_loss, adamw(model)) == want_losses
    assert_same(model, want)
