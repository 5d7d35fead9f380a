"""Inductor: its pipeline for a frame, its compiler of single graphs, its settings and its caches.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass

from autoshard._torch import aot


def known_settings(**wanted: object) -> dict[str, object]:
    """Select the settings of `wanted` that this version of torch has.

    wanted: values by key of Inductor's config, with `__` for a dot; the result has dots.
    """
    from torch._inductor import config

    known = config.get_config_copy()
    named = {key.replace("__", "."): value for key, value in wanted.items()}
    return {key: value for key, value in named.items() if key in known}


def flags(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings of Inductor's that its code may depend on, with `settings` among them, as text."""
    from torch._inductor import config

    with config.patch(dict(settings)):
        found = config.save_config_portable()
    return {f"inductor {key}": repr(found[key]) for key in sorted(found) if key not in _OF_HOSTS}


_OF_HOSTS = ("cpp.vec_isa_ok", "compile_threads", "cpp.threads")
"""Settings of Inductor's that say how a host compiles, or how many cores it has."""


NO_GRAPHS = {"triton.cudagraphs": False}
"""Setting with which Inductor makes no CUDA graphs."""


def modes() -> list[str]:
    """List the modes of torch.compile that settings of Inductor's stand for."""
    from torch._inductor import list_mode_options

    return list(list_mode_options())


def mode_settings(mode: str | None) -> dict[str, Any]:
    """Return Inductor's settings for a mode of torch.compile, but that for CUDA graphs.

    None has none.
    """
    from torch._inductor import list_mode_options

    found = list_mode_options(mode) if mode else {}
    return {key: value for key, value in found.items() if key not in NO_GRAPHS}


def compile_frame(
    gm: torch.fx.GraphModule,
    example_inputs: Any,
    *,
    inner_compile: Callable[..., Any],
    joint_pass: Callable[[torch.fx.GraphModule], torch.fx.GraphModule],
    partition: Callable[..., Any] | None = None,
    settings: Mapping[str, Any],
    key: str | None,
) -> tuple[Callable[..., Any], list[str]]:
    """Compile `gm` with Inductor's whole pipeline, changed at two places.

    inner_compile: takes the place of Inductor's compiler of single graphs, and has its arguments.
    joint_pass: runs last over the joint graph, before it is partitioned; it must change the graph
        in place, as what it returns is ignored.
    partition: takes the place of torch's partitioner; None: torch's.
    settings: by key of Inductor's config. It makes no CUDA graphs in any case.
    key: all that these three depend on besides the graph. On a hit of AOTAutograd's cache none is
        called. None: that cache is not used.

    A backward, if gradients are enabled now, is compiled with its forward.

    Returns the compiled frame, and the names in Inductor's cache of the graphs in it, in the order
    in which they were made or loaded; "" for one that is not cached.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.pattern_matcher import stable_topological_sort

    class JointPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            """Sort `graph` so that no node is read before it is made, and run `joint_pass`."""
            # Inductor's own passes before it, as that which finds attention, leave nodes that are
            # read before they are defined; it puts them in order after this one.
            stable_topological_sort(graph)
            assert graph.owning_module is not None
            joint_pass(graph.owning_module)

        def uuid(self) -> str | None:
            return key

    class Partitioner(CustomPartitionerFn):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            assert partition is not None
            return partition(*args, **kwargs)

        def uuid(self) -> str | None:
            return key

        def __reduce__(self) -> tuple[Any, ...]:
            """Stand, in keys of caches, which pickle settings, for what `uuid` says."""
            return str, (key,)

    names: list[str] = []
    with aot.settings(is_cached=key is not None), _noting_names(names):
        compiled: Any = compile_fx(
            gm,
            example_inputs,
            inner_compile=inner_compile,
            config_patches={
                **settings,
                **NO_GRAPHS,
                "joint_custom_post_pass": JointPass(),
                **({} if partition is None else {"custom_partitioner_fn": Partitioner()}),
            },
        )
    call: Callable[..., Any] = compiled
    return call, names


def partition_joint(
    gm: torch.fx.GraphModule,
    example_inputs: Any,
    partition: Callable[..., object],
    settings: Mapping[str, Any],
) -> None:
    """Give the joint graph of `gm`, as Inductor would partition it, to `partition`, and stop.

    partition: has the arguments of `aot.min_cut_rematerialization_partition`. It is not called for
        a graph without a backward.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            partition(*args, **kwargs)
            raise aot.Stopped

        def uuid(self) -> str | None:
            return None

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise aot.Stopped

    with aot.settings(), contextlib.suppress(aot.Stopped):
        patches = {**settings, **NO_GRAPHS, "custom_partitioner_fn": Partitioner()}
        compile_fx(gm, example_inputs, inner_compile=stop, config_patches=patches)


