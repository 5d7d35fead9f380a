"""Scalar parameters, as CLIP's `logit_scale`: replicated in their unit, and reduced with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.models import tokens
from support.ranks import on_ranks
from support.selection import each_value
from support.training import (
    adamw,
    assert_same,
    average_gradients,
    compiled,
    in_both_forms,
    in_form,
    replicated,
    train,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

import autoshard


class Scaled(nn.Module):
    """A layer whose output is scaled by a parameter without dims."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(dim, dim), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.scale.exp()


class Scales(nn.Module):
    """Blocks with a scalar each, and one of the root's; and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(Scaled(5) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.fixed = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.head = nn.Linear(5, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.logit_scale + self.fixed


def scales_loss(model: Any, rank: int, step: int) -> Tensor:
    ids = tokens(rank, step)
    return functional.cross_entropy(model(ids), ids.roll(-1))


def arguments_of(strategy: str) -> dict[str, Any]:
    if not strategy.startswith("hybrid"):
        return {"strategy": strategy}
    shape = (2, 1) if strategy == "hybrid_shard" else (1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return {"strategy": strategy, "mesh": mesh}


@each_value(
    strategy=["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"],
    bucketing=["auto", "per_unit", "none"],
)
@on_ranks(2)
def test_scalars_are_trained(rank: int, strategy: str, bucketing: str) -> None:
    want, want_losses = replicated(Scales, scales_loss)
    arguments = arguments_of(strategy)
    torch.manual_seed(0)
    model = autoshard.shard(Scales(), **arguments)
    assert model.logit_scale.shape == ()
    assert set(model.logit_scale.placements) == {Replicate()}
    assert train(model, scales_loss, adamw(model)) == want_losses
    assert_same(model, want)
    got, losses = compiled(Scales, scales_loss, bucketing=bucketing, **arguments)
    assert losses == want_losses
    assert_same(got, want)


@on_ranks(2)
def test_scalars_with_inductor(rank: int) -> None:
    want, _ = replicated(Scales, scales_loss, backend="inductor")
    got, _ = compiled(Scales, scales_loss, lowering="inductor")
    assert_same(got, want)


@in_both_forms
@on_ranks(4)
def test_scalars_on_four_ranks(rank: int, form: str) -> None:
    """Sums of four have an order, which gloo takes as it likes; all compute with the first's."""
    want, _ = replicated(Scales, scales_loss)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Scales()), form)
    train(model, scales_loss, adamw(model))
    assert_same(model, want, rtol=1e-5)
    seen = [torch.empty(()) for _ in range(4)]
    model.unshard()
    dist.all_gather(seen, model.logit_scale.detach().clone())
    assert len({value.item() for value in seen}) == 1


@in_both_forms
@on_ranks(2)
def test_optimizers_state_before_sharding(rank: int, form: str) -> None:
    """AdamW's count of steps has the shape of a scalar parameter, and is no part of it."""

    def trained(model: Any, *, shards: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        optimizer = adamw(model)
        for step in range(4):
            if step == 2 and shards:
                call = torch.compile(
                    model, backend="autoshard", options={"lowering": "eager", "strict": True}
                )
            else:
                call = model if step < 2 or not shards else call
            scales_loss(call, rank, step).backward()
            if step < 2 or not shards:
                average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    torch.manual_seed(0)
    want, _ = trained(Scales(), shards=False)
    torch.manual_seed(0)
    got, optimizer = trained(Scales(), shards=True)
    assert_same(got, want)
    assert not any(isinstance(state["step"], DTensor) for state in optimizer.state.values())


@in_both_forms
@on_ranks(2)
def test_accumulation_and_clipping(rank: int, form: str) -> None:
    """Gradients that wait, and a norm in which a scalar counts once."""
    torch.manual_seed(0)
    want = Scales()
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Scales()), form)
    for each in (want, model):
        optimizer = adamw(each)
        for step in range(3):
            if each is model:
                with model.no_sync():
                    scales_loss(each, rank, 2 * step).backward()
            else:
                scales_loss(each, rank, 2 * step).backward()
            scales_loss(each, rank, 2 * step + 1).backward()
            if each is want:
                average_gradients(want)
                norms = [torch.nn.utils.clip_grad_norm_(want.parameters(), 0.5)]
            else:
                norms.append(model.clip_grad_norm_(0.5))
            optimizer.step()
            optimizer.zero_grad()
    assert norms[1] > 0.5
    # A norm over shards sums in another order than one over whole gradients.
    assert_same(model, want, rtol=1e-5)


@on_ranks(2)
def test_low_precision_and_the_state_dict(rank: int) -> None:
    """0-dim in the state dict and in a checkpoint; bf16 on the wire, in both forms."""
    policy = autoshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = []
    for form in ("eager", "compiled"):
        torch.manual_seed(0)
        model = in_form(autoshard.shard(Scales(), mp_policy=policy), form)
        train(model, scales_loss, adamw(model))
        models.append(model)
    assert_same(*models)
    state = models[0].state_dict()
    assert state["logit_scale"].shape == ()
    assert state["layers.1.scale"].full_tensor().shape == ()
    with models[0].full_params():
        assert not isinstance(models[0].logit_scale, DTensor)
        with torch.no_grad():
            models[0].logit_scale.fill_(3.0)
    assert models[0].logit_scale.full_tensor() == 3.0


@on_ranks(2)
def test_scalars_in_checkpoints(rank: int) -> None:
    paths: list[Any] = [None]
    if rank == 0:
        import tempfile

        paths = [tempfile.mkdtemp()]
    dist.broadcast_object_list(paths)
    model = autoshard.shard(Scales())
    optimizer = adamw(model)
    train(model, scales_loss, optimizer, steps=2)
    autoshard.save_checkpoint(Path(paths[0]), model, optimizer, step=2)
    again = autoshard.shard(Scales())
    optimizer = adamw(again)
    with torch.no_grad():
        again.logit_scale.fill_(9.0)
    assert autoshard.load_checkpoint(Path(paths[0]), again, optimizer) == 2
    assert_same(again, model)
    for each in (model, again):
        train(each, scales_loss, adamw(each) if each is model else optimizer, steps=1)
    assert torch.isfinite(again.logit_scale.full_tensor())
