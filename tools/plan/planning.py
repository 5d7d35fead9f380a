"""Find the best configurations of a model on a cluster: `autoshard plan`.

A configuration is a strategy, a mesh, a microbatch and whether activations are recomputed. All
configurations that the caller leaves open are estimated with one bucket a unit; buckets are
searched for in the best few.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.passes.ir.layout import DTYPES, Member
from autoshard.passes.planner.topology import Topology, default_topology, is_known, names
from autoshard.runtime.unit.policies import MixedPrecisionPolicy
from autoshard.tools.plan import batches
from autoshard.tools.plan.blocks import Stack, cut_stacks, grown
from autoshard.tools.plan.dry_run import Prepared, mean_loss, trace
from autoshard.tools.plan.estimate import (
    OPTIMIZERS,
    Configuration,
    Estimate,
    Parameters,
    StepGraphs,
    estimate,
)
from autoshard.tools.plan.front import Tried
from autoshard.tools.plan.graphs import Graph, in_numbers
from autoshard.tools.plan.speed import Work, forward_flops, tensors_in, tokens_of
from autoshard.tools.plan.splice import checkpointed, read_way, spliced
from autoshard.tools.plan.ways import CHECKPOINTING

MICRO_BATCHES = (1, 2, 4)  # tried where the caller names none
SHOWN = 3  # configurations in which buckets are searched for

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


@dataclass(frozen=True)
class Choices:
    """Settings of configurations; None where the caller leaves one open.

    mesh: (replicas, shards).
    strategy: "zero1" is tried only where it is named.
    accumulate: microbatches of a step.
    """

    mesh: tuple[int, int] | None = None
    strategy: str | None = None
    micro_batches: tuple[int, ...] | None = None
    checkpointing: str | None = None
    accumulate: int = 1


@dataclass(frozen=True)
class PlanReport:
    """Result of `plan`.

    work: of one sample.
    tried: all configurations that were estimated, the best first.
    estimates: at most three that fit, the best first; if none fits, the one that needs least.
    """

    model: PlannedModel
    topology: Topology
    gpus: int
    num_parameters: int
    work: Work
    tried: tuple[Tried, ...]
    estimates: tuple[Estimate, ...]
    planning_s: float

    @property
    def overflow(self) -> str | None:
        """Category of memory with which the best estimate doesn't fit; None if it does."""
        return self.estimates[0].memory.first_beyond(self.topology.memory_bytes)

    @property
    def num_configurations(self) -> int:
        """Number of configurations that were estimated."""
        return len(self.tried)

    def __str__(self) -> str:
        """Return the tables that `autoshard plan` prints."""
        from autoshard.tools.plan.report import text  # which reads reports, as `page` does

        return text(self)

    def _repr_html_(self) -> str:
        """Return the content of `autoshard plan --html`, for notebooks."""
        from autoshard.tools.plan.page import content

        return content(self)


