"""Traced training steps of a model: how it is built, with which batches, and what comes of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.passes.ir.layout import DTYPES, Member
from autoshard.passes.planner.topology import Topology
from autoshard.runtime.unit.policies import MixedPrecisionPolicy
from autoshard.tools.arguments import as_call
from autoshard.tools.plan import batches
from autoshard.tools.plan.blocks import Stack, cut_stacks, grown
from autoshard.tools.plan.chunks import in_chunks
from autoshard.tools.plan.dry_run import Prepared, mean_loss, trace
from autoshard.tools.plan.estimate import Parameters, StepGraphs
from autoshard.tools.plan.graphs import Graph, in_numbers
from autoshard.tools.plan.speed import tensors_in, tokens_of
from autoshard.tools.plan.ways import BY_VALUES

UNTIL_REGULAR = 2  # blocks, until copies to the host are as regular as blocks; seen in Llamas
Batch = Callable[[int, int], Any]
"""batch(micro_batch, seq): keyword arguments of the model in a dict, or positional ones."""


@dataclass(frozen=True)
class PlannedModel:
    """Model to train, with its batches, dtypes and optimizer.

    build: makes the model; called with the meta device as torch's default.
    batch: None: zeros, as token ids, or as pictures for a model of Hugging Face that takes them.
    dtype: name of the dtype of computation and gathers, "bf16" for instance.
    param_dtype: name of the dtype of shards, and of reduces.
    reduce_dtype: name of the dtype of reduces, if it is another.
    is_amp: whether computation is under autocast to `dtype`, with gathers in `param_dtype`.
    is_fp8: whether linear layers compute in float8, but for that of the vocabulary.
    is_loss_chunked: whether the loss, and the layer before it, run over chunks of the tokens.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Batch | None
    seq: int
    dtype: str
    param_dtype: str
    optimizer: str
    lowering: str
    reduce_dtype: str | None = None
    is_amp: bool = False
    is_fp8: bool = False
    is_loss_chunked: bool = False


def traced_step(planned: PlannedModel, micro_batch: int, recompute: str) -> StepGraphs:
    """Trace one training step, as `traced_steps` does; `recompute` is one of `CHECKPOINTING`."""
    return traced_steps(planned, [micro_batch], [recompute])[micro_batch, recompute]


def traced_steps(
    planned: PlannedModel,
    micro_batches: Collection[int],
    ways: Collection[str],
    topology: Topology | None = None,
) -> dict[tuple[int, str], StepGraphs]:
    """Trace training steps of `planned`: few of its like blocks, one of which stands for the rest.

    ways, topology: as of `trace`.

    One trace is enough for all `ways` of checkpointing, and for all microbatches unless sizes are
    not in proportion to them. As in `trace`, this process becomes one of ranks that are not there,
    and what torch has compiled is reset. Raises as `trace` does.

    Returns steps by microbatch and way.
    """
    model, smallest = on_meta(planned), min(micro_batches)
    samples = _batch(planned, model, smallest)
    traced_with, is_shared = smallest, len(micro_batches) > 1
    if is_shared:
        traced_with = batches.prime_for(model, [torch.empty(planned.seq), *tensors_in(samples)])
    try:
        traces = _Traces(planned, traced_with, ways, topology)
        is_right = not is_shared or traces.follow_batch()
    except RuntimeError:
        if not is_shared:
            raise
        is_right = False  # the model may take no such batch
    if not is_right:
        each_alone = [traced_steps(planned, [size], ways, topology) for size in micro_batches]
        return {key: step for steps in each_alone for key, step in steps.items()}
    any_step = StepGraphs(
        {},
        _parameters(model),
        planned.optimizer,
        casts=policy_of(planned).param_dtype is not None,
        reduce_bytes=DTYPES[planned.reduce_dtype or planned.param_dtype].itemsize,
        tokens=tokens_of(samples, smallest, planned.seq),
    )
    found = {}
    for micro_batch, way in itertools.product(micro_batches, ways):
        graphs = traces.graphs(micro_batch, way)
        if planned.is_fp8:
            vocabulary = _vocabulary(model)
            graphs = {kind: graph.in_float8(vocabulary) for kind, graph in graphs.items()}
        found[micro_batch, way] = dataclasses.replace(any_step, graphs=graphs)
    return found


