"""First values of tensors that were on meta: modules compute them, and what none has is an error.

A module that was built on meta has buffers without values, as the frequencies of a rotary
embedding, which are computed in `__init__` and are in no checkpoint. Its memory, once allocated,
holds whatever was there before: other numbers at every run, and no error. So each buffer is filled
with a pattern first, and one that still has it at the end was written by nobody.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.runtime.eager import access
from autoshard.runtime.weights import adapters

_PATTERN = 0x5A  # of each byte of a buffer that has no values yet
_DONE = "_is_hf_initialized"  # attribute: transformers leaves such a tensor, or module, alone


def pretrained_class() -> type | None:
    """Return transformers' PreTrainedModel; None where transformers has not been imported."""
    module = sys.modules.get("transformers.modeling_utils")
    return getattr(module, "PreTrainedModel", None)


def pretrained_models(model: nn.Module) -> dict[str, Any]:
    """Find transformers' models in `model`, which may be one: the outermost ones, by path."""
    kind = pretrained_class()
    found: dict[str, Any] = {}

    def visit(path: str, module: nn.Module) -> None:
        if kind is not None and isinstance(module, kind):
            found[path] = module
            return
        for name, child in module.named_children():
            visit(f"{path}.{name}".removeprefix("."), child)

    visit("", model)
    return found


def is_there_a_way(module: nn.Module) -> bool:
    """Tell whether `module` has a `reset_parameters()`."""
    return callable(getattr(module, "reset_parameters", None))


def make_buffer(like: Tensor, device: torch.device) -> Tensor:
    """Allocate a buffer like `like` on `device`, with a pattern that says that it has no values."""
    made = torch.empty_like(like, device=device)
    if made.dtype == torch.bool:
        return made.zero_()
    made.reshape(-1).view(torch.uint8).fill_(_PATTERN)
    return made


@torch.no_grad()
def compute(model: nn.Module, fresh: Mapping[Tensor, str]) -> None:
    """Have the modules of `model` compute the tensors `fresh`, which are in use there.

    They are parameters, or buffers that `make_buffer` has made. transformers' models do so as
    `from_pretrained` has them do, adapters by PEFT, other modules by `reset_parameters()`. All
    other parameters and buffers are left as they are. Nothing is sent.

    fresh: the tensors, by their names for errors.
    Raises RuntimeError, naming them, if there are buffers that were not written to, or parameters
    of modules without a way; ValueError for adapters without one; and what a module raises, with a
    note.
    """
    versions = {tensor: tensor._version for tensor in fresh}
    with set_aside(model, fresh):
        theirs: set[nn.Module] = set()
        for its in pretrained_models(model).values():
            inside = set(its.modules())
            theirs |= inside
            if any(_own(module, fresh) for module in inside):
                _initialize(its, fresh)
        for path, module in model.named_modules():
            if module not in theirs and _own(module, fresh) and is_there_a_way(module):
                try:
                    # Found callable, which mypy can't know of a module's attribute.
                    module.reset_parameters()  # type: ignore[operator]
                except Exception as error:
                    error.add_note(f"in reset_parameters() of {path or 'the model'}")
                    raise
        done = adapters.initialise(model, fresh)
        without = {
            tensor
            for module in model.modules()
            if module not in theirs and not is_there_a_way(module)
            for tensor in _own(module, fresh)
            if isinstance(tensor, nn.Parameter) and tensor not in done
        }
    left = {t for t, version in versions.items() if t in without or _is_unwritten(t, version)}
    in_use = {each for module in model.modules() for each in _tensors(module)}
    names = sorted(fresh[tensor] for tensor in left & in_use)
    if names:
        raise RuntimeError(
            f"{names} were on the meta device, are in no checkpoint, and nothing computes them: "
            "have reset_parameters() of their modules do so, pass param_init_fn to "
            "autoshard.shard(), or build these modules on a real device"
        )


def _tensors(module: nn.Module) -> list[Tensor]:
    own = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in own if tensor is not None]


def _own(module: nn.Module, fresh: Mapping[Tensor, str]) -> list[Tensor]:
    return [tensor for tensor in _tensors(module) if tensor in fresh]


def _is_unwritten(tensor: Tensor, version: int) -> bool:
    """Tell whether a buffer of `make_buffer` is as it was made. A parameter never is."""
    if isinstance(tensor, nn.Parameter) or tensor._version != version or not tensor.numel():
        return False
    wanted = 0 if tensor.dtype == torch.bool else _PATTERN
    return bool((tensor.reshape(-1).view(torch.uint8) == wanted).all())


@contextlib.contextmanager
def set_aside(model: nn.Module, fresh: Container[Tensor] = frozenset()) -> Iterator[None]:
    """Have tensors on meta stand in the places of those of `model` that are not `fresh`.

    Whatever a module does to them then does nothing; and a read of a sharded parameter gathers
    nothing. What is put in the place of one meanwhile is dropped.
    """
    instead: dict[Tensor, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for place in own:
            for name, tensor in list(place.items()):
                if tensor is None or tensor in fresh:
                    continue
                if tensor not in instead:
                    instead[tensor] = _stand_in(tensor)
                before.append((place, name, tensor))
                place[name] = instead[tensor]
    heads = [module for module in model.modules() if access.unit_of(module) is not None]
    access.unsharded_heads.update(heads)
    try:
        yield
    finally:
        access.unsharded_heads.difference_update(heads)
        for place, name, tensor in before:
            place[name] = tensor


def _stand_in(tensor: Tensor) -> Tensor:
    """Make a plain tensor on meta of the true size of `tensor`, which transformers leaves alone."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    setattr(made, _DONE, True)
    return made


def _initialize(model: Any, fresh: Mapping[Tensor, str]) -> None:
    """Have transformers initialise what of `model` is not marked, as `from_pretrained` does."""
    for module in model.modules():
        module.__dict__.pop(_DONE, None)
    model.initialize_weights()
    for module in model.modules():
        module.__dict__.pop(_DONE, None)
    for tensor in fresh:
        tensor.__dict__.pop(_DONE, None)
