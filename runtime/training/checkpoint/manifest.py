"""Manifest of a checkpoint: which files it has, and what is in them.

It is written last, as `complete.json`, with a digest of itself and one of each file, so that a
checkpoint that is spoiled, by whatever, is noticed before it is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 2
OLDEST = 1  # it had the sizes of files, and no digests
COMPLETE = "complete.json"


class TooNew(ValueError):
    """A manifest of a format that a later version of autoshard has written."""


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: its bytes, and their SHA-256, None in the oldest format."""

    size: int
    sha256: str | None


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint, which lies in it as `complete.json`.

    run:    that it was saved by: one process of rank 0, or several, each of which went on.
    number: of the checkpoint in its folder, in the order of saving, from 1.
    step, world: the step and the number of ranks that saved it.
    files:  by name.
    """

    run: str
    number: int
    step: int
    world: int
    files: Mapping[str, File]

    def write(self, folder: Path) -> None:
        """Write it to `folder`, and flush it to the disk."""
        with (folder / COMPLETE).open("w") as file:
            file.write(_text(dataclasses.asdict(self)))
            file.flush()
            os.fsync(file.fileno())


def read(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`.

    Other files are not looked at. Raises OSError if it is not there; TooNew if a later version of
    autoshard wrote it in a newer format; ValueError if it can't be read, or if its digest is
    another.
    """
    text = (folder / COMPLETE).read_text()
    try:
        found = json.loads(text)
        if found["format"] == OLDEST:
            files = {name: File(int(size), None) for name, size in found["files"].items()}
        elif isinstance(found["format"], int) and found["format"] > FORMAT:
            raise TooNew(
                f"format {found['format']}, and this version of autoshard reads {FORMAT}: install "
                "the version that saved it, or a later one"
            )
        elif _text({key: found[key] for key in _KEYS}) != text:
            raise ValueError("its digest is another")
        else:
            files = {name: File(**each) for name, each in found["files"].items()}
        if any(Path(name).name != name for name in files):
            raise ValueError("it names a file outside of the checkpoint")
        return Manifest(
            run=str(found.get("run", "")),
            number=int(found["number"]),
            step=int(found["step"]),
            world=int(found["world"]),
            files=files,
        )
    except TooNew:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / COMPLETE} is spoiled: {error}") from None


_KEYS = tuple(field.name for field in dataclasses.fields(Manifest))


def _text(facts: Mapping[str, Any]) -> str:
    """Write `facts` as JSON, with a digest of them in front."""
    said = json.dumps(facts, indent=1)
    digest = hashlib.sha256(said.encode()).hexdigest()
    return json.dumps({"format": FORMAT, "sha256": digest, **facts}, indent=1)


def describe(path: Path) -> File:
    """Read `path` once, and tell how many bytes it has, and their digest. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return File(file.tell(), digest.hexdigest())


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise OSError for the first of `names` whose file is missing, or not as the manifest says.

    Files of the oldest format, which have no digest, are not looked into.
    """
    for name in names:
        wanted = manifest.files[name]
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name} is not there: do all ranks share it?")
        if wanted.sha256 is not None and describe(folder / name) != wanted:
            raise OSError(
                f"{name} is spoiled: its bytes are not those that were written. Move {folder} "
                "away, or give `step` for another one"
            )
