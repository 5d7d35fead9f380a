"""Run a model replicated, eagerly sharded and compiled on the same data, and compare.

Each rank compares its own shards with the matching rows, parameter by parameter and
step by step: a norm over the whole model can hide a wrong shard.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.comm.flat_shard import cut
from autoshard.runtime.comm.mesh import device_type, ensure_process_group
from autoshard.runtime.sharding.shard import shard

if TYPE_CHECKING:
    from autoshard.tools.parity import bisection

log = logging.getLogger(__name__)

REPLICATED, EAGER, COMPILED = "replicated", "eager", "compiled"

Loss = Callable[[Any, Any], Tensor]
"""loss(model, batch), a scalar."""


@dataclass(frozen=True)
class Difference:
    """First parameter in which two runs differ, and the largest difference there is.

    step:     counted from 0; parameters are compared after its optimizer step.
    absolute: the largest difference of this parameter's elements on `rank`.
    relative: `absolute` over the largest element, on `rank`, in the run that is compared with.
    worst:    the largest `relative` of all parameters, ranks and steps.
    """

    parameter: str
    rank: int
    step: int
    absolute: float
    relative: float
    worst: float


@dataclass(frozen=True)
class Comparison:
    """Comparison of one run with another; `difference` is None where they are equal bit for bit.

    only_here: parameters that had a gradient in `run`, in some step, but None in `against`. It is
        zeros then, as behind a graph break. An optimizer skips a parameter whose gradient is None;
        with zeros it may decay the parameter, or count a step.
    """

    run: str
    against: str
    difference: Difference | None
    rtol: float
    only_here: tuple[str, ...] = ()

    @property
    def bitwise(self) -> bool:
        return self.difference is None

    @property
    def ok(self) -> bool:
        """Tell whether the runs are equal, or within `rtol`."""
        return self.difference is None or self.difference.worst <= self.rtol

    def text(self) -> str:
        """Format the verdict, and the first three names of `only_here`, if there are any."""
        given = ""
        if self.only_here:
            shown = ", ".join(self.only_here[:3])
            more = len(self.only_here) - 3
            given = f"; gradients in {self.run} alone: {shown}{f' and {more} more' * (more > 0)}"
        return self._verdict() + given

    def _verdict(self) -> str:
        """Format one clause: equal bit for bit, within `rtol`, or different, and where first."""
        if self.difference is None:
            return f"{self.run} = {self.against} bitwise"
        d = self.difference
        verdict = f"within {self.rtol:g}" if self.ok else "DIFFERS"
        return (
            f"{self.run} = {self.against} {verdict}: relative {d.worst:.3g}, first in "
            f"{d.parameter} on rank {d.rank} after step {d.step} by {d.absolute:.3g} "
            f"({d.relative:.3g} relative)"
        )


@dataclass(frozen=True)
class ParityReport:
    """Result of `parity`; the same on every rank, but for `losses`.

    ok, bitwise: whether all comparisons are.
    """

    comparisons: tuple[Comparison, ...]
    steps: int
    lowering: str
    losses: dict[str, tuple[float, ...]]  # this rank's, by run
    parted: tuple[str, ...] = ()  # with `bisect`: a line for each two runs that differ

    @property
    def ok(self) -> bool:
        return all(comparison.ok for comparison in self.comparisons)

    @property
    def bitwise(self) -> bool:
        return all(comparison.bitwise for comparison in self.comparisons)

    def text(self) -> str:
        """Format one line, `parity: ...`, and a line for each of `parted`."""
        parts = "; ".join(comparison.text() for comparison in self.comparisons)
        line = f"parity: {parts}; {self.steps} steps, lowering {self.lowering}"
        return "\n".join([line, *self.parted])


def parity(
    build_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    *,
    loss: Loss | None = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    options: dict[str, Any] | None = None,
    rtol: float = 1e-5,
    seed: int = 0,
    bisect: bool = False,
    **shard_arguments: Any,
) -> ParityReport:
    """Train a model replicated, on the eager runtime, and compiled; compare after every step.

    All ranks call this, and wait for each other. The process group is made if there is none.
    Torch's random generator is reseeded in each run. Parameters of all steps are kept until the
    end.

    build_model: called once a run, under the same seed; the model is moved to this rank's device,
        and trained in float32 or whatever it is built in.
    batches: one a step, this rank's own, on its device; each run gets copies. A dict is passed as
        keywords, a tuple or list as arguments.
    loss: a scalar of (model, batch). By default the model's output: its `loss` if it has one,
        itself if it is a scalar, else the mean of its squares; of a tuple or list, the first.
    optimizer: makes one for a list of parameters; AdamW with lr 1e-3 by default.
    options: the backend's; `lowering` is "eager", and `strict` True, unless given.
    rtol: largest relative difference that passes where two runs are not equal bit for bit.
    bisect: whether to train again where two runs differ, to find the first op that gives something
        else.
    shard_arguments: `shard()`'s, for the eager and the compiled run.

    Raises nothing for a difference: ask the report's `ok` and `bitwise`.
    """
    ensure_process_group()
    options = {"lowering": "eager", "strict": True, **(options or {})}
    setup = _Setup(
        build_model,
        batches,
        loss or default_loss,
        optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-3)),
        options,
        seed,
        shard_arguments,
    )
    runs = {name: setup.run(name) for name in (REPLICATED, EAGER, COMPILED)}
    pairs = ((EAGER, REPLICATED), (COMPILED, EAGER), (COMPILED, REPLICATED))
    comparisons = tuple(_compare(runs, run, against, rtol) for run, against in pairs)
    return ParityReport(
        comparisons=comparisons,
        steps=len(batches),
        lowering=str(options["lowering"]),
        losses={name: run.losses for name, run in runs.items()},
        parted=tuple(_parted(setup, comparisons[:2])) if bisect else (),
    )


@dataclass(frozen=True)
class _Setup:
    """Arguments of `parity`, and the runs that they make."""

    build_model: Callable[[], nn.Module]
    batches: Sequence[Any]
    loss: Loss
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    options: dict[str, Any]
    seed: int
    shard_arguments: dict[str, Any]

    def run(self, name: str) -> _Run:
        """Train one run, REPLICATED, EAGER or COMPILED; copy the parameters after every step."""
        losses, snapshots, with_grad = [], [], []
        for model, loss, had_grad in self.steps(name):
            losses.append(loss.item())
            snapshots.append({n: param.detach().clone() for n, param in model.named_parameters()})
            with_grad.append(had_grad)
        return _Run(tuple(losses), tuple(snapshots), tuple(with_grad))

    def steps(
        self,
        name: str,
        forward_begins: Callable[[], None] = lambda: None,
        backward_ends: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[nn.Module, Tensor, frozenset[str]]]:
        """Train one run; after every step yield the model, the loss, and names of parameters.

        The names are those of parameters that had a gradient in the step. Each run builds its model
        anew, from the same seed; the replicated one has the weights of rank 0, and its gradients
        are averaged over the ranks. Then torch's random generator is seeded by rank. A batch is
        copied before it is used. The optimizer has stepped, and gradients are emptied, before a
        step is yielded. All ranks take the steps together.
        forward_begins, backward_ends: called in every step, before forward and after backward.
        """
        log.info("parity: %s run", name)
        torch.manual_seed(self.seed)
        model = self.build_model().to(torch.device(device_type()))
        call: Any = model
        if name == REPLICATED:
            _broadcast(model)
        else:
            shard(model, **self.shard_arguments)
        if name == COMPILED:
            call = torch.compile(model, backend="autoshard", options=self.options)
        torch.manual_seed(self.seed + 1 + dist.get_rank())
        optimizer = self.make_optimizer(list(model.parameters()))
        for batch in self.batches:
            given = copy.deepcopy(batch)
            forward_begins()
            value = self.loss(call, given)
            value.backward()  # type: ignore[no-untyped-call]
            backward_ends()
            if name == REPLICATED:
                average_gradients(model)
            had_grad = (n for n, param in model.named_parameters() if param.grad is not None)
            names = frozenset(had_grad)
            optimizer.step()
            optimizer.zero_grad()
            yield model, value, names


def _parted(setup: _Setup, comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield a line with the first op that differs, for each of `comparisons` that is not bitwise.

    With Inductor, comparisons within their `rtol` are left out. The runs are trained again, with
    the plain lowering; if that shows nothing, and a run by Inductor differs, with Inductor. If no
    op is found, the line says so. All ranks call this.
    """
    from autoshard.tools.parity import bisection  # with all of the backend, which most never need

    by_inductor = setup.options["lowering"] == "inductor"
    for comparison in comparisons:
        if comparison.difference is None or (by_inductor and comparison.ok):
            continue
        step, run, against = comparison.difference.step, comparison.run, comparison.against
        # The run with a name for each op, or with fewer of them, says which one it is.
        one, other = (run, against) if run == COMPILED else (against, run)
        plain = dataclasses.replace(setup, options={**setup.options, "lowering": "eager"})
        where = bisection.first_unknown(_results(plain, one, step), _results(plain, other, step))
        if where is None and by_inductor and run == COMPILED:
            with bisection.miscompiled(comparison.rtol) as found:
                for _ in itertools.islice(setup.steps(run), step + 1):
                    pass
            where = "; ".join(found) or None
        where = where or "no op of forward or backward: in a reduction, or in the optimizer"
        yield f"{run} and {against} part in step {step} at {where}"


