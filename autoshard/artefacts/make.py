"""Making of an artefact: each call of a model is traced, planned and written, and none is run.

One process stands for rank 0 of ranks that are not there. Dynamo traces the call, as the backend
has it; what the graphs return is put together of stand-ins, which say what becomes of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoshard import _torch
from autoshard.artefacts import facts, guards, sources
from autoshard.artefacts.entry import Entry, Signature, built, described, kinds_of
from autoshard.artefacts.folder import Artefact, ArtefactError, given_options
from autoshard.artefacts.graphs import CannotBeKept, outputs_of, written
from autoshard.compilation import Compilation, has_backward
from autoshard.deciding import Decider
from autoshard.options import CompileSettings
from autoshard.runtime.compiled.frame import Frame, make_frame, sharded_parameters
from autoshard.runtime.eager.access import named_sharded
from autoshard.runtime.sharding.adopt import adopt_module
from autoshard.runtime.unit.param import ShardedParam, find
from autoshard.runtime.unit.unit import Unit, unit_of
from autoshard.runtime.unit.unsharded import keep

CALLS = ("train", "accumulate", "last", "evaluate")
"""Ways to call a model: a forward with its backward; one whose gradients wait; one that reduces
those that have waited, too; one without gradients."""


def make(
    folder: Path,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    options: Mapping[str, Any],
    mesh: tuple[int, int] | None = None,
    calls: Sequence[str] = ("train",),
) -> str:
    """Write an artefact of `calls` of `model` to `folder`; return its digest.

    The process has a group over ranks that are not there. `model` is sharded, if it is not; on the
    meta device it gets memory for shards, which is not written to. What torch has compiled before
    is reset.
    args, kwargs: of each call; sizes are those that the artefact is for.
    options: of the backend. mesh: replicas and shards, for the strategy "hybrid_shard".
    calls: of `CALLS`. For "evaluate" all modules are in eval mode; for others as they are.
    Raises ArtefactError for what can't be an artefact, ValueError for a wrong option.
    """
    given = given_options(options, mesh)
    adopt_module(model, given.shard_arguments())
    params = [find(param) for _, param in named_sharded(model)]
    known = [each for each in params if each is not None]
    if not known:
        raise ArtefactError("the model has no parameter that is sharded: there is nothing to plan")
    device = known[0].device
    if any(each.is_meta for each in model.parameters()):
        model.to_empty(device=device)
    settings = given.resolve(device)
    captures = []
    for call in calls:
        with _as(call, model):
            captures.append(_Capture(model, call, settings, args, kwargs))
    codes = [code for each in captures for code in each.codes]
    classes = {type(each) for each in model.modules()}
    classes |= {type(each) for capture in captures for each in capture.objects}
    try:
        names = sources.names_of(codes, classes)
    except sources.NoSource as error:
        raise ArtefactError(str(error)) from None
    found = {
        **facts.of_process(settings, device),
        **facts.of_model(model),
        **facts.of_sources(names),
    }
    texts = {name: text for each in captures for name, text in each.texts.items()}
    entries = [each.entry for each in captures]
    return Artefact(found, dict(options), mesh, names, entries, texts).write(folder)


@contextlib.contextmanager
def _as(call: str, model: Any) -> Iterator[None]:
    """Have `model` called as `call` says in this context.

    For "last", what stays unsharded between microbatches is gathered.
    """
    modes = {module: module.training for module in model.modules()}
    kept: list[Unit] = []
    try:
        if call == "evaluate":
            model.eval()
        if call == "last":
            units = {unit for module in model.modules() if (unit := unit_of(module)) is not None}
            with model.no_sync():
                kept += [unit for unit in units if unit.stays and not unit.is_unsharded_by_user]
            for unit in kept:
                keep(unit)
                unit.update_markers()
        waits = model.no_sync() if call == "accumulate" else contextlib.nullcontext()
        with torch.set_grad_enabled(call != "evaluate"), waits:
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for unit in kept:
            unit.kept = None
            unit.update_markers()


def call_model(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `model`: this is what Dynamo traces, so that guards name the model `model`."""
    return model(*args, **kwargs)


@dataclass
class _Graphs:
    """Findings of the backend, while Dynamo traced the call; graphs are those of `compilation`."""

    frame: Frame
    inputs: list[Any]
    stand_ins: list[Tensor]
    expressions: list[str]
    codes: list[CodeType]
    compilation: _Written


