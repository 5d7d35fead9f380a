"""What torch does where we patch it: a test that fails says that a patch is no longer needed.

Each patch is described where it is made, most of them in `autoshard/_torch/`; CONTRIBUTING.md lists
them. That they work is tested elsewhere.
"""

from __future__ import annotations

import gc
import inspect
import operator
import time
import tomllib
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.caches import fresh_graphs
from support.faults_of_pages import CALLS, DEPTHS, faults, run_calls
from support.ranks import on_ranks
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounter
from torch.distributed import pipelining
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    _dtensor_spec,
    distribute_tensor,
)
from torch.nn.parallel import DistributedDataParallel

import autoshard
from autoshard import _torch
from autoshard.runtime.training.state_dict_names import keep_names

ROOT = Path(__file__).resolve().parent.parent.parent


def test_torch_refuses_a_second_backward() -> None:
    """Needed: the patch of `aot._donating_nothing`, in place of a setting."""
    passed = _torch.aot.aot_autograd(fw_compiler=lambda gm, inputs: _torch.fx.boxed(gm))

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with torch._functorch.config.patch(
            donated_buffer=False, force_non_lazy_backward_lowering=True
        ):
            return passed(gm, inputs)

    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    result = torch.compile(lambda x: x.sin().sin().sum(), backend=backend)(x)
    with pytest.raises(RuntimeError, match="non-empty donated buffers"):
        result.backward(retain_graph=True)


@on_ranks(2)
def test_torch_distributes_no_other_placements(rank: int) -> None:
    """Needed: the patch of `dtensor.distribute_also`."""

    class Other(Placement):
        pass

    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises((RuntimeError, TypeError, AssertionError)):
        distribute_tensor(torch.ones(3, 5), mesh, [Other()])


def test_layouts_spread_through_a_gather() -> None:
    """Needed: the patch of `inductor._layouts_end_at`."""
    from torch._inductor.graph import GraphLowering

    aten = torch.ops.aten
    graph = torch.fx.Graph()
    image, bucket, shard = map(graph.placeholder, ("image", "bucket", "shard"))
    bias = graph.call_function(aten.relu.default, (shard,))  # stands for an op with one result
    weights = graph.call_function(aten.split.Tensor, (bucket, 3))
    filters = graph.call_function(operator.getitem, (weights, 0))
    scale = graph.call_function(operator.getitem, (weights, 1))
    sizes = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    patches = graph.call_function(aten.convolution.default, (image, filters, bias, *sizes))
    scaled = graph.call_function(aten.mul.Tensor, (scale, patches))
    graph.output(scaled)
    lowering: Any = SimpleNamespace(module=torch.fx.GraphModule({}, graph))
    assert {scaled, shard} <= GraphLowering.find_nodes_prefer_channels_last(lowering)
    ours = (aten.split.Tensor, aten.relu.default)
    with _torch.inductor._layouts_end_at(lambda node: node.target in ours):
        preferring = GraphLowering.find_nodes_prefer_channels_last(lowering)
    assert {image, filters, bias, patches} == set(preferring)


def test_layouts_spread_through_an_order() -> None:
    """Needed: the same patch. What ops are kept behind tells nothing of theirs."""
    from torch._inductor.graph import GraphLowering

    aten = torch.ops.aten
    graph = torch.fx.Graph()
    image, bucket, beside = map(graph.placeholder, ("image", "bucket", "beside"))
    before = graph.call_function(aten.neg.default, (beside,))
    weights = graph.call_function(aten.split.Tensor, (bucket, 3))
    filters = graph.call_function(operator.getitem, (weights, 0))
    scale = graph.call_function(operator.getitem, (weights, 1))
    scaled = graph.call_function(aten.sin.default, (scale,))
    read = graph.call_function(aten.abs.default, (image,))
    sizes = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    patches = graph.call_function(aten.convolution.default, (read, filters, None, *sizes))
    graph.output((patches, scaled))
    module = torch.fx.GraphModule({}, graph)
    _torch.inductor.keep_nodes_behind(graph, {weights: [before], read: [before]})
    lowering: Any = SimpleNamespace(module=module)
    assert {before, beside, scaled} <= GraphLowering.find_nodes_prefer_channels_last(lowering)
    with _torch.inductor._layouts_end_at(lambda node: node.target is aten.split.Tensor):
        preferring = GraphLowering.find_nodes_prefer_channels_last(lowering)
    tensors = {node for node in preferring if node.op != "get_attr"}
    assert {node.name for node in tensors} == {"image", read.name, filters.name, patches.name}


