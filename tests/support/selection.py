"""Which of many combinations a run of the tests takes.

AUTOSHARD_MATRIX=full takes all of them, which is an hour's work. By default tests take a part in
which every value of every option still occurs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

IS_FULL = os.environ.get("AUTOSHARD_MATRIX") == "full"


def part_of(cases: Sequence[T], every: int) -> list[T]:
    """Every so many-th of `cases`, or all of them."""
    return list(cases) if IS_FULL else list(cases[::every])
