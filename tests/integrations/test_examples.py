"""Programs in examples/ and on docs/start.md run on two ranks, as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

for _name in ("accelerate", "lightning", "peft", "trl"):
    pytest.importorskip(_name, reason=f"{_name} is not installed: pip install '.[hosts]'")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 240


def torchrun(folder: Path, *arguments: str) -> str:
    """Run a program on two ranks in `folder`; return what it prints to standard output."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launcher, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(2 * LIMIT_S)
def test_pretraining(tmp_path: Path) -> None:
    """Resumed, it prints the losses of a run that was not stopped, and saves the same weights."""
    program = str(EXAMPLES / "pretrain_llama.py")
    settings = (program, "--text", str(ROOT / "README.md"), "--save-every", "5")
    whole = torchrun(tmp_path, *settings, "--steps", "20", "--out", "whole")
    assert "step 10: " not in torchrun(tmp_path, *settings, "--steps", "7", "--out", "parts")
    rest = torchrun(tmp_path, *settings, "--steps", "20", "--out", "parts")
    assert "step 8: " in rest
    for step in (10, 20):
        (line,) = re.findall(rf"step {step}: .*", whole)
        assert line in rest
    weights = [tmp_path / each / "model" / "model.safetensors" for each in ("whole", "parts")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.timeout(LIMIT_S)
def test_fine_tuning(tmp_path: Path) -> None:
    said = torchrun(tmp_path, str(EXAMPLES / "finetune_lora.py"), "--steps", "20")
    assert "generated: 2 + 3 =" in said
    assert (tmp_path / "finetuned" / "adapters" / "adapter_model.safetensors").is_file()


@pytest.mark.timeout(LIMIT_S)
def test_vision(tmp_path: Path) -> None:
    """It learns the task."""
    said = torchrun(tmp_path, str(EXAMPLES / "vit_lightning.py"))
    (accuracy,) = re.findall(r"accuracy ([0-9.]+)", said)
    assert float(accuracy) > 0.9


@pytest.mark.timeout(LIMIT_S)
def test_the_first_page(tmp_path: Path) -> None:
    """A model is trained, saved, loaded and says what it has learned, by the page alone."""
    page = (ROOT / "docs" / "start.md").read_text()
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    for name, block in blocks:
        (tmp_path / name).write_text(block)
    commands = re.findall(r"torchrun --standalone --nproc-per-node 2 (\S+)", page)
    assert commands == [name for name, _ in blocks] == ["train.py", "generate.py"]
    assert "saved ['config.json'" in torchrun(tmp_path, "train.py")
    (said,) = re.findall(r"It says: `(.*)`", page)
    assert torchrun(tmp_path, "generate.py").strip() == said
