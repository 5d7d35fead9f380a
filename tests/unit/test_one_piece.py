"""Frames in one piece of memory: no page is mapped again and again, however deep the caller is."""

from __future__ import annotations

from typing import Any

import torch
from support.faults_of_pages import CALLS, DEPTHS, faults, run_calls
from torch import nn

import autoshard
from autoshard.one_piece import in_one_piece


def test_in_one_piece() -> None:
    @in_one_piece
    def calls() -> None:
        run_calls()

    assert max(faults(calls, depth) for depth in DEPTHS) < CALLS / 2


class Layers(nn.Module):
    """Many parameters, with little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


def test_a_compiled_step(fake_world: None) -> None:
    """Forward and backward, with a gather and a reduce for each of its layers.

    Fewer pages than there are parameters: no call for each parameter or layer maps one.
    """
    model: Any = Layers()
    for layer in model.layers:
        autoshard.fully_shard(layer)
    autoshard.fully_shard(model)
    options = {"bucketing": "per_unit", "lowering": "eager", "strict": True}
    model.compile(backend="autoshard", options=options)
    x = torch.randn(4, 8)

    def faults_of_a_step(depth: int) -> int:
        found = faults(lambda: model(x).backward(), depth)
        model.zero_grad()  # not measured: torch's own calls for each gradient that is let go
        return found

    for _ in range(3):
        faults_of_a_step(0)
    assert max(map(faults_of_a_step, DEPTHS)) < len(list(model.parameters()))
