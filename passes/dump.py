"""Write each graph as text after each pass that changes it: a folder a graph, a file a pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import fx

from autoshard.passes.ir.meta import PLAN
from autoshard.passes.ir.text import render


class Dump:
    """Observer for `run()`: writes the graph to `<folder>/<pass>.txt` after each pass.

    A pass that leaves the graph's text as it was at the call before gets no file; the first call
    always writes one. The plan, once there is one, goes to `<folder>/plan.txt`, at every call.
    Files are overwritten; a pipeline has each pass once.

    folder: made if missing.
    axes: process group name -> mesh axis, printed in its place.
    """

    def __init__(self, folder: Path, axes: Mapping[str, str]) -> None:
        """Make `folder`, with its parents, if it is missing."""
        self._folder = folder
        self._axes = axes
        self._last = ""
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, gm: fx.GraphModule) -> None:
        """Write `gm`'s graph to `<name>.txt` if its text has changed since the last call.

        Its plan, if it has one, is written to plan.txt at every call.

        name: of the pass that has run; the file's first line is "# after <name>".
        """
        text = render(gm.graph, axes=self._axes)
        if text != self._last:
            (self._folder / f"{name}.txt").write_text(f"# after {name}\n{text}")
        self._last = text
        plan = PLAN.get(gm)
        if plan is not None:
            (self._folder / "plan.txt").write_text(plan.text())
