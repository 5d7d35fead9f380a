"""Log lines about the progress of a long compilation."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

log = logging.getLogger(__name__)

INTERVAL = 10.0  # seconds between lines; a compilation shorter than that has none


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Log a line on rank 0 every `INTERVAL`: `compiling <what>: backward, 2 of 2, 30 s elapsed`.

    A thread does so, at level WARNING, until the context ends; other ranks log nothing. Without a
    process group this process counts as rank 0.

    total: number of graphs.
    Yields a function to call with the name of each graph when its compilation begins.
    """
    begun: list[str] = []
    is_over = threading.Event()
    start = time.monotonic()

    def watch() -> None:
        """Log a line every `INTERVAL`, until the context has ended."""
        while not is_over.wait(INTERVAL):
            graph = f"{begun[-1]}, {len(begun)} of {total}" if begun else f"tracing, 0 of {total}"
            elapsed = time.monotonic() - start
            log.warning("compiling %s: %s, %.0f s elapsed", what, graph, elapsed)

    watcher = threading.Thread(target=watch, name="autoshard progress", daemon=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        watcher.start()
    try:
        yield begun.append
    finally:
        is_over.set()
