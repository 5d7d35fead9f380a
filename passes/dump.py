"""Write each graph as text after each pass: one folder for each graph, one file for each pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import fx

from autoshard.passes.ir.meta import PLAN
from autoshard.passes.ir.text import render


class Dump:
    """Observer for `run()`: writes `<folder>/<number>_<pass>.txt` after each pass, and the plan."""

    def __init__(self, folder: Path, axes: Mapping[str, str]) -> None:
        self._folder = folder
        self._axes = axes
        self._number = 0
        self._last = ""
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, gm: fx.GraphModule) -> None:
        path = self._folder / f"{self._number:02d}_{name}.txt"
        text = render(gm.graph, axes=self._axes)
        changed = text != self._last
        path.write_text(f"# after {name}\n{text}" if changed else f"# after {name}: unchanged\n")
        self._number += 1
        self._last = text
        plan = PLAN.get(gm)
        if plan is not None:
            (self._folder / "plan.txt").write_text(plan.text())
