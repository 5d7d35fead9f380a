"""Every block of code in docs/hosts.md runs, with the real packages."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.hosts import launched, lines, llama, loader, texts, tokenizer
from support.ranks import on_ranks
from support.titan import on_cpu
from torch import Tensor

for _name in ("accelerate", "lightning", "peft", "trl"):
    pytest.importorskip(_name, reason=f"{_name} is not installed: pip install '.[hosts]'")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hosts.md"
BLOCKS = dict(
    re.findall(r"## ([^\n]*)\n(?:(?!## ).)*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
)
(BLOCKS["Fabric"],) = re.findall(
    r"```python\n((?:(?!```).)*Fabric\(.*?)```", PAGE.read_text(), re.DOTALL
)


def given() -> dict[str, Any]:
    """Make what the page's blocks take for granted."""
    import lightning

    class Module(lightning.LightningModule):
        """Small Llama."""

        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, ids: Tensor, number: int) -> Tensor:
            loss: Tensor = self.model(input_ids=ids, labels=ids).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    model = llama()
    return {
        "model": model,
        "module": Module(),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": loader(8),
        "data": [{"input_ids": text, "labels": text} for text in texts(16)],
        "ids": texts(1)[0][None, :4],
        "lines": lines(16),
        "tokenizer": tokenizer(),
    }


def test_all_blocks_are_found() -> None:
    assert len(BLOCKS) == PAGE.read_text().count("```python")


HAS_TITAN = all(map(importlib.util.find_spec, ("torchtitan", "triton")))
NO_TITAN = pytest.mark.skipif(not HAS_TITAN, reason="torchtitan or triton is not installed")


@pytest.mark.parametrize(
    "block",
    [pytest.param(each, marks=NO_TITAN if each == "torchtitan" else ()) for each in BLOCKS],
)
@on_ranks(2)
def test_a_block(rank: int, block: str, tmp_path: Path) -> None:
    from lightning import fabric, pytorch

    cpus = on_cpu() if block == "torchtitan" else contextlib.nullcontext()
    with launched(rank), cpus, pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path)
        for each in (fabric, pytorch):  # as many as there are GPUs, which a page need not say
            accelerator = each.accelerators.CPUAccelerator
            patched.setattr(accelerator, "auto_device_count", staticmethod(dist.get_world_size))
        exec(compile(BLOCKS[block], str(PAGE), "exec"), given())
