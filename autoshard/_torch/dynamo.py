"""Dynamo: the frame that it traces, the modules that it has compiled, and when it starts again.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame as _eval_frame
from torch._dynamo import convert_frame as _convert_frame
from torch._dynamo.eval_frame import skip_code as skip_code
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis
from torch._dynamo.exc import (
    SkipFrame as SkipFrame,
)
from torch._dynamo.exc import (
    TensorifyScalarRestartAnalysis,
    UnspecializeRestartAnalysis,
)
from torch._dynamo.exc import exceptions_allowed_to_be_fallback as _breaks
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._guards import CompileContext, TracingContext
from torch._logging._internal import trace_structured_artifact as trace_structured_artifact
from torch.distributed.tensor import DTensor

from autoshard._torch.autograd import in_functorch
from autoshard._torch.ops import is_observed

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NEW = (AttributeMutationNew, ValueMutationNew)  # of what a trace has made itself

break_graph: Callable[[], None] = torch._dynamo.graph_break


class TraceAgain(UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis):
    """Exception that a backend raises to have Dynamo trace the frame again.

    A module that the frame reads has changed, or the frame's plan has to. The first base makes
    Dynamo's frame conversion restart; the second is the one that `call_user_compiler` lets through
    unwrapped.
    """


def is_compiling() -> bool:
    """Tell whether Dynamo compiles in this thread: one thread of a process at a time does."""
    lock: Any = _convert_frame.compile_lock
    owned: bool = lock._is_owned()
    return owned


def waits_to_compile(innermost: FrameType) -> bool:
    """Tell whether a thread, other than the one that compiles, waits until it may.

    innermost: frame of that thread.
    """
    return innermost.f_globals.get("__name__") == _convert_frame.__name__


def compiles_now() -> bool:
    """Tell whether Dynamo compiles what it meets now.

    It does not where it is switched off, by its configuration or by `torch.compiler`, nor inside of
    a dispatch mode or of a transform of `torch.func`.
    """
    stance: str = torch._dynamo.eval_frame._stance.stance
    is_on = not torch._dynamo.config.disable and stance == "default"
    return is_on and not in_functorch() and not is_observed()


def breaks_graphs(error: Exception) -> bool:
    """Tell whether Dynamo takes `error`, raised by a backend, for a reason to run a frame eagerly.

    It says so to nobody.
    """
    return isinstance(error, _breaks)


def disable(function: _Function) -> _Function:
    """Wrap `function` so that Dynamo sees neither it nor what it calls."""
    disabled: _Function = torch.compiler.disable(function)
    return disabled


def leave_alone(function: _Function) -> _Function:
    """Have Dynamo neither compile `function`, nor what it calls, when it is called; returns it.

    Unlike `disable` it makes no wrapper, whose calls take some microseconds each.
    function: of Python's, which C++ calls, such as a hook.
    """
    code: Any = function.__code__  # type: ignore[attr-defined]  # it is one of Python's
    _eval_frame.set_code_exec_strategy(code, _SKIPPED)
    return function


_SKIPPED = _eval_frame._FrameExecStrategy(
    _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP
)


def recompiling(limit: int) -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo compile a frame up to `limit` times in this context."""
    context: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(
        recompile_limit=limit
    )
    return context


def compiled_module(module: object) -> torch.nn.Module | None:
    """Return the module in torch.compile's wrapper, or `module` itself after `module.compile()`.

    Returns None for anything else.
    """
    if isinstance(module, torch._dynamo.OptimizedModule):
        original: torch.nn.Module = module._orig_mod
        return original
    if isinstance(module, torch.nn.Module) and module._compiled_call_impl is not None:
        return module  # by its own method compile()
    return None


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

    They come behind the graph's other inputs. Those stand for variables that Dynamo knows; as the
    added ones do not, Dynamo must not see them.
    examples: example values of the inputs to add, by name.
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
    """Name of the frame that Dynamo is tracing now, without a path: "Net.forward:12".

    Of a decorator's frame around the forward of a module, that of the forward.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tx = InstructionTranslator.current_tx()
    code = tx.f_code
    owner = tx.output.local_scope.get(code.co_varnames[0]) if code.co_argcount else None
    if isinstance(owner, torch.nn.Module) and "<locals>" in code.co_qualname:
        function = type(owner).forward
        while hasattr(function, "__wrapped__"):
            is_around = function.__code__ is code
            function = function.__wrapped__
            if is_around:
                line = inspect.unwrap(function).__code__.co_firstlineno
                return f"{type(owner).__name__}.forward:{line}"
    return f"{code.co_qualname}:{code.co_firstlineno}"


def guard_expressions() -> list[str]:
    """List the Python expressions that code which is compiled now is guarded by, each once.

    Where it is guarded by whether a dict has a key, or an object an attribute of its own, that is
    one, too: `contains(dict, 'key')`, `holds(object, 'name')`. Only to be called by a backend.
    """
    found = set()
    for guard in TracingContext.get().guards_context.dynamo_guards.inner:
        if not guard.name:
            continue
        found.add(guard.name)
        named = getattr(guard.create_fn, "keywords", {})
        if isinstance(named.get("attr"), str):
            found.add(f"holds({guard.name}, {named['attr']!r})")
        key = named.get("key")
        if isinstance(key, (str, bytes, int)):
            found.add(f"contains({guard.name}, {key!r})")
    return sorted(found)


def codes() -> list[CodeType]:
    """List the code of all functions that were traced into the graph that is compiled now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return list(InstructionTranslator.current_tx().output.traced_code)


