"""Private torch names that autoshard uses, all of them, and where they moved.

Everything else imports from here, so that a torch upgrade is a change to one
file. Each name was tried on torch 2.11.0, 2.13.0 and 2.15.0; a name that is
missing on some of them says so beside it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition as _partition
from torch._C import _autograd
from torch._dynamo.backends import common as _backends
from torch._dynamo.eval_frame import skip_code as skip_code
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis
from torch._dynamo.exc import (
    SkipFrame as SkipFrame,
)
from torch._dynamo.exc import (
    TensorifyScalarRestartAnalysis,
    UnspecializeRestartAnalysis,
)
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._higher_order_ops.effects import with_effects as with_effects
from torch._higher_order_ops.print import Print as Print
from torch._logging._internal import trace_structured_artifact as trace_structured_artifact
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.distributed import distributed_c10d as _c10d
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.checkpoint import state_dict as _checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

_Function = TypeVar("_Function", bound=Callable[..., Any])

aot_autograd: Callable[..., Any] = _backends.aot_autograd
min_cut_rematerialization_partition: Callable[..., Any] = _partition
push_saved_tensors_hooks: Callable[..., None] = _autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
# The ignores: torch has these two at run time, and its type information has not.
default_store: Callable[[], Any] = _c10d._get_default_store
default_group: Callable[[], dist.ProcessGroup] = _c10d._get_default_group
resolve_group: Callable[[Any], dist.ProcessGroup] = _c10d._resolve_process_group  # type: ignore[attr-defined]
HashStore: Callable[[], Any] = dist.HashStore  # type: ignore[attr-defined]
# What a GPU is given next begins that many of its cycles later.
spin_gpu: Callable[[int], None] = torch.cuda._sleep
# State-dict methods that torch.distributed.checkpoint is to look behind.
patched_state_dicts: set[Any] = _checkpoint._patched_state_dict

# They stand for an op that writes to what it takes, their first argument.
FUNCTIONALIZED: tuple[Any, ...] = (auto_functionalized, auto_functionalized_v2)

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer."""


DATA_PARALLEL = ("fully_shard", "replicate")
"""Composable functions of torch that take a module's parameters for themselves."""


def enter_contract(module: torch.nn.Module) -> None:
    """Have torch's `fully_shard` and `replicate` leave `module` alone.

    Given a module around it they skip it; given `module` itself they raise AssertionError.
    """
    registry = module.__dict__.setdefault(REGISTRY_KEY, {})
    for name in DATA_PARALLEL:
        registry.setdefault(name, RegistryItem())


def contracts(module: torch.nn.Module) -> list[str]:
    """Names of torch's functions `fully_shard` and `replicate`, if `module` was given to them."""
    registry = module.__dict__.get(REGISTRY_KEY, {})
    return [name for name in DATA_PARALLEL if name in registry]


def checkpoint_name(model: torch.nn.Module, name: str) -> str:
    """Name of a parameter of `model` in a checkpoint: no wrapper's prefix is in it."""
    (found,) = _checkpoint._get_fqns(model, name)
    return str(found)


