"""Clusters that are not there, for what a plan is to choose."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autoshard.passes.planner.topology import Topology


@contextlib.contextmanager
def where_copies_cost_most() -> Iterator[str]:
    """The file of a topology on which no gather is packed that can be grouped."""
    costs = {"call_us": 500.0, "member_us": 0.0, "copy_gb_per_s": 1e-3}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "grouped.json"
        path.write_text(json.dumps(json.loads(Topology.load("gloo").to_json()) | costs))
        yield str(path)
