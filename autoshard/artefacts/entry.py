"""Calls of a model as data: what is passed to its graphs, and what is made of their outputs."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoshard import _torch
from autoshard.artefacts.graphs import CannotBeKept

JSON = Any
"""Value as `json` reads and writes it."""


@dataclass(frozen=True)
class Entry:
    """One way to call a model, and the graphs that run it.

    call:     one of `make.CALLS`.
    takes:    what the call is given: a tree of tensors, by number, and constants; see `described`.
    tensors:  of each tensor in it, what `kinds_of` says.
    returns:  likewise; the graph's outputs have the first numbers, arguments those behind them.
    inputs:   of the frame: ["param", name], ["buffer", name] or ["arg", number].
    local:    numbers of the inputs for which shards are passed.
    table:    names of the frame's parameters, in the order of their numbers.
    stays:    numbers of those that are passed unsharded.
    markers:  by name: how each parameter is gathered and reduced; groups are tokens.
    modes:    names of the modules in train mode, "" for the model.
    trained:  for each output of the frame: whether it requires a gradient.
    tangents: strides of the gradients that the backward graph is given.
    graphs:   by kind, "forward", "backward" or "inference": name of the file.
    plans:    of the graphs with collectives, as JSON.
    reads:    paths of what was read of the model, and what was there; see `guards.py`.
    ambient:  flags of torch as the call was traced; see `facts.ambient`.
    """

    call: str
    takes: JSON
    tensors: list[JSON]
    returns: JSON
    inputs: list[list[Any]]
    local: list[int]
    table: list[str]
    stays: list[int]
    markers: dict[str, list[Any]]
    modes: list[str]
    trained: list[bool]
    tangents: list[list[int]]
    graphs: dict[str, str]
    plans: list[str]
    reads: dict[str, str]
    ambient: dict[str, str]

    def to_json(self) -> dict[str, JSON]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, JSON]) -> Entry:
        """Read what `to_json` made. Raises TypeError for other fields."""
        return Entry(**found)


def described(value: Any, tensors: list[Tensor]) -> JSON:
    """Describe `value` as a tree, and add the tensors in it, each once, to `tensors`.

    Lists, tuples, dicts with text as keys, and dataclasses and dicts of other classes are branches.
    Raises CannotBeKept for a leaf that is neither a tensor nor a constant.
    """
    if isinstance(value, Tensor):
        known = next((at for at, each in enumerate(tensors) if each is value), None)
        if known is None:
            known = len(tensors)
            tensors.append(value)
        return {"tensor": known}
    if type(value) in (bool, int, float, str, type(None)):
        return {"constant": value}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    cls = type(value)
    if cls in (list, tuple):
        return {cls.__name__: [described(each, tensors) for each in value]}
    is_dict = isinstance(value, dict) and not isinstance(value, defaultdict)
    if is_dict and all(isinstance(key, str) for key in value):
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        beside = {*getattr(value, "__dict__", ())} - {*value, *(each.name for each in fields)}
        if beside:
            raise CannotBeKept(f"a {cls.__qualname__} has {min(beside)} beside its items")
        items = {key: described(each, tensors) for key, each in value.items()}
        return {"dict": items} if cls is dict else {"mapping": items, "class": _class_name(cls)}
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        parts = [described(each, tensors) for each in value]
        return {"named": parts, "class": _class_name(cls)}
    if isinstance(value, torch.Size):
        return {"size": list(map(int, value))}
    if dataclasses.is_dataclass(value) and not hasattr(cls, "__post_init__"):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        more = sorted(set(vars(value)) - set(names))
        if more:
            raise CannotBeKept(f"a {cls.__qualname__} has {more[0]}, which is no field of it")
        items = {name: described(getattr(value, name), tensors) for name in names}
        return {"mapping": items, "class": _class_name(cls)}
    raise CannotBeKept(
        f"a {cls.__module__}.{cls.__qualname__} among the arguments or outputs can't be kept: give "
        "tensors, numbers, text, and lists and dicts of them"
    )


def built(tree: JSON, tensors: Sequence[Any]) -> Any:
    """Build the value that `tree` describes, of `tensors`. Raises LookupError for what is none."""
    ((kind, of),) = ((key, value) for key, value in tree.items() if key != "class")
    match kind:
        case "tensor":
            return tensors[of]
        case "constant":
            return of
        case "dtype":
            return getattr(torch, of)
        case "size":
            return torch.Size(of)
        case "list" | "tuple":
            parts = [built(each, tensors) for each in of]
            return parts if kind == "list" else tuple(parts)
        case "dict":
            return {key: built(each, tensors) for key, each in of.items()}
        case "named":
            return class_of(tree["class"])(*(built(each, tensors) for each in of))
        case "mapping":
            return class_of(tree["class"])(**{k: built(v, tensors) for k, v in of.items()})
    raise LookupError(f"{kind!r} is no part of a tree")


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def class_of(name: str) -> Any:
    """Find a class of outputs, in a module that is imported already; nothing is imported.

    Raises LookupError if it is not there, or is no class of data.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part, None)
    is_data = isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, (dict, tuple))
    )
    if not is_data:
        raise LookupError(f"{name} is no class of outputs")
    return found


def kinds_of(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Say of each argument what graphs depend on, besides its values.

    [its class, "" for torch's own; dtype, size, strides, whether it requires a gradient; number of
    the first one that has the same memory, None if none before does]. Strides of dims of one
    element say nothing, and are 0.
    """
    found: list[list[Any]] = []
    memories: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        size = list(tensor.shape)
        strides = [n if many > 1 else 0 for n, many in zip(tensor.stride(), size, strict=True)]
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        memory = _torch.tensors.storage_id(tensor) if is_plain else -1 - number
        first = memories.setdefault(memory, number)
        found.append(
            [
                "" if is_plain else type(tensor).__qualname__,
                str(tensor.dtype).removeprefix("torch."),
                size,
                strides,
                tensor.requires_grad,
                None if first == number else first,
            ]
        )
    return found


class Signature:
    """Signature of a model's forward, by which calls that mean the same look the same."""

    def __init__(self, model: Any) -> None:
        """Read the signature of `model.forward`."""
        self._signature = inspect.signature(model.forward)

    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[JSON, list[Tensor]]:
        """Describe the arguments of a call, defaults among them: (tree by name, its tensors).

        Raises TypeError for arguments that forward does not take, CannotBeKept as `described`.
        """
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        tensors: list[Tensor] = []
        given = {name: described(value, tensors) for name, value in bound.arguments.items()}
        return {"dict": given}, tensors


def shown(tree: JSON) -> str:
    """Show the arguments that `tree` describes, for a message: "(x=a tensor, k=1)"."""
    ((kind, of),) = ((key, value) for key, value in tree.items() if key != "class")
    match kind:
        case "tensor":
            return "a tensor"
        case "constant":
            return repr(of)
        case "dict" | "mapping":
            return f"({', '.join(f'{key}={shown(each)}' for key, each in of.items())})"
        case "list" | "tuple" | "named":
            return f"[{', '.join(map(shown, of))}]"
    return str(of)
