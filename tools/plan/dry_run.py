"""Trace the graphs of a training step, without a cluster or weights in memory.

    model on the meta device -> its repeated blocks cut (`blocks.py`) -> sharded over many ranks
    that are not there -> traced as the backend does -> checkpoints (`ways.py`) -> partitioned ->
    other microbatches (`batches.py`) -> numbers (`graphs.py`) -> blocks repeated again

Compute between collectives does not depend on the number of ranks, so graphs are traced for one,
large number, whose shards take next to no memory; `estimate.py` gives them the costs of a cluster.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autoshard import _torch, passes
from autoshard.compilation import DryCompilation, Partition
from autoshard.options import CompileOptions
from autoshard.passes.planner.topology import Topology
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.saved import SavedValues, saved_names
from autoshard.runtime.compiled.frame import Frame, make_frame
from autoshard.runtime.sharding.find_units import find_units
from autoshard.runtime.sharding.shard import fully_shard
from autoshard.runtime.unit.policies import MixedPrecisionPolicy
from autoshard.tools.plan.ways import BY_VALUES, CHECKPOINTING, mark_regions, saving, tagged

RANKS = 1024  # that are not there


Prepared = Mapping[str, fx.GraphModule]
"""The "forward" and "backward" graph of a step, after `passes.preparation`."""


def trace(
    model: nn.Module,
    call: Callable[[Any], Any],
    *,
    mp_policy: MixedPrecisionPolicy,
    ways: Collection[str],
    lowering: str,
    topology: Topology | None = None,
) -> dict[str, Prepared]:
    """Trace the "forward" and "backward" graph of `model`, sharded and compiled, and run neither.

    This process becomes rank 0 of `RANKS` that are not there, and what torch has compiled before is
    reset. Returns the graphs by way. All parameters, the root's too, are freed after forward.
    model: on the meta device; it is changed and sharded, and of no use afterwards.
    call: begins forward and backward of the compiled model that it is given; it ends in forward.
    ways: of checkpointing, of `ways.TRACED`: for each unit but the root, or by values.
    lowering: "inductor" or "eager".
    topology: by whose times values are chosen; None if no way has to.
    Raises RuntimeError if forward is not one graph with a backward, or in a process that has
    another process group.
    """
    pretend_ranks(RANKS)
    mark_regions(find_units(model, None))
    shard_without_weights(model, mp_policy=mp_policy, reshard_after_forward=True)
    settings = CompileOptions(lowering=lowering).resolve(torch.device("cpu"))
    graphs: dict[str, Prepared] = {}
    prices = None if topology is None else Prices(topology, lowering == "inductor")

    def compile_frame(frame: Frame) -> None:
        """Fill `graphs` with those of `frame`, by way; with none if it has no backward."""
        compilation = DryCompilation(frame, settings)

        def take(joint: fx.GraphModule, partition: Partition) -> None:
            def prepared(gm: fx.GraphModule, moved: Collection[str] = ()) -> Prepared:
                transforms = passes.preparation(compilation.table)
                if moved:
                    transforms = (*passes.parted(moved, prices), *transforms)
                parts = [passes.run(part, transforms) for part in partition(gm)]
                return dict(zip(("forward", "backward"), parts, strict=True))

            graphs.update(
                (way, prepared(tagged(joint, way))) for way in ways if way in CHECKPOINTING
            )
            by_values = [way for way in ways if way in BY_VALUES]
            if by_values:
                assert prices is not None
                none = graphs.get("none") or prepared(tagged(joint, "none"))
                saved = saved_names(joint.graph, none["backward"].graph)
                host = prices.topology.host_link
                values = SavedValues(joint.graph, saved, prices, compilation.table).near(host)
                graphs.update((way, prepared(*saving(joint, values, way))) for way in by_values)

        compilation.partition(take)

    compile_only(model, call, compile_frame)
    if not graphs:
        raise RuntimeError("the model's output depends on no parameter: there is nothing to train")
    return graphs


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


def pretend_ranks(ranks: int) -> None:
    """Make this process rank 0 of `ranks` that are not there; do nothing if it is that already.

    Raises RuntimeError if it has another process group.
    """
    if not dist.is_initialized():
        _torch.dist.pretend_ranks(ranks)
    if dist.get_backend() != "fake" or dist.get_world_size() != ranks:
        raise RuntimeError("a dry run needs a process of its own, without a process group")


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
