"""Names of frames that Dynamo traces, as messages have them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autoshard import _torch


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: nn.Module, *args: Any) -> Any:
        return function(self, *args)

    return wrapper


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Twice(nn.Module):
    @decorated
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def name_of(function: Callable[..., Any]) -> str:
    names = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        names.append(_torch.dynamo.traced_code())
        return gm.forward

    torch.compile(function, backend=backend)(torch.ones(2))
    return names[0].rpartition(":")[0]


def test_a_decorated_forward_is_its_modules() -> None:
    """As transformers decorates those of its models."""
    assert name_of(Plain()) == "Plain.forward"
    assert name_of(Twice()) == "Twice.forward"
    assert name_of(lambda x: x.sin()).endswith("<lambda>")
