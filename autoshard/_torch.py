"""Every private torch name that autoshard uses, and where it moved.

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
    """Have those functions leave `module` alone: around it they pass it by, and given it they raise
    AssertionError."""
    registry = module.__dict__.setdefault(REGISTRY_KEY, {})
    for name in DATA_PARALLEL:
        registry.setdefault(name, RegistryItem())


def contracts(module: torch.nn.Module) -> list[str]:
    """Which of those functions `module` was given to."""
    registry = module.__dict__.get(REGISTRY_KEY, {})
    return [name for name in DATA_PARALLEL if name in registry]


def checkpoint_name(model: torch.nn.Module, name: str) -> str:
    """What a parameter of `model` is called in a checkpoint: no wrapper's prefix is in it."""
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
    """Whether collectives of `group` on `device`, a CPU, are gloo's."""
    return device.type == "cpu" and isinstance(group._get_backend(device), dist.ProcessGroupGloo)


def all_gather_grouped(
    receive: list[torch.Tensor], send: list[torch.Tensor], group: Any
) -> list[dist.Work]:
    """Begin to gather each tensor of `send` into that of `receive`, in one call of the backend.

    In one each on devices for which gloo has no such call. Returns what to wait for, all of it.
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
    """Make a default process group of that many ranks, of which only this one exists.

    Collectives over it are done at once and change nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


class TraceAgain(UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis):
    """Raised by a backend: trace this frame again, the module it reads has changed.

    The first base makes Dynamo's frame conversion restart; the second is the one
    that `call_user_compiler` lets through unwrapped.
    """


def disable(function: _Function) -> _Function:
    """`function`, and all that it calls, never seen by Dynamo."""
    disabled: _Function = torch.compiler.disable(function)
    return disabled


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, which torch leaves untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward now running has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def dtensor_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], size: Sequence[int], dtype: torch.dtype
) -> Any:
    """Of a DTensor of whole, contiguous `size`."""
    whole = torch.empty(size, dtype=dtype, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def dtensor_of_spec(local: torch.Tensor, spec: Any) -> DTensor:
    """The DTensor of `spec` whose part on this rank is `local`, where it is.

    `DTensor.from_local` would move `local` to the mesh's device.
    """
    return DTensor(local, spec, requires_grad=False)


def join_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh of the axes of `meshes`, all of them slices of one. Raises RuntimeError if not."""
    joined: DeviceMesh = DeviceMesh._concatenate(meshes)
    return joined


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of one axis over all ranks of the axes `names` of `mesh`."""
    if len(names) == 1:
        return mesh[names[0]]
    flat: DeviceMesh = mesh[names]._flatten("_".join(names))
    return flat


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Cut along `dim`, where `split_factor` ranks of later axes had cut before."""
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def graph_task() -> int:
    """A number for the backward that this thread is inside, or -1."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether this thread is inside a backward."""
    return graph_task() != -1


def in_functorch() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_functorch() -> contextlib.AbstractContextManager[Any]:
    """Inside, no transform of torch.func sees what is done: tensors that are made are constants to
    it, with a graph of autograd's own."""
    context: contextlib.AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return context


def in_nested_backward() -> bool:
    """Whether a node of another backward has started the running one, as a reentrant checkpoint
    does."""
    calls, outermost = 0, sys._getframe()
    frame: FrameType | None = outermost
    while frame is not None:
        calls += frame.f_code is _RUN_BACKWARD
        outermost, frame = frame, frame.f_back
    # Threads of a device are autograd's own: the call that woke them stands in another one.
    return calls > (outermost.f_code is not _APPLY_BACKWARD)


def will_run(node: Any) -> bool:
    """Whether the running backward runs `node`, or has done so."""
    # torch's type information puts it on another class, here and below.
    return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]


def accumulates_gradient(leaf: Any) -> bool:
    """Whether the running backward will fill `.grad` at `leaf`, a node that accumulates."""
    return _leaf_use(leaf) is True


def returns_gradient(leaf: Any) -> bool:
    """Whether the running backward is a `torch.autograd.grad` that may want `leaf`'s gradient."""
    return _leaf_use(leaf) is None