def plan(planned: PlannedModel, topology: Topology, gpus: int, choices: Choices) -> PlanReport:
    """Estimate all configurations that `choices` leaves open, the best three with a search.

    The model is traced as `traced_steps` does it, for which this process becomes one of ranks that
    are not there, and what torch has compiled is reset. Fewer bytes beyond a device's memory are
    better, then less time for a sequence.
    Raises ValueError for a mesh that doesn't hold `gpus`, or a strategy that no mesh has;
    RuntimeError for a model whose forward is not one graph, and in a process that has a process
    group.
    """
    began = time.perf_counter()
    if choices.checkpointing not in (None, *CHECKPOINTING):
        read_way(choices.checkpointing)  # what is wrong is said before anything is traced
    configurations = list(_configurations(topology, gpus, choices))
    if not configurations:
        raise ValueError(f"strategy {choices.strategy!r} has no mesh of {gpus} ranks")

    wanted = {each.checkpointing for each in configurations}
    ways = wanted if wanted <= {*CHECKPOINTING} else {"none", "full"}
    steps = traced_steps(planned, {each.micro_batch for each in configurations}, ways)

    @functools.cache
    def step(micro_batch: int, recompute: str) -> StepGraphs:
        if recompute in CHECKPOINTING:
            return steps[micro_batch, recompute]
        none, full = (step(micro_batch, each) for each in ("none", "full"))
        chosen = checkpointed(recompute, none.graphs["forward"])
        graphs = {
            kind: spliced(graph, full.graphs[kind], chosen) for kind, graph in none.graphs.items()
        }
        return dataclasses.replace(none, graphs=graphs)

    def estimated(found: Configuration, *, searched: bool) -> Estimate:
        traced = step(found.micro_batch, found.checkpointing)
        return estimate(traced, found, topology, searched=searched)

    def rank(found: Estimate) -> tuple[int, float]:
        over = found.memory.peak_bytes - topology.memory_bytes
        return (over, 0.0) if over > 0 else (0, found.sample_us)

    rough = sorted((estimated(each, searched=False) for each in configurations), key=rank)
    best = [estimated(each.configuration, searched=True) for each in rough[:SHOWN]]
    best.sort(key=rank)
    searched = {each.configuration: each for each in best}
    all_tried = [searched.get(each.configuration, each) for each in rough]
    first = configurations[0]
    traced = step(first.micro_batch, first.checkpointing)
    members = traced.parameters.members
    flops = 3 * forward_flops(traced.graphs["forward"]) / first.micro_batch
    return PlanReport(
        planned,
        topology,
        gpus,
        sum(math.prod(member.size) for member in members),
        Work(traced.tokens, flops),
        tuple(map(Tried.of, sorted(all_tried, key=rank))),
        tuple(each for each in best if rank(each)[0] == rank(best[0])[0] == 0) or (best[0],),
        time.perf_counter() - began,
    )


def _configurations(topology: Topology, gpus: int, choices: Choices) -> Iterator[Configuration]:
    """Yield all configurations that `choices` leaves open, each once.

    With one shard there is nothing to reshard, so that `reshards` is True alone.
    Raises ValueError for a mesh that doesn't hold `gpus`.
    """
    meshes = [choices.mesh] if choices.mesh else _meshes(topology, gpus)
    for replicas, shards in meshes:
        if replicas * shards != gpus:
            raise ValueError(f"mesh {replicas}x{shards} has {replicas * shards} ranks, not {gpus}")
    recomputes = ["none", "full"] if choices.checkpointing is None else [choices.checkpointing]
    batches = choices.micro_batches or MICRO_BATCHES
    for micro_batch, recompute in itertools.product(batches, recomputes):
        for (replicas, shards), reshards in itertools.product(meshes, (True, False)):
            found = Configuration(
                *(replicas, shards, reshards, micro_batch, recompute),
                accumulate=choices.accumulate,
                shards_states=shards == 1 and choices.strategy == "zero1",
            )
            is_same = shards == 1 and not reshards  # as with it
            if not is_same and choices.strategy in (None, found.strategy):
                yield found


