"""A process that imports this, or calls `end`, ends with the one that has started it.

It does so also where it is kept from running, as ranks are while others run. Linux only; elsewhere
nothing is done.
"""

from __future__ import annotations

import ctypes
import signal

_C = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end() -> None:
    """Have the kernel end this process with the thread that has started it; not its children."""
    if hasattr(_C, "prctl"):
        _C.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


end()