def _results(setup: _Setup, name: str, last: int) -> list[bisection.OpResult]:
    """Train the run `name` again, up to step `last`; return the results of that step's ops.

    They are those of forward and backward: of all ops that are dispatched, or, compiled, of the
    nodes of planned graphs.
    last: counted from 0.
    """
    from autoshard.tools.parity import bisection

    kept: list[bisection.OpResult] = []
    with bisection.nodes_of() if name == COMPILED else bisection.ops_of() as found:

        def backward_ends() -> None:
            kept[:] = found

        for _ in itertools.islice(setup.steps(name, found.clear, backward_ends), last + 1):
            pass
    return kept


def first_problem(problem: str | None) -> str | None:
    """Return the `problem` of the first rank that has one, as "rank 1: ..."; None if none has.

    All ranks call this.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(found) if each), None)


def default_loss(model: Any, batch: Any) -> Tensor:
    """Call `model` with `batch`, and return the loss of its output, a scalar.

    That is the output's `loss` if it has one, or else the output; of a tuple or list, the first. If
    that tensor is no scalar, the mean of its squares, in float32, is returned.
    batch: a dict is passed as keywords, a tuple or list as arguments.
    """
    if isinstance(batch, dict):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    value = getattr(output, "loss", None)
    if value is None:
        value = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(value, Tensor)
    return value if value.dim() == 0 else value.float().pow(2).mean()


@dataclass(frozen=True)
class _Run:
    """Losses and parameters of one run."""

    losses: tuple[float, ...]
    snapshots: tuple[dict[str, Tensor], ...]  # after each step; DTensors where sharded
    with_grad: tuple[frozenset[str], ...]  # parameters that had a gradient, in each step


def _broadcast(model: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0, in place; all ranks call this."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.numel():
                dist.broadcast(tensor.detach(), src=0)


def average_gradients(model: nn.Module) -> None:
    """Average gradients over all ranks, in place, as replicated training does; all ranks call this.

    Parameters without a gradient are left out, and have to be the same on all ranks.
    """
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def _compare(runs: dict[str, _Run], run: str, against: str, rtol: float) -> Comparison:
    """Compare two of `runs`, this rank's shards with the matching rows; all ranks call this.

    Every rank returns the same. The first difference is that of the earliest step, then of the
    lowest rank, then of the first parameter. Gradients are compared only in whether there is one:
    what any rank had in `run` alone is listed.
    """
    first: tuple[int, int, str, float, float] | None = None  # step, rank, parameter, abs, rel
    worst = 0.0
    for step, (have, want) in enumerate(
        zip(runs[run].snapshots, runs[against].snapshots, strict=True)
    ):
        for name, param in have.items():
            absolute, relative = _difference(_local(param, param), _local(want[name], param))
            worst = max(worst, relative)
            if relative and first is None:
                first = (step, dist.get_rank(), name, absolute, relative)
    pairs = zip(runs[run].with_grad, runs[against].with_grad, strict=True)
    more = {name for have, want in pairs for name in have - want}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (first, worst, more))
    only_here = tuple(sorted(set().union(*(entry for _, _, entry in found))))
    firsts = sorted(entry for entry, _, _ in found if entry is not None)
    if not firsts:
        return Comparison(run, against, None, rtol, only_here)
    step, rank, name, absolute, relative = firsts[0]
    overall = max(entry for _, entry, _ in found)
    difference = Difference(name, rank, step, absolute, relative, overall)
    return Comparison(run, against, difference, rtol, only_here)


def compare_local(
    got: nn.Module,
    want: nn.Module,
    rtol: float,
    *,
    floor: float = 0.0,
    exact: nn.Module | None = None,
) -> str | None:
    """Describe the first parameter whose part on this rank differs by more than is allowed.

    Returns None if there is none. Nothing is sent to other ranks.
    got: sharded or replicated; it may be compiled.
    want: replicated, or sharded likewise.
    rtol: what is allowed, of the part's largest element, or of `floor` if that element is smaller.
    exact: as `want`, but trained in more bits: its distance from `want` is rounding, and up to
        twice that is allowed, too, as two runs may be off to opposite sides.
    """
    theirs = dict(want.named_parameters())
    exacts = {} if exact is None else dict(exact.named_parameters())
    for name, param in got.named_parameters():
        key = name.replace("_orig_mod.", "")
        other = _local(theirs[key], param)
        absolute, relative = _difference(_local(param, param), other)
        rounding = _difference(other, _local(exacts[key], param))[0] if exacts else 0.0
        allowed = max(rtol * floor, 2 * rounding if math.isfinite(rounding) else 0.0)
        if relative > rtol and absolute > allowed:
            return f"{name} by {absolute:.3g} ({relative:.3g} relative)"
    return None


def _difference(have: Tensor, want: Tensor) -> tuple[float, float]:
    """Largest difference of two tensors, and the same over the largest element of `want`.

    Both are 0 if the tensors are equal or empty, and infinite if there is a NaN; the second is
    infinite, too, if `want` is all 0. One of them may be on the host.
    """
    want = want.to(have.device)
    if torch.equal(have, want) or not want.numel():
        return 0.0, 0.0
    absolute = (have.double() - want.double()).abs().max().item()
    if absolute != absolute:  # NaN in one of them: as different as can be
        return float("inf"), float("inf")
    largest = want.double().abs().max().item()
    return absolute, absolute / largest if largest else float("inf")


def _local(param: Tensor, like: Tensor) -> Tensor:
    """Part of `param` on this rank: its own shard, or the rows that `like` has here.

    A parameter that is not sharded, nor `like`, is returned whole.
    """
    if isinstance(param, DTensor):
        return param.to_local()
    if not isinstance(like, DTensor):
        return param
    return _torch.dtensor.local_tensor(cut(param.detach(), like.device_mesh, like.placements))
