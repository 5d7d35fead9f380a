"""The Dynamo backend: torch.compile(model, backend="autoshard").

Dynamo's graph -> make_frame -> AOTAutograd -> joint passes -> partition
  -> pipeline over the forward graph, and over the backward graph -> lower -> call
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autoshard import _torch, passes, plan_cache
from autoshard.options import CompileOptions
from autoshard.passes.dump import Dump
from autoshard.passes.ir import groups
from autoshard.passes.ir.match import is_gradient, is_marker, table_of
from autoshard.passes.ir.meta import PLAN
from autoshard.passes.ir.plan import Plan, show_bytes
from autoshard.passes.ir.text import render
from autoshard.passes.lowering.eager import lower_eagerly
from autoshard.passes.lowering.inductor import lower_inductor
from autoshard.passes.planner.keep import worth_keeping
from autoshard.passes.plans.auto_buckets import PRICED, PricedGraph
from autoshard.passes.plans.drafts import INNER
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.roofline import hint_of
from autoshard.progress import progress
from autoshard.runtime.compiled.frame import Frame, follow_replaced, make_frame, sharded_parameters
from autoshard.runtime.compiled.plans import record
from autoshard.runtime.compiled.unit_graphs import graphs_of
from autoshard.runtime.eager import access
from autoshard.runtime.ranks.agreement import Outcome, PlansDiffer, agree, first_difference, share
from autoshard.runtime.sharding import first_call
from autoshard.runtime.sharding.adopt import adopt, plain_parameters
from autoshard.runtime.unit.param import ShardedParam, find
from autoshard.runtime.unit.precision import cast_buffers

log = logging.getLogger(__name__)

MANY = 50_000  # objects
NEVER = 2**31 - 1  # so many collections of the middle generation make one of the old

# torch.compile(..., backend="autoshard") imports this module before it wraps what it is given.
first_call.watch_first_calls(lambda options: CompileOptions.read(options).shard_arguments())


def autoshard(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured; Dynamo finds this function by the entry point.

    A model that is not sharded yet is sharded here, in place, on its first graph.
    mode: one of Inductor's, "max-autotune" for instance.
    options: see `CompileOptions`.
    Raises ValueError for a wrong option; RuntimeError if ranks have other options, or compile
    other collectives. Anything else that goes wrong in tracing, a pass or the lowering is raised
    only with `strict`: otherwise it is one warning, and the frame runs on the eager runtime.
    """
    settings = CompileOptions.read(options)
    params = plain_parameters(example_inputs)
    if params:
        if adopt(params, settings.shard_arguments()):
            raise _torch.dynamo.TraceAgain(restart_reason="autoshard sharded the model")
        _warn_once(
            f"parameters of size {', '.join(str(list(p.shape)) for p in params)} were left out of "
            "fully_shard: they are not sharded, and their gradients are not reduced"
        )
    if follow_replaced(example_inputs):
        raise _torch.dynamo.TraceAgain(restart_reason="parameters were replaced after sharding")
    units = {param.unit for param in sharded_parameters(example_inputs)}
    were_cast = [cast_buffers(unit) for unit in units]
    if any(were_cast):
        raise _torch.dynamo.TraceAgain(restart_reason="buffers were cast")
    _log_graph_break()
    return _compile(gm, example_inputs, settings, mode)


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: CompileOptions, mode: str | None
) -> Callable[..., Any]:
    params = sharded_parameters(example_inputs)
    code = _torch.dynamo.traced_code()
    if params and params[0].unit.is_unordered:  # no collective in it, but who compiled it is told
        attempt, name = _Attempt(gm, example_inputs, settings, mode), code
    elif params:
        _check_bucketing(settings, params[0])
        attempt = _agreed_attempt(gm, example_inputs, settings, mode, params, code)
        unit = params[0].unit.name
        name = f"the graph of {code} ({', '.join([unit, *attempt.outcome.digests])})"
    else:  # it has no collective, and other ranks may not have it at all
        attempt, name = _Attempt(gm, example_inputs, settings, mode), code
    if attempt.reason is None:
        first_call.num_graphs += bool(params)
        for plan in attempt.plans:
            record((param.unit for param in attempt.compilation.frame.params), plan)
        _warn_beyond_budget(attempt, code)
        return attempt.compilation.frame.wrap(attempt.compiled, name)
    if settings.strict:
        raise attempt.failure or RuntimeError(attempt.reason)
    _warn_once(
        "autoshard could not compile a frame, which runs on the eager runtime instead: "
        f"{attempt.reason}"
    )
    raise _torch.dynamo.SkipFrame(attempt.reason)


