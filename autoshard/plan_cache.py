"""Plans of compiled graphs, and decisions on them, stored beside the graphs in torch's caches.

On a hit, AOTAutograd's cache returns the compiled graphs of a frame, and none of our passes run.
The plans that they made are in one file for each graph, named by the graph's key in Inductor's
cache; that key depends on the plan, too (`lowering.inductor.KeepOrder`). Two frames are alike if
they have the same `frame_key`, which covers all that passes depend on, except for the graph and its
inputs, and torch's own settings: AOTAutograd compares these itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from autoshard import _torch
from autoshard.passes.ir.plan import Plan

NO_PLAN = "null"  # of a graph without collectives


def frame_key(facts: Sequence[object]) -> str:
    """Digest of `facts`, as text, and of this package's source."""
    return hashlib.sha256(f"{digest_of_sources()} {list(facts)!r}".encode()).hexdigest()


def sources() -> list[Path]:
    """List the package's source files that plans depend on: all but tools and integrations.

    Their order is the same wherever the package is installed.
    """
    here = Path(__file__).parent
    folders = ("_torch", "artefacts", "passes", "runtime")
    inside = [(here / folder).resolve() for folder in folders]  # rglob needs no links
    return [
        *sorted(here.glob("*.py")),
        *(path for each in inside for path in sorted(each.rglob("*.py"))),
    ]


@functools.cache
def digest_of_sources() -> str:
    """Return the digest of the package's version and source files, read once in a process."""
    found = hashlib.sha256(importlib.metadata.version("autoshard").encode())
    for path in sources():
        found.update(path.read_bytes())
    return found.hexdigest()


def save(graph_key: str, plan: Plan | None) -> None:
    """Store `plan` for the graph with the key `graph_key`.

    plan: None, or a plan without buckets, is stored as "no collectives".
    If the file can't be written, nothing is stored or raised, and `load` will return None.
    """
    _save(graph_key, plan.to_json() if plan is not None and plan.buckets else NO_PLAN)


def save_decision(key: str, text: str) -> None:
    """Store what the forward of a frame hands to backward, as text; as `save` does it.

    key: digest of all that it depends on.
    """
    _save(key, text)


def load_decision(key: str) -> str | None:
    """Load what `save_decision` has stored, or what is in its place; None if that can't be read."""
    try:
        return _path(key).read_text()
    except (OSError, ValueError):
        return None


def _save(key: str, text: str) -> None:
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError:
        return


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, which others see as it was, or as a whole. Raises OSError."""
    aside = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        aside.write_text(text)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def load(graph_keys: Sequence[str]) -> list[Plan] | None:
    """Load the plans of the graphs with these keys, in order.

    A graph without collectives adds no plan. Returns None if the file of any graph is missing, or
    can't be read.
    """
    plans = []
    for graph_key in graph_keys:
        try:
            text = _path(graph_key).read_text()
            if json.loads(text) is not None:
                plans.append(Plan.from_json(text))
        except (OSError, ValueError, KeyError, TypeError):
            return None
    return plans


def _path(graph_key: str) -> Path:
    return Path(_torch.inductor.cache_folder()) / "autoshard" / f"{graph_key}.json"
