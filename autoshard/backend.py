"""The Dynamo backend: torch.compile(model, backend="autoshard").

Dynamo's graph -> make_frame -> AOTAutograd -> joint passes -> partition
  -> pipeline over the forward graph, and over the backward graph -> lower -> call

`compilation.py` does that for one frame, `agreed_plan.py` so that ranks agree on it.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from autoshard import _torch
from autoshard.agreed_plan import Attempt, agreed_attempt
from autoshard.one_piece import MANY, in_one_piece
from autoshard.options import CompileOptions, CompileSettings
from autoshard.passes.ir.plan import show_bytes
from autoshard.runtime.compiled import tables
from autoshard.runtime.compiled.calls import call_of
from autoshard.runtime.compiled.frame import follow_replaced, sharded_parameters
from autoshard.runtime.sharding import first_call
from autoshard.runtime.sharding.adopt import adopt, plain_parameters
from autoshard.runtime.unit.param import ShardedParam
from autoshard.runtime.unit.precision import cast_buffers
from autoshard.runtime.unit.unit import root_of

log = logging.getLogger(__name__)

# torch.compile(..., backend="autoshard") imports this module before it wraps what it is given.
first_call.watch_first_calls(lambda options: CompileOptions.read(options).shard_arguments())


@functools.partial(in_one_piece, values=MANY)
def autoshard(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured; Dynamo finds this function by the entry point.

    Returns a function with the inputs and outputs of `gm`. Dynamo is made to trace the frame again
    if anything changes first: a model that is not sharded yet is sharded here, in place; parameters
    that were replaced after sharding are followed; buffers are cast as mixed precision says.
    Parameters that the user left out of sharding are a warning, and not sharded. Ranks wait for
    each other where a model is sharded, and where they compile what is new to them. `gm` is
    changed; plans are recorded.

    mode: as the option of that name.
    options: see `CompileOptions`.
    Raises ValueError for a wrong option; RuntimeError if ranks have other options, or compile
    other collectives, or if a model can't be sharded here. Anything else that goes wrong in
    tracing, a pass or the lowering, on any rank, is raised only with `strict`: otherwise it is one
    warning, and the frame runs on the eager runtime.
    """
    tables.count_graph()
    given = CompileOptions.read({"mode": mode, **(options or {})})
    plain = plain_parameters(example_inputs)
    if plain:
        if adopt(plain, given.shard_arguments()):
            raise _torch.dynamo.TraceAgain(restart_reason="autoshard sharded the model")
        _warn_once(
            f"parameters of size {', '.join(str(list(p.shape)) for p in plain)} were left out of "
            "fully_shard: they are not sharded, and their gradients are not reduced"
        )
    if follow_replaced(example_inputs):
        raise _torch.dynamo.TraceAgain(restart_reason="parameters were replaced after sharding")
    params = sharded_parameters(example_inputs)
    were_cast = [cast_buffers(unit) for unit in {param.unit for param in params}]
    if any(were_cast):
        raise _torch.dynamo.TraceAgain(restart_reason="buffers were cast")
    _log_graph_break()
    settings = given.resolve(params[0].device if params else None)
    return _compile(gm, example_inputs, settings, params)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: CompileSettings,
    params: Sequence[ShardedParam],
) -> Callable[..., Any]:
    """Compile a frame; `params` are the sharded parameters that it reads.

    Ranks agree on the plans, unless the frame reads no sharded parameter or has `strict_order` off.
    Then they wait for each other, if the plans are new. Warns once if a plan is predicted to exceed
    the memory budget.
    Returns a function with the inputs and outputs of `gm`.
    Raises SkipFrame after a failure, with one warning, so that the frame runs eagerly; with
    `strict`, the failure. Raises as `agreed_attempt`, and ValueError for a wrong name in
    `bucketing`.
    """
    code = _torch.dynamo.traced_code()
    if params and params[0].unit.is_unordered:  # no collective in it, but who compiled it is told
        attempt, name = Attempt(gm, example_inputs, settings), code
    elif params:
        _check_bucketing(settings, params[0])
        attempt = agreed_attempt(gm, example_inputs, settings, params, code)
        unit = params[0].unit.name
        name = f"the graph of {code} ({', '.join([unit, *attempt.outcome.digests])})"
    else:  # it has no collective, and other ranks may not have it at all
        attempt, name = Attempt(gm, example_inputs, settings), code
    if attempt.reason is None:
        _warn_beyond_budget(attempt, code)
        compilation = attempt.compilation
        planned = compilation.planned_bytes()
        return call_of(compilation.frame, attempt.compiled, name, attempt.plans, planned)
    if settings.strict:
        failure = attempt.failure
        if failure is None or _torch.dynamo.breaks_graphs(failure):
            raise RuntimeError(attempt.reason) from failure
        raise failure
    _warn_once(
        "autoshard could not compile a frame, which runs on the eager runtime instead: "
        f"{attempt.reason}"
    )
    raise _torch.dynamo.SkipFrame(attempt.reason)


def _warn_beyond_budget(attempt: Attempt, code: str) -> None:
    """Warn once if a plan is predicted to exceed the memory budget; only with bucketing "auto".

    That is so if no plan keeps to the budget, or if the batch is larger than the one that a plan
    was found with. By how much is logged, at INFO, each time.
    """
    compilation = attempt.compilation
    prices = compilation.prices
    if compilation.settings.bucketing != "auto" or not attempt.plans:
        return
    if prices is None or prices.budget_bytes is None:
        return
    plan = max(attempt.plans, key=lambda plan: plan.peak_bytes)
    beyond = plan.peak_bytes - prices.budget_bytes
    if beyond > 0:
        log.info("the %s graph: %s beyond the budget", plan.graph, show_bytes(beyond))
        most = ""
        if plan.graph in compilation.priced:
            name, num_bytes = compilation.priced[plan.graph].most_at_peak(prices.budget_bytes)
            most = f", where {name} are most ({show_bytes(num_bytes)})"
        others = compilation.others.num_bytes
        if others:
            most += f", beside {show_bytes(others)} of the model's other frames"
        _warn_once(
            f"a graph of {code} is predicted to need more memory than option 'memory_budget' "
            f"allows, by {show_bytes(beyond)} at the {plan.graph}'s peak{most}: take a larger "
            "budget, a smaller batch, or activation checkpointing; and where batches differ, begin "
            "with the largest",
            about=code,
        )


def _check_bucketing(settings: CompileSettings, param: ShardedParam) -> None:
    """Raise ValueError if `bucketing` lists a name that the model of `param` lacks.

    Names of modules and of parameters are valid.
    """
    if isinstance(settings.bucketing, str):
        return
    root = root_of(param)
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


def _log_graph_break() -> None:
    """Log, at INFO, where and why a graph break ends the graph being compiled, if one does."""
    found = _torch.dynamo.graph_break()
    if found is not None:
        log.info("graph break at %s: %s; what follows has a plan of its own", *found)


_warned: set[str] = set()


def _warn_once(message: str, *, about: str = "") -> None:
    """Give `message` as a RuntimeWarning, unless it was given before in this process.

    about: what a message with numbers is about, so that others about it are not given.
    """
    key = about or message
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
