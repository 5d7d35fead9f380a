"""Lowered graphs of a forward and its backward as one autograd function, without AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard import _torch

Graph = Callable[[list[Any]], Any]
"""A lowered graph: it takes its inputs as a list."""


@dataclass(frozen=True)
class Graphs:
    """Lowered graphs of a call, and what autograd has to know of them.

    trained: for each output, whether it requires a gradient.
    tangents: strides of the gradients of these, as backward takes them.
    """

    forward: Graph
    backward: Graph | None
    trained: Sequence[bool]
    tangents: Sequence[Sequence[int]]

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run forward; the outputs have a backward, if there is one."""
        outputs: Sequence[Any]
        if self.backward is None:
            outputs = self.forward(list(inputs))
        else:
            outputs = _torch.autograd.apply(_Planned, self, *inputs)
        return outputs


class _Planned(torch.autograd.Function):
    """Autograd function that runs a forward graph, and its backward graph once."""

    @staticmethod
    def forward(ctx: Any, graphs: Graphs, *inputs: Any) -> tuple[Any, ...]:
        """Run the forward graph; what it hands to backward is saved."""
        count = len(graphs.trained)
        results = graphs.forward(list(inputs))
        outputs, handed = tuple(results[:count]), results[count:]
        is_tensor = [isinstance(each, Tensor) for each in handed]
        ctx.save_for_backward(*(each for each in handed if isinstance(each, Tensor)))
        ctx.others = [each for each in handed if not isinstance(each, Tensor)]
        ctx.is_tensor, ctx.graphs, ctx.num_inputs = is_tensor, graphs, len(inputs)
        ctx.mark_non_differentiable(
            *(
                each
                for each, is_trained in zip(outputs, graphs.trained, strict=True)
                if isinstance(each, Tensor) and not is_trained
            )
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Run the backward graph over what was saved and the gradients of outputs.

        The graph alone holds what was saved meanwhile, unless there is to be another backward: it
        lets go of each tensor after its last use.
        """
        graphs = ctx.graphs
        given = _handed(ctx)
        trained = [
            grad for grad, is_trained in zip(grads, graphs.trained, strict=True) if is_trained
        ]
        given += [
            _laid_out(grad, stride) for grad, stride in zip(trained, graphs.tangents, strict=True)
        ]
        _torch.autograd.clear_saved(ctx)
        found = list(graphs.backward(given))
        found += [None] * (ctx.num_inputs - len(found))
        return None, *found


def _handed(ctx: Any) -> list[Any]:
    """List what forward has handed to backward, in order."""
    saved, others = iter(ctx.saved_tensors), iter(ctx.others)
    return [next(saved) if is_tensor else next(others) for is_tensor in ctx.is_tensor]


def _laid_out(grad: Tensor | None, stride: Sequence[int]) -> Tensor:
    """Return `grad` with these strides, as the backward graph takes it."""
    assert grad is not None  # autograd makes zeros of those that are missing
    if grad.stride() == tuple(stride):
        return grad
    return torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)


def node_of(outputs: Sequence[Any]) -> tuple[Any, list[int]] | None:
    """Find autograd's node of the graphs that gave `outputs`, and whose gradients it has.

    None if there is none, as without a backward.
    """
    for each in outputs:
        node = each.grad_fn if isinstance(each, Tensor) else None
        graphs = getattr(node, "graphs", None)
        if isinstance(graphs, Graphs):
            return node, [at for at, is_trained in enumerate(graphs.trained) if is_trained]
    return None