class _Traces:
    """Graphs of one microbatch that was traced, `traced_with` samples, for all ways."""

    def __init__(
        self,
        planned: PlannedModel,
        traced_with: int,
        ways: Collection[str],
        topology: Topology | None,
    ) -> None:
        """Trace `planned`, of whose like blocks most are cut. Raises as `trace` does."""
        self.planned, self.traced_with = planned, traced_with
        self.ways, self.topology = ways, topology
        model = on_meta(planned)
        self.vocabulary = _vocabulary(model)
        has_host = topology is not None and topology.host_link is not None
        moves = has_host and not set(BY_VALUES).isdisjoint(ways)
        self.stacks = cut_stacks(model, ahead=UNTIL_REGULAR if moves else 0)
        self.cut = self._trace(model)

    @functools.cached_property
    def whole(self) -> dict[str, Prepared]:
        """The same with all blocks, traced when they are asked for."""
        return self._trace(on_meta(self.planned))

    def _trace(self, model: nn.Module) -> dict[str, Prepared]:
        """Trace this step with `model`, which is sharded by it: graphs by way."""
        return trace(
            model,
            step_of(self.planned, model, self.traced_with),
            mp_policy=policy_of(self.planned),
            ways=self.ways,
            lowering=self.planned.lowering,
            topology=self.topology,
        )

    def follow_batch(self) -> bool:
        """Tell whether graphs of other microbatches can be told from these."""
        return all(
            batches.follows_batch(each["forward"], self.traced_with) for each in self.cut.values()
        )

    def graphs(self, micro_batch: int, way: str) -> dict[str, Graph]:
        """Return the graphs of `micro_batch` in numbers, with all blocks.

        All blocks are traced if they turn out not to be computed alike, or if there are barriers.
        """
        try:
            return self._in_numbers(self.cut[way], micro_batch, self.stacks)
        except ValueError:
            return self._in_numbers(self.whole[way], micro_batch, [])

    def _in_numbers(
        self, graphs: Prepared, micro_batch: int, stacks: Sequence[Stack]
    ) -> dict[str, Graph]:
        """Describe `graphs` for that microbatch, with all blocks of `stacks`.

        Raises ValueError if these are not alike.
        """
        if micro_batch != self.traced_with:
            graphs = {
                kind: batches.of_microbatch(gm, self.traced_with, micro_batch)
                for kind, gm in graphs.items()
            }
        if self.planned.is_loss_chunked:
            tokens = micro_batch * self.planned.seq
            cut = [in_chunks(gm, self.vocabulary, tokens, micro_batch) for gm in graphs.values()]
            if not any(cut):
                raise RuntimeError(
                    "a loss in chunks needs logits: this model makes no tensor of its tokens by "
                    f"{self.vocabulary}, the rows of its largest embedding"
                )
        is_fused = self.planned.lowering == "inductor"
        found = {kind: in_numbers(gm, kind, is_fused=is_fused) for kind, gm in graphs.items()}
        return grown(found, stacks)


def _vocabulary(model: nn.Module) -> int:
    """Number of rows of the largest embedding; 0 if there is none."""
    found = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    return max(found, default=0)


def step_of(planned: PlannedModel, model: nn.Module, micro_batch: int) -> Callable[[Any], None]:
    """Return a function that runs forward and backward of the compiled `model` that it is given.

    It has one batch, which is made here, and the loss of `mean_loss`.
    """
    batch = _batch(planned, model, micro_batch)

    def call(compiled: Any) -> None:
        args, kwargs = as_call(batch)
        with torch.autocast("cpu", DTYPES[planned.dtype], enabled=planned.is_amp):
            output = compiled(*args, **kwargs)
        mean_loss(output).backward()

    return call


def policy_of(planned: PlannedModel) -> MixedPrecisionPolicy:
    """Mixed precision of `planned`: gathers in `dtype`, or under autocast as shards are.

    Without a cast, and with reduces in the dtype that they have by themselves, it has no dtypes.
    """
    param = DTYPES[planned.param_dtype]
    low = param if planned.is_amp else DTYPES[planned.dtype]
    reduced = DTYPES[planned.reduce_dtype or planned.param_dtype]
    return MixedPrecisionPolicy(low if low != param else None, reduced if reduced != low else None)


def on_meta(planned: PlannedModel) -> nn.Module:
    """Build the unsharded model, in `param_dtype`, on the meta device: without memory."""
    with torch.device("meta"):
        model = planned.build()
    return model.to(DTYPES[planned.param_dtype])


def _parameters(model: nn.Module) -> Parameters:
    """Sizes and dtypes of `model`'s parameters, and of those that require a gradient."""

    def members(params: Sequence[nn.Parameter]) -> tuple[Member, ...]:
        return tuple(Member(param.dtype, tuple(param.shape)) for param in params)

    params = list(model.parameters())
    return Parameters(members(params), members([param for param in params if param.requires_grad]))


def _batch(planned: PlannedModel, model: nn.Module, micro_batch: int) -> Any:
    """Make the batch of a step: that of `planned.batch`, or else zeros on the default device.

    Zeros are token ids, i64[micro_batch, seq]; for a model with a `config`, a dict of them as
    `input_ids` and `labels`, or of `pixel_values` and `labels` if it takes pictures.
    """
    if planned.batch is not None:
        return planned.batch(micro_batch, planned.seq)
    ids = torch.zeros(micro_batch, planned.seq, dtype=torch.long)
    config = getattr(model, "config", None)
    if config is None:
        return ids
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        sides = (config.num_channels, config.image_size, config.image_size)
        labels = torch.zeros(micro_batch, dtype=torch.long)
        return {"pixel_values": torch.zeros(micro_batch, *sides), "labels": labels}
    return {"input_ids": ids, "labels": ids}
