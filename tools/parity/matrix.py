"""Random combinations of options, each trained on the eager runtime and compiled, and compared.

Errors are most likely where modes meet. A case is drawn from a seed alone, so that a number names a
failing one: `autoshard parity --matrix --samples 1 --seed 17`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoshard import _torch
from autoshard.runtime.comm.flat_layout import FlatShard
from autoshard.runtime.comm.mesh import device_type, ensure_process_group
from autoshard.runtime.sharding.shard import replicate, shard
from autoshard.runtime.unit.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from autoshard.tools.parity.compare import average_gradients, compare_local, first_problem
from autoshard.tools.parity.meshes import mesh_of

STEPS = 3
FLOOR = 0.02  # biases begin at zero, and hold little but rounding after few steps in bfloat16
F32, BF16 = torch.float32, torch.bfloat16

PRECISIONS: dict[str, MixedPrecisionPolicy | None] = {
    "float32": None,
    "bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "bf16, reduced in f32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32),
    "reduced in bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
    "bf16, gradients kept": MixedPrecisionPolicy(param_dtype=BF16, keep_low_precision_grads=True),
    "bf16 but in eval": MixedPrecisionPolicy(param_dtype=BF16, full_precision_in_eval=True),
    "bf16 with buffers": MixedPrecisionPolicy(param_dtype=BF16, buffer_dtype=BF16),
    "bf16, output in f32": MixedPrecisionPolicy(BF16, F32, output_dtype=F32),
}

CHOICES: dict[str, Sequence[Any]] = {
    "lowering": ("eager", "eager", "eager", "inductor"),
    "strategy": (
        "full_shard",
        "shard_grad_op",
        "no_shard",
        "hybrid_shard",
        "hybrid_shard_zero2",
        "replicate",
    ),
    "copies": (1, 2),  # of the shards, on two ranks, in a hybrid strategy
    "precision": tuple(PRECISIONS),
    "bucketing": ("auto", "per_unit", "none", (("layers.0", "layers.1"), ("head",))),
    "accumulation": ("none", "reduced each", "no_sync", "all-reduced last"),
    "checkpointing": (None, "non-reentrant", "reentrant"),
    "tied": (False, True),
    "frozen": ("nothing", "a layer", "half a layer", "in turns"),
    "used": ("once", "a layer twice", "not all"),
    "batch": ("fixed", "of other sizes", "of other sizes by rank"),
    "broken": (False, False, True),  # the graph, in the middle
    "eval": (False, True),  # a forward without gradients after each step
    "keeps": (False, True),  # whole parameters after backward
    "divide_by": (None, None, None, 3.0),
    "optimizer": ("sgd", "adamw", "foreach adamw", "fused adamw"),
    "compiled": ("model", "model", "layers"),
    "on_host": (False, False, True),  # where shards live
    "gathered": ("as it is", "as it is", "in two parts"),  # a layer's weight
    "cut": ("as chosen", "as chosen", "through rows"),
}


@dataclass(frozen=True)
class Case:
    """Combination of options; the fields are those of `CHOICES`."""

    lowering: str
    strategy: str
    copies: int
    precision: str
    bucketing: Any
    accumulation: str
    checkpointing: str | None
    tied: bool
    frozen: str
    used: str
    batch: str
    broken: bool
    eval: bool
    keeps: bool
    divide_by: float | None
    optimizer: str
    compiled: str
    on_host: bool
    gathered: str
    cut: str

    def text(self) -> str:
        """Format the options that differ from the first of each choice, or "all defaults"."""
        parts = [
            f"{name}={value!r}"
            for name, value in dataclasses.asdict(self).items()
            if value != CHOICES[name][0]
        ]
        return ", ".join(parts) or "all defaults"


def draw(seed: int) -> Case:
    """Draw the case of a seed, the same on every rank and in every process.

    Options that don't go together are replaced.
    """
    source = random.Random(seed)
    case = Case(**{name: source.choice(values) for name, values in CHOICES.items()})
    # AdamW divides by a gradient's size, so that rounding may become a step; and torch's takes no
    # gradients of another dtype than the parameter's.
    if case.lowering == "inductor" or case.precision == "bf16, gradients kept":
        case = dataclasses.replace(case, optimizer="sgd")
    if case.gathered == "in two parts":  # that is not compiled for shards on the host
        case = dataclasses.replace(case, on_host=False, cut="as chosen")
    if not _torch.dtensor.SUBCLASSES_DISPATCH:
        case = dataclasses.replace(case, cut="as chosen")
    return case


class _Layer(nn.Module):
    """Layer with sizes that two ranks can't share evenly, a buffer, and a one-element parameter."""

    def __init__(self) -> None:
        """Make a norm, two linear layers, a gain of one element, and a buffer "scale"."""
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` plus what the layers make of it, times gain and scale; sizes stay."""
        # Nothing with a kink: rounding to bfloat16 may put a unit on either side of it.
        y = self.down(torch.tanh(self.up(self.norm(x)))) * self.gain
        scaled: Tensor = y * self.scale.to(y.dtype)
        return x + scaled


class _Model(nn.Module):
    """Three layers between an embedding and a head, with the ties and frozen layers of a case."""

    def __init__(self, case: Case) -> None:
        """Make the modules; tie the head to the embedding, and freeze layers, as `case` says."""
        super().__init__()
        self.case = case
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.spare = nn.Linear(3, 3)
        self.head = nn.Linear(6, 11, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        if case.frozen == "a layer":
            self.layers[1].requires_grad_(False)
        elif case.frozen == "half a layer":
            self.layers[1].up.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of token ids, [length, 11]; which modules are used, `case` says.

        A graph break is in the middle if the case is "broken".
        """
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = self._run(layer, x)
            if number == 1 and self.case.broken:
                _torch.dynamo.break_graph()
        if self.case.used == "a layer twice":
            x = self._run(self.layers[0], x)
        if self.case.used != "not all":
            x = x.to(self.spare.weight.dtype)  # layers may give another
            x = x + self.spare(x[..., :3]).sum(-1, keepdim=True)
        result: Tensor = self.head(x.to(self.head.weight.dtype))
        return result

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Call `layer`, in a checkpoint if `case` has checkpointing and gradients are computed."""
        if self.case.checkpointing is None or not torch.is_grad_enabled():
            result: Tensor = layer(x)
            return result
        reentrant = self.case.checkpointing == "reentrant"
        again: Tensor = checkpoint(layer, x, use_reentrant=reentrant)
        return again


def _build(case: Case) -> _Model:
    torch.manual_seed(0)
    return _Model(case).to(device_type())


def _shard(model: _Model, case: Case) -> Any:
    """Shard or replicate `model` as `case` says, in place, and return it.

    Hybrid strategies have `copies` replicas, or one if the ranks don't divide. Also sets what
    `case` says of parameters after backward, of the divide factor of layer 1, and of an all-gather
    extension of one weight of layer 0. All ranks call this.
    """
    given: dict[str, Any] = {"mp_policy": PRECISIONS[case.precision]}
    given["offload_policy"] = CPUOffloadPolicy() if case.on_host else OffloadPolicy()
    if case.strategy == "replicate":
        for layer in model.layers:
            replicate(layer, **given)
        sharded: Any = replicate(model, **given)
    else:
        given["strategy"] = case.strategy
        if case.cut == "through rows":
            given["shard_placement_fn"] = lambda _: FlatShard()
        if case.strategy.startswith("hybrid"):
            copies = case.copies if dist.get_world_size() % case.copies == 0 else 1
            given["mesh"] = mesh_of(copies, dist.get_world_size() // copies)
        sharded = shard(model, **given)
    sharded.set_reshard_after_backward(not case.keeps)
    if case.divide_by is not None:
        sharded.layers[1].set_gradient_divide_factor(case.divide_by)
    if case.gathered == "in two parts":
        shard_of_it = _torch.dtensor.local_tensor(sharded.layers[0].up.weight)
        for name, method in (("pre", _in_two_parts), ("post", _from_two_parts)):
            bound = types.MethodType(method, shard_of_it)
            setattr(shard_of_it, f"fsdp_{name}_all_gather", bound)
    return sharded


def _in_two_parts(self: Tensor, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
    """Split a shard into scaled values and their scale: its `fsdp_pre_all_gather`.

    Values are not rounded, but float64: a last bit before rounding is a whole step after it.
    """
    scale = self.abs().max().clamp(min=1e-3)
    return ((self / scale).double(), scale.view(())), None


def _from_two_parts(
    self: Tensor, outputs: Sequence[Tensor], metadata: None, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Multiply gathered values by their ranks' scales: a shard's `fsdp_post_all_gather`.

    Returns the unsharded parameter, and the same in a tuple, as what is freed later.
    """
    values, scales = outputs
    parts = zip(values.chunk(len(scales)), scales, strict=True)
    whole = torch.cat([part.to(dtype) * scale.to(dtype) for part, scale in parts])
    return whole, (whole,)


def _optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """Make the optimizer that `case` names, for all parameters of `model`."""
    params = list(model.parameters())
    if case.optimizer == "sgd":
        # On a GPU torch steps many parameters at once by default, each of its gradient's dtype.
        foreach = False if case.precision == "bf16, gradients kept" else None
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=foreach)
    kind = case.optimizer.partition(" ")[0]
    foreach, fused = kind == "foreach" or None, kind == "fused" or None
    return torch.optim.AdamW(params, lr=1e-2, foreach=foreach, fused=fused)


def _ids(case: Case, number: int) -> Tensor:
    """Make random token ids of this rank, i64[length], for batch `number`.

    The length is 5, or changes with the batch, or with batch and rank, as `case` says.
    """
    rank = dist.get_rank()
    length = 5
    if case.batch == "of other sizes":
        length += number % 4
    elif case.batch == "of other sizes by rank":
        length += (number + rank) % 3
    source = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(0, 11, (length,), generator=source).to(device_type())


@contextlib.contextmanager
def _waiting(model: Any, case: Case, is_last: bool) -> Iterator[None]:
    """Put off, in this context, the reductions that wait for the step's last batch in `case`.

    With "no_sync" that is the model's `no_sync`; with "all-reduced last" all-reduces are turned
    off, or on again for the last batch, which lasts beyond the context. Otherwise nothing is put
    off.
    """
    if case.accumulation == "no_sync" and not is_last:
        with model.no_sync():
            yield
        return
    if case.accumulation == "all-reduced last":
        model.set_requires_all_reduce(is_last)
    yield


def _train(model: _Model, call: Any, case: Case, *, replicated: bool = False) -> list[float]:
    """Train `model`, called as `call`, for `STEPS` steps; return losses of training and eval.

    Losses are this rank's, in order: of each batch, and of the forward in eval mode after each
    step, if `case` has one. Gradients of three batches add up in a step if `case` accumulates.
    Layers are frozen and unfrozen in turns if it says so. All ranks call this.
    replicated: whether the model is whole on each rank, and gradients are averaged here.
    """
    optimizer = _optimizer(model, case)
    batches = 1 if case.accumulation == "none" else 3
    losses: list[float] = []
    for step in range(STEPS):
        if case.frozen == "in turns":
            for number, layer in enumerate(model.layers):
                layer.requires_grad_((number + step) % 2 == 0)
        for batch in range(batches):
            is_last = batch == batches - 1
            context = contextlib.nullcontext() if replicated else _waiting(model, case, is_last)
            with context:
                ids = _ids(case, batches * step + batch)
                loss = functional.cross_entropy(call(ids).float(), ids.roll(-1))
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
        if replicated:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if case.eval:
            model.eval()
            with torch.no_grad():
                losses.append(call(_ids(case, 0)).float().square().mean().item())
            model.train()
    return losses


@dataclass(frozen=True)
class CaseOutcome:
    """Result of a case; `problem` is None if no run fails, or differs by more than is allowed."""

    seed: int
    case: Case
    problem: str | None

    @property
    def text(self) -> str:
        return self.case.text()


def try_case(seed: int) -> CaseOutcome:
    """Train the case of `seed`, eagerly and compiled, and compare; all ranks call this.

    It is also compared with replicated training, where the case changes no values. The process
    group is made if there is none, what torch has compiled is reset, and its random generator
    reseeded. Every rank returns the same result. An exception, or a RuntimeWarning, is a problem,
    too.
    """
    ensure_process_group()
    case = draw(seed)
    torch.compiler.reset()
    # What trains in turns, in batches of several sizes, has a graph for each, and each part of it.
    limit = _torch.dynamo.recompiling(64)
    with limit, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a frame that was not compiled
        try:
            problem = _compare_runs(case)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return CaseOutcome(seed, case, first_problem(problem))


def _compare_runs(case: Case) -> str | None:
    """Train `case` in each form; describe how parameters or losses differ on this rank, or None.

    Compiled training, of the model or of its layers alone, is compared with eager; and that, where
    the case changes no values, with the replicated model. Losses count only where compiled and
    eager have to be equal bit for bit; where they don't, and precision is low, a further run in
    float32 says how much is rounding. Each run reseeds torch's random generator. All ranks call
    this.
    """
    eager = _shard(_build(case), case)
    eager_losses = _train(eager, eager, case)
    compiled = _shard(_build(case), case)
    bucketing = case.bucketing if isinstance(case.bucketing, str) else list(case.bucketing)
    options = {"lowering": case.lowering, "bucketing": bucketing, "strict": True}
    if case.compiled == "layers":
        options["bucketing"] = bucketing if isinstance(bucketing, str) else "auto"
        for layer in compiled.layers:
            layer.compile(backend="autoshard", options=options)
    else:
        compiled.compile(backend="autoshard", options=options)
    losses = _train(compiled, compiled, case)
    rtol = _rtol(case)
    if rtol == 0.0 and losses != eager_losses:
        return f"losses differ: compiled {losses}, eager {eager_losses}"
    exact = None
    if rtol > 0.0 and PRECISIONS[case.precision] is not None:
        exact = _shard(_build(case), dataclasses.replace(case, precision="float32"))
        _train(exact, exact, case)
    problem = compare_local(compiled, eager, rtol, floor=FLOOR, exact=exact)
    if problem is not None:
        return f"compiled and eager differ: {problem}"
    changes_values = case.divide_by is not None or case.gathered == "in two parts"
    if PRECISIONS[case.precision] is None and not changes_values:
        plain = _build(case)
        _train(plain, plain, case, replicated=True)
        problem = compare_local(eager, plain, 0.0 if _is_exact(case) else 1e-4)
        if problem is not None:
            return f"eager and replicated differ: {problem}"
    return None


def _is_exact(case: Case) -> bool:
    """Tell whether the eager runtime adds gradients in the order of the replicated model.

    Both are then equal bit for bit. It does not if each microbatch is reduced: gradients are then
    summed over ranks first; nor for a layer used twice in reentrant checkpoints, as each use has a
    backward of its own. And torch's fused AdamW on a CPU rounds an element by where it stands,
    which is elsewhere in a shard.
    """
    twice = case.used == "a layer twice" and case.checkpointing == "reentrant"
    is_summed_alike = case.accumulation in ("none", "no_sync") and not twice
    return is_summed_alike and case.optimizer != "fused adamw"


def _rtol(case: Case) -> float:
    """Largest difference allowed of compiled from eager, relative to a parameter's largest element.

    It is 0 where both must be equal bit for bit. Inductor keeps more bits between fused operations:
    bfloat16 rounds by 2 ** -8 at each in eager torch, which adds up over three steps of some
    twenty. And of a layer used twice, both gradients are added before the sum over ranks, but after
    it where each use has a backward, or a graph, of its own: in reentrant checkpoints that run
    eagerly; and in compiled parts of a model.
    """
    has_parts = case.compiled == "layers" or case.broken or case.checkpointing == "reentrant"
    if case.lowering == "eager" and not (case.used == "a layer twice" and has_parts):
        return 0.0
    return 1e-4 if PRECISIONS[case.precision] is None else 2.0**-5
