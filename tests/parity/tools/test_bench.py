"""`autoshard bench step`, with the smallest of models, and what needs no compiler."""

from __future__ import annotations

import pytest
import torch
from support.ranks import on_ranks
from torch import fx, nn

from autoshard.tools.bench.contestants import CONTESTANTS, Setting, read_contestants
from autoshard.tools.bench.step import StepTimes, bench_step
from autoshard.tools.bench.workloads import SIZES, Sizes, read_workloads

NAMES = [
    "DDP",
    "FSDP1",
    "FSDP2",
    "FSDP2, kept",
    "autoshard, eager",
    "autoshard, compiled",
    "autoshard, kept",
]


def not_compiled(model: nn.Module, setting: Setting) -> nn.Module:
    """Contestant that no torch can compile."""

    def fail(gm: fx.GraphModule, inputs: object) -> None:
        """Fail as a compiler does."""
        raise AssertionError("no such kernel")

    compiled: nn.Module = torch.compile(model, backend=fail)
    return compiled


@on_ranks(2)
def test_a_table(rank: int) -> None:
    """Contestants of all kinds; what can't be compiled is told, and the others are measured."""
    sizes, SIZES["cpu"]["gpt2"] = SIZES["cpu"]["gpt2"], Sizes(64, 1, 1, 8)
    told: list[StepTimes] = []
    try:
        (found,) = bench_step(
            read_workloads(["gpt2"], "cpu"),
            contestants={"broken": not_compiled, **read_contestants(NAMES)},
            rounds=2,
            options={"lowering": "eager"},
            tell=told.append,
        )
    finally:
        SIZES["cpu"]["gpt2"] = sizes
    assert list(found.entries) == NAMES
    assert all(len(entry.step_ms) == 2 for entry in found.entries.values())
    assert all(entry.first_s > 0 for entry in found.entries.values())
    assert all(e.peak.allocated > e.kept.allocated > 0 for e in found.entries.values())
    assert found.entries["FSDP2"].kept.allocated < found.entries["DDP"].kept.allocated
    assert len(found.collectives_ms) == 2
    assert min(found.collectives_ms) > 0
    assert told == [found]
    assert all(f"  {name} " in found.text() for name in NAMES)
    assert found.failed == {"broken": "AssertionError: no such kernel"}
    assert "  broken                   can't be compiled: AssertionError" in found.text()


def test_names() -> None:
    with pytest.raises(ValueError, match=r"no contestant \['FSDP3'\]; expected some of \['unsh"):
        read_contestants(["FSDP2", "FSDP3"])
    with pytest.raises(ValueError, match=r"no model \['tiny'\]; expected some of \['small'"):
        read_workloads(["tiny"], "cpu")
    assert list(read_contestants(CONTESTANTS)) == list(CONTESTANTS)
