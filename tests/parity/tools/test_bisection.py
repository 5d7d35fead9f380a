"""`parity(..., bisect=True)`: the first op of the run that goes wrong, and its module."""

from __future__ import annotations

import re
import unittest.mock
from typing import Any

import pytest
import torch
from support.caches import fresh_graphs
from support.models import Net, tokens
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional

import autoshard
from autoshard.runtime.eager.access import PARAMS


class Wrong(nn.Module):
    """Does something else under one condition, in its second layer."""

    def __init__(self, *, when: str) -> None:
        super().__init__()
        self.net = Net(layers=2)
        self.net.layers[1].register_forward_hook(self.spoil)
        self.scale = nn.Parameter(torch.rand(11))
        self.when = when

    def spoil(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        is_compiled = torch.compiler.is_compiling()
        is_sharded = is_compiled or PARAMS in layer.up.__dict__
        spoils = {"sharded": is_sharded, "compiled": is_compiled, "never": False}[self.when]
        return output * 1.5 if spoils else torch.sin(output)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(ids) + torch.cosh(self.scale), ids.roll(-1))


def compared(rank: int, when: str, **options: Any) -> autoshard.Report:
    torch._dynamo.reset()
    batches = [{"ids": tokens(rank, step)} for step in range(1)]
    return autoshard.parity(
        lambda: Wrong(when=when),
        batches,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),  # Adam's first step has no sizes
        options=options,
        bisect=True,
    )


@on_ranks(2)
def test_an_eager_run_that_differs(rank: int) -> None:
    report = compared(rank, "sharded")
    assert not report.ok
    assert len(report.parted) == 1, report.parted
    assert re.match(
        r"eager and replicated part in step 0 at aten\.sin\.default in Wrong\.net, forward",
        report.parted[0],
    ), report.parted
    assert report.text().endswith(report.parted[0])


@on_ranks(2)
def test_a_graph_that_differs(rank: int) -> None:
    report = compared(rank, "compiled")
    assert len(report.parted) == 1, report.parted
    assert report.parted[0].startswith(
        "compiled and eager part in step 0 at %mul (aten.mul.Tensor"
    ), report.parted


@pytest.mark.parametrize(
    ("op", "like", "kind"), [("sin", "cos", "forward"), ("sinh", "cosh", "backward")]
)
@on_ranks(2)
def test_a_node_that_is_lowered_wrong(rank: int, op: str, like: str, kind: str) -> None:
    """In backward of one that only makes a parameter's gradient, which is sent, and not seen again:
    that of cosh."""
    from torch._inductor.lowering import lowerings

    wrong, right = (getattr(torch.ops.aten, name).default for name in (op, like))
    with (
        fresh_graphs(),
        unittest.mock.patch.dict(lowerings, {wrong: lowerings[right]}),
    ):
        report = compared(rank, "never", lowering="inductor")
    assert len(report.parted) == 1, report.parted
    assert re.match(
        rf"compiled and eager part in step 0 at %{op} \(aten\.{op}\.default\) in .*, {kind}$",
        report.parted[0],
    ), report.parted


@on_ranks(2)
def test_runs_that_do_not_differ(rank: int) -> None:
    report = compared(rank, "never")
    assert report.bitwise
    assert not report.parted
