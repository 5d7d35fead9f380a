"""Plans beside the graphs that they were compiled to, in torch's caches.

AOTAutograd's cache gives back a frame's compiled graphs, and none of our passes run. What they had
decided is in a file for each graph, by the name that Inductor's cache has for it; that name depends
on the plan, too (`lower_inductor.KeepOrder`). Which frames are alike is told by `frame_key`: all
that passes depend on, but for the graph and its inputs, and torch's own settings, which
AOTAutograd sees itself.
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
from autoshard.passes.plan import Plan

NO_PLAN = "null"  # of a graph without collectives


def frame_key(facts: Sequence[object]) -> str:
    """A digest of `facts`, by their text, and of this package's source."""
    return hashlib.sha256(f"{_sources()} {list(facts)!r}".encode()).hexdigest()


@functools.cache
def _sources() -> str:
    found = hashlib.sha256(importlib.metadata.version("autoshard").encode())
    here = Path(__file__).parent
    for folder in (".", "passes", "passes/planner", "runtime"):
        for path in sorted((here / folder).glob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def save(graph_key: str, plan: Plan | None) -> None:
    """Keep `plan` beside the graph of that name. Where it can't be written, it isn't found."""
    text = plan.to_json() if plan is not None and plan.buckets else NO_PLAN
    try:
        path = _path(graph_key)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        try:
            aside.write_text(text)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError:
        return


def load(graph_keys: Sequence[str]) -> list[Plan] | None:
    """The plans of graphs of those names; None if one is not there."""
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
    return Path(_torch.inductor_cache_folder()) / "autoshard" / f"{graph_key}.json"
