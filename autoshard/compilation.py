"""Compilation of one frame: its graph -> AOTAutograd -> passes -> a plan a graph -> code."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autoshard import _torch, passes, plan_cache
from autoshard.deciding import Decider
from autoshard.handed import Handed, Part, Parts
from autoshard.options import CompileSettings
from autoshard.passes.dump import Dump
from autoshard.passes.ir import groups
from autoshard.passes.ir.match import is_gradient, is_marker, table_of, tangents
from autoshard.passes.ir.meta import PLAN
from autoshard.passes.ir.plan import Plan
from autoshard.passes.ir.text import render
from autoshard.passes.lowering.eager import lower_eagerly
from autoshard.passes.lowering.inductor import lower_inductor
from autoshard.passes.pipeline import copied
from autoshard.passes.planner.update import STATES, HostStates, moved_states
from autoshard.passes.plans.auto_buckets import PRICED, PricedGraph
from autoshard.passes.plans.drafts import INNER
from autoshard.passes.plans.liveness import handed_bytes
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.saved import movable
from autoshard.passes.plans.values import hint_of
from autoshard.progress import progress
from autoshard.runtime.compiled.frame import Frame
from autoshard.runtime.compiled.other_frames import Others, PlannedBytes, others_of
from autoshard.runtime.compiled.unit_graphs import graphs_of
from autoshard.runtime.training.loaded_states import move_loaded
from autoshard.runtime.training.optimizers import live_optimizers
from autoshard.runtime.unit.param import ShardedParam
from autoshard.runtime.unit.policies import OptimizerOffloadPolicy
from autoshard.runtime.unit.unit import root_of

log = logging.getLogger(__name__)

MANY = 50_000  # objects
NEVER = 2**31 - 1  # so many collections of the middle generation make one of the old


Lowered = Callable[[list[Any]], Any]
"""A lowered graph: it takes its inputs as a list."""

Watcher = Callable[[fx.GraphModule, str, Lowered, Callable[[fx.GraphModule], Lowered]], Lowered]
"""watcher(gm, graph, call, lower) returns what is to run in place of `call`, a lowered graph.