_OF_RANKS = frozenset({"get_rank", "get_local_rank", "get_group_rank", "get_coordinate"})
"""Functions whose results Dynamo takes for constants, and that differ by rank."""


class _Written(Compilation):
    """Compilation that writes its planned graphs as text.

    texts: by kind. trained, tangents: see `Entry`.
    """

    is_cached = False

    def __init__(self, frame: Frame, settings: CompileSettings, decider: Decider | None) -> None:
        """Begin as `Compilation` does."""
        super().__init__(frame, settings, decider=decider)
        self.texts: dict[str, str] = {}
        self.trained: list[bool] = []
        self.tangents: list[list[int]] = []

    def host_states(self) -> None:
        """Return None: where states live is for the process to say that trains."""

    def apply(self, gm: fx.GraphModule, graph: str) -> fx.GraphModule:
        """Plan a graph as `Compilation` does, and write it. Raises CannotBeKept."""
        self.trained, odd = _torch.aot.outputs_of_forward()
        if odd:
            raise CannotBeKept(f"{odd[0]}: return a copy, as clone() makes it")
        planned = super().apply(gm, graph)
        self.texts[graph] = written(planned, facts.tokens_of(self.frame.params))
        if graph == "backward":
            self.tangents = [
                list(node.meta["val"].stride())
                for node in planned.graph.find_nodes(op="placeholder")
                if node.name.startswith("tangents")
            ]
        return planned


