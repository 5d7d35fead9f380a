"""Verdict on ranks that wait in vain: it ends the waits of this rank, and is in its errors.

A wait in the store asks for it here (`raise_if_found`); one for a collective is ended by breaking
the process groups, which can't be used any more, as ranks would take one collective for another.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch.distributed as dist

from autoshard import _torch
from autoshard.runtime.ranks import waits

HINT = (
    "Run the same forwards, backwards, saves and collectives, in the same order, on every rank, "
    "and have all end together"
)


@dataclass(frozen=True)
class _Verdict:
    """Finding, in words, about the wait of this rank that began at `since`."""

    text: str
    since: float
    breaks: bool


_latest: weakref.WeakKeyDictionary[dist.ProcessGroup, _Verdict] = weakref.WeakKeyDictionary()
"""Latest verdict, by the default process group of that time: another one begins anew."""


def note(text: str, since: float, *, breaks: bool) -> None:
    """Note what was found, in words, of the wait of this rank that began at `since`.

    breaks: whether to break the process groups, as where this rank waits for a collective.
    """
    _latest[_torch.dist.default_group()] = _Verdict(text, since, breaks)
    if breaks:
        break_groups()


def break_groups() -> None:
    """Have all that waits over a process group of this rank raise, and all that comes later."""
    for group in _torch.dist.groups_by_name().values():
        _torch.dist.break_messages(group)


def found() -> str:
    """Return what was found, in words, if the process groups are broken for that; else ""."""
    latest = _of_this_group()
    return latest.text if latest is not None and latest.breaks else ""


def raise_if_found(what: str, hint: str) -> None:
    """Raise RuntimeError if what this thread waits for is in vain.

    what, hint: what its message begins and ends with.
    """
    latest = _of_this_group()
    if latest is not None and latest.since == waits.since():
        raise RuntimeError(
            f"{what}, while others wait elsewhere, or have left: {latest.text}. {hint or HINT}"
        )


def _of_this_group() -> _Verdict | None:
    return _latest.get(_torch.dist.default_group()) if dist.is_initialized() else None
