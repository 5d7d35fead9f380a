"""Clusters that are not there, for what a plan is to choose."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

from autoshard.compilation import Compilation
from autoshard.passes.planner.topology import Topology


def where_copies_cost_most() -> AbstractContextManager[str]:
    """The file of a topology on which no gather is packed that can be grouped."""
    return _topology_of("gloo", call_us=500.0, member_us=0.0, copy_gb_per_s=1e-3, together_bytes=0)


def where_calls_cost_little() -> AbstractContextManager[str]:
    """The file of one on which plans have many buckets, each for what compute it hides behind."""
    return _topology_of("gloo", call_us=100.0)


@contextlib.contextmanager
def where_the_host_is_near(
    *, host_gb_per_s: float = 400.0, for_states: bool = False
) -> Iterator[str]:
    """The file of a cluster of H100s where small values, too, may lie on the host.

    for_states: whether a budget may have optimizer states live there, which goes first.
    """
    near = _topology_of("h100", call_us=0.1, host_alpha_us=0.0, host_gb_per_s=host_gb_per_s)
    stay = mock.patch.object(Compilation, "host_states", return_value=None)
    with near as topology, contextlib.nullcontext() if for_states else stay:
        yield topology


@contextlib.contextmanager
def _topology_of(name: str, **costs: float) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "topology.json"
        path.write_text(json.dumps(json.loads(Topology.load(name).to_json()) | costs))
        yield str(path)
