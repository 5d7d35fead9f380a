"""What the null CUDA device has counted, and code generated for it; see `driver.c`."""

from __future__ import annotations

import contextlib
import ctypes
import types
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

_library = ctypes.CDLL(None)  # what is loaded already


def is_there() -> bool:
    """Tell whether this process has the null device in place of CUDA."""
    return hasattr(_library, "null_cuda_count")


def counts() -> Counter[str]:
    """What was counted since the process began, by the names in `driver.c`."""
    _library.null_cuda_name.restype = ctypes.c_char_p
    _library.null_cuda_count.restype = ctypes.c_long
    numbers = range(_library.null_cuda_num_counters())
    found = {_library.null_cuda_name(n).decode(): _library.null_cuda_count(n) for n in numbers}
    return Counter(found)


def counted(run: Callable[[], object]) -> Counter[str]:
    """What is counted while `run` is called."""
    before = counts()
    run()
    found = counts()
    found.subtract(before)
    return found


@contextlib.contextmanager
def without_triton() -> Iterator[list[str]]:
    """Have Inductor compile no kernel: each is a stub that is counted as `kernels` when it is run.

    Gives a list to which the wrappers are added that Inductor writes meanwhile.
    """
    from torch._inductor import async_compile, graph

    wrappers: list[str] = []

    def stub(self: object, kernel_name: str, *_: Any, **__: Any) -> Any:
        def run(*_: Any, **__: Any) -> None:
            _library.null_cuda_launch()

        return types.SimpleNamespace(run=run, launchers=[], fn=None, kernel_name=kernel_name)

    patch = unittest.mock.patch.object
    with (
        patch(async_compile.AsyncCompile, "triton", stub),
        patch(async_compile.AsyncCompile, "wait", lambda self, scope: None),
        patch(graph.GraphLowering, "save_output_code", staticmethod(wrappers.append)),
    ):
        yield wrappers
