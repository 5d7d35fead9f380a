"""Patches in docs/upstream/: each applies to its release, and what it is about is gone with it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "upstream"
PATCHES = sorted(FOLDER.glob("*.patch"))

ONE_RANK = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
param = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
"""

SHOWN = {
    "accelerate-1.15.0-dynamo-backends": """
import pytest
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DynamoBackend
import torch
from torch.distributed.tensor import DTensor

accelerator = Accelerator(cpu=True, dynamo_backend="autoshard")
assert accelerator.state.dynamo_plugin.to_dict()["backend"] == "autoshard"
assert DynamoBackend("AUTOSHARD") is DynamoBackend("AUTOSHARD") != DynamoBackend.INDUCTOR
assert DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
told = launch_command_parser().parse_args(["--dynamo_backend", "autoshard", "train.py"])
assert told.dynamo_backend == "autoshard"
model = accelerator.prepare(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
assert isinstance(accelerator.unwrap_model(model).weight, DTensor)  # as autoshard has sharded it
with pytest.raises(ValueError, match="is not a valid"):
    DynamoBackend("AUTOSHART")
""",
    "accelerate-1.15.0-ranks-on-cpus": """
import pathlib
import subprocess
import sys

program = pathlib.Path("ranks.py")
program.write_text('\\n'.join((
    "import os",
    "from accelerate import Accelerator",
    "accelerator = Accelerator()",
    "assert accelerator.num_processes == int(os.environ['WORLD_SIZE'])",
    "assert accelerator.process_index == int(os.environ['RANK'])",
    "assert accelerator.device.type == 'cpu'",
    "accelerator.end_training()",
)))
for number in ("1", "2"):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number)
    subprocess.run([sys.executable, *launch, program], check=True, timeout=100)
""",
    "safetensors-0.8.0-dtensors": ONE_RANK
    + """
import pytest
from safetensors.torch import load_file, save, save_file, save_model

for save_it in (
    lambda: save_file({"weight": param}, "some.safetensors"),
    lambda: save({"weight": param}),
    lambda: save_model(torch.nn.ParameterDict({"weight": param}), "some.safetensors"),
):
    with pytest.raises(ValueError, match=r"DTensors: `.'weight'.`.*full_tensor"):
        save_it()
save_file({"weight": param.full_tensor()}, "some.safetensors")
assert load_file("some.safetensors")["weight"].shape == (4, 2)
""",
    "torch-2.13.0-dtensor-data": ONE_RANK
    + """
import pytest

param.data = distribute_tensor(torch.ones(4, 2, dtype=torch.float64), mesh, [Shard(0)])
assert torch.equal(param.to_local(), torch.ones(4, 2, dtype=torch.float64))
assert torch.equal(param.data.full_tensor(), param.full_tensor())
assert param.dtype == torch.float64 and param.requires_grad and param.is_leaf
(param * 2).sum().backward()
assert torch.equal(param.grad.full_tensor(), torch.full((4, 2), 2.0, dtype=torch.float64))
with pytest.raises(RuntimeError, match="from_local"):
    param.data = torch.ones(4, 2)
module = torch.nn.Linear(2, 2)
torch.distributed.tensor.distribute_module(module, mesh)
assert module.double().weight.to_local().dtype == torch.float64
""",
    "transformers-5.23.0-save-sharded": """
import pathlib
import accelerate
import torch
from support.hosts import llama, texts
from transformers import Trainer, TrainingArguments
from autoshard.integrations.trainer import AutoshardTrainer


class Plain(AutoshardTrainer):
    save_model = Trainer.save_model


data = [{"input_ids": text, "labels": text} for text in texts(4)]
for only in (False, True):
    arguments = TrainingArguments(
        output_dir=f"run{only}", max_steps=1, save_steps=1, report_to=[], use_cpu=True,
        save_only_model=only,
    )
    trainer = Plain(llama(), args=arguments, train_dataset=data, autoshard={"lowering": "eager"})
    trainer.train()
    trainer.save_model(f"run{only}/final")
    whole = type(llama()).from_pretrained(f"run{only}/final").state_dict()
    for name, param in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        assert torch.equal(param.full_tensor(), whole[name]), name
    checkpoint = pathlib.Path(f"run{only}/checkpoint-1")
    assert (checkpoint / "model.safetensors").is_file() == only  # or else there are shards
""",
}
"""Program for each patch, which fails without it."""

COMPLAINTS = {
    "accelerate-1.15.0-dynamo-backends": "'AUTOSHARD' is not a valid DynamoBackend",
    "accelerate-1.15.0-ranks-on-cpus": "assert accelerator.num_processes ==",
    "safetensors-0.8.0-dtensors": "data pointer on an invalid python storage",
    "torch-2.13.0-dtensor-data": "AssertionError",
    "transformers-5.23.0-save-sharded": "runFalse/final",
}
"""What is said without it."""


def overlay(package: Path, files: list[str], folder: Path) -> None:
    """Make a package in `folder` of links to `package`, and of copies of `files` in it."""
    for file in files:
        place = folder
        for part in Path(file).parts[:-1]:
            place = place / part
            if not place.exists():
                place.mkdir()
                original = package.parent / place.relative_to(folder)
                for each in original.iterdir():
                    if each.name != "__pycache__":
                        (place / each.name).symlink_to(each)
            elif place.is_symlink():
                original = place.resolve()
                place.unlink()
                place.mkdir()
                for each in original.iterdir():
                    if each.name != "__pycache__":
                        (place / each.name).symlink_to(each)
        copied = folder / file
        original = copied.resolve()
        copied.unlink()
        shutil.copy(original, copied)


def test_each_patch_is_shown_and_listed() -> None:
    names = {path.stem for path in PATCHES}
    assert names == SHOWN.keys() == COMPLAINTS.keys()
    listed = re.findall(r"\((\S+)\.patch\)", (FOLDER / "README.md").read_text())
    assert sorted(listed) == sorted(names)


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch(path: Path, tmp_path: Path) -> None:
    """Its program fails with the release, and does not with the patched one."""
    name, version, _ = path.stem.split("-", 2)
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if installed.split("+")[0] != version:
        pytest.skip(f"{name} {installed} is installed, and the patch is against {version}")
    for needed in re.findall(r"^(?:from|import) (\w+)", SHOWN[path.stem], re.MULTILINE):
        if needed != "support" and importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    files = re.findall(r"^\+\+\+ b/(\S+)", path.read_text(), re.MULTILINE)
    patched = tmp_path / "patched"
    patched.mkdir()
    overlay(Path(spec.origin).parent, files, patched)
    given = ["patch", "-p1", "--fuzz=0", "-i", str(path)]
    done = subprocess.run(given, cwd=patched, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    before, after = (run(path.stem, tmp_path, first) for first in ([], [patched]))
    assert before.returncode != 0
    assert COMPLAINTS[path.stem] in before.stderr, before.stderr[-3000:]
    assert after.returncode == 0, after.stderr[-3000:]


def run(name: str, folder: Path, first: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run the program for a patch, with packages in `first` before those that are installed."""
    work = folder / ("with" if first else "without")
    work.mkdir()
    tests = Path(__file__).resolve().parents[1]
    paths = [*map(str, first), str(tests.parent), str(tests)]
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")},
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", SHOWN[name]],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