# 2.13 renamed both and left the old spellings as deprecated wrappers; 2.11 has only the old ones.
all_gather_flat: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_flat: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def is_gloo_on_cpu(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether collectives of `group` on `device` are gloo's, on a CPU."""
    return device.type == "cpu" and isinstance(group._get_backend(device), dist.ProcessGroupGloo)


def all_gather_grouped(
    receive: list[torch.Tensor], send: list[torch.Tensor], group: Any
) -> list[dist.Work]:
    """Begin to gather each tensor of `send` into that of `receive`, in one call of the backend.

    gloo has such a call on CPUs only: on other devices there is one call a tensor. Returns the
    works, all of which have to be waited for.
    """
    device = receive[0].device
    if device.type != "cpu" and isinstance(group._get_backend(device), dist.ProcessGroupGloo):
        pairs = zip(receive, send, strict=True)
        return [all_gather_flat(*pair, group=group, async_op=True) for pair in pairs]
    # 2.13 renamed it; 2.11 has the old name alone.
    found = getattr(group, "all_gather_single_coalesced", None)
    return [(found or group.allgather_into_tensor_coalesced)(receive, send)]


_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_APPLY_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__


def pretend_ranks(world_size: int) -> None:
    """Make a default process group of `world_size` ranks, of which only this one exists.

    Collectives over it are done at once and change nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


class TraceAgain(UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis):
    """Exception by which a backend has Dynamo trace the frame again: a module it reads has changed.

    The first base makes Dynamo's frame conversion restart; the second is the one
    that `call_user_compiler` lets through unwrapped.
    """


def disable(function: _Function) -> _Function:
    """Wrap `function` so that Dynamo sees neither it nor what it calls."""
    disabled: _Function = torch.compiler.disable(function)
    return disabled


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call `function.apply(*args)`, which torch leaves untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward now running has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def dtensor_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], size: Sequence[int], dtype: torch.dtype
) -> Any:
    """Make the spec of a contiguous DTensor of global `size`."""
    whole = torch.empty(size, dtype=dtype, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def dtensor_of_spec(local: torch.Tensor, spec: Any) -> DTensor:
    """Return the DTensor of `spec` whose part on this rank is `local`, which is not moved.

    `DTensor.from_local` would move `local` to the mesh's device.
    """
    return DTensor(local, spec, requires_grad=False)


def join_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Join `meshes`, slices of one mesh, into one mesh of all their axes.

    Raises RuntimeError if they are no slices of one.
    """
    joined: DeviceMesh = DeviceMesh._concatenate(meshes)
    return joined


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of one axis over all ranks of the axes `names` of `mesh`."""
    if len(names) == 1:
        return mesh[names[0]]
    flat: DeviceMesh = mesh[names]._flatten("_".join(names))
    return flat


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Placement that cuts along `dim` after `split_factor` ranks of later mesh axes have cut it."""
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def graph_task() -> int:
    """Number of the backward that this thread is inside, or -1."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Tell whether this thread is inside a backward."""
    return graph_task() != -1


def in_functorch() -> bool:
    """Tell whether a transform of torch.func (grad, vmap, jvp, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_functorch() -> contextlib.AbstractContextManager[Any]:
    """Hide what is done in this context from transforms of torch.func.

    Tensors made inside are constants to them, with a graph of autograd's own.
    """
    context: contextlib.AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return context


def in_nested_backward() -> bool:
    """Tell whether a node of another backward has started the running one.

    A reentrant checkpoint does so.
    """
    calls, outermost = 0, sys._getframe()
    frame: FrameType | None = outermost
    while frame is not None:
        calls += frame.f_code is _RUN_BACKWARD
        outermost, frame = frame, frame.f_back
    # Threads of a device are autograd's own: the call that woke them stands in another one.
    return calls > (outermost.f_code is not _APPLY_BACKWARD)


def will_run(node: Any) -> bool:
    """Tell whether the running backward runs the autograd node `node`, or has done so."""
    # torch's type information puts it on another class, here and below.
    return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]


def accumulates_gradient(leaf: Any) -> bool:
    """Tell whether the running backward will fill `.grad` at `leaf`, a node that accumulates."""
    return _leaf_use(leaf) is True


def returns_gradient(leaf: Any) -> bool:
    """Tell whether the running backward is a `torch.autograd.grad` that may want `leaf`'s."""
    return _leaf_use(leaf) is None


def _leaf_use(leaf: Any) -> bool | None:
    try:
        return will_run(leaf)
    except RuntimeError:  # so says torch when autograd.grad() captures what arrives there
        return None


def compiled_node(outputs: Sequence[Any]) -> Any:
    """Find AOTAutograd's node behind `outputs` of a compiled forward; None if it has no backward.

    Behind a view that was made of an output it is one step further.
    """
    for each in outputs:
        fn = each.grad_fn if isinstance(each, torch.Tensor) else None
        behind = [fn, *(node for node, _ in fn.next_functions)] if fn is not None else []
        for node in behind:
            if isinstance(getattr(getattr(type(node), "_forward_cls", None), "_aot_id", None), int):
                return node
    return None


def tangent_positions(node: Any) -> list[int]:
    """Positions of the joint graph's tangents, in their order, among the gradients given to `node`.

    node: AOTAutograd's, of a compiled backward.
    """
    metadata = type(node)._forward_cls.metadata
    known: list[int] | None = getattr(metadata, _POSITIONS, None)
    if known is None:
        known = list(_tangent_positions(metadata))
        setattr(metadata, _POSITIONS, known)
    return known


_POSITIONS = "_autoshard_tangent_positions"


def _tangent_positions(metadata: Any) -> Iterator[int]:
    mutated, outputs = metadata.mutated_inp_runtime_indices, metadata.output_info
    for position, index in enumerate(mutated):
        info = metadata.input_info[index]
        if info.mutates_data and info.requires_grad:
            yield position
    kinds = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
    for position, info in enumerate(outputs, len(mutated)):
        # 2.12 and later tell one that needs no gradient of a backward that is traced.
        needs = getattr(info, "requires_grad_for_backward", info.requires_grad)
        if info.output_type in kinds and issubclass(info.raw_type, torch.Tensor) and needs:
            yield position
    first_base = len(mutated) + len(outputs)
    yield from range(first_base, first_base + metadata.num_intermediate_bases)


def saved_tensors_hooks_on_top() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the (pack, unpack) pair of hooks that autograd would call now, or None."""
    pair: Any = _autograd._top_saved_tensors_default_hooks(False)
    return None if pair is None else (pair[0], pair[1])


def group_size(name: str) -> int:
    """World size of the process group that c10d registered under `name`."""
    return int(resolve_group(name).size())


def group_rank(name: str) -> int:
    """Rank of this process in the process group registered under `name`."""
    return int(resolve_group(name).rank())


def group_ranks(name: str) -> list[int]:
    """Global ranks of the process group registered under `name`."""
    return dist.get_process_group_ranks(resolve_group(name))


def group_allocator(
    name: str, device: torch.device
) -> Callable[[int, torch.dtype, torch.device], torch.Tensor] | None:
    """Return a function that allocates memory of the backend's own, of the group called `name`.

    Its arguments are the number of elements, the dtype and the device. None if the backend has no
    such memory.
    """
    backend = resolve_group(name)._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    return lambda numel, dtype, device: backend.allocate_tensor(numel, dtype=dtype, device=device)


def symmetric_memory(
    name: str, backend: str
) -> tuple[
    Callable[[int, torch.dtype, torch.device], torch.Tensor], Callable[[torch.Tensor, Any], object]
]:
    """Return two functions for symmetric memory over the group called `name`.

    The first allocates: its arguments are the number of elements, the dtype and the device. The
    second has to be called with each buffer, and the group, before the buffer is used. All ranks of
    the group call all of this.
    """
    import torch.distributed._symmetric_memory as symmetric

    set_backend: Callable[[str], None] = symmetric.set_backend  # type: ignore[assignment]
    set_backend(backend)
    dist.barrier(group=resolve_group(name))  # its communicator has to be there

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            return torch.empty(numel, dtype=dtype, device=device)

    return allocate, lambda tensor, group: symmetric.rendezvous(tensor, group=group.group_name)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Timeout of collectives of `group`; torch's default if its backend doesn't have one."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return _c10d.default_pg_timeout


def is_checkpoint_hook(pack: Callable[..., Any]) -> bool:
    """Tell whether `pack` is a hook that non-reentrant `torch.utils.checkpoint` installs."""
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint"


def is_recomputation_hook(pack: Callable[..., Any]) -> bool:
    """Tell whether `pack` is such a checkpoint's hook while it runs a part of forward again."""
    return is_checkpoint_hook(pack) and pack.__qualname__.startswith("_recomputation_hook.")


def boxed(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the generated code of `gm` as a function of a list of inputs, which it empties.

    Boxed, an input dies after its last use; passed one by one, the caller's frame
    would keep every saved activation alive through the whole backward.
    """
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    forward = torch.fx.GraphModule(gm, gm.graph).forward

    return mark_boxed(lambda args: forward(args))


def mark_boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark `call`, and return it, so that AOTAutograd gives it a list of inputs."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Make a graph module whose code is generated when it is first needed.

    Inductor needs the code only to hash the graph.
    """
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def rename(node: torch.fx.Node, name: str) -> None:
    """Rename `node` to `name`, with a number added if another node of its graph is called that."""
    node._rename(name)


def inductor_settings(**wanted: object) -> dict[str, object]:
    """Select the settings of `wanted` that this version of torch has.

    wanted: keys of Inductor's config, with `__` for a dot.
    """
    from torch._inductor import config

    known = config.get_config_copy()
    named = {key.replace("__", "."): value for key, value in wanted.items()}
    return {key: value for key, value in named.items() if key in known}


@contextlib.contextmanager
def aot_settings(*, is_cached: bool = False) -> Iterator[None]:
    """Set up AOTAutograd for a compilation in this context.

    - Its cache skips our passes on a hit: `is_cached` is for callers that know what they would do.
    - A backward is compiled with its forward. torch would put off one that can't be compiled to the
      first backward, when it is too late to fall back.
    - Tensors saved for a backward are not written to in it: with `retain_graph=True` there may be
      another one, unknown at compile time. (By default torch compiles backward when it first
      runs, and fails if a later one retains what the first did not.)
    """
    with (
        torch._functorch.config.patch(
            enable_autograd_cache=is_cached, force_non_lazy_backward_lowering=True
        ),
        # Not by `donated_buffer`: it is asked again by backward, which then refuses.
        mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[]),
    ):
        yield


def caches_frames() -> bool:
    """Tell whether AOTAutograd's cache can be used for frames of ours.

    It can't if its entries contain their graphs, which then have no name, or if ranks are
    configured to wait for each other in passes that a hit skips.
    """
    functorch, dynamo = torch._functorch.config, torch._dynamo.config
    return bool(functorch.enable_autograd_cache) and not (
        functorch.bundled_autograd_cache
        or getattr(dynamo, "caching_precompile", False)
        or getattr(functorch, "_sync_decision_cross_ranks", False)
        or getattr(functorch, "_sync_cache_decision_cross_ranks", False)
    )


def ambient_dtypes() -> list[tuple[object, ...]]:
    """List the settings, besides a graph's inputs, that its dtypes depend on.

    The key of torch 2.11's cache lacks them.
    """
    devices = torch._C._autocast_supported_devices()
    return [
        (torch.get_default_dtype(),),
        *((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
    ]


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Any,
    *,
    inner_compile: Callable[..., Any],
    joint_pass: Callable[[torch.fx.GraphModule], torch.fx.GraphModule],
    mode: str | None,
    key: str | None,
) -> tuple[Callable[..., Any], list[str]]:
    """Compile `gm` with Inductor's whole pipeline, changed at two places.

    inner_compile: takes the place of Inductor's compiler of single graphs.
    joint_pass: runs last over the joint graph, before it is partitioned.
    key: all that these two depend on besides the graph; None: nothing of the frame is cached.

    Returns the compiled frame, and the names in Inductor's cache of the graphs in it.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.pattern_matcher import stable_topological_sort

    class JointPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            # Inductor's own passes before it, as that which finds attention, leave nodes that are
            # read before they are defined; it puts them in order after this one.
            stable_topological_sort(graph)
            assert graph.owning_module is not None
            joint_pass(graph.owning_module)

        def uuid(self) -> str | None:
            return key

    names: list[str] = []
    post_compile = CompiledFxGraph.post_compile

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(self._fx_graph_cache_key or "")
        post_compile(self, *args, **kwargs)

    with (
        aot_settings(is_cached=key is not None),
        mock.patch.object(CompiledFxGraph, "post_compile", noted),
    ):
        compiled: Any = compile_fx(
            gm,
            example_inputs,
            inner_compile=inner_compile,
            config_patches={
                **(list_mode_options(mode) if mode else {}),
                "joint_custom_post_pass": JointPass(),
            },
        )
    call: Callable[..., Any] = compiled
    return call, names


@contextlib.contextmanager
def tracing_again(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Allow a graph to be lowered in this context, though the compilation that it is of is over.

    example_inputs: fake, like the graph's inputs.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing

    with tracing(TracingContext(detect_fake_mode(example_inputs))):
        yield


def fresh_inductor_cache() -> contextlib.AbstractContextManager[Any]:
    """Use an empty Inductor cache in this context; kernels made in it are removed at exit."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def cpu_allocations(profile: torch.profiler.profile) -> list[int]:
    """List the bytes allocated on the CPU while `profile`, with `profile_memory`, ran.

    They are in the order of time, less than 0 where they were freed.
    """
    found = []
    assert profile.profiler is not None  # it has run
    results: Any = profile.profiler.kineto_results
    events = list(results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        is_allocation = event.tag == torch._C._profiler._EventType.Allocation
        if is_allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [num_bytes for _, num_bytes in sorted(found, key=lambda each: each[0])]


def stand_in_for_fsdp2(module: torch.nn.Module, finish: Callable[[], object]) -> None:
    """Have `torch.distributed.fsdp.fully_shard` find a state of `module`, to reduce gradients with.

    Up to 2.13, torch.distributed.pipelining asks it for the state of a stage.
    finish: what the state calls to reduce.
    """
    from torch.distributed._composable.contract import STATE_KEY
    from torch.distributed.fsdp import fully_shard

    group = SimpleNamespace(post_backward=lambda: None)
    state = SimpleNamespace(_root_post_backward_final_callback=finish)
    state._fsdp_param_groups, state._fsdp_param_group = [group], group  # since 2.13; in 2.11
    state._state_ctx = SimpleNamespace(all_states=[state])
    states = module.__dict__.setdefault(STATE_KEY, {})
    states[fully_shard.__wrapped__] = state  # type: ignore[attr-defined]


def overlap_gathers(module: torch.nn.Module) -> None:
    """Have FSDP2's `module` go on while it gathers on a CPU, as it does on a GPU."""
    module._set_unshard_async_op(True)  # type: ignore[operator]


def inductor_cache_folder() -> str:
    """Path of the folder where Inductor keeps kernels, made if missing.

    Raises OSError if it can't be made.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def is_to_local(node: torch.fx.Node) -> bool:
    """Tell whether `node`, of a graph that Dynamo made, is `DTensor.to_local()`.

    2.11 calls a function made for the arguments; later versions call the method.
    """
    if node.op == "call_method":
        return node.target == "to_local"
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "prim_to_local"


@contextlib.contextmanager
def more_inputs(graph: torch.fx.Graph, examples: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Add inputs to `graph`, which Dynamo made, for as long as the context lasts.

    examples: example values of the inputs, by name. They come behind the other inputs, which all
    stand for variables of Dynamo's; as these do not, Dynamo must not see them.
    """
    last = graph.find_nodes(op="placeholder")[-1]
    added: list[torch.fx.Node] = []
    for name, example in examples.items():
        with graph.inserting_after(added[-1] if added else last):
            added.append(graph.placeholder(name))
        added[-1].meta["example_value"] = example
        added[-1]._dynamo_source = None  # type: ignore[attr-defined]  # Dynamo's, on its own nodes
    try:
        yield
    finally:
        for node in added:
            graph.erase_node(node)


def traced_scope() -> tuple[dict[str, Any], dict[str, Any]]:
    """Locals and globals of the frame that Dynamo is tracing now, as they were when it started."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    return dict(output.local_scope), dict(output.global_scope)


def traced_code() -> str:
    """Name of the frame that Dynamo is tracing now, without a path: "Net.forward:12"."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    code = InstructionTranslator.current_tx().f_code
    return f"{code.co_qualname}:{code.co_firstlineno}"


def graph_break() -> tuple[str, str] | None:
    """Return (place, reason) of the graph break that ends the graph being compiled now, or None."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    reason = getattr(InstructionTranslator.current_tx().output, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    stack = reason.user_stack
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place"
    return place, str(reason.reason).strip().splitlines()[0]


def watch_compile(backend: str, callback: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
    """Have `torch.compile(fn, backend=backend)` return `callback(fn, compiled, options)` in future.

    fn: what was compiled: a module, a function or a method. For a module there is a second call,
    with the `forward` of the wrapper that torch.compile made of it.
    """
    from torch._dynamo.eval_frame import OptimizeContext

    cls: Any = OptimizeContext
    original = cls.__call__

    @functools.wraps(original)
    def call(self: Any, fn: Any) -> Any:
        compiled = original(self, fn)
        wrapper = _find_backend(self)
        if wrapper is None or wrapper.compiler_name != backend:
            return compiled
        return callback(fn, compiled, wrapper.kwargs.get("options") or {})

    cls.__call__ = call


def _find_backend(context: Any) -> Any:
    """Find the `_TorchCompileWrapper` of a Dynamo context: the backend's name, mode and options."""
    found: Any = getattr(context, "callback", None)
    while found is not None and not hasattr(found, "compiler_name"):
        found = getattr(found, "_torchdynamo_orig_backend", None)
    return found