def test_a_cached_frame_has_no_names() -> None:
    """Needed: the patch of `inductor._noting_names`."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    compiled: list[Any] = []
    inside: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        inside.append(compile_fx_inner(*args, **kwargs))
        return inside[-1]

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled.append(compile_fx(gm, list(inputs), inner_compile=inner))
        return compiled[-1]

    with (
        fresh_graphs(),
        torch._functorch.config.patch(
            enable_autograd_cache=True, force_non_lazy_backward_lowering=True
        ),
    ):
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3, requires_grad=True))
    assert len(compiled) == 2
    assert len(inside) == 2  # forward and backward, once: the second time nothing is compiled
    assert all(_torch.inductor.cached_as(graph) for graph in inside)
    assert _torch.inductor.cached_as(compiled[1]) is None


def test_a_backend_is_called_for_graphs_only() -> None:
    """Needed: the patch of `dynamo.watch_compile`."""
    calls: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        calls.append(gm)
        return gm.forward

    class Unseen(nn.Linear):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    torch._dynamo.reset()
    torch.compile(Unseen(2, 2), backend=backend)(torch.ones(1, 2))
    assert not calls


def test_a_layout_is_a_guard_in_python(fake_world: None) -> None:
    """Needed: the patch of `dynamo.may_leave_layouts_unguarded`."""
    weight = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Replicate()])
    compiled = torch.compile(lambda: weight.to_local() + 1, backend="eager")
    compiled()
    equal = _dtensor_spec.DTensorSpec._check_equals
    with mock.patch.object(
        _dtensor_spec.DTensorSpec, "_check_equals", autospec=True, side_effect=equal
    ) as asked:
        compiled()
    assert asked.called


def test_a_mesh_is_a_guard_in_python(fake_world: None) -> None:
    """Needed, but not on torch 2.11: the patch of `dynamo.may_leave_layouts_unguarded`."""
    mesh = init_device_mesh("cpu", (2,))
    one, other = (distribute_tensor(torch.ones(4), mesh, [Replicate()]) for _ in range(2))
    compiled = torch.compile(lambda: one.to_local() + other.to_local(), backend="eager")
    compiled()
    (entry,) = _debug_get_cache_entry_list(compiled.__wrapped__.__code__)
    is_guarded = ".device_mesh is " in str(entry.guard_manager)
    assert is_guarded == (_version(torch.__version__) != (2, 11))


HOOKS = """
def changed(tensor):
    return tensor * 1

def pack(tensor):
    changed(tensor)
    return tensor

def unpack(tensor):
    changed(tensor)
    return tensor
"""


def _run_as_it_is(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return (x.sin() * x).sum()


def test_hooks_are_compiled_unless_left_alone() -> None:
    """Needed: `dynamo.leave_alone`; and it does what it should."""

    def num_graphs(mark: Callable[[Any], Any]) -> int:
        torch._dynamo.reset()
        _torch.dynamo.skip_code(_run_as_it_is.__code__)
        hooks: dict[str, Any] = {}
        exec(HOOKS, hooks)  # new code, which has no mark yet
        graphs = CompileCounter()
        call = torch.compile(lambda x: _run_as_it_is(x), backend=graphs)
        pack, unpack = mark(hooks["pack"]), mark(hooks["unpack"])
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            call(torch.ones(3, requires_grad=True)).backward()
        return graphs.frame_count

    assert num_graphs(lambda hook: hook) == 1
    assert num_graphs(_torch.dynamo.leave_alone) == 0


@on_ranks(2)
def test_ddp_takes_shards_for_parameters(rank: int) -> None:
    """Needed: the entry that `fsdp.enter_contract` makes."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with mock.patch.object(_torch.fsdp, "enter_contract"):
        autoshard.fully_shard(model[0])
    replicate(model)
    # `replicate` has Dynamo split graphs from a forward's begin to its end, which a failure skips.
    with (
        mock.patch.object(DistributedDataParallel, "_active_ddp_module", None),
        pytest.raises(RuntimeError, match="cannot be multiplied"),
    ):
        model(torch.ones(1, 2))


