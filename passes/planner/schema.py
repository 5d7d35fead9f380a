"""Read JSON into dataclasses, whose fields are the schema."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def read_as(kind: type[T], data: Any, where: str) -> T:
    """Convert `data`, as `json.loads` gave it, to the dataclass `kind`, by its type hints.

    Fields may be dataclasses, tuples (from lists), mappings, numbers, texts, or optional. Those
    with a default may be missing. An int is accepted for a float, and stays an int.

    where: name of what `data` describes, for messages.
    Raises ValueError, naming the field, for one that is missing, unknown, or of another type.
    """
    value: T = _read(kind, data, where)
    return value


def _read(kind: Any, data: Any, where: str) -> Any:
    """Convert `data` to the type `kind`: a dataclass, tuple, mapping, optional or plain type.

    Raises ValueError, beginning with `where`, if it is not of that type; see `read_as`.
    """
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # of something and None
        return None if data is None else _read(arguments[0], data, where)
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise _wrong(where, data, "a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(data)
        if len(arguments) != len(data):
            raise _wrong(where, data, f"a list of {len(arguments)}")
        pairs = zip(arguments, data, strict=True)
        return tuple(_read(each, value, f"{where}[{i}]") for i, (each, value) in enumerate(pairs))
    if origin is collections.abc.Mapping:
        _check_object(data, where)
        return {
            name: _read(arguments[1], each, f"{where}[{name!r}]") for name, each in data.items()
        }
    allowed = (int, float) if kind is float else (kind,)
    if not isinstance(data, allowed) or (isinstance(data, bool) and kind is not bool):
        raise _wrong(where, data, f"a value of type {kind.__name__}")
    return data


def _read_fields(kind: Any, data: Any, where: str) -> Any:
    """Make the dataclass `kind` from a dict of its fields, each converted to its type hint.

    Raises ValueError if `data` is no dict, if a field without a default is missing, or one is
    unknown.
    """
    _check_object(data, where)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [name for name in data if name not in fields]
    missing = [
        name
        for name, field in fields.items()
        if name not in data
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if unknown or missing:
        raise ValueError(f"{where}: missing {missing}, unknown {unknown}")
    hints = typing.get_type_hints(kind)
    return kind(
        **{name: _read(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    )


def _check_object(data: Any, where: str) -> None:
    if not isinstance(data, dict):
        raise _wrong(where, data, "an object")


def _wrong(where: str, data: Any, expected: str) -> ValueError:
    shown = repr(data)
    shown = shown if len(shown) < 60 else f"{shown[:57]}..."
    return ValueError(f"{where} is {shown}; expected {expected}")
