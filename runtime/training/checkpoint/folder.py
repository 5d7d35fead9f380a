"""Folder of checkpoints: each is written aside, published by a rename, and chosen to be loaded.

A checkpoint is complete if its manifest, `complete.json`, is there, and the files that it lists
are, at their sizes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path

from autoshard.runtime.training.checkpoint import manifest as manifests
from autoshard.runtime.training.checkpoint.manifest import File, Manifest, describe
from autoshard.runtime.training.checkpoint.reader import Reader

# Folders to which nothing was written for so long: of another run, and of a process of this one
# that may be gone; two jobs that go on from one checkpoint are of one run.
ABANDONED_S, LEFT_S = 24 * 3600, 600
_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_runs: dict[Path, str] = {}  # by folder: which run this is; rank 0 alone knows


def prepare(root: Path, step: int) -> Path:
    """Make `root` if need be, and in it an empty folder of this process to write `step` to.

    Deletes what killed processes of this run have left there, if nothing was written to it for
    LEFT_S, and what others have for ABANDONED_S: several may save to `root` at a time. Warns, where
    this run begins, of complete checkpoints in `root`: they are of another one. Returns the folder.
    """
    root.mkdir(parents=True, exist_ok=True)
    if root.resolve() not in _runs:
        _warn_of_other_runs(root)
    run = _run(root)
    for left in (*root.glob(".writing_*"), *root.glob(".deleting_*")):
        is_own, is_of_run = left.name.endswith(_process(os.getpid())), f".{run}." in left.name
        if is_own or time.time() - _written(left) > (LEFT_S if is_of_run else ABANDONED_S):
            shutil.rmtree(left, ignore_errors=True)
    aside = folder_aside(root, step, f"{run}.{_process(os.getpid())}")
    aside.mkdir()
    return aside


def folder_aside(root: Path, step: int, whose: str) -> Path:
    """Return the folder in `root` that a process writes `step` to before it is published.

    whose: names of the run, and of the process of rank 0.
    """
    return root / f".writing_{step:08d}.{whose}"


def whose_aside(aside: Path) -> str:
    """Return whose folder `aside` is, as of `folder_aside`."""
    return aside.name.split(".", 2)[2]


def _warn_of_other_runs(root: Path) -> None:
    """Warn if there are complete checkpoints in `root`: they stay."""
    saved, _ = _sorted_out(root)
    if saved:
        warnings.warn(
            f"{root} has checkpoints of another run, which stay: {list(saved)}. Give each run a "
            "folder of its own, or load from this one to go on",
            RuntimeWarning,
            stacklevel=6,
        )


def _run(root: Path) -> str:
    """Name of the run that this process is of, as far as `root` is concerned."""
    return _runs.setdefault(root.resolve(), uuid.uuid4().hex)


@functools.cache
def _process(pid: int) -> str:
    """Name of this process, whose number is `pid`; a forked copy of it has another number."""
    return uuid.uuid4().hex


def _written(folder: Path) -> float:
    """When something was last written to `folder`, in seconds; now if it has just gone."""
    try:
        return max(each.stat().st_mtime for each in (folder, *folder.iterdir()))
    except OSError:
        return time.time()


def publish(
    root: Path, aside: Path, step: int, keep: int, written: Mapping[str, File], world: int
) -> str:
    """Check what was written to `aside`, rename it to be a checkpoint, and delete older ones.

    The manifest is written first, and flushed to the disk; it names the run, which other
    checkpoints that this process saves to `root` share. Those of other runs stay.

    keep: how many complete checkpoints of this run stay, this one included; those saved first are
        deleted, whatever their steps. Incomplete ones stay.
    written: what ranks have written, by name.
    world: the number of ranks that have.
    Returns its name: "step_00000040", or "step_00000040.1" if there was one of that step.
    Raises OSError if a file is missing or too short, or as `Reader.read_metadata`.
    """
    metadata = Reader(aside).read_metadata()
    for stored in metadata.storage_data.values():
        name = stored.relative_path
        if name not in written or written[name].size < stored.offset + stored.length:
            raise OSError(f"{name} is missing or too short: do all ranks share {root}?")
    (saved, _), run = _sorted_out(root), _run(root)
    own = [name for name, each in saved.items() if each.run == run]
    files = {**written, ".metadata": describe(aside / ".metadata")}
    number = 1 + max((each.number for each in saved.values()), default=0)
    Manifest(run, number, step, world, files).write(aside)
    name = _rename(aside, root, step)
    _sync(root)
    for old in [*own, name][:-keep]:
        _delete(root / old)
    return name


def _rename(aside: Path, root: Path, step: int) -> str:
    """Rename `aside` to be a checkpoint of `step` in `root`; return its name, which none had."""
    attempts = [attempt for other, attempt in map(step_of, _names(root)) if other == step]
    attempt = max(attempts, default=-1) + 1
    while True:
        name = f"step_{step:08d}" + (f".{attempt}" if attempt else "")
        try:
            aside.rename(root / name)
            return name
        except OSError as error:  # another run was quicker
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            attempt += 1


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint; at no time is a part of it there by its name."""
    aside = checkpoint.parent / f".deleting_{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):  # another job of this run has deleted it
        checkpoint.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def choose(root: Path, step: int | None) -> tuple[str, Manifest] | None:
    """Choose the complete checkpoint saved last, or the last of `step` if that is given.

    Checkpoints that this process saves to `root` later get the identity of its run. Warns of those
    that are not complete: files are missing, or of another size, or the manifest can't be read.

    Returns its name and manifest; None if `root` has no checkpoint.
    Raises OSError if `step` is given and there is none of it, or if there are only incomplete ones.
    """
    saved, broken = _sorted_out(root)
    if broken and not saved:
        raise OSError(
            f"{list(broken)} can't be loaded as complete checkpoints, and there is no other one: "
            f"{next(iter(broken.values()))}. To begin anew, move them away"
        )
    if broken:
        said = "; ".join(f"{name}: {why}" for name, why in broken.items())
        warnings.warn(f"in {root} are not complete: {said}", RuntimeWarning, stacklevel=5)
    found = [name for name in saved if step is None or step_of(name)[0] == step]
    if step is not None and not found:
        raise OSError(f"there is no complete checkpoint of step {step}, but {list(saved)}")
    if not found:
        return None
    manifest = saved[found[-1]]
    _runs[root.resolve()] = manifest.run or uuid.uuid4().hex
    return found[-1], manifest