@on_ranks(2)
def test_ddp_keeps_parameters(rank: int) -> None:
    """Needed: what `ddp.let_go` does. DDP holds what its module has given up."""
    model = nn.Linear(2, 2)
    ddp = DistributedDataParallel(model)
    before = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.ones(2, 2))
    gc.collect()
    assert before() is not None
    assert ddp.reducer is not None


def test_pipelines_look_for_the_state_of_fsdp2() -> None:
    """Needed: the stand-in of `fsdp.stand_in_for_fsdp2`, for as long as torch 2.13 is supported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = (each for each in project["dependencies"] if each.startswith("torch>="))
    assert _version(oldest.removeprefix("torch>=")) < (2, 14)
    asked = "fully_shard.state(" in inspect.getsource(pipelining.stage)
    assert asked == (_version(torch.__version__) < (2, 14))


def test_data_assigned_to_a_dtensor_is_lost(group_of_one: str) -> None:
    """Needed: `dtensor.write_assigned_data`."""
    mesh = init_device_mesh("cpu", (1,))
    tensor, other = (distribute_tensor(torch.full((2,), value), mesh) for value in (1.0, 2.0))
    torch.Tensor.data.__set__(tensor, other)
    assert tensor.to_local().tolist() == [1.0, 1.0]


def test_forward_methods_ask_for_the_state_of_fsdp2() -> None:
    """Needed: `fsdp.share_register_forward_method`, as torch's own asks any FSDPModule for it."""
    asked: list[str] = []

    class Unit(FSDPModule, nn.Module):
        def __new__(cls) -> Any:
            return object.__new__(cls)

        def _get_fsdp_state(self) -> Any:
            asked.append("state")
            raise NotImplementedError

        def embed(self) -> None: ...

    unit = Unit()
    inspect.unwrap(torch.distributed.fsdp.register_fsdp_forward_method)(unit, "embed")
    with pytest.raises(NotImplementedError):
        unit.embed()
    assert asked == ["state"]


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def test_recurrent_modules_keep_what_they_read() -> None:
    """Needed: the property of `nn.replaced_weights`."""

    read: list[Tensor] = []

    class Gathering(nn.LSTM):
        @property
        def weight_ih_l0(self) -> Tensor:
            read.append(torch.ones(12, 2))
            return read[-1]

    model = nn.LSTM(2, 3)
    model.__class__ = Gathering
    model(torch.ones(1, 2))
    kept = model._flat_weights[0]
    assert any(kept is each for each in read)  # and it would stay unsharded


def test_checkpoints_take_the_prefix_off() -> None:
    """Needed: the `state_dict` that `keep_names` puts on a module, and `checkpoint.look_behind`."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    compiled = torch.compile(model, backend="eager")
    assert list(compiled.state_dict()) == ["_orig_mod.0.weight"]
    keep_names(compiled)
    assert list(compiled.state_dict()) == list(get_model_state_dict(compiled)) == ["0.weight"]
    with (
        mock.patch.object(torch.distributed.checkpoint.state_dict, "_patched_state_dict", set()),
        pytest.raises(AssertionError, match="_orig_mod"),
    ):
        get_model_state_dict(compiled)


@on_ranks(2)
def test_torch_gives_no_advice_on_mixed_tensors(rank: int) -> None:
    """Needed: the hook of `outside.explain_uncaught`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as raised:
        nn.functional.linear(torch.ones(1, 2), weight)
    assert not getattr(raised.value, "__notes__", ())


def test_comm_debug_mode_counts_no_messages() -> None:
    from torch.distributed.tensor.debug import _comm_mode

    ops = torch.ops.c10d
    assert ops._allgather_base_ in _comm_mode.c10d_collective_ops
    assert not {ops.send, ops.recv_} & _comm_mode.c10d_collective_ops


@on_ranks(2)
def test_torch_names_no_rank(rank: int) -> None:
    """Needed: the patches of `dist.watch_waits`."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        with pytest.raises(RuntimeError) as raised:
            _torch.dist.wait_for_work(work)
        assert "rank" not in str(raised.value)
    else:
        time.sleep(2.0)


def test_python_maps_pages_again_and_again() -> None:
    """Somewhere, each call of a loop maps a piece for its frames, and its return unmaps it."""
    assert max(faults(run_calls, depth) for depth in DEPTHS) >= CALLS
