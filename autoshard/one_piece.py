"""Frames of Python in one piece of memory.

CPython keeps frames in pieces of 16 KB. From 3.11 on it maps a piece whenever a call needs a new
one, and unmaps it when that call returns: thousands of times a second where the calls of a loop
cross the end of a piece, which is a matter of how deep the caller happens to be. A frame that says
that it needs much gets a piece with room for those that it calls.

Tried on Python 3.11; a test of `tests/unit/test_patches.py` fails once it is of no use. Source:
`push_chunk` and `_PyThreadState_PopFrame` in CPython's `Python/pystate.c`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

FEW = 1 << 14
"""Values on a stack: 128 KB, of a piece of 256; room for some hundred frames. None is touched."""

MANY = 1 << 17
"""The same for a compilation, whose frames are ten times as many."""


def in_one_piece(function: F, values: int = FEW) -> F:
    """Have the frames of what `function` calls lie in one piece of memory; return `function`.

    values: for which the frame of `function` claims to have room, and gets as much again.
    """
    changed: Any = function
    code = changed.__code__
    changed.__code__ = code.replace(co_stacksize=max(code.co_stacksize, values))
    return function
