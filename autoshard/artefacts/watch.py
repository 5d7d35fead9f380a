"""Watch over what loaded graphs depend on, and that may change between two calls of the model.

At loading all of it was compared, by `facts.py`; a call only asks whether it is still what was
there then: the same objects, equal constants.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from autoshard import _torch
from autoshard.artefacts import guards
from autoshard.runtime.eager.access import original_class

Get = Callable[[Any, Any], Any]
"""Function that gets something by its name from what has it."""


class Watch:
    """Watch over a model, as it is when this is made, and over what was read of it by traced code.

    Parameters, buffers, modules, hooks, methods, and the values at paths of guards.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        """Note what is there now. paths: of guards; those of modes are left out."""
        self._values = [
            each
            for path in paths
            if not guards.is_mode(path, model) and (each := _asked(path, model)) is not None
        ]
        self._dicts: list[tuple[dict[Any, Any], list[Any]]] = [
            (each, list(each.values()))
            for module in model.modules()
            for each in _torch.nn.hooks_of(module)
        ]
        self._dicts += [(each, list(each.values())) for each in _torch.nn.global_hooks()]
        self._tensors: list[tuple[dict[str, Any], str, Any, bool, str]] = []
        self._buffers: list[tuple[dict[str, Any], str, tuple[Any, ...], str]] = []
        self._children: list[tuple[dict[str, Any], dict[str, Any], str]] = []
        for path, module in model.named_modules():
            before = f"{path}." if path else ""
            for name, param in module._parameters.items():
                if param is not None:
                    trained = param.requires_grad
                    self._tensors.append(
                        (module._parameters, name, param, trained, f"{before}{name}")
                    )
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    kind = _kind(buffer)
                    self._buffers.append((module._buffers, name, kind, f"{before}{name}"))
            children = _torch.nn.children_of(module)
            self._children.append((children, dict(children), before))
        classes = {original_class(module) for module in model.modules()}
        classes |= {type(value) for _, _, _, value in self._values}
        self._classes = [
            (each, name, value)
            for cls in classes
            for each in cls.__mro__
            for name, value in vars(each).items()
            if guards.is_method(value)
            and (name == "forward" or not guards.is_covered(each.__module__))
        ]
        own = ("_compiled_call_impl",)  # by which loaded graphs are called
        self._owned = [(module.__dict__, {*module.__dict__, *own}) for module in model.modules()]
        read = {path.rpartition("['")[2].removesuffix("']") for path in paths if "type(" in path}
        self._shadowed = [_methods(original_class(module)) | read for module in model.modules()]

    def changed(self) -> str | None:
        """Say what is not as it was; None if all is."""
        for where, name, param, trained, path in self._tensors:
            now = where.get(name)
            if now is not param:
                return f"another parameter stands in the place of {path}"
            if now.requires_grad is not trained:
                return f"{path} is {'trained' if now.requires_grad else 'frozen'} since loading"
        for where, name, kind, path in self._buffers:
            now = where.get(name)
            if now is None or _kind(now) != kind:
                return f"buffer {path} has another dtype, size or layout than at loading"
        for where, known, before in self._children:
            if where.keys() != known.keys():
                name = min(where.keys() ^ known.keys())
                return f"module {before}{name} was put there, or taken away, since loading"
            for name, child in known.items():
                if where[name] is not child:
                    return f"another module stands in the place of {before}{name}"
        for each, its in self._dicts:
            same = len(each) == len(its) and all(map(operator.is_, each.values(), its))
            if not same:
                return "a module has other hooks than at loading"
        for cls, name, value in self._classes:
            if vars(cls).get(name) is not value:
                return f"{name} of {cls.__qualname__} is another one than at loading"
        for owner, get, name, value in self._values:
            try:
                now = get(owner, name)
            except guards.MISSING:
                now = guards.NOTHING
            if now is not value and not _equal(now, value):
                is_now, was = guards.fact(now, 1), guards.fact(value, 1)
                said = (
                    "another object than at loading"
                    if is_now == was
                    else f"{is_now}, and was {was}"
                )
                return f"{name} of {guards.fact(owner, 1)} is {said}"
        for (own, had), shadowed in zip(self._owned, self._shadowed, strict=True):
            if not own.keys() <= had:
                new = sorted((set(own) - had) & shadowed)
                if new:
                    return f"a module has a {new[0]} of its own since loading"
        return None


def _methods(cls: type) -> set[str]:
    """Names of the methods and properties of `cls`."""
    found = ((name, value) for each in cls.__mro__ for name, value in vars(each).items())
    return {name for name, value in found if guards.is_method(value)}


def _kind(buffer: Any) -> tuple[Any, ...]:
    """Facts of a buffer, besides its values, that code which reads it depends on."""
    return buffer.dtype, buffer.shape, buffer.stride(), buffer.device


def _equal(now: Any, value: Any) -> bool:
    """Tell whether two constants are the same, of one type; NaN is NaN."""
    return guards.plain(now) and guards.plain(value) and repr(now) == repr(value)


def _asked(path: str, model: nn.Module) -> tuple[Any, Get, Any, Any] | None:
    """Return (what has the value at `path`, how to get it, its name, the value).

    Of a container, and of what each read makes anew, as a method, it is what `guards.fact` says.
    None for a path that ends in neither an attribute nor an item, or that others look at: what is
    in a module's own dicts.
    """
    if path.endswith(("._modules", "._parameters", "._buffers")) or "._buffers['" in path:
        return None
    value = guards.value_at(path, model)
    if "type(" in path:  # its last step would ask a copy of what the class has
        return model, _read_again, path, guards.fact(value)
    try:
        last = guards.last_step(path, model)
    except guards.MISSING:
        return None
    if last is None:
        return None
    owner, name, get = last
    is_made_anew = value is not guards.NOTHING and get(owner, name) is not value
    if isinstance(value, (list, set, dict, deque)) or (is_made_anew and not guards.plain(value)):
        return owner, functools.partial(_contents, get), name, guards.fact(value)
    return owner, get, name, value


def _read_again(model: nn.Module, path: str) -> str:
    """Say what is at `path`."""
    return guards.fact(guards.value_at(path, model))


def _contents(get: Get, owner: Any, name: Any) -> str:
    """Say what is in a container, which may be changed where it is."""
    return guards.fact(get(owner, name))
