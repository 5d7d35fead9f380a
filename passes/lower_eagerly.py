"""Run a planned graph as it stands: FX's own generated code, one kernel a node.

The plain lowering. Its results are bit for bit those of the eager runtime, as both
call the same kernels in the same order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from autoshard import _torch


def lower_eagerly(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A boxed callable: it takes the inputs as a list, and empties the list."""
    return _torch.boxed(gm)
