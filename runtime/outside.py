"""Parameters that are read outside of a forward, where they are DTensors: what is said of that.

torch refuses to compute with a DTensor and a plain tensor. Its error names neither the parameter
nor the way that works, so a note is added to it: where it passes through a call of ours, and where
nobody catches it. A loss that is a DTensor, as with a penalty on `model.parameters()`, sends
gradients that are DTensors, too, into the model's backward: that is an error there.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_MIXED = "mixed torch.Tensor and DTensor"  # of torch's message, 2.11 to 2.15

_latest = threading.local()


def note_read(name: str) -> None:
    """The parameter of that name was read outside of a forward, and given as it is."""
    _latest.name = name


def hint() -> str:
    """What works, in a sentence."""
    name = getattr(_latest, "name", None)
    which = f" ({name} was the latest)" if name else ""
    return (
        f"a parameter of a sharded module that is read outside of its forward{which} is a DTensor, "
        "which computes with no plain tensor: compute with it in the module's forward, or in a "
        "method given to autoshard.register_forward_method(model, name); between model.unshard() "
        "and model.reshard(), for one unit; or without gradients inside model.full_params(). For a "
        "penalty on weights take the optimizer's weight_decay, or param.full_tensor()"
    )


def explain(error: BaseException | None) -> None:
    """Add the hint to `error` if it says that both kinds of tensors met."""
    if isinstance(error, RuntimeError) and _MIXED in str(error):
        text = f"autoshard: {hint()}"
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)


@functools.cache
def explain_uncaught() -> None:
    """Have `explain` look at errors that nobody catches, from now on."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        explain(error)
        before(kind, error, traceback)

    sys.excepthook = hook


def refuse_dtensor(grad: Tensor | None) -> None:
    """Raise RuntimeError if `grad`, of what a model gave, is a DTensor."""
    if isinstance(grad, DTensor):
        raise RuntimeError(
            "the gradient of the model's output is a DTensor, as the loss has a term that is one: "
            + hint()
        )


def watch_output(output: Any) -> None:
    """Have gradients of `output`, of an outermost forward, looked at when they arrive."""
    if torch.is_grad_enabled():
        for tensor in _tensors(output):
            # Not a leaf, which an identity hands on: it would gather hooks from step to step.
            if tensor.grad_fn is not None and not isinstance(tensor, DTensor):
                tensor.register_hook(refuse_dtensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    """`value`, or those right in it."""
    if isinstance(value, Tensor):
        yield value
        return
    inside = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, tuple, list)):
        yield from (each for each in inside if isinstance(each, Tensor))
