"""Clipping by the norm of all gradients is that of the replicated model, whatever holds them."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.models import SmallNet as Net
from support.models import net_loss
from support.ranks import on_ranks
from support.selection import each_value
from support.training import (
    assert_same,
    average_gradients,
    in_both_forms,
    in_form,
    local_rows_of,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autoshard
from autoshard.runtime.training.clip_grad_norm import clip_grad_norm_

OPTIONS = {"lowering": "eager", "strict": True}
ROUNDING = 1e-6  # the norm is summed in another order: a few units in the last place of f32
NORMS = [1.0, 2.0, 3.5, math.inf]

Clip = Callable[[nn.Module, float, float], Tensor]


def own(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    return model.clip_grad_norm_(max_norm, norm_type)


def torchs(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return total.full_tensor() if isinstance(total, DTensor) else total


def with_gradients(kind: str, rank: int) -> nn.Module:
    """A model after one backward: "replicated", "eager" or "compiled"."""
    torch.manual_seed(0)
    model = Net()
    if kind == "eager":
        autoshard.shard(model)
    call = (
        torch.compile(model, backend="autoshard", options=OPTIONS) if kind == "compiled" else model
    )
    net_loss(call, rank, 0).backward()
    if kind == "replicated":
        average_gradients(model)
    return model


def assert_gradients_close(got: nn.Module, want: nn.Module) -> None:
    theirs = dict(want.named_parameters())
    for name, param in got.named_parameters():
        expected = theirs[name].grad
        if expected is None:
            assert param.grad is None, name
            continue
        have = local_rows_of(param.grad, param.grad)
        torch.testing.assert_close(
            have, local_rows_of(expected, param), rtol=ROUNDING, atol=0.0, equal_nan=True
        )


def same_on_all_ranks(value: Tensor) -> bool:
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return all(torch.equal(value, other) for other in values)


@each_value(kind=["eager", "compiled"], norm_type=NORMS, clip=[own, torchs])
@on_ranks(2)
def test_equals_replicated(rank: int, kind: str, norm_type: float, clip: Clip) -> None:
    """D-40: the norm, a plain tensor, and what is left of the gradients; tied, uneven sizes."""
    want, got = with_gradients("replicated", rank), with_gradients(kind, rank)
    for max_norm in (1e6, 0.1):  # nothing to clip, then much
        expected = torchs(want, max_norm, norm_type)
        total = clip(got, max_norm, norm_type)
        assert not isinstance(total, DTensor)
        assert total.dtype == torch.float32
        assert total.shape == ()
        assert same_on_all_ranks(total)
        torch.testing.assert_close(total, expected, rtol=ROUNDING, atol=0.0)
        assert_gradients_close(got, want)


@on_ranks(2)
def test_training_with_clipping(rank: int) -> None:
    """D-40: it goes on as the replicated model does."""
    torch.manual_seed(0)
    want = Net()
    torch.manual_seed(0)
    got = autoshard.shard(Net())
    for model in (want, got):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            net_loss(model, rank, step).backward()
            if model is want:
                average_gradients(model)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            else:
                model.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(got, want, rtol=1e-5)


@on_ranks(2)
def test_one_collective(rank: int) -> None:
    """D-40: one all-reduce, however many parameters, also where no rank has a gradient."""
    model = with_gradients("eager", rank)
    calls = []

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return reduce(*args, **kwargs)

    reduce, dist.all_reduce = dist.all_reduce, counted
    try:
        model.clip_grad_norm_(1.0)
        model.zero_grad()
        model.clip_grad_norm_(1.0)
    finally:
        dist.all_reduce = reduce
    assert len(calls) == 2


@on_ranks(2)
def test_no_gradients(rank: int) -> None:
    """D-40: none at all, some, a part of the model, and a norm that is no norm."""
    model = autoshard.shard(Net(tied=False))
    assert model.clip_grad_norm_(1.0).item() == 0.0
    net_loss(model, rank, 0).backward()
    torch.manual_seed(0)
    want = Net(tied=False)
    torch.manual_seed(0)
    net_loss(want, rank, 0).backward()
    average_gradients(want)
    for each in (model, want):
        each.embed.weight.grad = None
        each.layers[1].zero_grad()
    for pick in (lambda m: m.layers[0], lambda m: m):
        total = pick(model).clip_grad_norm_(0.1)
        torch.testing.assert_close(total, torchs(pick(want), 0.1, 2.0), rtol=ROUNDING, atol=0.0)
    assert_gradients_close(model, want)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="norm_type should be greater than 0"):
            model.clip_grad_norm_(1.0, wrong)
    with model.full_params(), pytest.raises(RuntimeError, match="inside full_params"):
        model.clip_grad_norm_(1.0)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
@on_ranks(2)
def test_a_gradient_that_is_not_finite_on_one_rank(
    rank: int, norm_type: float, value: float
) -> None:
    """D-40: every rank learns of it, NaN with the largest value too."""
    want, got = with_gradients("replicated", rank), with_gradients("eager", rank)
    for model in (want, got):
        grad = model.layers[0].up.weight.grad
        if isinstance(grad, DTensor):
            if rank == 1:
                grad.to_local()[-1, 0] = value
        else:
            grad[-1, 0] = value
    total = got.clip_grad_norm_(1.0, norm_type)
    torch.testing.assert_close(
        total, torchs(want, 1.0, norm_type), rtol=ROUNDING, atol=0.0, equal_nan=True
    )
    assert_gradients_close(got, want)


class WithScale(Net):
    """A parameter that nobody shards, put in after sharding."""

    def scaled(self) -> nn.Parameter:
        self.scale = nn.Parameter(torch.tensor([3.0, -4.0]))
        self.scale.grad = torch.tensor([30.0, 40.0])
        return self.scale


@pytest.mark.parametrize("norm_type", NORMS)
@on_ranks(2)
def test_plain_parameters_count_once(rank: int, norm_type: float) -> None:
    """D-40: beside sharded ones, with the same gradient on every rank."""
    want, got = WithScale(), autoshard.shard(WithScale())
    for model in (want, got):
        model.scaled()
        generator = torch.Generator().manual_seed(3)
        for param in model.parameters():
            if param is model.scale:
                continue
            grad = torch.randn(param.shape, generator=generator)
            if isinstance(param, DTensor):
                grad = distribute_tensor(
                    grad, param.device_mesh, param.placements, src_data_rank=None
                )
            param.grad = grad
    total = got.clip_grad_norm_(1.0, norm_type)
    torch.testing.assert_close(total, torchs(want, 1.0, norm_type), rtol=ROUNDING, atol=0.0)
    assert_gradients_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@on_ranks(2)
def test_dtypes(rank: int, dtype: torch.dtype) -> None:
    """D-40: the norm of half-precision gradients is f32; of f64 ones it keeps their digits."""
    model = autoshard.shard(Net()).to(dtype)
    net_loss(model, rank, 0).backward()
    whole = [param.grad.full_tensor().double() for param in model.parameters()]
    want = torch.cat([grad.reshape(-1) for grad in whole]).norm()
    total = model.clip_grad_norm_(1.0)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    rounding = 1e-14 if dtype == torch.float64 else ROUNDING
    torch.testing.assert_close(total.double(), want, rtol=rounding, atol=0.0)


class Bag(nn.Module):
    """Parameters on any meshes, with gradients of the same layout."""

    def __init__(self, *layouts: tuple[object, list[object]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.whole = []
        for number, (mesh, placements) in enumerate(layouts):
            value, grad = torch.randn(2, 5, 3, generator=generator)
            self.whole.append(grad.clone())
            if mesh is not None:
                value = distribute_tensor(value, mesh, placements, src_data_rank=None)
                grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
            param = nn.Parameter(value)
            param.grad = grad
            self.register_parameter(f"p{number}", param)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@on_ranks(2)
def test_axes_that_replicate(rank: int, norm_type: float, shape: tuple[int, int]) -> None:
    """D-40: replicas are counted once; HSDP meshes (1, 2) and (2, 1), plain ones beside them."""
    hybrid = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    model = Bag(
        (hybrid, [Replicate(), Shard(0)]), (line, [Shard(0)]), (line, [Replicate()]), (None, [])
    )
    total = clip_grad_norm_(model, 0.5, norm_type)
    everything = torch.cat([grad.reshape(-1) for grad in model.whole])
    want = torch.linalg.vector_norm(everything, norm_type)
    torch.testing.assert_close(total, want, rtol=ROUNDING, atol=0.0)
    for param, grad in zip(model.parameters(), model.whole, strict=True):
        have = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        torch.testing.assert_close(have, grad * (0.5 / (want + 1e-6)), rtol=1e-5, atol=0.0)


@on_ranks(4)
def test_two_replicas_of_two_shards(rank: int) -> None:
    """D-40: as above where both axes are longer than one."""
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Bag((hybrid, [Replicate(), Shard(0)]), (hybrid, [Shard(0), Shard(1)]))
    want = torch.stack(model.whole).norm()
    total = clip_grad_norm_(model, 0.5, 2.0)
    torch.testing.assert_close(total, want, rtol=ROUNDING, atol=0.0)


@in_both_forms
@on_ranks(2)
def test_gradients_that_wait_are_not_clipped(rank: int, form: str) -> None:
    """They are none yet; and what waits is still there after the refusal."""
    grads = []
    for clips in (False, True):
        torch.manual_seed(0)
        model = in_form(autoshard.shard(Net()), form)
        with model.no_sync():
            net_loss(model, rank, 0).backward()
        if clips:
            with pytest.raises(RuntimeError, match=r"embed\.weight is waiting to be reduced"):
                model.clip_grad_norm_(1.0)
        net_loss(model, rank, 1).backward()
        model.clip_grad_norm_(1.0)
        grads.append([param.grad for param in model.parameters()])
    for without, after in zip(*grads, strict=True):
        assert torch.equal(without.to_local(), after.to_local())
