"""The Dynamo backend: torch.compile(model, backend="autoshard").

    Dynamo's graph -> make_frame -> AOTAutograd -> JOINT passes -> partition
      -> pipeline over the forward graph, and over the backward graph -> lower -> call
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autoshard import _torch, passes
from autoshard.options import CompileOptions
from autoshard.passes.lower_eagerly import lower_eagerly
from autoshard.passes.lower_inductor import lower_inductor
from autoshard.passes.meta import PLAN
from autoshard.passes.plan import Plan
from autoshard.runtime.frame import Frame, make_frame

log = logging.getLogger(__name__)


def autoshard(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one captured graph; Dynamo calls this, through the entry point.

    options: see `CompileOptions`.
    """
    settings = CompileOptions.read(options)
    frame = make_frame(gm, example_inputs)
    compiled = Compilation(frame, settings).compile()
    return frame.wrap(compiled)


class Compilation:
    """The compilation of one frame: its graphs share a table of parameters and the options."""

    def __init__(self, frame: Frame, options: CompileOptions) -> None:
        self.frame = frame
        self.options = options
        self.table = frame.table()
        self.plans: list[Plan] = []

    def compile(self) -> Callable[..., Any]:
        if self.options.lowering == "eager":
            return self._compile_eagerly()
        return self._compile_inductor()

    def _compile_eagerly(self) -> Callable[..., Any]:
        def lower(graph: str) -> Callable[..., Any]:
            def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
                return lower_eagerly(self._apply(gm, graph))

            return compiler

        backend = _torch.aot_autograd(
            fw_compiler=lower("forward"),
            bw_compiler=lower("backward"),
            inference_compiler=lower("inference"),
            partition_fn=self._partition,
            keep_inference_input_mutations=True,
        )
        compiled: Callable[..., Any] = backend(self.frame.gm, self.frame.inputs)
        return compiled

    def _compile_inductor(self) -> Callable[..., Any]:
        def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
            graph = (
                "backward"
                if kwargs.get("is_backward")
                else ("inference" if kwargs.get("is_inference") else "forward")
            )
            return lower_inductor(self._apply(gm, graph), example_inputs, **kwargs)

        return _torch.compile_with_inductor(
            self.frame.gm, self.frame.inputs, inner_compile=inner, joint_pass=self._joint
        )

    def _partition(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        return _torch.min_cut_rematerialization_partition(self._joint(gm), joint_inputs, **kwargs)

    def _joint(self, gm: fx.GraphModule) -> fx.GraphModule:
        for transform in passes.JOINT:
            gm = transform(gm)
        gm.graph.lint()
        gm.recompile()
        return gm

    def _apply(self, gm: fx.GraphModule, graph: str) -> fx.GraphModule:
        transforms = passes.pipeline(
            self.table, graph=graph, bucketing=self.options.bucketing
        )
        gm = passes.run(gm, transforms)
        plan = PLAN.get(gm)
        if plan is not None:
            self.plans.append(plan)
            log.info("%s", plan.text())
        return gm