class _Attempt:
    """Compilation of a frame, done or failed.

    reason: why it can't be used, here or on another rank; None if it can.
    """

    compilation: Compilation
    compiled: Callable[..., Any]
    failure: Exception | None = None
    reason: str | None = None
    plans: tuple[Plan, ...] = ()

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        settings: CompileOptions,
        mode: str | None,
        known: Sequence[Plan] = (),
        kept: Collection[str] = (),
    ) -> None:
        device = next((param.device for param in sharded_parameters(example_inputs)), None)
        self.options = settings.told(device)
        try:
            frame = make_frame(gm, example_inputs)
            self.compilation = Compilation(frame, settings, mode, known, kept)
            self.compiled = self.compilation.compile()
            self.plans = tuple(self.compilation.plans)
        except _torch.dynamo.RestartAnalysis:  # ours, or Dynamo's: as where a float has changed
            raise
        except Exception as error:
            self.failure = error
            self.reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"

    @property
    def outcome(self) -> Outcome:
        """Outcome of the compilation, for the other ranks."""
        return Outcome(
            self.reason,
            tuple(plan.digest for plan in self.plans),
            self.options,
        )

    def explained(self, error: PlansDiffer, name: str, mesh: DeviceMesh) -> PlansDiffer:
        """Add the first collective that differs to `error`; all ranks of `mesh` call this."""
        lines = [line for plan in self.plans for line in plan.launches()]
        difference = first_difference(name, lines, error.ranks[0], mesh)
        return PlansDiffer(f"{error}. Collective {difference}", error.ranks)


def _agreed_attempt(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: CompileOptions,
    mode: str | None,
    params: Sequence[ShardedParam],
    code: str,
) -> _Attempt:
    """Compile a frame so that all ranks have the same plans, or none can use the result.

    A search for plans depends on the batch at hand, which may differ from rank to rank, or in a
    later call on one rank alone. So plans that ranks have agreed on are kept for the frame; and if
    ranks found different ones, all trace the frame again and follow the first rank's. The same
    holds for the parameters that are kept for backward, which are chosen once, before anything
    else.
    """
    unit = params[0].unit
    name, mesh = f"{unit.identity}/{code}", unit.axes.mesh
    key = f"{name} {settings.lowering} {settings.topology} {settings.memory_budget}"
    graphs = graphs_of(unit)
    known = graphs.known_plans.setdefault(key, [])
    searches = settings.searches_for(params[0].device)
    may_keep = searches and settings.memory_budget is not None
    if may_keep and key not in graphs.kept_params and _is_whole_step(params, example_inputs):
        worth = _worth_keeping(gm, example_inputs, settings, mode)
        worth = json.loads(share(name, json.dumps(worth), mesh, is_first=True))
        log.info("%s keeps for backward: %s", code, ", ".join(worth) or "nothing")
        graphs.kept_params[key] = frozenset(worth)
        raise _torch.dynamo.TraceAgain(restart_reason="what to keep for backward was decided")
    kept = graphs.kept_params.get(key, frozenset())
    attempt = _Attempt(gm, example_inputs, settings, mode, known, kept)
    try:
        attempt.reason = agree(name, attempt.outcome, mesh, graphs.agreed)
    except PlansDiffer as error:
        if not searches:
            raise attempt.explained(error, name, mesh) from None
        found = [dataclasses.replace(plan, figures=None) for plan in attempt.plans]
        is_followed = {plan.digest for plan in found} <= {plan.digest for plan in known}
        # The first rank says for all whether there is anything new to follow.
        text = "" if is_followed else json.dumps([plan.to_json() for plan in found])
        text = share(name, text, mesh)
        if not text:  # one of them has another graph
            raise attempt.explained(error, name, mesh) from None
        known[:0] = map(Plan.from_json, json.loads(text))
        raise _torch.dynamo.TraceAgain(restart_reason="ranks follow the first one's plan") from None
    if searches and attempt.reason is None:
        digests = {plan.digest for plan in known}
        new = (plan for plan in attempt.plans if plan.digest not in digests)
        known += [dataclasses.replace(plan, figures=None) for plan in new]
    return attempt


def _is_whole_step(params: Sequence[ShardedParam], example_inputs: Sequence[Any]) -> bool:
    """Tell whether a frame with these inputs has a backward, and all parameters of the model.

    Otherwise parameters that several frames keep would add up, and no frame knows of the others.
    """
    own = {id(param.param) for param in params}
    sharded = (each for each in access.root_of(params[0]).parameters() if find(each) is not None)
    return _has_backward(example_inputs) and all(id(each) in own for each in sharded)