def effects() -> list[str]:
    """Name what the traced code changes besides tensors, such as a module's attributes.

    What it makes itself does not count, nor an attribute that gets a constant which it has.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects
    found = []
    for variable in effects.id_to_variable.values():
        if not effects.is_modified(variable) or isinstance(variable.mutation_type, _NEW):
            continue
        name = variable.source.name if variable.source is not None else type(variable).__name__
        stored = effects.store_attr_mutations.get(variable)
        if stored is None:
            found.append(str(name))
            continue
        value = getattr(variable, "value", None)
        found += [
            f"{name}.{attribute}"
            for attribute, new in stored.items()
            if not (
                new.is_python_constant()
                and new.as_python_constant() is getattr(value, attribute, _NEW)
            )
        ]
    return found


def graph_break() -> tuple[str, str] | None:
    """Return (place, reason) of the graph break that ends the graph being compiled now.

    Returns None if no break ends it. Only to be called by a backend, while Dynamo compiles.
    place: "file:line" of the user's code, or "an unknown place".
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    reason = getattr(InstructionTranslator.current_tx().output, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    stack = reason.user_stack
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place"
    return place, str(reason.reason).strip().splitlines()[0]


_unguarded: dict[Any, set[int]] = {}
"""Ids of layouts and meshes that need no guard, of the frame compiled now, by its number."""


def leave_layouts_unguarded(dtensors: Iterable[DTensor], others: Iterable[DTensor]) -> None:
    """Have code that is compiled now run without a look at the layouts of `dtensors`, its inputs.

    Nor does it compare their meshes with each other.
    Whoever calls this looks at them instead, whenever the code runs. Only to be called by a
    backend, while Dynamo compiles, and after `may_leave_layouts_unguarded`. What was left unguarded
    for other frames is forgotten, as their guards are made.
    others: inputs whose layouts are looked at, and that may share them with `dtensors`.
    """
    _unguarded.clear()
    specs = [each._spec for each in dtensors]
    ids = {id(spec) for spec in specs} - {id(each._spec) for each in others}
    ids |= {id(spec.mesh) for spec in specs}  # a user's DTensor is guarded by its own layout
    _unguarded[CompileContext.current_compile_id()] = ids


@functools.cache
def may_leave_layouts_unguarded() -> None:
    """Have Dynamo ask, of each layout that it is about to guard code by, whether it has to.

    Dynamo copies each layout, and compares it by a Python function, which keeps it from passing
    over modules that have not changed. Another such function asks of each parameter whether its
    mesh is still that of the first.

    Patched: `torch._dynamo.guards.GuardBuilder.DTENSOR_SPEC_MATCH` and `DUPLICATE_INPUT`, for good;
             they do nothing for layouts that were left unguarded, and their meshes, and for others
             what they did.
    Why:     Dynamo can leave guards out (`guard_filter_fn`), but then builds all of them twice.
    Tests:   `test_a_layout_is_a_guard_in_python`, `test_a_mesh_is_a_guard_in_python`, needed; in
             tests/parity/compiled/test_graphs.py `test_layouts_are_looked_at`, works.
    """
    builder: Any = GuardBuilder
    builder.DTENSOR_SPEC_MATCH = _unless_unguarded(builder.DTENSOR_SPEC_MATCH)
    builder.DUPLICATE_INPUT = _unless_unguarded(builder.DUPLICATE_INPUT)


def _unless_unguarded(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `original`, Dynamo's method that guards a value, to skip those in `_unguarded`.

    These are layouts and meshes, by id, of the frame that is being compiled.
    """

    @functools.wraps(original)
    def match(self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        """Guard the value by `original`, unless it was left unguarded for the frame of now."""
        ids = _unguarded.get(CompileContext.current_compile_id(), ())
        if not ids or id(self.get(guard)) not in ids:
            original(self, guard, *args, **kwargs)

    return match


def watch_compile(backend: str, callback: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
    """Have `torch.compile(fn, backend=backend)` return `callback(fn, compiled, options)` in future.

    fn: what is compiled: a module, a function or a method. For a module the callback is called
        twice: first with the module's `__call__`, or a function around it, and what it returns
        becomes the `forward` of torch.compile's wrapper; then with the module, and the wrapper.
    compiled: what torch.compile has made of `fn`.
    options: the backend's; empty if none are given. A mode that is given instead is one of them.

    Patched: `torch._dynamo.eval_frame.OptimizeContext.__call__`, for good; what other backends
             compile is returned as it is.
    Why:     a backend is called for a graph. torch has no hook for "this was compiled with backend
             X", and a model of which Dynamo captures nothing would train unsharded.
    Tests:   `test_a_backend_is_called_for_graphs_only`, needed; in
             tests/parity/sharding/test_composition.py `test_methods_before_the_first_call`, works.
    """
    from torch._dynamo.eval_frame import OptimizeContext

    cls: Any = OptimizeContext
    original = cls.__call__

    @functools.wraps(original)
    def call(self: Any, fn: Any) -> Any:
        """Compile `fn` as torch does; if the backend is ours, return what the callback does."""
        compiled = original(self, fn)
        wrapper = _find_backend(self)
        if wrapper is None or wrapper.compiler_name != backend:
            return compiled
        mode = wrapper.kwargs.get("mode")  # never beside options
        given = wrapper.kwargs.get("options") or ({"mode": mode} if mode else {})
        return callback(fn, compiled, given)

    cls.__call__ = call


def _find_backend(context: Any) -> Any:
    """Find the `_TorchCompileWrapper` of a Dynamo context: the backend's name, mode and options.

    Returns None if there is none.
    """
    found: Any = getattr(context, "callback", None)
    while found is not None and not hasattr(found, "compiler_name"):
        found = getattr(found, "_torchdynamo_orig_backend", None)
    return found
