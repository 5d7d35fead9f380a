"""Hints about parameters that are read outside of a forward, where they are DTensors.

torch refuses to compute with a DTensor and a plain tensor. Its error names neither the parameter
nor a way that works, so a note is added to it: where it passes through a call of ours, and where
it is not caught. A loss that is a DTensor, as with a penalty on `model.parameters()`, sends
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

_NO_MEMORY = "data pointer on an invalid python storage"  # as safetensors meets it, 2.11 to 2.15
_SAVE_HINT = (
    "if these are tensors of a sharded model, they are DTensors, which have no memory of their own "
    "and which safetensors can't write: call autoshard.save_pretrained(model, folder) on all "
    "ranks, or save autoshard.full_state_dict(model, cpu_offload=True, rank0_only=True) on rank 0"
)

_latest = threading.local()


def note_read(name: str) -> None:
    """Note, for `hint`, that parameter `name` was read outside of a forward, as a DTensor."""
    _latest.name = name


def hint() -> str:
    """Advice, in words, on how to compute with a parameter outside of a forward.

    It names the parameter that this thread has read last, if any.
    """
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
    """Add a note to `error` if it is torch's about a DTensor and a plain tensor, or its memory."""
    if not isinstance(error, RuntimeError):
        return
    text = ""
    if _MIXED in str(error):
        text = f"autoshard: {hint()}"
    elif _NO_MEMORY in str(error):
        text = f"autoshard: {_SAVE_HINT}"
    if text and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


@functools.cache
def explain_uncaught() -> None:
    """Have `explain` look at uncaught errors, from now on.

    Patched: `sys.excepthook`; the one that was there is called.
    Why:     C++ raises the error, in a call that has no frame of ours, on torch 2.11 to 2.15.
    Tests:   in tests/unit/test_patches.py `test_torch_gives_no_advice_on_mixed_tensors`, needed; in
             tests/parity/eager/test_outside.py `test_an_error_that_nobody_catches`, works.
    """
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        explain(error)
        before(kind, error, traceback)

    sys.excepthook = hook


def refuse_dtensor(grad: Tensor | None) -> None:
    """Raise RuntimeError if `grad`, the gradient of a model's output, is a DTensor."""
    if isinstance(grad, DTensor):
        raise RuntimeError(
            "the gradient of the model's output is a DTensor, as the loss has a term that is one: "
            + hint()
        )


def watch_output(output: Any) -> None:
    """Have backward raise RuntimeError if a gradient of `output` is a DTensor.

    output: of an outermost forward. Only tensors found by `tensors_in` are watched that have a
        `grad_fn` and are no DTensors themselves; none where gradients are disabled.
    """
    if torch.is_grad_enabled():
        for tensor in tensors_in(output):
            # Not a leaf, which an identity hands on: it would gather hooks from step to step.
            if tensor.grad_fn is not None and not isinstance(tensor, DTensor):
                tensor.register_hook(refuse_dtensor)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield `value` if it is a tensor, or the tensors in a mapping, tuple or list, no deeper."""
    if isinstance(value, Tensor):
        yield value
        return
    inside = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, tuple, list)):
        yield from (each for each in inside if isinstance(each, Tensor))