def _has_backward(inputs: Sequence[Any]) -> bool:
    tensors = (value for value in inputs if isinstance(value, torch.Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _worth_keeping(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: CompileOptions, mode: str | None
) -> Sequence[str]:
    """Names of the parameters that forward should keep unsharded for backward.

    Predicted by this rank alone. `gm` is used up.
    """
    drawn = dataclasses.replace(settings, bucketing="per_unit", dump=None)
    try:
        draft = Draft(make_frame(gm, example_inputs), drawn, mode)
        draft.compile()
        return draft.worth_keeping()
    except _torch.dynamo.RestartAnalysis:
        raise
    except Exception:  # the compilation will meet it, too, and tell all ranks
        return ()


def _warn_beyond_budget(attempt: _Attempt, code: str) -> None:
    """Warn once if the plan exceeds the memory budget.

    That is so if no plan keeps to it, or a batch is larger than the one a plan was found with.
    """
    compilation = attempt.compilation
    prices = compilation.prices
    if compilation.options.bucketing != "auto" or not attempt.plans:
        return
    if prices is None or prices.budget_bytes is None:
        return
    plan = max(attempt.plans, key=lambda plan: plan.peak_bytes)
    beyond = plan.peak_bytes - prices.budget_bytes
    if beyond > 0:
        log.info("the %s graph: %s beyond the budget", plan.graph, show_bytes(beyond))
        _warn_once(
            f"a graph of {code} is predicted to need more memory than option 'memory_budget' "
            "allows: take a larger budget, a smaller batch, or activation checkpointing; and where "
            "batches differ, begin with the largest"
        )


def _check_bucketing(settings: CompileOptions, param: ShardedParam) -> None:
    """Raise ValueError if a list of module names has one that the model of `param` lacks."""
    if isinstance(settings.bucketing, str):
        return
    root = access.root_of(param)
    valid = {name for name, _ in (*root.named_modules(), *root.named_parameters())}
    given = [
        name
        for entry in settings.bucketing
        for name in ([entry] if isinstance(entry, str) else entry)
    ]
    unknown = [name for name in given if name not in valid]
    if unknown:
        top = [name for name, _ in root.named_children()]
        raise ValueError(
            f"option 'bucketing' for backend 'autoshard' names {unknown}, which the model has not; "
            f"expected names from model.named_modules(), such as {top[:8]}"
        )


Lowered = Callable[[list[Any]], Any]
"""A lowered graph: it takes its inputs as a list."""

Watcher = Callable[[fx.GraphModule, str, Lowered, Callable[[fx.GraphModule], Lowered]], Lowered]
"""Function that gives what is to run in place of a lowered graph.

It takes the planned graph, its kind, what it was lowered to, and what lowers a part of it that has
the same inputs."""

_watchers: list[Watcher] = []


@contextlib.contextmanager
def watch_lowered(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` with every graph that is compiled in the context; none comes from a cache."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _watched(
    gm: fx.GraphModule, graph: str, call: Any, lower: Callable[[fx.GraphModule], Lowered]
) -> Any:
    for watcher in _watchers:
        call = _torch.aot.mark_boxed(watcher(gm, graph, call, lower))
    return call


class Compilation:
    """Compilation of one frame: its graphs share a table of parameters and the options.

    known: plans that "auto" follows where one is of such a graph.
    kept: names of parameters that are kept unsharded for backward, however their units reshard.
    """

    _numbers = itertools.count()
    is_cached = True  # by torch, between processes

    def __init__(
        self,
        frame: Frame,
        options: CompileOptions,
        mode: str | None,
        known: Sequence[Plan] = (),
        kept: Collection[str] = (),
    ) -> None:
        self.frame = frame
        self.options = options
        self.mode = mode
        self.known = known
        self.kept = kept
        self.number = next(self._numbers)
        self.table = frame.table()
        pairs = list(zip(frame.params, self.table, strict=True))
        self.axes = {param.group: info.axis for param, info in pairs}
        self.axes |= {param.reduce_group: info.reduce_axis for param, info in pairs}
        smaller = (param.unit.settings.smaller for param in frame.params)
        self.axes |= {axes.shard_group: INNER for axes in smaller if axes is not None}
        self.prices = self._prices()
        self.plans: list[Plan] = []  # filled as graphs are compiled
        self.priced: dict[str, PricedGraph] = {}  # likewise, by kind
        self._begins: Callable[[str], None] = lambda graph: None

    def _prices(self) -> Prices | None:
        """Prices to plan with, from sizes, options and the kind of device: the same on every rank.

        None if no topology is known.
        """
        params, budget = self.frame.params, self.options.memory_budget
        topology = self.options.topology_for(params[0].device) if params else None
        if topology is None:
            return None
        if isinstance(budget, float):
            budget = int(budget * topology.memory_bytes)
        if budget is not None:  # a gradient, and two states of an optimizer
            trained = (param for param in params if param.param.requires_grad)
            budget -= 3 * sum(_shard_bytes(param) for param in trained)
        return Prices(topology, self.options.lowering == "inductor", budget)

    def compile(self) -> Callable[..., Any]:
        """Compile the frame's graph to a callable with the same inputs and outputs."""
        code = _torch.dynamo.traced_code()
        begins = progress(code, self._num_graphs())
        with self.frame.with_more_inputs(), _old_objects_stay(), begins as self._begins:
            if self.options.lowering == "eager":
                return self._compile_eagerly()
            return self._compile_inductor()

    def _num_graphs(self) -> int:
        """Number of graphs to compile: forward and backward, or one for inference."""
        return 2 if _has_backward(self.frame.inputs) else 1

    def _compile_eagerly(self) -> Callable[..., Any]:
        def lower(graph: str) -> Callable[..., Any]:
            def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
                gm = self.apply(gm, graph)
                return _watched(gm, graph, lower_eagerly(gm), lower_eagerly)

            return compiler

        backend = _torch.aot.aot_autograd(
            fw_compiler=lower("forward"),
            bw_compiler=lower("backward"),
            inference_compiler=lower("inference"),
            partition_fn=self._partition,
            keep_inference_input_mutations=True,
        )
        with _torch.aot.settings():
            compiled: Callable[..., Any] = backend(self.frame.gm, self.frame.inputs)
        return compiled

    def _compile_inductor(self) -> Callable[..., Any]:
        is_lowered = False

        def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
            nonlocal is_lowered
            is_lowered = True
            graph = "inference" if kwargs.get("is_inference") else "forward"
            graph = "backward" if kwargs.get("is_backward") else graph
            gm = self.apply(gm, graph)
            compiled = self.lower_inductor(gm, example_inputs, **kwargs)
            name = _torch.inductor.cached_as(compiled)
            if name is not None:
                plan_cache.save(name, PLAN.get(gm))

            def lower(part: fx.GraphModule) -> Lowered:
                with _torch.inductor.tracing_again(example_inputs):
                    lowered: Lowered = lower_inductor(part, example_inputs, **kwargs)
                    return lowered

            return _watched(gm, graph, compiled, lower)

        call, names = _torch.inductor.compile_frame(
            self.frame.gm,
            self.frame.inputs,
            inner_compile=inner,
            joint_pass=self._joint,
            mode=self.mode,
            key=self._cache_key(),
        )
        if not is_lowered:
            plans = plan_cache.load(names)
            if plans is None:
                graphs_of(self.frame.params[0].unit).misses_plans = True
                raise _torch.dynamo.TraceAgain(restart_reason="plans of cached graphs are gone")
            for plan in plans:
                self._tell(plan, None)
        if self.frame.params:
            graphs_of(self.frame.params[0].unit).misses_plans = False
        return call

    def _cache_key(self) -> str | None:
        """Key of the frame in AOTAutograd's cache: all that passes depend on.

        None if passes have to run.
        """
        params = self.frame.params
        if _watchers or not (self.is_cached and params and _torch.aot.caches_frames()):
            return None
        # A mesh of the user's, among the inputs, is another one to torch in each process.
        if self.options.dump is not None or any(param.tp is not None for param in params):
            return None
        if graphs_of(params[0].unit).misses_plans:
            return None
        joined = {param.group for param in params} | {param.reduce_group for param in params}
        smaller = (each.unit.settings.smaller for each in params)
        joined |= {each.shard_group for each in smaller if each is not None}
        facts: list[object] = [
            (self.options.lowering, self.options.bucketing, self.mode),
            self.table,
            sorted(self.kept),
            [plan.to_json() for plan in self.known],
            _torch.aot.ambient_dtypes(),
        ]
        for group in sorted(joined):
            sizes = [groups.local_size(param.member, group) for param in params]
            facts.append((group, groups.shards(group), groups.size(group), sizes))
        if self.prices is not None:
            parts = {
                part
                for each in joined
                for part in (groups.shard_part(each), groups.replicate_part(each))
            }
            facts += [self.prices, [(part, self.prices.ranks(part)) for part in sorted(parts)]]
            facts.append([_hints(value) for value in self.frame.inputs])
        return plan_cache.frame_key(facts)

    def _partition(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        return _torch.aot.min_cut_rematerialization_partition(
            self._joint(gm), joint_inputs, **kwargs
        )

    def _joint(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Run the joint passes on `gm`, which is about to be partitioned, in place.

        In place, as the partitioner's caller holds this very module.
        """
        kept = {number for number, info in enumerate(self.table) if info.name in self.kept}
        for transform in passes.joint(kept):
            gm = passes.run_one(gm, transform)
        without = [node.name for node in gm.graph.nodes if is_gradient(node) and not table_of(node)]
        if without:
            raise passes.PassError(f"%{', %'.join(without)} found no table of parameters")
        gm.recompile()
        return gm

    def lower_inductor(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        """Lower `gm`, whose passes have run, by Inductor."""
        return lower_inductor(gm, example_inputs, **kwargs)

    def apply(self, gm: fx.GraphModule, graph: str) -> fx.GraphModule:
        """Run the pipeline over one of the frame's graphs, and log its plan."""
        self._begins(graph)
        transforms = passes.pipeline(
            self.table,
            graph=graph,
            bucketing=self.options.bucketing,
            prices=self.prices,
            known=self.known,
        )
        gm = passes.run(gm, transforms, after_each=self._dump(gm, graph))
        left = [node.name for node in gm.graph.nodes if is_marker(node)]
        if left:
            raise passes.PassError(f"markers %{', %'.join(left)} are in no bucket of the plan")
        plan, priced = PLAN.get(gm), PRICED.pop(gm)  # no cache could tell what the latter is
        if priced is not None:
            self.priced[graph] = priced
        if plan is not None and plan.buckets:
            self._tell(plan, gm)
        return gm

    def _tell(self, plan: Plan, gm: fx.GraphModule | None) -> None:
        """Log `plan` and add it to `plans`.

        gm: the planned graph; None if it comes from a cache, lowered.
        """
        self.plans.append(plan)
        log.info("graph %d, %s", self.number, plan.text())
        name = f"autoshard_{self.number}_{plan.graph}"
        _torch.dynamo.trace_structured_artifact(f"{name}_plan", "string", plan.text)
        if gm is not None:
            _torch.dynamo.trace_structured_artifact(
                f"{name}_graph", "string", lambda: render(gm.graph, axes=self.axes)
            )

    def _dump(self, gm: fx.GraphModule, graph: str) -> Dump | None:
        if self.options.dump is None:
            return None
        rank = dist.get_rank() if dist.is_initialized() else 0
        folder = Path(self.options.dump) / f"rank{rank}" / f"{self.number:02d}_{graph}"
        dump = Dump(folder, self.axes)
        dump("partition", gm)
        return dump


class Draft(Compilation):
    """Compilation for its plans only; the code that it makes gives the right numbers, slowly."""

    is_cached = False

    def worth_keeping(self) -> tuple[str, ...]:
        """Names of the parameters that are worth keeping unsharded for backward.

        None without a budget, or if nothing is gathered again.
        """
        forward, backward = self.priced.get("forward"), self.priced.get("backward")
        if forward is None or backward is None or forward.budget_bytes is None:
            return ()
        return worth_keeping(
            forward.problem, backward.problem, forward.candidates, forward.budget_bytes
        )

    def lower_inductor(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        return lower_eagerly(gm)

    def _tell(self, plan: Plan, gm: fx.GraphModule | None) -> None:
        """Do nothing: the plan of a draft is not reported."""


@contextlib.contextmanager
def _old_objects_stay() -> Iterator[None]:
    """Have Python look for garbage among young objects only, and rarely, in this context.

    Graphs are many objects that live, and Python scans all of them again whenever they have
    grown by a quarter: that is a twentieth of a compilation, and more for more layers. Young
        objects
    would be scanned whenever there are 700 more.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(max(young, MANY), middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def _hints(value: object) -> list[int]:
    """Current sizes of a graph's input, also where they are symbolic."""
    if isinstance(value, torch.Tensor):
        return list(map(hint_of, value.shape))
    return [hint_of(value)] if isinstance(value, torch.SymInt) else []


def _shard_bytes(param: ShardedParam) -> int:
    """Bytes of the shard of `param` on the rank that has most."""
    return param.member.chunk_numel(param.world) * param.member.dtype.itemsize


def _log_graph_break() -> None:
    found = _torch.dynamo.graph_break()
    if found is not None:
        log.info("graph break at %s: %s; what follows has a plan of its own", *found)


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
