"""What was found of ranks that wait in vain: it ends the waits of this rank, and is in its errors.

A wait in the store asks for it here (`raise_if_found`); one for a collective is ended by breaking
the process groups, which can't be used any more, as ranks would take one collective for another.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from autoshard import _torch

HINT = (
    "Run the same forwards, backwards, saves and collectives, in the same order, on every rank, "
    "and have all end together"
)

_found: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
"""By the default process group of that time: another one begins anew."""


def note(text: str, *, breaks: bool) -> None:
    """Note what was found, in words, which waits of this rank raise from now on.

    breaks: whether to break the process groups, as where this rank waits for a collective.
    """
    _found[_torch.dist.default_group()] = text
    if breaks:
        break_groups()


def break_groups() -> None:
    """Have all that waits over a process group of this rank raise, and all that comes later."""
    for group in _torch.dist.groups_by_name().values():
        _torch.dist.break_messages(group)


def found() -> str:
    """Return what was found, in words; "" if nothing was, of this default process group."""
    return _found.get(_torch.dist.default_group(), "") if dist.is_initialized() else ""


def raise_if_found(what: str) -> None:
    """Raise RuntimeError, which begins with `what`, if ranks were found to wait in vain."""
    text = found()
    if text:
        raise RuntimeError(f"{what}, and can't go on: {text}. {HINT}")