def _meshes(topology: Topology, gpus: int) -> list[tuple[int, int]]:
    """List meshes to try, (replicas, shards), those of few shards first.

    Shards are over all ranks; over one node, two, four and so on, as long as that divides `gpus`;
    and over one rank, with replicas alone.
    """
    shards = {1, gpus}
    number = min(topology.ranks_per_node, gpus)
    while number < gpus and gpus % number == 0:
        shards.add(number)
        number *= 2
    return [(gpus // each, each) for each in sorted(shards)]


def traced_step(planned: PlannedModel, micro_batch: int, recompute: str) -> StepGraphs:
    """Trace one training step, as `traced_steps` does; `recompute` is one of `CHECKPOINTING`."""
    return traced_steps(planned, [micro_batch], [recompute])[micro_batch, recompute]


def traced_steps(
    planned: PlannedModel, micro_batches: Collection[int], ways: Collection[str]
) -> dict[tuple[int, str], StepGraphs]:
    """Trace training steps of `planned`: few of its like blocks, one of which stands for the rest.

    One trace is enough for all `ways` of checkpointing, and for all microbatches unless sizes are
    not in proportion to them. The model is built again, and all blocks are traced, if blocks turn
    out not to be computed alike, or if there are barriers. As in `trace`, this process becomes one
    of ranks that are not there, and what torch has compiled is reset. Raises as `trace` does.

    Returns steps by microbatch and way.
    """
    model = on_meta(planned)
    parameters, vocabulary = _parameters(model), _vocabulary(model)
    smallest = min(micro_batches)
    samples = _batch(planned, model, smallest)
    tokens = tokens_of(samples, smallest, planned.seq)
    (traced_with,) = (
        micro_batches
        if len(micro_batches) == 1
        else (batches.prime_for(model, [torch.empty(planned.seq), *tensors_in(samples)]),)
    )
    casts = policy_of(planned).param_dtype is not None

    def trace_all(model: nn.Module) -> dict[str, Prepared]:
        """Trace this step with `model`, which is sharded by it: graphs by way."""
        return trace(
            model,
            step_of(planned, model, traced_with),
            mp_policy=policy_of(planned),
            ways=ways,
            lowering=planned.lowering,
        )

    stacks = cut_stacks(model)
    is_shared = traced_with not in micro_batches
    try:
        cut = trace_all(model)
        is_right = not is_shared or all(
            batches.follows_batch(each["forward"], traced_with) for each in cut.values()
        )
    except RuntimeError:
        if not is_shared:
            raise
        is_right = False  # the model may take no such batch
    if not is_right:
        each_alone = [traced_steps(planned, [size], ways) for size in micro_batches]
        return {key: step for steps in each_alone for key, step in steps.items()}
    whole = functools.cache(lambda: trace_all(on_meta(planned)))

    def numbers(graphs: Prepared, micro_batch: int, stacks: Sequence[Stack]) -> dict[str, Graph]:
        """Return `graphs` of that microbatch in numbers, with all blocks of `stacks`."""
        if micro_batch != traced_with:
            graphs = {
                kind: batches.of_microbatch(gm, traced_with, micro_batch)
                for kind, gm in graphs.items()
            }
        is_fused = planned.lowering == "inductor"
        found = {kind: in_numbers(gm, kind, is_fused=is_fused) for kind, gm in graphs.items()}
        return grown(found, stacks)

    found = {}
    for micro_batch, way in itertools.product(micro_batches, ways):
        try:
            graphs = numbers(cut[way], micro_batch, stacks)
        except ValueError:  # blocks that look alike are not computed alike
            graphs = numbers(whole()[way], micro_batch, [])
        if planned.is_fp8:
            graphs = {kind: graph.in_float8(vocabulary) for kind, graph in graphs.items()}
        found[micro_batch, way] = StepGraphs(
            graphs,
            parameters,
            planned.optimizer,
            casts=casts,
            reduce_bytes=DTYPES[planned.reduce_dtype or planned.param_dtype].itemsize,
            tokens=tokens,
        )
    return found


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
        args, kwargs = ((), batch) if isinstance(batch, dict) else (_as_tuple(batch), {})
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


def _as_tuple(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


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


def read_model(options: Any, load: Callable[[str], Callable[..., Any]]) -> PlannedModel:
    """Read a model from the command line's options; it is not built yet.

    options: what is parsed, with the options of `add_workload`, `micro_batch`, `optimizer` and
        `lowering`. `model` is a Hugging Face configuration if such a file exists, or its name ends
        in ".json", else a function's place.
    load: returns the function at "package.module:name".
    Raises ValueError, naming the option, for what is not known, and as `from_hugging_face` does.
    """
    for name in ("dtype", "param_dtype", "reduce_dtype"):
        given = getattr(options, name)
        if given is not None and given not in DTYPES:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {given!r}: expected one of {list(DTYPES)}")
    if options.optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {options.optimizer!r}: expected one of {list(OPTIMIZERS)}")
    for name in ("seq", "micro_batch", "accumulate"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected a number from 1 on")
    path = Path(options.model)
    is_file = path.suffix == ".json" or path.exists()
    return PlannedModel(
        name=options.model,
        build=from_hugging_face(path) if is_file else load(options.model),
        batch=load(options.batch) if options.batch else None,
        seq=options.seq,
        dtype=options.dtype,
        param_dtype=options.param_dtype,
        optimizer=options.optimizer,
        lowering=options.lowering,
        reduce_dtype=options.reduce_dtype,
        is_amp=options.amp,
    )


def from_hugging_face(path: Path) -> Callable[[], nn.Module]:
    """Return a function that builds the model of a `config.json`, of the class that it names first.

    If it names none, or transformers has no such class, the model is a causal language model.
    `use_cache` is turned off. The file is read here, not when the model is built. Weights are not
    loaded.
    Raises ValueError if there is no such file, if it is no configuration, or if transformers is not
    installed.
    """
    if not path.exists():  # else it is taken for a name on the hub, and asked for there
        raise ValueError(f"{path} is no configuration of a Hugging Face model: no such file")
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{path} needs transformers: pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is no configuration of a Hugging Face model: {error}") from None
    if hasattr(config, "use_cache"):
        config.use_cache = False  # no step of training has one
    names = getattr(config, "architectures", None) or []
    named = next((getattr(transformers, name, None) for name in names), None)

    def build() -> nn.Module:
        make: Any = named or transformers.AutoModelForCausalLM.from_config
        model: nn.Module = make(config)
        return model

    return build


def read_gpus(text: str, topology: str | None) -> tuple[int, Topology]:
    """Read a number of ranks and a topology from "64xH100", or "64" and a topology's name.

    topology: a name or a JSON file, which goes before the kind in `text`.
    Raises ValueError for anything else.
    """
    found = re.fullmatch(r"(\d+)(?:x(\w+))?", text)
    number = int(found[1]) if found else 0
    if not found or not number:
        raise ValueError(f"--gpus {text!r}: expected a number and a kind, such as 64xH100")
    if topology is None and found[2] is None:
        raise ValueError(f"--gpus {text!r} names no kind: write {text}xH100, or add --topology")
    return number, Topology.load(topology or _topology_of(found[2]))


def _topology_of(kind: str) -> str:
    """Name of the topology for a kind of GPU, "h100" for "H100", or of this package's topologies.

    Raises ValueError for a kind of which none is known.
    """
    if kind.lower() in names():
        return kind.lower()
    if not is_known(kind):
        raise ValueError(
            f"no topology is known of {kind!r}, but of {', '.join(names())}: write one of these, "
            "or add --topology, a name or a file"
        )
    return default_topology(kind)


def read_network(text: str, topology: Topology) -> Topology:
    """Return `topology` with a network of a rate such as "800Gb/node" or "400Gb/gpu".

    Raises ValueError for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)Gb/(node|gpu)", text)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"--network {text!r}: expected a rate such as 800Gb/node or 400Gb/gpu")
    ranks = topology.ranks_per_node if found[2] == "gpu" else 1
    return topology.with_network(float(found[1]) * ranks)


def read_mesh(text: str, gpus: int) -> tuple[int, int]:
    """Read (replicas, shards) from "2048x8", or from "8", shards alone: replicas then fill `gpus`.

    Raises ValueError for anything else. Whether the mesh has `gpus` ranks is not checked.
    """
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)", text)
    if not found or int(found[2]) < 1:
        raise ValueError(f"--mesh {text!r}: expected replicas x shards, such as 2048x8")
    shards = int(found[2])
    return int(found[1]) if found[1] else gpus // shards, shards
