"""Objects in a checkpoint: plain ones, as bytes that are read as weights only."""

from __future__ import annotations

import copy
import io
import pickle
import re
import sys
from typing import Any

import torch
from torch import Tensor

from autoshard import _torch


def to_plain(state: Any) -> Any:
    """Copy `state`, with Python's numbers for NumPy's, which a schedule may have computed with."""
    return _torch.tensors.tree_map(
        lambda leaf: leaf.item() if _is_numpy_number(leaf) else leaf, state
    )


def _is_numpy_number(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic)


def to_bytes(objects: Any, whose: str) -> Tensor:
    """Serialize `objects`, with all they contain, to one 1-D u8 tensor on the CPU.

    They are loaded once, as weights only, to see that they can be. Tensors in them will be read on
    the device that they are on.
    whose: whose they are, which the error begins with.
    Raises ValueError for what can't be pickled, or not be read as weights only.
    """
    saved, _ = _saved_and_loaded(objects, whose)
    return torch.frombuffer(bytearray(saved), dtype=torch.uint8)


def copy_of(objects: Any, whose: str) -> Any:
    """Copy `objects`, with all they contain, as a checkpoint would give them back.

    Arguments and errors are those of `to_bytes`. What is plain need not be serialized for that.
    """
    if _is_plain(objects):
        return copy.deepcopy(objects)
    return _saved_and_loaded(objects, whose)[1]


_PLAIN = (float, str, bool, type(None))


def _is_plain(value: Any) -> bool:
    """Tell whether `value` is of nothing but numbers and text in lists, tuples and dicts."""
    kind = type(value)
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 63)  # weights only has no numbers of 256 bytes
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return kind in _PLAIN or (kind in (list, tuple) and all(map(_is_plain, value)))


def _saved_and_loaded(objects: Any, whose: str) -> tuple[bytes, Any]:
    """Serialize `objects`, and load them as weights only; return both. Raises as `to_bytes`."""
    file = io.BytesIO()
    try:
        torch.save(objects, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{whose} have objects that can't be pickled: {error}") from error
    saved = file.getvalue()
    try:
        return saved, torch.load(io.BytesIO(saved), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{whose} have objects that could not be loaded as weights only "
            f"({_found_in(error)}): expected tensors, numbers, text, and lists and dicts of them"
        ) from None


def from_bytes(saved: Tensor) -> Any:
    """Return the objects that `to_bytes` has serialized to `saved`."""
    return torch.load(io.BytesIO(saved.numpy().tobytes()), weights_only=True)


def _found_in(error: pickle.UnpicklingError) -> str:
    named = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
    return named[1] if named else str(error).splitlines()[0]
