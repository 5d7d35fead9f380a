"""Trace the graphs of a training step in numbers, without a cluster or weights in memory.

    model on the meta device -> its repeated blocks cut to five -> sharded over many ranks that
    are not there -> traced as the backend does -> one block in the middle repeated again

Compute between collectives does not depend on the number of ranks, so graphs are traced for one,
large number, whose shards take next to no memory; `estimate.py` gives them the costs of a cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autoshard import _torch, passes
from autoshard.compilation import DryCompilation
from autoshard.options import CompileOptions, CompileSettings
from autoshard.passes.planner.kernels import Kernel, in_float8, kernel_us
from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.repeat import repeat
from autoshard.passes.planner.topology import Topology
from autoshard.passes.plans.auto_buckets import PricedGraph
from autoshard.passes.plans.liveness import Live
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.roofline import kernel_of
from autoshard.runtime.compiled.frame import Frame, make_frame
from autoshard.runtime.sharding.find_units import find_units
from autoshard.runtime.sharding.shard import fully_shard
from autoshard.runtime.unit.policies import MixedPrecisionPolicy

RANKS = 1024  # that are not there
KEPT = 5  # blocks of each list that are traced: two are compared, up to a third; ends may differ


@dataclass(frozen=True)
class Graph:
    """Graph of a training step, in numbers.

    problem: its costs are of no configuration, its live_bytes are without parameters, and its
        op_us are numbers of `kernels`.
    activations: bytes at each op, part of live_bytes, that forward makes for backward or the user.
    kernels: those that differ; None for views.
    """

    problem: Problem
    activations: tuple[int, ...]
    kernels: tuple[Kernel | None, ...]

    def op_us(self, topology: Topology) -> tuple[float, ...]:
        """Microseconds of each op on a device of `topology`."""
        times = [kernel_us(each, topology) for each in self.kernels]
        return tuple(times[int(number)] for number in self.problem.op_us)

    def in_float8(self, vocabulary: int) -> Graph:
        """Return this graph with products in float8, but for those as wide as `vocabulary`."""
        kernels = tuple(in_float8(each, vocabulary) for each in self.kernels)
        return dataclasses.replace(self, kernels=kernels)


@dataclass(frozen=True)
class TracedGraph:
    """Graph of a few blocks: its op_us are numbers of `kernels`, as of `Graph`."""

    problem: Problem
    live: Live
    kernels: tuple[Kernel | None, ...]


@dataclass(frozen=True)
class _Numbering(Prices):
    """Prices that number kernels, each as it is first seen, in place of timing them."""

    kernels: dict[Kernel | None, int] = dataclasses.field(default_factory=dict)

    def op_us(self, node: fx.Node) -> float:
        """Return the number of the kernel of `node`."""
        kernel = kernel_of(node, is_fused=self.is_fused)
        return self.kernels.setdefault(kernel, len(self.kernels))


@dataclass(frozen=True)
class Stack:
    """List of like blocks that was cut.

    path: of the `nn.ModuleList`.
    num_blocks: how many it had before.
    """

    path: str
    num_blocks: int


def cut_stacks(model: nn.Module) -> list[Stack]:
    """Cut long lists of like blocks in `model` to five; return the lists that were cut.

    An `nn.ModuleList` of more than five modules, all of them units, keeps the first four and the
    last if all but the first and the last are alike: of one class, with parameters of the same
    names and shapes. Other lists are left whole.
    """
    units = find_units(model, None)
    found = []
    for path, module in list(model.named_modules()):
        children = list(module.children())
        is_stack = isinstance(module, nn.ModuleList) and all(child in units for child in children)
        inner = {_looks(child) for child in children[1:-1]}
        if is_stack and len(children) > KEPT and len(inner) == 1:
            found.append(Stack(path, len(children)))
            del module[KEPT - 1 : -1]
    return found


def _looks(block: nn.Module) -> tuple[Any, ...]:
    params = ((name, tuple(param.shape)) for name, param in block.named_parameters())
    return type(block), tuple(params)


def trace(
    model: nn.Module,
    call: Callable[[Any], Any],
    *,
    mp_policy: MixedPrecisionPolicy,
    checkpointing: str,
    lowering: str,
) -> dict[str, TracedGraph]:
    """Trace the "forward" and "backward" graph of `model`, sharded and compiled, and run neither.

    This process becomes rank 0 of `RANKS` that are not there, and what torch has compiled before is
    reset. Returns the graphs by kind. All parameters, the root's too, are freed after forward.
    model: on the meta device; it is changed and sharded, and of no use afterwards.
    call: begins forward and backward of the compiled model that it is given; it ends in forward.
    checkpointing: one of `CHECKPOINTING`, for each unit but the root.
    lowering: "inductor" or "eager".
    Raises RuntimeError if forward is not one graph with a backward, or in a process that has
    another process group.
    """
    pretend_ranks(RANKS)
    for unit in find_units(model, None):
        if checkpointing != "none":
            more: dict[str, Any] = {"context_fn": _kept_ops} if checkpointing == "ops" else {}
            again = functools.partial(checkpoint, unit.forward, use_reentrant=False, **more)
            unit.forward = again  # type: ignore[method-assign]  # the instance's, not the class's
    shard_without_weights(model, mp_policy=mp_policy, reshard_after_forward=True)
    graphs: dict[str, TracedGraph] = {}
    settings = CompileOptions(lowering=lowering).resolve(torch.device("cpu"))
    compile_only(model, call, lambda frame: _Recording(frame, settings, graphs).compile())
    if set(graphs) != {"forward", "backward"}:
        raise RuntimeError("the model's output depends on no parameter: there is nothing to train")
    return graphs


CHECKPOINTING = ("none", "full", "ops")
"""Ways of checkpointing: backward computes nothing again of a unit; all; or all but products and
attention."""


def _kept_ops() -> Any:
    """Make the contexts in which results of matrix products and of attention are kept."""
    aten = torch.ops.aten
    names = [each for each in dir(aten) if each.startswith("_scaled_dot_product")]
    kept = [getattr(aten, name).default for name in names if not name.endswith("backward")]
    kept += [aten.mm.default, aten.addmm.default, aten.bmm.default]
    return create_selective_checkpoint_contexts(kept)


def shard_without_weights(model: nn.Module, **given: Any) -> None:
    """Apply `fully_shard` to all units of `model`, which is on the meta device, and to itself.

    Shards and buffers get memory on the CPU, which is not written to. Raises as `fully_shard` does.
    given: arguments of `fully_shard`. Parameters are cut as `shard` does it.
    """
    given = {"shard_placement_fn": "auto", **given}
    for unit in find_units(model, None):
        fully_shard(unit, **given)
    fully_shard(model, **given)
    model.to_empty(device="cpu")


def compile_only(
    model: nn.Module, call: Callable[[Any], Any], compile_frame: Callable[[Frame], object]
) -> None:
    """Capture the forward of the sharded `model`, and give it to `compile_frame`; run none of it.

    All that torch has compiled before is reset. Does nothing more if `call` never runs the model.
    call: calls the compiled model that it is given; an exception ends it there, which is caught
        here.
    Raises RuntimeError if forward is not one graph, or if `compile_frame` fails.
    """
    is_recorded = False

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Give the frame to `compile_frame`, then raise `_Recorded`, for nothing is to run."""
        nonlocal is_recorded
        compile_frame(make_frame(gm, example_inputs))
        is_recorded = True
        raise _Recorded

    torch.compiler.reset()
    try:
        with _quiet():
            call(torch.compile(model, backend=backend, fullgraph=True))
    except Exception as error:
        if not is_recorded:  # else it is ours
            message = f"the model's forward can't be planned as one graph: {error}"
            raise RuntimeError(message) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings of torch and of a model's own library from the user: nothing is run."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


