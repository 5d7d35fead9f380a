"""Trace a model's graphs and plans without its ranks: `autoshard trace`, `autoshard golden`.

Nothing is run and no weights are made: one step is traced on the meta device, sharded over any
number of ranks, and taken through all passes. `trace` shows the result, and the graph after each
pass; `golden` compares the result with files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from autoshard.compilation import Compilation
from autoshard.options import CompileOptions, CompileSettings
from autoshard.passes.ir.plan import Plan
from autoshard.passes.ir.text import render
from autoshard.passes.lowering.eager import lower_eagerly
from autoshard.runtime.compiled.frame import Frame
from autoshard.tools.plan.dry_run import compile_only, pretend_ranks, shard_without_weights
from autoshard.tools.plan.steps import PlannedModel, on_meta, policy_of, step_of


@dataclass(frozen=True)
class Traced:
    """Graph of a step after the last pass, as text, and its plan.

    graph: "forward" or "backward".
    """

    graph: str
    text: str
    plan: Plan


RESHARDS = {"full_shard": True, "shard_grad_op": False}
"""Strategies that can be traced: whether units reshard after forward."""

TAKEN = ("lowering", "bucketing", "topology", "strategy", "dump")
"""Options that `trace_model` heeds."""


def trace_model(
    planned: PlannedModel, ranks: int, micro_batch: int, options: dict[str, Any]
) -> list[Traced]:
    """Trace the forward and the backward graph of a step on rank 0 of `ranks`; run neither.

    It leaves a process group of that many ranks, of which no other is there, and resets what torch
    has compiled. Units are those of `shard()`. Logs the plans. Returns the graphs that have a
    collective.
    micro_batch: sequences of a rank.
    options: as the backend takes them, those of TAKEN; `dump` writes a file a pass. Without a
        topology, "auto" is one bucket a unit.
    Raises RuntimeError if forward is not one graph, or no graph has a collective, and in a process
    that has a process group other than such a one; ValueError for an option that is not in TAKEN,
    or a wrong value.
    """
    given = CompileOptions.read(options)
    if given.bucketing == "auto" and given.topology is None:
        given = dataclasses.replace(given, bucketing="per_unit")
    others = [name for name in options if name not in TAKEN]
    if others or given.strategy not in RESHARDS:
        raise ValueError(
            f"a trace takes the options {', '.join(TAKEN)}, and a strategy of {list(RESHARDS)}; "
            f"not {others or given.strategy!r}"
        )
    pretend_ranks(ranks)
    model = on_meta(planned)
    shard_without_weights(
        model,
        mesh=init_device_mesh("cpu", (ranks,)),
        mp_policy=policy_of(planned),
        reshard_after_forward=RESHARDS[given.strategy],
    )
    found: list[Traced] = []

    settings = given.resolve(torch.device("cpu"))

    def compile_frame(frame: Frame) -> None:
        compilation = _Tracing(frame, settings)
        compilation.compile()
        found.extend(compilation.traced)

    compile_only(model, step_of(planned, model, micro_batch), compile_frame)
    if not found:
        raise RuntimeError("no graph has a collective: is there a parameter that is trained?")
    return found


class _Tracing(Compilation):
    """Compilation that keeps the graphs' texts; all lowering is eager, as nothing is run."""

    is_cached = False

    def __init__(self, frame: Frame, settings: CompileSettings) -> None:
        super().__init__(frame, settings)
        self.traced: list[Traced] = []

    def lower_inductor(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        return lower_eagerly(gm)

    def _tell(self, plan: Plan, gm: fx.GraphModule | None) -> None:
        """Log `plan`, as a compilation does; add it, and the text of `gm`, to `traced`."""
        super()._tell(plan, gm)
        assert gm is not None
        self.traced.append(Traced(plan.graph, render(gm.graph, axes=self.axes), plan))


def write(found: Sequence[Traced], folder: Path) -> list[Path]:
    """Write plans as JSON, and timelines of plans with figures for Perfetto; return the paths.

    Files are "forward.plan.json" and "forward.trace.json", say, in `folder`, made if need be;
    earlier ones are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for each in found:
        paths.append(folder / f"{each.graph}.plan.json")
        paths[-1].write_text(each.plan.to_json() + "\n")
        if each.plan.figures is not None:
            paths.append(folder / f"{each.graph}.trace.json")
            each.plan.to_chrome_trace(paths[-1])
    return paths
