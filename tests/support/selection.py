"""Which of many combinations a run of the tests takes.

AUTOSHARD_MATRIX=full takes all of them, which is an hour's work. By default tests take a part in
which every value of every option still occurs.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

IS_FULL = os.environ.get("AUTOSHARD_MATRIX") == "full"


def part_of(cases: Sequence[T], every: int) -> list[T]:
    """Every so many-th of `cases`, or all of them."""
    return list(cases) if IS_FULL else list(cases[::every])


def each_value(**options: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize with all combinations of `options`; by default with as many as the longest has
    values, so that each value of each occurs. A value that is given twice occurs more often then.
    """
    values = [list(each) for each in options.values()]
    if IS_FULL:
        once = [[v for n, v in enumerate(each) if v not in each[:n]] for each in values]
        cases = list(itertools.product(*once))
    else:
        cases = list(zip(*_in_turn(values), strict=True))
    return pytest.mark.parametrize(tuple(options), cases)


def _in_turn(values: list[list[Any]]) -> Iterable[list[Any]]:
    """Each of `values`, repeated to the length of the longest. Of two of one length, the second is
    one further each time that the first begins anew: they then meet in other pairs."""
    longest = max(map(len, values))
    before: Counter[int] = Counter()
    for each in values:
        n, shift = len(each), before[len(each)]
        before[n] += 1
        yield [each[(i + shift * (i // n)) % n] for i in range(longest)]