class _Recorded(Exception):
    """Signal raised where a compiled step would run: there is nothing to run it on."""


class _Recording(DryCompilation):
    """Compilation that adds each graph, in numbers, to `graphs`, before anything is decided."""

    def __init__(
        self, frame: Frame, settings: CompileSettings, graphs: dict[str, TracedGraph]
    ) -> None:
        super().__init__(frame, settings)
        self.graphs = graphs

    def apply(self, gm: fx.GraphModule, graph: str) -> fx.GraphModule:
        """Add a prepared copy of `gm`, in numbers, to `graphs`; return `gm` unchanged."""
        prices = _Numbering(Topology.load("h100"), self.settings.lowering == "inductor")
        prepared = passes.run(gm, passes.preparation(self.table))
        priced = PricedGraph(prepared.graph, graph, prices)
        self.graphs[graph] = TracedGraph(priced.problem, priced.live, tuple(prices.kernels))
        return gm


def pretend_ranks(ranks: int) -> None:
    """Make this process rank 0 of `ranks` that are not there; do nothing if it is that already.

    Raises RuntimeError if it has another process group.
    """
    if not dist.is_initialized():
        _torch.dist.pretend_ranks(ranks)
    if dist.get_backend() != "fake" or dist.get_world_size() != ranks:
        raise RuntimeError("a dry run needs a process of its own, without a process group")


