"""Inductor's cache as tests need it: without graphs, with what a C++ compiler takes long for."""

from __future__ import annotations

import contextlib
import itertools
import string
from collections.abc import Iterator
from pathlib import Path

from autoshard import _torch

_LETTERS = string.ascii_lowercase + "234567"  # of the base-32 hashes that name kernels
_OF_KERNELS = ["locks", *map("".join, itertools.product(_LETTERS, repeat=2))]


@contextlib.contextmanager
def fresh_graphs() -> Iterator[None]:
    """Use a cache without graphs and plans in this context; kernels are those of the cache around.

    A kernel is named by a hash of its source: one that is there is what would be compiled.
    """
    around = Path(_torch.inductor.cache_folder())
    with _torch.inductor.fresh_cache():
        inside = Path(_torch.inductor.cache_folder())
        for name in _OF_KERNELS:
            (around / name).mkdir(exist_ok=True)
            (inside / name).symlink_to(around / name)
        yield
