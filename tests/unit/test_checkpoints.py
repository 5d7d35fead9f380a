"""Folders of checkpoints that other jobs use, too, and files that are spoiled."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import warm
from torch import nn

import autoshard
from autoshard.runtime.training.checkpoint import manifest as manifests
from autoshard.runtime.training.checkpoint.objects import copy_of
from autoshard.runtime.training.checkpoint.planning import flat, planner_of
from autoshard.runtime.training.checkpoint.writing import Task
from autoshard.tools.cli import main

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.fixture
def drills(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("checkpoints")


def test_two_jobs_and_readers(drills: Any, tmp_path: Path) -> None:
    errors, count = drills.two_jobs(tmp_path, 20)
    assert not errors
    assert count


@pytest.mark.parametrize("seed", range(2))
def test_bits_that_flip(drills: Any, tmp_path: Path, seed: int) -> None:
    assert drills.flips(tmp_path, 30, seed) == []


def saved(folder: Path, *steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    for step in steps:
        autoshard.save_checkpoint(folder, model, step=step)
    return model


HOSTILE = {
    "nothing": "",
    "no JSON": "{",
    "not an object": "[]",
    "deep": "[" * 100_000 + "]" * 100_000,
    "a huge number": '{"format": 2, "number": ' + "9" * 10_000 + "}",
    "no format": "{}",
    "another format": '{"format": "two"}',
    "without files": '{"format": 1, "run": "a", "number": 3, "step": 2, "world": 1}',
    "files that are none": '{"format": 1, "number": 3, "step": 2, "world": 1, "files": {"a": []}}',
    "a file outside": '{"format": 1, "number": 3, "step": 2, "world": 1, "files": {"../../b": 1}}',
    "without a digest": '{"format": 2, "number": 3, "step": 2, "world": 1, "files": {}}',
    "binary": "\udcff\udcfe",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_manifest_that_is_spoiled(text: str, tmp_path: Path) -> None:
    """The checkpoint before is loaded, with a warning; where there is none, that is an error."""
    model = saved(tmp_path, 1, 2)
    path = tmp_path / "step_00000002" / manifests.COMPLETE
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(RuntimeWarning, match=r"not complete: step_00000002: .*spoiled|decode"):
        assert autoshard.load_checkpoint(tmp_path, model) == 1
    (tmp_path / "step_00000001" / manifests.COMPLETE).unlink()
    with pytest.raises(autoshard.CheckpointError, match="can't be loaded as complete"):
        autoshard.load_checkpoint(tmp_path, model)


def test_a_later_format(tmp_path: Path) -> None:
    """It is not called spoiled: who has the later version can load it."""
    model = saved(tmp_path, 1)
    path = tmp_path / "step_00000001" / manifests.COMPLETE
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": manifests.FORMAT + 1}))
    later = r"format 3, and this version .* reads 2: install "
    with pytest.raises(autoshard.CheckpointError, match=later):
        autoshard.load_checkpoint(tmp_path, model)


def test_the_oldest_format(tmp_path: Path) -> None:
    """Its sizes are compared, as it has no digests."""
    model = saved(tmp_path, 1)
    path = tmp_path / "step_00000001" / manifests.COMPLETE
    was = manifests.read(path.parent)
    sizes = {name: file.size for name, file in was.files.items()}
    facts = {"run": was.run, "number": was.number, "step": 1, "world": 1}
    path.write_text(json.dumps({"format": 1, **facts, "files": sizes}))
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    assert autoshard.load_checkpoint(tmp_path, model) == 1
    assert torch.equal(model.weight, before)
    sizes[".metadata"] += 1
    path.write_text(json.dumps({"format": 1, **facts, "files": sizes}))
    with pytest.raises(autoshard.CheckpointError, match=r"\.metadata is of another size"):
        autoshard.load_checkpoint(tmp_path, model)


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    model = saved(tmp_path, 1)
    (tmp_path / "step_00000007").mkdir()
    (tmp_path / "step_00000008").write_text("no folder")
    (tmp_path / "step_000000090").mkdir()
    (tmp_path / "notes.txt").write_text("")
    with pytest.warns(RuntimeWarning, match=r"step_00000007: .*; step_00000008: "):
        assert autoshard.load_checkpoint(tmp_path, model) == 1
    data = tmp_path / "step_00000001" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(autoshard.CheckpointError, match=r"__0_0\.distcp is of another size"):
        autoshard.load_checkpoint(tmp_path, model)


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, 1, 2)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step_00000001: complete, 2 files of ")
    assert second.endswith(" bytes, by their digests; saved by 1 ranks")
    data = tmp_path / "step_00000002" / "__0_0.distcp"
    spoiled = bytearray(data.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    data.write_bytes(spoiled)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert ": complete" in first
    assert "step_00000002: __0_0.distcp is spoiled: its bytes are not" in second
    assert main(["checkpoint", "verify", str(tmp_path / "step_00000001")]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 1


def test_a_pending_checkpoint_without_a_process_group(tmp_path: Path) -> None:
    model = saved(tmp_path, 1)
    before = model.weight.detach().clone()
    later = autoshard.save_checkpoint(tmp_path, model, step=2, wait=False)
    with torch.no_grad():
        model.weight.zero_()
    assert later.wait() == later.wait() == tmp_path / "step_00000002"
    assert later.done()
    assert autoshard.load_checkpoint(tmp_path, model) == 2
    assert torch.equal(model.weight, before)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    with mock.patch.object(Task, "write", side_effect=OSError("no room")):
        autoshard.save_checkpoint(tmp_path, model, step=3, wait=False)
        with pytest.raises(autoshard.CheckpointError, match="on rank 0, OSError: no room"):
            autoshard.load_checkpoint(tmp_path, model)
    assert autoshard.load_checkpoint(tmp_path, model) == 2


def test_a_pending_checkpoint_at_exit(tmp_path: Path) -> None:
    code = f"""