def _leaf_use(leaf: Any) -> bool | None:
    try:
        return will_run(leaf)
    except RuntimeError:  # so says torch when autograd.grad() captures what arrives there
        return None


def compiled_node(outputs: Sequence[Any]) -> Any:
    """AOTAutograd's node behind `outputs`, of a compiled forward; None if it has no backward.

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
    """Where each tangent of the joint graph, in their order, is among the gradients that `node`, of
    AOTAutograd, is given."""
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
    """The (pack, unpack) pair that autograd would call now, or None."""
    pair: Any = _autograd._top_saved_tensors_default_hooks(False)
    return None if pair is None else (pair[0], pair[1])


def group_size(name: str) -> int:
    """World size of the process group that c10d registered under `name`."""
    return int(resolve_group(name).size())


def group_rank(name: str) -> int:
    """This process's rank in the process group registered under `name`."""
    return int(resolve_group(name).rank())


def group_ranks(name: str) -> list[int]:
    """Global ranks of the process group registered under `name`."""
    return dist.get_process_group_ranks(resolve_group(name))


def group_allocator(
    name: str, device: torch.device
) -> Callable[[int, torch.dtype, torch.device], torch.Tensor] | None:
    """What gives memory of the backend's own of that group; None if it has none."""
    backend = resolve_group(name)._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    return lambda numel, dtype, device: backend.allocate_tensor(numel, dtype=dtype, device=device)


def symmetric_memory(
    name: str, backend: str
) -> tuple[
    Callable[[int, torch.dtype, torch.device], torch.Tensor], Callable[[torch.Tensor, Any], object]
]:
    """What gives symmetric memory, and what has to be called with each buffer, and the group,
    before it is used. All ranks of the group call it."""
    import torch.distributed._symmetric_memory as symmetric

    set_backend: Callable[[str], None] = symmetric.set_backend  # type: ignore[assignment]
    set_backend(backend)
    dist.barrier(group=resolve_group(name))  # its communicator has to be there

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            return torch.empty(numel, dtype=dtype, device=device)

    return allocate, lambda tensor, group: symmetric.rendezvous(tensor, group=group.group_name)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long `group` waits for a collective; torch's default where its backend doesn't say."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return _c10d.default_pg_timeout


def is_checkpoint_hook(pack: Callable[..., Any]) -> bool:
    """Whether `pack` is what non-reentrant `torch.utils.checkpoint` installs."""
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint"


def is_recomputation_hook(pack: Callable[..., Any]) -> bool:
    """Whether it is what it installs when it runs a part of forward again."""
    return is_checkpoint_hook(pack) and pack.__qualname__.startswith("_recomputation_hook.")