class _Capture:
    """One call of a model, traced and planned.

    entry, texts: what is written of it. codes: of what was traced. objects: that were read.
    """

    def __init__(
        self,
        model: nn.Module,
        call: str,
        settings: CompileSettings,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Trace the call. Raises ArtefactError as `make`."""
        self.call, self.settings = call, settings
        try:
            takes, tensors = Signature(model).describe(args, kwargs)
            found, result = self._traced(model, args, kwargs)
            self.entry = self._entry(model, found, result, takes, tensors)
        except (CannotBeKept, guards.UnknownPath) as error:
            raise ArtefactError(f"call {call!r} of {type(model).__name__}: {error}") from None
        self.texts = {
            self.entry.graphs[graph]: text for graph, text in found.compilation.texts.items()
        }
        self.codes = found.codes
        values = (guards.value_at(path, model) for path in self.entry.reads)
        self.objects = [each for each in values if not guards.plain(each)]

    def _traced(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[_Graphs, Any]:
        """Trace the call, and lower its graphs: (what was found, the result, of stand-ins)."""
        found: list[_Graphs] = []
        failure: list[Exception] = []

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            """Plan the graphs of `gm`; return what gives stand-ins for its outputs."""
            try:
                found.append(self._planned(gm, example_inputs))
            except _torch.dynamo.RestartAnalysis:  # ours, or Dynamo's: it traces again
                raise
            except Exception as error:
                failure.append(error)
                raise
            stand_ins = tuple(found[-1].stand_ins)
            return lambda *given: stand_ins

        torch.compiler.reset()
        compiled = torch.compile(call_model, backend=backend, fullgraph=True, dynamic=False)
        try:
            result = compiled(model, args, kwargs)
        except Exception as error:
            if failure:
                raise failure[0] from None
            raise CannotBeKept(f"it can't be traced as one graph: {error}") from None
        if len(found) != 1:
            raise CannotBeKept("nothing in it could be traced")
        return found[0], result

    def _decides(self, example_inputs: Sequence[Any]) -> bool:
        """Tell whether to decide, under a memory budget, what forward hands to backward.

        That is as in `agreed_attempt`.
        """
        if not self.settings.searches or self.settings.budget_bytes is None:
            return False
        params = sharded_parameters(example_inputs)
        return bool(params) and has_backward(example_inputs)

    def _planned(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> _Graphs:
        """Plan and lower the graphs of `gm`, which Dynamo has just traced. Raises CannotBeKept."""
        changed = _torch.dynamo.effects()
        if changed:
            name = changed[0].replace("L['model']", "model")
            raise CannotBeKept(
                f"it sets {name}, which loaded code would not: write to a buffer in place, or "
                "set it outside of forward"
            )
        stand_ins = [torch.empty(0) for _ in outputs_of(gm)]
        inputs = list(example_inputs)
        frame = make_frame(gm, example_inputs)
        extended = [param.name for param in frame.params if param.is_extended]
        if extended:
            raise CannotBeKept(f"parameter {extended[0]} has an all-gather extension")
        codes = _torch.dynamo.codes()
        expressions = [*_torch.dynamo.guard_expressions(), *sources.variables_of(codes)]
        for code in codes:
            asked = _OF_RANKS.intersection(code.co_names)
            if asked and not sources.is_generated(code):
                raise CannotBeKept(
                    f"{code.co_qualname} asks for {min(asked)}(), and an artefact is one for all "
                    "ranks: give what differs as an argument, or keep it in a buffer"
                )
        decider = Decider() if self._decides(inputs) else None
        compilation = _Written(frame, self.settings, decider)
        compilation.compile()
        return _Graphs(frame, inputs, stand_ins, expressions, codes, compilation)

    def _entry(
        self, model: nn.Module, found: _Graphs, result: Any, takes: Any, tensors: list[Tensor]
    ) -> Entry:
        """Describe the call as data. Raises CannotBeKept, UnknownPath."""
        known = [*found.stand_ins, *tensors]
        returns = described(result, known)
        if len(known) > len(found.stand_ins) + len(tensors):
            raise CannotBeKept("it returns a parameter or a buffer: return a copy")
        again = list(known)
        if described(built(returns, known), again) != returns or len(again) > len(known):
            raise CannotBeKept(
                f"a {type(result).__name__} that it returns, or one in it, is made otherwise than "
                "by its parts alone: return a dict, a tuple or a plain dataclass"
            )
        paths = guards.paths_of(found.expressions, lambda path: guards.find(path, model))
        return Entry(
            call=self.call,
            takes=takes,
            tensors=kinds_of(tensors),
            returns=returns,
            inputs=_named_inputs(model, found.inputs, tensors),
            local=list(found.frame.local),
            table=_names(model, found.frame.params),
            stays=list(found.frame.stays),
            markers=markers_of(model, found.frame.params),
            modes=[name for name, module in model.named_modules() if module.training],
            trained=found.compilation.trained,
            tangents=found.compilation.tangents,
            graphs={graph: f"{self.call}.{graph}.txt" for graph in found.compilation.texts},
            plans=[plan.to_json() for plan in found.compilation.plans],
            reads=facts.of_reads(paths, model),
            ambient=facts.ambient(found.frame.params[0].device),
        )


def _named_inputs(
    model: nn.Module, inputs: Sequence[Any], tensors: Sequence[Tensor]
) -> list[list[Any]]:
    """Say of each input of a frame what it is; see `Entry.inputs`. Raises CannotBeKept."""
    params = {id(param): name for name, param in named_sharded(model)}
    buffers = {id(buffer): name for name, buffer in model.named_buffers()}
    args = {id(each): number for number, each in enumerate(tensors)}
    found: list[list[Any]] = []
    for value in inputs:
        if id(value) in params:
            found.append(["param", params[id(value)]])
        elif id(value) in buffers:
            found.append(["buffer", buffers[id(value)]])
        elif id(value) in args:
            found.append(["arg", args[id(value)]])
        else:
            what = f" of size {list(value.shape)}" if isinstance(value, Tensor) else ""
            raise CannotBeKept(
                f"it reads a {type(value).__name__}{what} that is no parameter, buffer or "
                "argument: make it a buffer, or give it as an argument"
            )
    return found


def _names(model: nn.Module, params: Sequence[ShardedParam]) -> list[str]:
    """Names of `params` in `model`."""
    names = {id(param): name for name, param in named_sharded(model)}
    return [names[id(each.param)] for each in params]


def markers_of(model: nn.Module, params: Sequence[ShardedParam]) -> dict[str, list[str]]:
    """Say, by name, how each of `params` is gathered and reduced; groups are tokens."""
    tokens = facts.tokens_of(params)
    return {
        name: [with_tokens(str(each), tokens) for each in arguments_of(param)]
        for name, param in zip(_names(model, params), params, strict=True)
    }


def arguments_of(param: ShardedParam) -> tuple[object, ...]:
    """Arguments of the markers of `param`, in the precision of its mode, and in full precision."""
    return (*param.marker_arguments, *param.marker_arguments_in_full)


def with_tokens(text: str, tokens: Mapping[str, str]) -> str:
    """Put tokens for the groups among the words of a marker's argument."""
    words = []
    for word in text.split(" "):
        flag, colon, group = word.rpartition(":") if word.startswith("cut:") else ("", "", word)
        words.append(f"{flag}{colon}{tokens.get(group, group)}")
    return " ".join(words)
