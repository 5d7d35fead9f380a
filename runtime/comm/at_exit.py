"""Calls that Python makes as it exits, in the process that asked for them alone.

A process that is forked inherits what `atexit` was told, but not the threads that this waits for,
and it would say in the store that this rank has ended.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable


def at_exit(work: Callable[[], None]) -> None:
    """Have Python call `work` as this process exits; a second call with it does nothing.

    What was registered last is called first.
    """
    _register(os.getpid(), work)


@functools.cache
def _register(process: int, work: Callable[[], None]) -> None:
    atexit.register(_call_in, process, work)


def _call_in(process: int, work: Callable[[], None]) -> None:
    if os.getpid() == process:
        work()