def boxed(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """`gm`'s generated code, taking its inputs as a list that it empties.

    Boxed, an input dies after its last use; passed one by one, the caller's frame
    would keep every saved activation alive through the whole backward.
    """
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    forward = torch.fx.GraphModule(gm, gm.graph).forward

    return mark_boxed(lambda args: forward(args))


def mark_boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """`call`, which AOTAutograd is to give a list."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """One that generates code once that is wanted. Inductor wants it only to hash the graph."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def rename(node: torch.fx.Node, name: str) -> None:
    """Call `node` `name`, or, if another node of its graph is called that, `name` with a number."""
    node._rename(name)


def inductor_settings(**wanted: object) -> dict[str, object]:
    """Those of `wanted`, Inductor config keys with `__` for a dot, that this torch has."""
    from torch._inductor import config

    known = config.get_config_copy()
    named = {key.replace("__", "."): value for key, value in wanted.items()}
    return {key: value for key, value in named.items() if key in known}


@contextlib.contextmanager
def aot_settings(*, is_cached: bool = False) -> Iterator[None]:
    """What compilations need of AOTAutograd.

    Its cache skips our passes on a hit, so it is used only by who knows what they would say. And
    torch would put off a backward that can't be compiled to the first
    backward, when it is too late to fall back. And what is saved for a backward is not written to
    in it: with `retain_graph=True` there may be another one, which nobody knows of when it is
    compiled. (Left to itself, torch compiles it when it runs first, and fails if a later one
    retains what the first did not.)
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
    """Whether AOTAutograd's cache can be used for frames of ours: not where entries have their
    graphs in them, so that these have no name, nor where ranks of the user's wait for each other in
    passes that a hit skips.
    """
    functorch, dynamo = torch._functorch.config, torch._dynamo.config
    return bool(functorch.enable_autograd_cache) and not (
        functorch.bundled_autograd_cache
        or getattr(dynamo, "caching_precompile", False)
        or getattr(functorch, "_sync_decision_cross_ranks", False)
        or getattr(functorch, "_sync_cache_decision_cross_ranks", False)
    )


def ambient_dtypes() -> list[tuple[object, ...]]:
    """What dtypes of a graph depend on besides its inputs, as torch 2.11's cache forgets."""
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
    """Inductor's whole pipeline, with `joint_pass` last over the joint graph before it is
    partitioned, and `inner_compile` in place of its compiler of single graphs.

    key: all that these two depend on besides the graph; None: nothing is cached of the frame.
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
    """Inside, a graph with inputs like `example_inputs`, which are fake, can be lowered, though the
    compilation that it is of is over."""
    from torch._guards import TracingContext, detect_fake_mode, tracing

    with tracing(TracingContext(detect_fake_mode(example_inputs))):
        yield


def fresh_inductor_cache() -> contextlib.AbstractContextManager[Any]:
    """No kernel of earlier compilations is found, and those of later ones are removed at exit."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def cpu_allocations(profile: torch.profiler.profile) -> list[int]:
    """What was allocated on the CPU while `profile`, with `profile_memory`, ran: bytes, in the
    order of time, less than 0 where they were freed."""
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
    """Have `torch.distributed.fsdp.fully_shard` know a state of `module` that calls `finish` to
    reduce gradients: up to 2.13, torch.distributed.pipelining asks it for the state of a stage.
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
    """Have `module`, of FSDP2, go on while it gathers on a CPU, as it does on a GPU."""
    module._set_unshard_async_op(True)  # type: ignore[operator]


def inductor_cache_folder() -> str:
    """Where Inductor keeps kernels. Makes it; raises OSError where that can't be."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def is_to_local(node: torch.fx.Node) -> bool:
    """Whether `node`, of a graph that Dynamo made, is `DTensor.to_local()`.

    2.11 calls a function made for the arguments; later versions call the method.
    """
    if node.op == "call_method":
        return node.target == "to_local"
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "prim_to_local"


@contextlib.contextmanager
def more_inputs(graph: torch.fx.Graph, examples: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, `graph`, which Dynamo made, has more inputs behind the others, by their names.

    Dynamo, whose variables are behind the others, is not to see them.
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
    """Locals and globals, as it started, of the frame that Dynamo is tracing now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    return dict(output.local_scope), dict(output.global_scope)


def traced_code() -> str:
    """A name for the frame that Dynamo is tracing now, without a path: "Net.forward:12"."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    code = InstructionTranslator.current_tx().f_code
    return f"{code.co_qualname}:{code.co_firstlineno}"


def graph_break() -> tuple[str, str] | None:
    """(place, reason) of the graph break that ends the graph being compiled now, if one does."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    reason = getattr(InstructionTranslator.current_tx().output, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    stack = reason.user_stack
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place"
    return place, str(reason.reason).strip().splitlines()[0]


def watch_compile(backend: str, callback: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
    """From now on, `torch.compile(fn, backend=backend)` returns `callback(fn, compiled, options)`.

    fn: what was compiled: a module; or a function, or a method, also `forward` of the wrapper
    that torch.compile made of a module, for which this is called a second time.
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
    """The `_TorchCompileWrapper` of a Dynamo context: the backend's name, mode and options."""
    found: Any = getattr(context, "callback", None)
    while found is not None and not hasattr(found, "compiler_name"):
        found = getattr(found, "_torchdynamo_orig_backend", None)
    return found
