"""Folder of checkpoints: each is written aside, published by a rename, and chosen to be loaded.

A checkpoint is complete if its manifest, `complete.json`, is there, and the files that it lists
are, at their sizes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
import warnings
from pathlib import Path
from typing import Any

from autoshard.runtime.training.checkpoint.on_ranks import num_ranks
from autoshard.runtime.training.checkpoint.reader import Reader

FORMAT = 1
COMPLETE = "complete.json"
_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_runs: dict[Path, str] = {}  # by folder: which run this is; rank 0 alone knows


def prepare(root: Path, aside: Path) -> str:
    """Make `root` if need be, and in it the empty folder `aside` to write to.

    Deletes all `.writing_` folders in `root` before, as left by ranks that were killed. Returns "".
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".writing_*"):  # by ranks that were killed
        shutil.rmtree(left)
    aside.mkdir()
    return ""


def publish(root: Path, aside: Path, step: int, keep: int) -> str:
    """Check what was written to `aside`, rename it to be a checkpoint, and delete older ones.

    The manifest is written first, and flushed to the disk; it names the run, which other
    checkpoints that this process saves to `root` share. Warns if all complete checkpoints in `root`
    are of another run; those of other runs stay.

    keep: how many complete checkpoints of this run stay, this one included; those saved first are
        deleted, whatever their steps. Incomplete ones stay.
    Returns its name: "step_00000040", or "step_00000040.1" if there was one of that step.
    Raises OSError if a file is missing or too short, or as `Reader.read_metadata`.
    """
    metadata = Reader(aside).read_metadata()
    sizes: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        path = aside / stored.relative_path
        end = stored.offset + stored.length
        if not path.exists() or path.stat().st_size < end:
            raise OSError(f"{path.name} is missing or too short: do all ranks share {root}?")
        sizes[path.name] = path.stat().st_size
    sizes[".metadata"] = (aside / ".metadata").stat().st_size
    saved = _complete(root)
    run = _runs.setdefault(root.resolve(), uuid.uuid4().hex)
    others = [name for name in saved if _manifest(root / name).get("run", run) != run]
    if others and len(others) == len(saved):
        warnings.warn(
            f"{root} has checkpoints of another run, which stay: {others}. Give each run a folder "
            "of its own, or load from this one to go on",
            RuntimeWarning,
            stacklevel=5,
        )
    manifest = {
        "format": FORMAT,
        "run": run,
        "number": 1 + max(saved.values(), default=0),
        "step": step,
        "world": num_ranks(),
        "files": sizes,
    }
    with (aside / COMPLETE).open("w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    attempts = [attempt for other, attempt in map(step_of, _names(root)) if other == step]
    name = f"step_{step:08d}" + (f".{max(attempts) + 1}" if attempts else "")
    aside.rename(root / name)
    _sync(root)
    for old in [*(name for name in saved if name not in others), name][:-keep]:
        shutil.rmtree(root / old)
    return name


def choose(root: Path, step: int | None) -> tuple[str, int] | None:
    """Choose the complete checkpoint saved last, or the last of `step` if that is given.

    Checkpoints that this process saves to `root` later get the identity of its run. Warns of those
    that are not complete: files are missing, or of another size, or the manifest can't be read.

    Returns its name, and the number of ranks that saved it; None if `root` has no checkpoint.
    Raises OSError if `step` is given and there is none of it, or if there are only incomplete ones.
    """
    saved = _complete(root)
    broken = [name for name in _names(root) if name not in saved]
    if broken and not saved:
        raise OSError(
            f"{broken}, which were complete once, are no more, and there is no other checkpoint: "
            "delete them to begin anew"
        )
    if broken:
        warnings.warn(f"{broken} in {root} are not complete", RuntimeWarning, stacklevel=5)
    found = [name for name in saved if step is None or step_of(name)[0] == step]
    if step is not None and not found:
        raise OSError(f"there is no complete checkpoint of step {step}, but {list(saved)}")
    if not found:
        return None
    manifest = _manifest(root / found[-1])
    _runs[root.resolve()] = manifest.get("run", uuid.uuid4().hex)
    return found[-1], int(manifest["world"])


def step_of(name: str) -> tuple[int, int]:
    """Step of a checkpoint by its name, and the number of the attempt at that step, from 0.

    A step is saved again by a run that was resumed before it.
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _complete(root: Path) -> dict[str, int]:
    """Map names of complete checkpoints, in the order in which they were saved, to `_number`.

    Their steps may be in another order: a run may have gone back to an earlier step.
    """
    numbers = {name: _number(root / name) for name in _names(root)}
    return dict(sorted(((k, v) for k, v in numbers.items() if v), key=lambda each: each[1]))


def _names(root: Path) -> list[str]:
    found = (path.name for path in root.glob("step_*")) if root.is_dir() else ()
    return sorted(name for name in found if _NAME.fullmatch(name))


def _number(path: Path) -> int:
    """Number of a complete checkpoint in the order of saving, from 1; 0 if it is not complete.

    0, too, if its manifest can't be read or is of another format.
    """
    try:
        manifest = _manifest(path)
        sizes = manifest["files"].items()
        is_there = all((path / name).stat().st_size == size for name, size in sizes)
        is_known = manifest["format"] == FORMAT and isinstance(manifest["world"], int)
        return int(manifest["number"]) if is_known and is_there else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / COMPLETE).read_text())
    return manifest


def _sync(folder: Path) -> None:
    """Flush `folder` itself to the disk, so that a rename in it is there after a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
