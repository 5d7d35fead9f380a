"""What stands in compiled graphs, and what does not: writes, and launches without an end."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import Net, net_loss
from support.programs import events_of
from support.ranks import on_ranks
from support.training import adamw, assert_same, in_both_forms, in_form, replicated, sgd, train
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.tensor import _dtensor_spec

import autoshard
from autoshard import _torch, compilation
from autoshard.passes.ir.match import is_launch, is_wait
from autoshard.runtime.eager import saved
from autoshard.runtime.unit.param import find


@contextmanager
def lowered_graphs() -> Iterator[list[fx.GraphModule]]:
    """Those that are lowered eagerly inside, in order."""
    graphs: list[fx.GraphModule] = []
    lower = compilation.lower_eagerly

    def note(gm: fx.GraphModule) -> Any:
        graphs.append(gm)
        return lower(gm)

    compilation.lower_eagerly = note
    try:
        yield graphs
    finally:
        compilation.lower_eagerly = lower


def writes(gm: fx.GraphModule) -> list[fx.Node]:
    """Calls of operators that write to an argument, or that nobody can tell of."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    operators = [node for node in calls if isinstance(node.target, torch._ops.OpOverload)]
    others = [node for node in gm.graph.nodes if node.op in ("call_method", "call_module")]
    return [*others, *(node for node in operators if node.target._schema.is_mutable)]


def trained(loss_of: Callable[..., Any], strategy: str) -> tuple[Any, list[fx.GraphModule]]:
    options = {
        "lowering": "eager",
        "bucketing": "per_unit",
        "strategy": strategy,
        "strict": True,
    }
    model = Net()
    call = torch.compile(model, backend="autoshard", options=options)
    with lowered_graphs() as graphs:
        train(call, loss_of, adamw(model), steps=2)
    return call, graphs


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2, compiles=True)
def test_graphs_write_to_no_parameter(rank: int, strategy: str) -> None:
    """D-70: gathered values are new tensors, and parameters are what they were."""
    call, graphs = trained(net_loss, strategy)
    assert len(graphs) == 2
    assert [writes(gm) for gm in graphs] == [[], []]
    params = [find(param) for param in call.parameters()]
    before = [(param.stamp, param.shard.data_ptr()) for param in params]
    net_loss(call, rank, 2).backward()
    assert [(param.stamp, param.shard.data_ptr()) for param in params] == before


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2, compiles=True)
def test_what_a_graph_launches_it_waits_for(rank: int, strategy: str) -> None:
    """D-71: backward needs no callback to end its reduces."""
    gc.collect()  # gradients that wait have one, those of models of other tests too
    queued: list[object] = []
    queue = _torch.autograd.queue_backward_callback
    _torch.autograd.queue_backward_callback = queued.append
    try:
        _, graphs = trained(net_loss, strategy)
    finally:
        _torch.autograd.queue_backward_callback = queue
    assert queued == [], queued
    assert len(graphs) == 2
    for gm in graphs:
        events = [node for node in gm.graph.nodes if is_launch(node) or is_wait(node)]
        assert events
        assert not any(map(is_launch, events[-1:]))
        for kind in ("gather", "reduce"):
            found = events_of(gm, kind)
            launched = sorted(bucket for what, bucket in found if what == "launch")
            assert launched == sorted(bucket for what, bucket in found if what == "wait")
    reduces = events_of(graphs[-1], "reduce")
    assert len(reduces) == 2 * 4


class Turned(nn.Module):
    """The gradient of its softplus comes transposed: torch traces other strides than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(self.layer(x)).transpose(1, 2).contiguous()


def turned_loss(model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, 12, 6, generator=generator)).square().sum()


@on_ranks(2)
def test_strides_other_than_traced(rank: int) -> None:
    """`aot_eager` raises here: "view size is not compatible with input tensor's size"."""
    want, _ = replicated(Turned, turned_loss)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Turned()), "compiled")
    train(model, turned_loss, adamw(model))
    assert_same(model, want)


class Attention(nn.Module):
    """Attention written out, which Inductor finds in the joint graph and replaces by one op."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).view(2, -1, 2, 4).permute(0, 2, 1, 3) for layer in self.layers[:3]
        )
        weights = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(4)
        mixed = torch.matmul(nn.functional.softmax(weights, dim=-1), value)
        mixed = mixed.permute(0, 2, 1, 3).contiguous().view(2, -1, 8)
        out: Tensor = self.layers[3](mixed)
        return out


def attention_loss(model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, 6, 8, generator=generator)).square().sum()


@on_ranks(2)
def test_attention_that_inductor_replaces(rank: int) -> None:
    """Its replacement is read before it is defined, until Inductor sorts the graph at the end."""
    want, _ = replicated(Attention, attention_loss, backend="inductor")
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = in_form(autoshard.shard(Attention()), "compiled", lowering="inductor")
    train(model, attention_loss, adamw(model))
    assert_same(model, want)