def _noting_names(names: list[str]) -> contextlib.AbstractContextManager[object]:
    """Add to `names`, in this context, the name in Inductor's cache of each graph made or loaded.

    The name of a graph that is not cached is "".

    Patched: `torch._inductor.output_code.CompiledFxGraph.post_compile`, which runs for each.
    Why:     on a hit, AOTAutograd's cache runs nothing of ours, and what it returns has no names.
    Tests:   `test_a_cached_frame_has_no_names`, needed; in tests/parity/compiled/test_plan_cache.py
             `test_a_hit_has_its_plans`, works.
    """
    from torch._inductor.output_code import CompiledFxGraph

    post_compile = CompiledFxGraph.post_compile

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(self._fx_graph_cache_key or "")
        post_compile(self, *args, **kwargs)

    return mock.patch.object(CompiledFxGraph, "post_compile", noted)


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Mapping[str, object],
    *,
    has_no_layout: Callable[[torch.fx.Node], bool],
    **kwargs: Any,
) -> Any:
    """Compile a single graph with Inductor; `kwargs` are those of its `inner_compile`.

    settings: of Inductor's config, for this compilation.
    has_no_layout: tells the ops whose inputs' and outputs' layouts have nothing to do with each
        other, by a node of the graph or of a subgraph that stands for it.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    with config.patch(dict(settings)), _layouts_end_at(has_no_layout):
        return compile_fx_inner(gm, example_inputs, **kwargs)


def _layouts_end_at(
    has_no_layout: Callable[[torch.fx.Node], bool],
) -> contextlib.AbstractContextManager[object]:
    """Keep the layout that a convolution prefers from spreading through ops, in this context.

    Control dependencies spread none, either.

    Patched: `torch._inductor.graph.GraphLowering.find_nodes_prefer_channels_last`, which is given
             a copy of the graph without the edges.
    Why:     what a convolution's weight is read from prefers channels last, and so do the users of
             all that is read there. A gather gives the weights of a whole bucket: whatever used
             one of them and had four dimensions was transposed, with other kernels and roundings.
    Tests:   in tests/parity/compiled/test_layouts.py `test_a_convolution_in_a_bucket`, works;
             `test_layouts_spread_through_a_gather` and `..._through_an_order`, needed.
    """
    from torch._inductor.graph import GraphLowering
    from torch.utils._ordered_set import OrderedSet

    find = GraphLowering.find_nodes_prefer_channels_last

    def found(self: Any) -> OrderedSet[torch.fx.Node]:
        """Find the nodes that prefer channels last, in a copy of the graph without the edges.

        Returns those nodes of the graph itself.
        """
        graph = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        graph.graph_copy(self.module.graph, copies)
        for node, copy in copies.items():
            _cut_layouts(node, copy, has_no_layout)
        only_a_graph: Any = SimpleNamespace(module=SimpleNamespace(graph=graph))
        preferring = find(only_a_graph)
        return OrderedSet(node for node, copy in copies.items() if copy in preferring)

    return mock.patch.object(GraphLowering, "find_nodes_prefer_channels_last", found)


def _cut_layouts(
    node: torch.fx.Node, copy: torch.fx.Node, has_no_layout: Callable[[torch.fx.Node], bool]
) -> None:
    """Take from `copy` the inputs of `node` that tell nothing of its layout.

    They are all inputs of an op that `has_no_layout`, or stands for one; the nodes that another
    control dependency waits for; and what a `getitem` takes from such an op.
    """
    from torch._inductor.fx_passes.control_dependencies import control_deps

    def stands_for_one(node: torch.fx.Node) -> bool:
        """Tell whether `node` has no layout, or is a control dependency around such an op."""
        if node.target is not control_deps:
            return has_no_layout(node)
        subgraph: Any = node.args[1]  # a `get_attr`
        owner: Any = node.graph.owning_module
        return any(map(has_no_layout, owner.get_submodule(subgraph.target).graph.nodes))

    if stands_for_one(node):
        copy.args, copy.kwargs = (), {}
    elif node.target is control_deps:
        copy.args = ((), *copy.args[1:])
    elif node.target is operator.getitem:
        source = node.args[0]
        if isinstance(source, torch.fx.Node) and stands_for_one(source):
            copy.args = (None, *copy.args[1:])


def cached_as(compiled: Any) -> str | None:
    """Name in Inductor's cache of a graph that it has compiled; None if it has none."""
    name: str | None = getattr(compiled, "_fx_graph_cache_key", None)
    return name


def keep_nodes_behind(
    graph: torch.fx.Graph, after: Mapping[torch.fx.Node, Sequence[torch.fx.Node]]
) -> None:
    """Add control dependencies, so that Inductor keeps each node of `after` behind other nodes.

    after: the nodes that a node must stay behind, by that node.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(before) for node, before in after.items()})


@contextlib.contextmanager
def tracing_again(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Allow a graph to be lowered in this context, after the compilation that made it has ended.

    example_inputs: the graph's, fake; their fake mode is used.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing

    with tracing(TracingContext(detect_fake_mode(example_inputs))):
        yield


@contextlib.contextmanager
def lowering_again(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    num_outputs: int,
    settings: Mapping[str, Any],
) -> Iterator[list[tuple[int, ...] | None]]:
    """Allow `gm`, a graph that was read from text, to be lowered in this context.

    example_inputs: fake; nodes of `gm` get examples that follow from them.
    num_outputs: of its outputs, those that the user sees: their layouts are kept.
    settings: by key of Inductor's config.
    Yields a list that is filled with the strides of its outputs, None where they are as traced.
    """
    from torch._guards import TracingContext, detect_fake_mode
    from torch._inductor import config
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode: Any = detect_fake_mode(example_inputs)
    FakeTensorProp(gm, mode=mode).propagate_dont_convert_inputs(*example_inputs)
    gm.graph.output_node().meta["user_visible_output_idxs"] = list(range(num_outputs))
    with (
        tracing_again(example_inputs),
        config.patch({**settings, **NO_GRAPHS}),
        TracingContext.report_output_strides() as strides,
    ):
        yield strides if strides is not None else []


def fresh_cache() -> contextlib.AbstractContextManager[Any]:
    """Use an empty Inductor cache in this context, and remove it when the context ends."""
    from torch._inductor import utils

    return utils.fresh_cache()


def cache_folder() -> str:
    """Path of the folder where Inductor keeps kernels, made if missing.

    Raises OSError if it can't be made.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()