# ---- repeated again


def grown(graphs: Mapping[str, TracedGraph], stacks: Iterable[Stack]) -> dict[str, Graph]:
    """Return `graphs` in numbers, as they are if `stacks` have all their blocks.

    graphs: as `trace` gives them, of a model that `cut_stacks` has cut.
    stacks: the lists that were cut.
    Raises ValueError if blocks that look alike are not computed alike, or if there are barriers.
    """
    found = {}
    for kind, traced in graphs.items():
        live = traced.live
        temporary = [each + live.inputs for each in live.temporaries]
        lives = (
            tuple(a + t for a, t in zip(live.activations, temporary, strict=True)),
            live.activations,
        )
        problem, activations = (
            _grown(dataclasses.replace(traced.problem, live_bytes=each), stacks) for each in lives
        )
        found[kind] = Graph(problem, activations.live_bytes, traced.kernels)
    return found


def _grown(problem: Problem, stacks: Iterable[Stack]) -> Problem:
    """Return `problem` with the blocks that were cut out of `stacks`: copies of a middle block.

    Blocks behind them get the numbers that they had before. Raises ValueError as `grown` does.
    """
    for stack in stacks:
        # The last blocks keep their places at the end, and in backward so does the one repeated.
        added = stack.num_blocks - KEPT
        moved = (3, 4) if problem.graph == "forward" else (2, 3, 4)
        problem = _renamed(problem, stack, {number: number + added for number in moved})
        units = [f"{stack.path}.{number}" for number in _middle(problem.graph, added)]
        step = 1 if problem.graph == "forward" else -1
        problem = repeat(problem, units, added, functools.partial(_name, stack, step))
    return problem


def _middle(graph: str, added: int) -> Iterator[int]:
    """Yield the numbers of three traced blocks that follow each other in program order.

    They are numbers in the whole stack. Neither its first nor its last block is among them.
    graph: "forward" or "backward".
    added: number of blocks that were cut out.
    """
    yield from (1, 2, 3 + added) if graph == "forward" else (3 + added, 2 + added, 1)


def _name(stack: Stack, step: int, name: str, copy: int) -> str:
    return _numbered(stack, name, lambda number: number + step * copy)


def _renamed(problem: Problem, stack: Stack, numbers: Mapping[int, int]) -> Problem:
    """Return `problem` with blocks of `stack` under other numbers: `numbers`, new ones by old."""

    def renamed(name: str) -> str:
        return _numbered(stack, name, lambda number: numbers.get(number, number))

    gathers, reduces = (
        tuple(
            dataclasses.replace(item, name=renamed(item.name), unit=renamed(item.unit))
            for item in items
        )
        for items in (problem.gathers, problem.reduces)
    )
    return dataclasses.replace(problem, gathers=gathers, reduces=reduces)


def _numbered(stack: Stack, name: str, change: Callable[[int], int]) -> str:
    """Return `name`, with its block's number changed by `change`, if it is in `stack`."""
    pattern = rf"^({re.escape(stack.path)}\.)(\d+)(?=\.|$)"
    return re.sub(pattern, lambda found: f"{found[1]}{change(int(found[2]))}", name)


def mean_loss(output: Any) -> Tensor:
    """Scalar to differentiate: a model's own loss, or the sum of the means of its outputs.

    The model's own is `output.loss`. Means are in float32, of all tensors in `output`, nested ones
    too, but for those that require no gradient. Raises RuntimeError if there is none.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = _torch.tensors.tree_leaves(output)
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    return torch.stack([each.float().mean() for each in tensors if each.requires_grad]).sum()