class Pair(nn.Module):
    """Two layers whose shards are of one size on the first of four ranks, and which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.longer, self.shorter = nn.Linear(4, 16), nn.Linear(4, 15)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.longer(x).sum() + self.shorter(x).sum()
        return total


@pytest.mark.parametrize("fake_world", [4], indirect=True)
def test_layouts_are_looked_at(fake_world: None) -> None:
    """By us, whenever the code runs: Dynamo does not see that two parameters have changed places,
    and asks no layout whether it is the one of before."""
    model: Any = in_form(autoshard.shard(Pair()), "compiled")
    model(torch.ones(1, 4))
    equal = _dtensor_spec.DTensorSpec._check_equals
    with mock.patch.object(
        _dtensor_spec.DTensorSpec, "_check_equals", autospec=True, side_effect=equal
    ) as asked:
        model(torch.ones(1, 4)).backward()
    assert not asked.called
    (entry,) = _debug_get_cache_entry_list(Pair.forward.__code__)
    assert ".device_mesh is " not in str(entry.guard_manager)
    for name in ("weight", "bias"):
        one, other = model.longer._parameters, model.shorter._parameters
        one[name], other[name] = other[name], one[name]
    with pytest.raises(RuntimeError, match=r"shorter\.weight stands where compiled code has"):
        model(torch.ones(1, 4))


class ReadsShard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        shard: Any = self.second._parameters["weight"]
        return self.first(x).sum() + 3 * shard.to_local().sum()


@in_both_forms
@on_ranks(2)
def test_a_parameter_that_is_read_as_a_shard(rank: int, form: str) -> None:
    """It is gathered by nobody, and its gradient is of the shard."""
    model: Any = in_form(autoshard.shard(ReadsShard()), form)
    model(torch.ones(1, 4)).backward()
    grad = model.second.weight.grad.to_local()
    assert torch.equal(grad, torch.full((2, 4), 3.0))


@on_ranks(2)
def test_a_mode_of_inductor(rank: int) -> None:
    """Micro-batches, with a hook that comes and one that goes between steps, in "max-autotune"."""

    def trained(**options: Any) -> Any:
        torch.manual_seed(0)
        model: Any = autoshard.shard(Net(layers=1))
        if options:
            model.compile(backend="autoshard", options=options)
        optimizer, hook = sgd(model), None
        for step in range(6):
            if step == 2:
                hook = model.head.weight.register_hook(lambda grad: grad * 2)
            if step == 4:
                assert hook is not None
                hook.remove()
            with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                net_loss(model, rank, step).backward()
            if step % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
        return model

    inductor = {"max_autotune_gemm_backends": "ATEN"}
    got = trained(mode="max-autotune", inductor=inductor, strict=True)
    assert_same(got, trained(), rtol=1e-5)  # Inductor rounds otherwise


@on_ranks(2)
def test_a_frame_has_no_saved_tensor_hooks(rank: int) -> None:
    """There is nothing for them to do: the graph gathers again itself."""
    for form in ("eager", "compiled"):
        model = in_form(autoshard.shard(Net()), form)
        with mock.patch.object(saved, "_pack", side_effect=saved._pack) as pack:
            net_loss(model, rank, 0).backward()
        assert pack.called is (form == "eager")


@on_ranks(2)
def test_models_that_are_alike_share_code(rank: int) -> None:
    """Each in one unit: Dynamo tells those apart whose modules have hooks. They have the same
    plans; and the numbers of a model that is trained alone, also where the code is not for it."""

    def trained(tied: bool, units: Sequence[str] = (), **arguments: Any) -> Any:
        torch.manual_seed(0)
        model = Net(tied=tied)
        for name in units:
            autoshard.fully_shard(model.get_submodule(name), **arguments)
        model = in_form(autoshard.fully_shard(model, **arguments), "compiled")
        train(model, net_loss, adamw(model))
        return model

    wanted = [replicated(functools.partial(Net, tied=tied), net_loss)[0] for tied in (False, True)]
    with lowered_graphs() as graphs:
        first = trained(False)
        assert len(graphs) == 2
        second = trained(False)
        assert len(graphs) == 2  # the same
        for others in (
            {"tied": True},  # one parameter in two places
            {"tied": False, "reshard_after_forward": True},
            {"tied": False, "units": ["layers.1"]},
        ):
            graphs.clear()
            assert_same(trained(**others), wanted[others["tied"]])
            assert len(graphs) == 2, others
    assert autoshard.plans(second) == autoshard.plans(first) != []
    for model in (first, second):
        assert_same(model, wanted[False])