gm: the planned graph; graph: its kind, "forward" for instance; call: what `gm` was lowered to;
lower: lowers a graph that is a part of `gm` and has the same inputs.
"""

Partition = Callable[[fx.GraphModule], tuple[fx.GraphModule, fx.GraphModule]]
"""Run the joint passes on a joint graph, in place, and part it in forward and backward."""

_watchers: list[Watcher] = []


@contextlib.contextmanager
def watch_lowered(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` with every graph that is compiled in the context; none comes from a cache.

    What the watcher returns runs in the graph's place, also after the context.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _watched(
    gm: fx.GraphModule, graph: str, call: Any, lower: Callable[[fx.GraphModule], Lowered]
) -> Any:
    """Return what is to run in place of `call`: what the watchers make of it, one after another.

    It is marked as boxed. Without a watcher it is `call` itself. Arguments: see `Watcher`.
    """
    for watcher in _watchers:
        call = _torch.aot.mark_boxed(watcher(gm, graph, call, lower))
    return call


class Compilation:
    """Compilation of one frame: its graphs share a table of parameters and settings.

    known: plans that "auto" follows: each graph the first plan that fits it.
    handed: what forward hands to backward; decided while the frame is compiled, if a decider is
        given.
    plans: of the graphs with collectives, in the order in which they were compiled.
    """

    _numbers = itertools.count()
    is_cached = True  # by torch, between processes

    def __init__(
        self,
        frame: Frame,
        settings: CompileSettings,
        known: Sequence[Plan] = (),
        handed: Handed | None = None,
        decider: Decider | None = None,
    ) -> None:
        """Collect from `frame` what passes need: the table of parameters, axes, prices.

        A decider needs a budget. Nothing is compiled yet. The compilation gets a number of its own,
        for logs and dumps.
        """
        self.frame = frame
        self.settings = settings
        self.known = known
        self.handed = handed or Handed()
        self._decider = decider
        self._key: str | None = None
        self.number = next(self._numbers)
        self.table = frame.table()
        pairs = list(zip(frame.params, self.table, strict=True))
        self.axes = {param.group: info.axis for param, info in pairs}
        self.axes |= {param.reduce_group: info.reduce_axis for param, info in pairs}
        smaller = (param.unit.settings.smaller for param in frame.params)
        self.axes |= {axes.shard_group: INNER for axes in smaller if axes is not None}
        # Of now: where graphs are parted nobody can tell whether the frame is in a checkpoint.
        self.others = others_of(frame.params) if settings.budget_bytes is not None else Others()
        self.prices = self._prices()
        self.plans: list[Plan] = []  # filled as graphs are compiled
        self.priced: dict[str, PricedGraph] = {}  # likewise, by kind
        self._begins: Callable[[str], None] = lambda graph: None

    def _prices(self) -> Prices | None:
        """Return prices to plan with, from sizes, options and kind of device: alike on every rank.

        None if no topology is known. Their budget is what gradients of the frame's trained shards,
        two optimizer states where these live on the device, and the model's other frames leave of
        the memory budget. Once it is decided what this frame hands to backward, what others are
        taken to save beside that is left out, too.
        """
        topology, budget = self.settings.topology, self.settings.budget_bytes
        beside = 0.0
        if topology is None:
            return None
        if budget is not None:
            for param in self._trained():
                states = 0 if param.states_offload else STATES
                budget -= (1 + states) * param.shard_bytes
            beside = self.others.per_byte
            budget -= self.others.num_bytes + round(beside * self.handed.num_bytes)
        return Prices(topology, self.settings.lowering == "inductor", budget, beside)

    def planned_bytes(self) -> PlannedBytes | None:
        """Return the memory that the compiled frame is planned to use.

        None without a budget, or if what it saves could not be decided.
        """
        budget, saved = self.settings.budget_bytes, self.handed.num_bytes
        if budget is None or (not saved and self._num_graphs() > 1):
            return None
        peaks = [plan.peak_bytes for plan in self.plans if plan.figures is not None]
        return PlannedBytes(saved, max(peaks, default=0), budget)

    def _trained(self) -> list[ShardedParam]:
        """List the frame's parameters that have gradients."""
        return [param for param in self.frame.params if param.param.requires_grad]

    def host_states(self) -> HostStates | None:
        """Return optimizer states that could live on the host; None if none could.

        Those of parameters whose states, or shards, are there already, are not among them. There
        are none for a frame that is a part of a model: others would have to move theirs, too.
        """
        if self.prices is None or not self.others.is_alone:
            return None
        near = [
            param.shard_bytes
            for param in self._trained()
            if param.states_offload is None and not param.unit.settings.is_offloaded
        ]
        return moved_states(near, OptimizerOffloadPolicy().bucket_bytes, self.prices.topology)

    def _obey(self, handed: Handed) -> None:
        """Follow a decision: passes do, and so do optimizer states, which plans count on."""
        self.handed = handed
        if handed.has_host_states:
            for param in self._trained():
                param.has_planned_states = True
        if self.prices is not None:
            self.prices = self._prices()

    def compile(self) -> Callable[..., Any]:
        """Compile the frame's graph to a callable with the same inputs and outputs.

        Called once, while Dynamo traces the frame. There is a backward if gradients are enabled
        now. Fills `plans` and `priced`, and logs plans; rank 0 logs the progress of a long
        compilation. Python's garbage collector runs rarely meanwhile.
        Raises TraceAgain if torch's caches have the graphs, but their plans are gone; otherwise
        whatever goes wrong in AOTAutograd, a pass or the lowering.
        """
        if self._decider is not None:
            self._key = self._decision_key()
            known = self._decider.known(self._key)
            if known is not None:
                self._decider = None
                self._obey(known)
        begins = progress(self._what(), self._num_graphs())
        with self.frame.with_more_inputs(), _old_objects_stay(), begins as self._begins:
            is_plain = self.settings.lowering == "eager"
            compiled = self._compile_eagerly() if is_plain else self._compile_inductor()
        if self.handed.has_host_states:
            for optimizer in live_optimizers():  # of states that were loaded before a first step
                move_loaded(optimizer)
        return compiled

    def _what(self) -> str:
        """Say what is compiled: a module, by the outermost one's class and the path from there.

        The traced code may be a decorator's, and is named only where no parameters are read.
        """
        paths = [param.name.split(".")[:-1] for param in self.frame.params]
        if not paths:
            return _torch.dynamo.traced_code()
        alike = itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))
        root = root_of(self.frame.params[0])
        return " ".join(filter(None, (type(root).__name__, ".".join(parts[0] for parts in alike))))

    def _num_graphs(self) -> int:
        """Number of graphs to compile: 2, forward and backward, if gradients are on now; or 1."""
        return 2 if has_backward(self.frame.inputs) else 1

    def _compile_eagerly(self) -> Callable[..., Any]:
        """Compile with AOTAutograd, without its cache, to FX's code of the planned graphs."""

        def lower(graph: str) -> Callable[..., Any]:
            """Return AOTAutograd's compiler of graphs of kind `graph`: passes, then FX's code."""

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
        """Compile with Inductor; on a hit of AOTAutograd's cache, load the plans of its graphs.

        Otherwise plans are stored beside graphs that Inductor caches. In either case they are
        logged, and added to `plans`. Raises TraceAgain if the plans of a hit are gone; the next
        compilation then does without that cache, and later ones with it again.
        """
        is_lowered = False
        is_part = self.handed.num_bytes > 0 and not self.others.is_alone  # and counts its bytes

        def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
            """Plan `gm` by our passes, and lower it, in place of Inductor's compiler of graphs.

            Its plan is saved if Inductor has cached what it was lowered to. What watchers make of
            that is returned in its place. kwargs: Inductor's.
            """
            nonlocal is_lowered
            is_lowered = True
            graph = "inference" if kwargs.get("is_inference") else "forward"
            graph = "backward" if kwargs.get("is_backward") else graph
            gm = self.apply(gm, graph)
            compiled = self.lower_inductor(gm, example_inputs, **kwargs)
            name = _torch.inductor.cached_as(compiled)
            if name is not None:
                plan_cache.save(name, PLAN.get(gm))
                if is_part and graph == "forward":  # the bytes that it saves of this batch
                    plan_cache.save_decision(_handed_key(name), self.handed.to_json())

            def lower(part: fx.GraphModule) -> Lowered:
                """Lower `part`, a part of `gm` with its inputs, also after this compilation."""
                with _torch.inductor.tracing_again(example_inputs):
                    lowered: Lowered = self.lower_inductor(part, example_inputs, **kwargs)
                    return lowered

            return _watched(gm, graph, compiled, lower)

        parts_itself = self._decider is not None or bool(self.handed.moved) or is_part
        call, names = _torch.inductor.compile_frame(
            self.frame.gm,
            self.frame.inputs,
            inner_compile=inner,
            joint_pass=self._joint_of_inference if parts_itself else self._joint,
            partition=self._partition if parts_itself else None,
            settings=self.settings.inductor,
            key=self._cache_key(),
        )
        if not is_lowered:
            plans = plan_cache.load(names)
            handed = _handed_beside(names) if is_part else None
            if plans is None or (is_part and handed is None):
                graphs_of(self.frame.params[0].unit).misses_plans = True
                raise _torch.dynamo.TraceAgain(restart_reason="plans of cached graphs are gone")
            if handed is not None:
                self._obey(handed)
            for plan in plans:
                self._tell(plan, None)
        if self.frame.params:
            graphs_of(self.frame.params[0].unit).misses_plans = False
        return call

    def _cache_key(self) -> str | None:
        """Return a digest, for AOTAutograd's cache, of all that passes depend on besides the graph.

        None if the cache must not be used: torch is configured not to, or passes have to run, for a
        decision, a prediction, a watcher or a dump, after plans were lost, and for frames with
        tensor-parallel parameters or without sharded ones. So a frame is cached by the first
        process that finds a decision, not by the one that makes it.
        """
        facts = None if self._decider is not None else self._facts()
        return None if facts is None else plan_cache.frame_key([*facts, self.handed.to_json()])

    def _decision_key(self) -> str | None:
        """Return a digest of what a decision depends on, as far as that is known before tracing.

        None where AOTAutograd's cache is of no use; then decisions are not kept, either. To be
        called before anything is compiled: it depends on torch's settings.
        """
        facts = self._facts() if self.settings.lowering == "inductor" else None
        if facts is None:
            return None
        modules = self.frame.gm.modules()
        code = [each.code for each in modules if isinstance(each, fx.GraphModule)]
        inputs = [_looks(value) for value in self.frame.inputs]
        return plan_cache.frame_key([*facts, code, inputs, _torch.aot.partitioner_settings()])

    def _facts(self) -> list[object] | None:
        """List what passes depend on besides the graph, and what is handed to backward.

        None if AOTAutograd's cache must not be used, whatever that is.
        """
        params = self.frame.params
        if _watchers or not (self.is_cached and params and _torch.aot.caches_frames()):
            return None
        # A mesh of the user's, among the inputs, is another one to torch in each process.
        if self.settings.dump is not None or any(param.tp is not None for param in params):
            return None
        if graphs_of(params[0].unit).misses_plans:
            return None
        joined = {param.group for param in params} | {param.reduce_group for param in params}
        smaller = (each.unit.settings.smaller for each in params)
        joined |= {each.shard_group for each in smaller if each is not None}
        facts: list[object] = [
            (self.settings.lowering, self.settings.bucketing),
            sorted(self.settings.inductor.items()),
            self.table,
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
        return facts

    def _partition(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        """Part a joint graph, in place, in place of torch's partitioner.

        What forward hands to backward is decided before, if that is still to be done.
        """

        def partition(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
            parts = _torch.aot.min_cut_rematerialization_partition(
                self._joint(joint), joint_inputs, **kwargs
            )
            return self._with_host(*parts, kwargs["num_fwd_outputs"])

        decider, self._decider = self._decider, None
        if decider is None:
            forward, backward = partition(gm)
            if self.handed.num_bytes and self.prices is not None:  # for this batch
                num_bytes = handed_bytes(forward.graph, backward.graph, self._shards_of(gm.graph))
                self._obey(dataclasses.replace(self.handed, num_bytes=num_bytes))
            return forward, backward
        assert self.prices is not None
        prices, made = self.prices, {}

        def parts(handed: Handed) -> Parts:
            self.handed = handed  # which passes obey
            found = self.priced_parts(copied(gm), partition, prices)
            made[handed] = found.made
            return found

        self._obey(decider.decide(parts, prices, self.host_states(), self._key))
        # Parts are the same wherever states live. There are none of another rank's decision.
        key = dataclasses.replace(self.handed, has_host_states=False, num_bytes=0)
        return made.get(key) or partition(gm)

    def priced_parts(self, joint: fx.GraphModule, partition: Partition, prices: Prices) -> Parts:
        """Part a joint graph, in place, as `handed` says, and price the parts."""
        made = partition(joint)
        parts = []
        for kind, gm in zip(("forward", "backward"), made, strict=True):
            graph = passes.run(gm, passes.preparation(self.table)).graph
            parts.append(Part(graph, PricedGraph(graph, kind, prices)))
        forward, backward = parts
        shards = self._shards_of(joint.graph)
        num_bytes = handed_bytes(forward.graph, backward.graph, shards)
        others = round(prices.beside * num_bytes)
        return Parts(joint.graph, self.table, forward, backward, made, num_bytes, others)

    def _shards_of(self, joint: fx.Graph) -> set[str]:
        """Names of the inputs of a joint graph that are shards."""
        inputs = joint.find_nodes(op="placeholder")
        return {inputs[at].name for at in self.frame.local}

    def _with_host(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Have parts of a joint graph copy to the host, and back, what is to lie there meanwhile.

        What the user gets of this graph stays, whatever was decided for another one of the frame.
        The parts are changed in place. Raises PassError if the pass fails.
        num_outputs: of forward, those that are no saved values.
        """
        moved = movable(forward.graph, num_outputs).intersection(self.handed.moved)
        if moved:
            transforms = passes.parted(moved, self.prices)
            for gm, transform in itertools.product((forward, backward), transforms):
                passes.run_one(gm, transform).recompile()
        return forward, backward

    def _joint_of_inference(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Run the joint passes on `gm`, unless `_partition` is to run them."""
        return gm if tangents(gm.graph) else self._joint(gm)

    def _joint(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Run the joint passes on `gm`, which is about to be partitioned, and return it.

        They run in place, as the partitioner's caller holds this very module.
        Raises PassError if a pass fails, or a gradient has no table of parameters.
        """
        names = self.handed.params
        kept = {number for number, info in enumerate(self.table) if info.name in names}
        for transform in passes.joint(kept, self.handed.saved):
            gm = passes.run_one(gm, transform)
        without = [node.name for node in gm.graph.nodes if is_gradient(node) and not table_of(node)]
        if without:
            raise passes.PassError(f"%{', %'.join(without)} found no table of parameters")
        gm.recompile()
        return gm

    def lower_inductor(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        """Lower `gm`, whose passes have run, by Inductor; `kwargs` are its `inner_compile`'s."""
        has_budget = self.settings.budget_bytes is not None
        return lower_inductor(gm, example_inputs, has_budget=has_budget, **kwargs)

    def apply(self, gm: fx.GraphModule, graph: str) -> fx.GraphModule:
        """Run the pipeline over a copy of one of the frame's graphs, and return it.

        Its plan, if it has collectives, is logged and added to `plans`; the problem that a search
        for it has solved, if any, is put in `priced`. With the option `dump` the graph is written
        after each pass.
        graph: "forward", "backward" or "inference".
        Raises PassError if a pass fails, or leaves a marker.
        """
        self._begins(graph)
        transforms = passes.pipeline(
            self.table,
            graph=graph,
            bucketing=self.settings.bucketing,
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
        """Log `plan`, add it to `plans`, and write it, and `gm`, to torch's structured trace.

        The first one says what lives on the host, and what forward saves, also where it is
        backward's: a forward without collectives has no plan.
        gm: the planned graph; None if it comes from a cache, lowered.
        """
        if not self.plans and plan.graph != "inference":
            moved = STATES * sum(
                param.shard_bytes for param in self._trained() if param.states_offload
            )
            plan = dataclasses.replace(plan, saved=self.handed.blocks, host_state_bytes=moved)
        self.plans.append(plan)
        log.info("graph %d, %s", self.number, plan.text())
        name = f"autoshard_{self.number}_{plan.graph}"
        _torch.dynamo.trace_structured_artifact(f"{name}_plan", "string", plan.text)
        if gm is not None:
            _torch.dynamo.trace_structured_artifact(
                f"{name}_graph", "string", lambda: render(gm.graph, axes=self.axes)
            )

    def _dump(self, gm: fx.GraphModule, graph: str) -> Dump | None:
        """Write `gm` as it is before passes, and return an observer that writes it after each pass.

        Does nothing, and returns None, without the option `dump`.
        """
        if self.settings.dump is None:
            return None
        rank = dist.get_rank() if dist.is_initialized() else 0
        folder = Path(self.settings.dump) / f"rank{rank}" / f"{self.number:02d}_{graph}"
        dump = Dump(folder, self.axes)
        dump("partition", gm)
        return dump


class DryCompilation(Compilation):
    """Compilation for predictions: it parts joint graphs, and compiles none of them."""

    def partition(self, take: Callable[[fx.GraphModule, Partition], None]) -> None:
        """Give `take` the frame's joint graph, and what parts such a graph; compile nothing.

        Without a backward there is no joint graph, and `take` is not called.
        """

        def partition(gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> None:
            take(gm, lambda joint: self._partition(joint, joint_inputs, **kwargs))

        with self.frame.with_more_inputs(), _old_objects_stay():
            gm, inputs = self.frame.gm, self.frame.inputs
            if self.settings.lowering == "eager":
                _torch.aot.partition_joint(gm, inputs, partition)
            else:
                _torch.inductor.partition_joint(gm, inputs, partition, self.settings.inductor)


@contextlib.contextmanager
def _old_objects_stay() -> Iterator[None]:
    """Keep Python's garbage collector from old objects in this context, and have it run rarely.

    Its thresholds, which are the process's, are set again as they were at the end.
    Graphs are many objects that live, and Python scans all of them again whenever they have
    grown by a quarter: that is a twentieth of a compilation, and more for more layers. Young
    objects would be scanned whenever there are 700 more.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(max(young, MANY), middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def _hints(value: object) -> list[int]:
    """Return the sizes of a tensor, or the value of a size, as a graph's input; else [].

    Symbolic sizes are given by their hints, the sizes that were traced.
    """
    if isinstance(value, torch.Tensor):
        return list(map(hint_of, value.shape))
    return [hint_of(value)] if isinstance(value, torch.SymInt) else []


def _handed_key(graph_key: str) -> str:
    """Name what is stored of a decision beside a forward of the key `graph_key`."""
    return f"{graph_key}.handed"


def _handed_beside(graph_keys: Sequence[str]) -> Handed | None:
    """Load what is stored of a decision beside the forward among graphs; None if it is gone."""
    for graph_key in graph_keys:
        text = plan_cache.load_decision(_handed_key(graph_key))
        if text is not None:
            try:
                return Handed.from_json(text)
            except ValueError:  # a file that is none of ours
                return None
    return None


def _looks(value: object) -> list[object]:
    """Describe a graph's input for a digest: sizes, and, of a tensor, all that a trace depends on.

    Of other inputs only the sizes.
    """
    if not isinstance(value, torch.Tensor):
        return [_hints(value)]
    strides = [hint_of(stride) for stride in value.stride()]
    return [_hints(value), strides, str(value.dtype), value.device.type, value.requires_grad]


def has_backward(inputs: Sequence[Any]) -> bool:
    """Tell whether a graph with these inputs will have a backward.

    It will if gradients are enabled now, and one of the tensors requires one.
    """
    tensors = (value for value in inputs if isinstance(value, torch.Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