def verify(root: Path) -> dict[str, Manifest | str]:
    """Read all checkpoints in `root`, or the one that it is itself, and compare their digests.

    Returns, by name, the manifest of each, or what is wrong with it.
    """
    found: dict[str, Manifest | str] = {}
    for checkpoint in [root / name for name in _names(root)] or [root]:
        found[checkpoint.name] = manifest = _look(checkpoint)
        if isinstance(manifest, Manifest):
            try:
                manifests.check_files(checkpoint, manifest, manifest.files)
            except OSError as error:
                found[checkpoint.name] = str(error)
    return found


def is_there(checkpoint: Path) -> bool:
    """Tell whether `checkpoint` is complete, still."""
    return isinstance(_look(checkpoint), Manifest)


def step_of(name: str) -> tuple[int, int]:
    """Step of a checkpoint by its name, and the number of the attempt at that step, from 0.

    A step is saved again by a run that was resumed before it.
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _sorted_out(root: Path) -> tuple[dict[str, Manifest], dict[str, str]]:
    """Complete checkpoints by name, in the order of saving, and why others are not complete.

    Their steps may be in another order: a run may have gone back to an earlier step.
    """
    complete, broken = {}, {}
    for name in _names(root):
        found = _look(root / name)
        if isinstance(found, Manifest):
            complete[name] = found
        elif (root / name).exists():  # another run may have deleted it
            broken[name] = found
    return dict(sorted(complete.items(), key=lambda each: each[1].number)), broken


def _names(root: Path) -> list[str]:
    found = (path.name for path in root.glob("step_*")) if root.is_dir() else ()
    return sorted(name for name in found if _NAME.fullmatch(name))


def _look(checkpoint: Path) -> Manifest | str:
    """Return the manifest of `checkpoint`, or why it is not complete, as sizes of files say."""
    try:
        manifest = manifests.read(checkpoint)
        for name, file in manifest.files.items():
            if (checkpoint / name).stat().st_size != file.size:
                return f"{name} is of another size"
    except (OSError, ValueError) as error:
        return str(error)
    return manifest


def _sync(folder: Path) -> None:
    """Flush `folder` itself to the disk, so that a rename in it is there after a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems can't
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
