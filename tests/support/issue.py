"""Collectives that a step really launches, by kind and in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from support.training import issued
from torch import Tensor


def kinds(run: Callable[[], object]) -> list[str]:
    """What `run` launches: "gather", "reduce", "all_reduce"."""
    return [entry.kind for entry in issued(run)]


def counts(model: Any, loss: Callable[[], Tensor]) -> tuple[int, int, int, int]:
    """Gathers in forward; gathers, reduce-scatters and all-reduces in backward."""
    losses: list[Tensor] = []
    forward = Counter(kinds(lambda: losses.append(loss())))
    backward = Counter(kinds(losses[0].backward))
    assert forward["reduce"] == forward["all_reduce"] == 0
    return forward["gather"], backward["gather"], backward["reduce"], backward["all_reduce"]
