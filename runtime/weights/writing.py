"""Writing of safetensors files, a tensor at a time, and of a folder of them that is complete.

    .writing_model-00001-of-00004.safetensors ... --all written--> model-00001-of-00004.safetensors

Files are written under other names, flushed, and renamed once all ranks have written theirs. What
was there before is complete until then; while files are renamed, there is no index, so that nobody
reads some of one model and some of the other.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from autoshard.runtime.weights.files import DTYPES, INDEX, SINGLE, bytes_of
from autoshard.runtime.weights.lazy import Node

ASIDE = ".writing_"  # names of files that are not complete begin so
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OF_ONE_SAVE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class Part:
    """File to be written: its name, the keys of its tensors in order, and the rank that writes."""

    name: str
    keys: tuple[str, ...]
    rank: int


def parts_of(nodes: Mapping[str, Node], most_bytes: int, world: int) -> list[Part]:
    """Share tensors out to files, in order, of up to `most_bytes`, or of one larger tensor.

    There is a file for each of `world` ranks where that leaves files of `LEAST_BYTES`. In a file
    tensors of long elements come first, so that each begins at a multiple of its element's size.
    """
    total = sum(node.num_bytes for node in nodes.values())
    most = min(most_bytes, max(LEAST_BYTES, -(-total // world)))
    groups: list[list[str]] = [[]]
    size = 0
    for key, node in nodes.items():
        if groups[-1] and size + node.num_bytes > most:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += node.num_bytes
    count = len(groups)
    names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    if count == 1:
        names = [SINGLE]
    return [
        Part(name, tuple(sorted(keys, key=lambda key: -nodes[key].dtype.itemsize)), number % world)
        for number, (name, keys) in enumerate(zip(names, groups, strict=True))
    ]


LEAST_BYTES = 32 << 20  # of a file, unless it is the only one: for less, no rank opens another


class Writer:
    """File to which tensors are written one after the other, in the order of its header."""

    def __init__(self, path: Path, nodes: Mapping[str, Node]) -> None:
        """Begin the file at `path` with a header for `nodes`. Raises OSError, ValueError."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for key, node in nodes.items():
            if node.dtype not in _NAMES:
                raise ValueError(
                    f"{key!r} is {node.dtype}, which safetensors has no name for: convert it before"
                )
            end = at + node.num_bytes
            header[key] = {
                "dtype": _NAMES[node.dtype],
                "shape": list(node.size),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor. Raises OSError."""
        if tensor.numel():
            self._file.write(bytes_of(tensor.detach().cpu().contiguous()))

    def close(self) -> None:
        """Flush the file to the disk, and close it. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def publish(folder: Path, parts: Sequence[Part], nodes: Mapping[str, Node]) -> None:
    """Give the files in `folder` their names, and write the index; delete those of a save before.

    Raises OSError.
    """
    index = folder / INDEX
    index.unlink(missing_ok=True)
    kept = {part.name for part in parts}
    for path in folder.glob("model*.safetensors"):
        if _OF_ONE_SAVE.fullmatch(path.name) and path.name not in kept:
            path.unlink()
    for part in parts:
        (folder / f"{ASIDE}{part.name}").rename(folder / part.name)
    if len(parts) > 1:
        places = {key: part.name for part in parts for key in part.keys}
        sizes = {"total_size": sum(node.num_bytes for node in nodes.values())}
        about = {"metadata": sizes, "weight_map": dict(sorted(places.items()))}
        aside = folder / f"{ASIDE}{INDEX}"
        aside.write_text(json.dumps(about, indent=2) + "\n")
        aside.rename(index)


def clear(folder: Path) -> None:
    """Delete what saves that were broken off have left in `folder`."""
    for path in folder.glob(f"{ASIDE}model*"):
        path.unlink(missing_ok=True)
