"""Read a trace of torch.profiler: the spans in it, as it has them."""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

HOST = frozenset(("cpu_op", "user_annotation"))
LAUNCHES = frozenset(("cuda_runtime", "cuda_driver"))
DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
KEPT = HOST | LAUNCHES | DEVICE
"""Categories of the spans that are kept."""

GZIP = b"\x1f\x8b"


class Event(NamedTuple):
    """Span of a trace, in microseconds of the trace's clock.

    thread: process and thread, as the trace names them; of a device, its number and a stream's.
    """

    name: str
    category: str
    begin: float
    end: float
    thread: tuple[Any, Any]
    args: dict[str, Any]


def read(path: Path) -> list[Event]:
    """Read the spans of a trace whose categories are in KEPT, in the order of the file.

    path: JSON of `export_chrome_trace`, or such a file packed by gzip.
    Raises ValueError, with the path and what was expected, for anything else, and for a trace
    without such spans; OSError if the file can't be read.
    """
    with _no_garbage():
        return _kept(path, _events(path))


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Pause the search for garbage: it takes half of the time in which a trace is read."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _kept(path: Path, found: list[Any]) -> list[Event]:
    """Make the spans of events whose categories are in KEPT. Raises ValueError as `read` does."""
    kept = []
    for number, event in enumerate(found):
        if not isinstance(event, dict):
            raise ValueError(f"{path}: event {number} is {event!r:.40}; expected an object")
        category = event.get("cat")
        if event.get("ph") == "X" and isinstance(category, str) and category.lower() in KEPT:
            kept.append(_span(path, number, event, category.lower()))
    if not kept:
        raise ValueError(
            f"{path}: no operation, kernel or annotation in {len(found)} events; expected a trace "
            "of torch.profiler, of a step that ran within it"
        )
    return kept


def _events(path: Path) -> list[Any]:
    """Read the list of a trace's events. Raises ValueError and OSError as `read` does."""
    raw = path.read_bytes()
    try:
        data = json.loads(gzip.decompress(raw) if raw.startswith(GZIP) else raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a whole file of gzip: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no JSON: {error}; expected a trace of torch.profiler"
        ) from None
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise ValueError(f"{path} has no list 'traceEvents'; expected a trace of torch.profiler")
    return events


def _span(path: Path, number: int, event: dict[str, Any], category: str) -> Event:
    """Make the span of one event. Raises ValueError, with its number, if it is malformed."""
    name, thread = event.get("name"), (event.get("pid"), event.get("tid"))
    begin, length, args = event.get("ts"), event.get("dur"), event.get("args", {})
    where = f"{path}: event {number}, {name!r:.60}"
    if not isinstance(name, str) or not isinstance(args, dict):
        raise ValueError(f"{where}: expected a text as 'name', and an object as 'args'")
    if not all(isinstance(each, int | str) for each in thread):
        raise ValueError(f"{where}: expected numbers or texts as 'pid' and 'tid'")
    if not (_is_number(begin) and _is_number(length)) or length < 0:
        raise ValueError(
            f"{where}, has ts={begin!r:.40} and dur={length!r:.40}; "
            "expected microseconds, 'dur' not below 0"
        )
    return Event(name, category, begin, begin + length, thread, args)


def _is_number(value: Any) -> TypeGuard[float]:
    """Tell whether `value` is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)
