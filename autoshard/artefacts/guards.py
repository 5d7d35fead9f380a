"""Guards as data: what a traced call has read, as paths from the model, and what was found there.

Dynamo guards its code by Python expressions, such as `L['model']._modules['a'].scale`. A path is
such an expression, with `model` for the model, and `module('pkg.mod')` for globals of a module:

    model._modules['blocks']._modules['0'].scale      "0.5"
    module('pkg.layers').EPSILON                      "1e-05"
    model._modules['head'].__dict__['activation']     "function torch.nn.functional.gelu ..."
    environ('DEBUG')                                  "None"

A path is data: `find` walks over attributes and items, and calls nothing but properties.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import hashlib
import operator
import os
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.runtime.eager.access import original_class

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, enum.Enum)
"""Types whose values are facts by themselves."""

_IMPORTED = re.compile(r"G\['__import_(\w+)'\]")
# What sharding puts on modules, what is compared by itself, and what differs by rank.
_OURS = re.compile(
    r"\._autoshard_|\['_autoshard_|\._parameters\['|\._(forward|backward|state_dict)_(pre_)?hooks"
    r"|\b_compiled_call_impl\b|\.environ(?!\w)(?!\._data\[)|type\(.*(\.fget|'_(for|back)ward_)"
)
_STEPS: dict[str, Callable[..., Any]] = {
    "type": type,
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "len": len,
    "dict.keys": dict.keys,
    "dict.values": dict.values,
}


MISSING = (LookupError, AttributeError, TypeError, StopIteration)
"""Exceptions of `find` where there is nothing at a path."""


NOTHING = object()
"""Stand-in for the value at a path where there is none."""


class UnknownPath(ValueError):
    """A guard whose expression is none of those that a path can be."""


def paths_of(expressions: Iterable[str], known: Callable[[str], object]) -> list[str]:
    """Return the paths of Dynamo's guards on the model and on globals, sorted, each once.

    Guards on arguments, and on what sharding has put on modules, are left out, as others look at
    these; and so are those on torch's and autoshard's own globals, which versions stand for.
    expressions: of the guards. known: finds the value at a path.
    Raises UnknownPath for one that can't be walked.
    """
    found = set()
    for expression in expressions:
        path = path_of(expression, known)
        about_model = path.startswith(("model.", "model[")) or "(model" in path
        is_own = _OURS.search(path) is not None
        if is_own or not (about_model or _is_users(path) or path.startswith("environ(")):
            continue
        try:
            value = known(path)
        except MISSING:
            value = None  # that nothing is there is a fact, too
        except SyntaxError as error:
            raise UnknownPath(f"{expression}: {error}") from None
        is_constant = plain(value) or isinstance(value, (list, dict, set, deque))
        if "type(" in path and (not is_constant or not path.endswith("]")):
            continue  # which methods a class has is a fact of its own
        is_registry = isinstance(value, dict) and (
            type(value) is not dict or not plain(list(value))
        )
        if is_registry and not about_model:
            continue  # what else is in it depends on what else was imported
        found.add(path)
    return sorted(found)


def path_of(expression: str, known: Callable[[str], object]) -> str:
    """Return the path that Dynamo's `expression` stands for.

    A key by its place in a dict, which depends on what else was put there, becomes one by its fact.
    """
    path = _IMPORTED.sub(lambda each: f"module({_module_named(each[1])!r})", expression)
    path = path.replace("L['model']", "model")
    while (begin := path.find("list(dict.keys(")) >= 0:
        end = _end_of_call(path, begin + len("list"))
        place, _, rest = path[end:].removeprefix("[").partition("]")
        owner = path[begin + len("list(dict.keys(") : end - len("))")]
        if not path[end:].startswith("[") or not place.isdigit():
            break
        key = known(f"list(dict.keys({owner}))[{place}]")
        path = f"{path[:begin]}key({owner}, {fact(key)!r}){rest}"
    return path


def _end_of_call(text: str, begin: int) -> int:
    """Place behind the bracket that closes the one at `begin`."""
    depth = 0
    for at, each in enumerate(text[begin:], begin):
        depth += (each == "(") - (each == ")")
        if depth == 0:
            return at + 1
    return len(text)


def _is_users(path: str) -> bool:
    """Tell whether `path` begins at a module of Python's that is neither torch's nor ours."""
    begin = re.search(r"module\('([\w.]+)'\)", path)
    return begin is not None and not is_covered(begin[1])


def is_covered(module: str) -> bool:
    """Tell whether a digest or a version stands for all code of `module`: torch, this, Python."""
    root = module.partition(".")[0]
    return root in ("torch", "autoshard", "builtins") or root in sys.stdlib_module_names - {
        "__main__"
    }


def _module_named(alias: str) -> str:
    """Name of the module that Dynamo has imported under `alias`: "pkg_dot_mod" for "pkg.mod"."""
    name = alias.replace("_dot_", ".")
    return name if name in sys.modules else alias


def is_mode(path: str, model: nn.Module) -> bool:
    """Tell whether at `path` is the mode of a module, train or eval; each call has its own."""
    if not path.endswith(".training"):
        return False
    return isinstance(value_at(path.removesuffix(".training"), model), nn.Module)


def value_at(path: str, model: nn.Module) -> Any:
    """Return the value at `path`, NOTHING if there is none. Raises UnknownPath as `find`."""
    try:
        return find(path, model)
    except MISSING:
        return NOTHING


def find(path: str, model: nn.Module) -> Any:
    """Return the value at `path`.

    Raises AttributeError or LookupError where there is none, UnknownPath for an expression that is
    no path.
    """
    return _walk(_parsed(path), model)


@functools.lru_cache(maxsize=1 << 14)
def _parsed(path: str) -> ast.expr:
    """Parse `path`; some are walked at each call of a model. Raises SyntaxError."""
    return ast.parse(path, mode="eval").body


def last_step(path: str, model: nn.Module) -> tuple[Any, Any, Callable[[Any, Any], Any]] | None:
    """Return what `path` asks last, by which name, and how; None for another end."""
    match _parsed(path):
        case ast.Attribute(value=owner, attr=name):
            return _walk(owner, model), name, getattr
        case ast.Subscript(value=owner, slice=key):
            return _walk(owner, model), _walk(key, model), operator.getitem
        case ast.Call(func=ast.Name(id="environ"), args=[ast.Constant(value=name)]):
            return os.environ, name, lambda environment, name: environment.get(name)
        case ast.Call(func=ast.Name(id="contains"), args=[owner, ast.Constant(value=key)]):
            return _walk(owner, model), key, operator.contains
        case ast.Call(func=ast.Name(id="holds"), args=[owner, ast.Constant(value=key)]):
            return vars(_walk(owner, model)), key, operator.contains
    return None


def _walk(node: ast.expr, model: nn.Module) -> Any:
    """Return the value that `node` stands for; see `find`."""
    match node:
        case ast.Name(id="model"):
            return model
        case ast.Constant(value=value):
            return value
        case ast.Attribute(value=owner, attr=name):
            return getattr(_walk(owner, model), name)
        case ast.Subscript(value=owner, slice=key):
            return _walk(owner, model)[_walk(key, model)]
        case ast.Call(func=ast.Name(id="module"), args=[ast.Constant(value=str(name))]):
            return sys.modules[name]
        case ast.Call(func=ast.Name(id="environ"), args=[ast.Constant(value=str(name))]):
            return os.environ.get(name)
        case ast.Call(func=ast.Name(id="holds"), args=[owner, ast.Constant(value=str(name))]):
            return name in vars(_walk(owner, model))
        case ast.Call(func=ast.Name(id="___from_numpy"), args=[owner]):
            return _walk(owner, model)
        case ast.Call(func=ast.Name(id="contains"), args=[owner, ast.Constant(value=wanted)]):
            return wanted in _walk(owner, model)
        case ast.Call(func=ast.Name(id="key"), args=[owner, ast.Constant(value=wanted)]):
            return next(key for key in _walk(owner, model) if fact(key) == wanted)
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="object"), attr="__getattribute__"),
            args=[owner, ast.Constant(value=str(name))],
        ):
            return object.__getattribute__(_walk(owner, model), name)
        case ast.Call(func=ast.Attribute(attr="__getitem__"), args=[owner, key], keywords=[]):
            return _walk(owner, model)[_walk(key, model)]
        case ast.Call(func=function, args=[argument], keywords=[]):
            step = _STEPS.get(ast.unparse(function))
            if step is not None:
                return step(_walk(argument, model))
    raise UnknownPath(f"{ast.unparse(node)[:200]} is no path")


def plain(value: object) -> bool:
    """Tell whether `value` is a constant, or a tuple or list of constants."""
    if isinstance(value, (tuple, list)):
        return all(map(plain, value))
    return isinstance(value, PLAIN)


def fact(value: Any, depth: int = 4) -> str:
    """Say what `value` is, as far as traced code may depend on it, alike in all processes.

    Constants are given as they are, of tensors the type, of containers what is in them, of
    functions the name, and a digest of code, defaults and closure, of modules the class, of other
    objects the class, with a digest of its methods.

    depth: how far to look into containers and closures.
    """
    if value is NOTHING:
        return "nothing"
    if plain(value):
        said = repr(value)
        is_short = len(said) <= 1000
        return said if is_short else f"{_name(type(value))} of {len(said)}, {_sha(said.encode())}"
    if isinstance(value, Tensor):
        where = value.device.type
        return f"{value.dtype} {list(value.shape)} {where} {value.requires_grad}"
    name = _name(type(value))
    if depth == 0:
        return f"a {name}"
    if isinstance(value, dict):
        items = [f"{_key(key)}: {fact(each, depth - 1)}" for key, each in value.items()]
        return f"{name} {_listed(items)}"
    if isinstance(value, (list, tuple, deque)):
        return f"{name} {_listed([fact(each, depth - 1) for each in value])}"
    if isinstance(value, (set, frozenset)):
        return f"{name} {_listed(sorted(fact(each, depth - 1) for each in value))}"
    if isinstance(value, types.FunctionType):
        return f"function {_name(value)} {_digest_of(value, depth)}"
    if isinstance(value, types.MethodType):
        return f"method {_name(value.__func__)} {fact(value.__func__, depth - 1)}"
    if isinstance(value, functools.partial):
        parts = [value.func, list(value.args), dict(value.keywords)]
        return f"partial {_listed([fact(each, depth - 1) for each in parts])}"
    if isinstance(value, property):
        return f"property {_listed([fact(each, depth - 1) for each in (value.fget, value.fset)])}"
    if isinstance(value, (staticmethod, classmethod)):
        return f"{type(value).__name__} {fact(value.__func__, depth - 1)}"
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return f"{type(value).__name__} {_name(value)}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return f"numpy {value.dtype} {list(value.shape)} {_sha(value.tobytes())}"
    cls = original_class(value) if isinstance(value, nn.Module) else type(value)
    if isinstance(value, nn.Module) or is_covered(cls.__module__):
        return f"a {_name(cls)}"
    return f"a {_name(cls)} {_sha(repr(methods_of(cls, depth - 1)).encode())}"


def methods_of(cls: type, depth: int = 3) -> dict[str, list[tuple[str, str]]]:
    """Find the methods of the user's classes that `cls` is made of, by class.

    Constants of classes are facts where they are read.
    """
    return {
        _name(each): sorted(
            (name, fact(value, depth))
            for name, value in vars(each).items()
            if is_method(value) and not name.startswith("_autoshard_")
        )
        for each in cls.__mro__
        if not is_covered(each.__module__)
    }


def is_method(value: object) -> bool:
    """Tell whether `value`, of a class, is a method or a property."""
    return callable(value) or isinstance(value, (property, staticmethod, classmethod))


def _key(key: object) -> str:
    return repr(key) if plain(key) else fact(key, 1)


def _listed(parts: list[str]) -> str:
    """Show what is in a container; of many, a digest."""
    shown = ", ".join(parts)
    return f"[{shown}]" if len(shown) <= 200 else f"of {len(parts)}, {_sha(shown.encode())}"


def _digest_of(function: types.FunctionType, depth: int) -> str:
    """Digest of a function's code, defaults and closure; not of its place."""
    cells = []
    for each in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            cells.append(each.cell_contents)
    parts = [
        _code(function.__code__),
        fact(function.__defaults__, depth - 1),
        fact(function.__kwdefaults__, depth - 1),
        *(fact(each, depth - 1) for each in cells),
    ]
    return _sha("\n".join(parts).encode())


def _code(code: types.CodeType) -> str:
    """Describe code: what it does, not where it is."""
    consts = [_code(c) if isinstance(c, types.CodeType) else fact(c, 2) for c in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, consts))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _name(value: Any) -> str:
    """Full name of a class or a function."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        value = value.__dict__.get("_autoshard_original", value)
    return f"{value.__module__}.{value.__qualname__}"