import autoshard, torch
autoshard.save_checkpoint({str(tmp_path)!r}, torch.nn.Linear(500, 500), step=3, wait=False)
"""
    subprocess.run([warm.python(), "-c", code], check=True, timeout=240)
    assert autoshard.load_checkpoint(tmp_path, nn.Linear(500, 500)) == 3


STATES = {
    "a model": {"model": {"w": torch.ones(2), "norm._extra_state": {"seen": [1, 2]}}},
    "nothing": {"model": {}, "optimizer": {"state": {}, "param_groups": [{"params": ["w"]}]}},
    "an optimizer": {
        "model": {"a.w": torch.ones(2)},
        "optimizer": {
            "state": {
                "a.w": {"exp_avg": torch.ones(2), "old": [torch.ones(1), 3], "step": 1, "of": {}},
                "b": {"step": torch.ones(())},
                "c": {},
            },
            "param_groups": [
                {"lr": 0.1, "params": ["a.w"]},
                {"lr": torch.ones(()), "betas": (1, 2)},
            ],
        },
    },
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_names_are_those_of_torchs_planner(state: dict[str, Any]) -> None:
    found, wanted = flat(state), planner_of(state).state_dict
    assert {name for name in wanted if name.count(".")} <= found.keys() <= wanted.keys() | {"model"}
    assert all(found[name] is value for name, value in wanted.items() if name in found)


@pytest.mark.parametrize(
    "whole", [{"lr": 0.1, "betas": (1, 2.0), 3: None}, torch.ones(2), 1 << 2000]
)
def test_copies_of_objects(whole: Any) -> None:
    """They are equal, and lists and tensors in them are others."""
    objects = [whole, ["a", "b"]]
    found = copy_of(objects, "they")
    assert found[1] == objects[1]
    assert found[1] is not objects[1]
    assert found[0].equal(whole) if isinstance(whole, torch.Tensor) else found[0] == whole
    if isinstance(whole, torch.Tensor):
        assert found[0].data_ptr() != whole.data_ptr()


@pytest.mark.parametrize("objects", [object(), {"a": [1 << 3000]}, {Path("a"): 1}])
def test_objects_that_cannot_be_loaded(objects: Any) -> None:
    with pytest.raises(ValueError, match="they have objects that"):
        copy_of(objects, "they")
