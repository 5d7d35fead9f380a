"""Safetensors files: where the bytes of each tensor are, and reads of a part of them.

    8 bytes: length of the header | header, JSON: dtype, size and place of each tensor | their bytes

Bytes are read by `pread`, not through a map of the file: a file that was cut short is an error
here and no signal, what was read is no part of this process's memory, and it can be counted.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.weights.lazy import Box, Node

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Names of dtypes in headers."""

LONGEST_HEADER = 100_000_000  # bytes, as the package safetensors allows
LEAST_PIECE = 4096  # bytes of a row that are worth a read of their own
STAGED_BYTES = 64 << 20  # read at once where rows are read whole for a part of each


class WrongFile(ValueError):
    """Error of a file that is no safetensors file, or that was cut short."""


@dataclass
class Counter:
    """Count of bytes read."""

    num_bytes: int = 0


class Stored(Node):
    """Tensor in a file: `key` there, and the place of its first byte."""

    def __init__(
        self,
        path: Path,
        key: str,
        size: tuple[int, ...],
        dtype: torch.dtype,
        first_byte: int,
        counter: Counter,
    ) -> None:
        super().__init__(size, dtype)
        self.path, self.key, self.first_byte, self._counter = path, key, first_byte, counter

    @property
    def about(self) -> str:
        """Line that says what it is, and where."""
        return f"{self.path.name} {self.key} {self.dtype} {list(self.size)} {self.first_byte}"

    def read(self, box: Box) -> Tensor:
        """Read the part `box`; of dims that are cut behind the first, row by row if rows are long.

        Raises WrongFile if the file ends before it, OSError if it can't be read.
        """
        lengths = [stop - start for start, stop in box]
        made = torch.empty(lengths, dtype=self.dtype)
        self.read_into(made, box)
        return made

    def read_into(self, into: Tensor, box: Box) -> None:
        """Read the part `box` into `into`: straight from the file if it is contiguous, on the CPU.

        Raises as `read`.
        """
        if not into.numel():
            return
        if into.device.type != "cpu" or not into.is_contiguous():
            into.copy_(self.read(box))
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            self._read_rows(into, box, descriptor, self.first_byte, self.size)
        finally:
            os.close(descriptor)

    def _read_rows(
        self, made: Tensor, box: Box, descriptor: int, first_byte: int, size: tuple[int, ...]
    ) -> None:
        """Read `box` of the tensor of `size` at `first_byte` into `made`, which is contiguous."""
        item = self.dtype.itemsize
        if all(each == (0, of) for each, of in zip(box[1:], size[1:], strict=True)):
            row = math.prod(size[1:]) * item
            start = box[0][0] if box else 0
            self._fill(made, descriptor, first_byte + start * row)
            return
        row = math.prod(size[1:]) * item
        wanted = math.prod(stop - start for start, stop in box[1:]) * item
        start, stop = box[0]
        if wanted >= LEAST_PIECE:
            for index in range(start, stop):
                at = first_byte + index * row
                self._read_rows(made[index - start], box[1:], descriptor, at, size[1:])
            return
        inner = tuple(slice(*each) for each in box[1:])
        step = max(1, STAGED_BYTES // row)
        for first in range(start, stop, step):
            rows = torch.empty((min(step, stop - first), *size[1:]), dtype=self.dtype)
            self._fill(rows, descriptor, first_byte + first * row)
            made[first - start : first - start + len(rows)] = rows[(slice(None), *inner)]

    def _fill(self, made: Tensor, descriptor: int, first_byte: int) -> None:
        """Read the bytes of `made`, which is contiguous, from `first_byte` on."""
        room = bytes_of(made)
        done = 0
        while done < len(room):
            got = os.preadv(descriptor, [room[done : done + (1 << 30)]], first_byte + done)
            if not got:
                raise WrongFile(
                    f"{self.path} ends within {self.key!r}, after {first_byte + done} bytes: it "
                    "was cut short; copy or download it again"
                )
            done += got
        self._counter.num_bytes += done


def read_header(path: Path, counter: Counter) -> dict[str, Stored]:
    """Read which tensors a file has, and check that all of them are there.

    Raises WrongFile, OSError.
    """
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        begin = file.read(8)
        length = int.from_bytes(begin, "little")
        if len(begin) < 8 or not 2 <= length <= min(LONGEST_HEADER, num_bytes - 8):
            raise WrongFile(
                f"{path} ({num_bytes} bytes) begins with no header of a safetensors file: it was "
                "cut short, is another format, or is a pointer of Git LFS; download it again"
            )
        text = file.read(length)
    counter.num_bytes += 8 + len(text)
    try:
        header = json.loads(text)
        entries = {key: about for key, about in header.items() if key != "__metadata__"}
        found = {key: _stored(path, key, its, 8 + length, counter) for key, its in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, WrongFile):
            raise
        raise WrongFile(
            f"the header of {path} can't be read ({type(error).__name__}: {error}): the file is "
            "damaged; copy or download it again"
        ) from None
    for key, its in found.items():
        end = its.first_byte + its.num_bytes
        if end > num_bytes:
            raise WrongFile(
                f"{path} has {num_bytes} bytes, and {key!r} in it ends at byte {end}: the file was "
                "cut short; copy or download it again"
            )
    return found


def _stored(path: Path, key: str, its: Mapping[str, Any], start: int, counter: Counter) -> Stored:
    """Read one entry of a header. Raises WrongFile, ValueError, KeyError, TypeError."""
    if its["dtype"] not in DTYPES:
        raise WrongFile(
            f"{key!r} in {path} has dtype {its['dtype']!r}, which can't be loaded: expected one of "
            f"{list(DTYPES)}"
        )
    dtype = DTYPES[its["dtype"]]
    size = tuple(int(of) for of in its["shape"])
    first, last = (int(at) for at in its["data_offsets"])
    num_bytes = math.prod(size) * dtype.itemsize
    if min(size, default=0) < 0 or first < 0 or last - first != num_bytes:
        raise WrongFile(
            f"{key!r} in {path} is said to be {list(size)} of {its['dtype']}, {num_bytes} bytes, "
            f"and to be at bytes {first} to {last}: the file is damaged; download it again"
        )
    return Stored(path, key, size, dtype, start + first, counter)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of `tensor`, which is contiguous and on the CPU."""
    buffer: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(buffer)


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def find_stored(folder: Path, counter: Counter) -> dict[str, Stored]:
    """Find the tensors of a folder: of the files that its index names, or of its only file.

    Raises FileNotFoundError if there are none, WrongFile where index and files don't agree, or as
    `read_header`.
    """
    indices = sorted(folder.glob("*.safetensors.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        return _indexed(folder / INDEX, counter)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE, counter)
    if len(indices) == 1:
        return _indexed(indices[0], counter)
    if len(files) == 1 and not indices:
        return read_header(files[0], counter)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}: give one with {SINGLE}; of a model on the Hub that is "
            "what huggingface_hub.snapshot_download(name) returns"
        )
    there = sorted(path.name for path in folder.iterdir())[:8]
    raise FileNotFoundError(
        f"{folder} has neither {INDEX} nor {SINGLE}, but {there}: weights in another format, as "
        "pytorch_model.bin, become such files by transformers' from_pretrained(folder)"
        ".save_pretrained(folder)"
    )


def _indexed(index: Path, counter: Counter) -> dict[str, Stored]:
    """Find the tensors that `index` names. Raises as `find_stored`."""
    text = index.read_bytes()
    counter.num_bytes += len(text)
    try:
        places: dict[str, str] = dict(json.loads(text)["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise WrongFile(
            f"{index} can't be read ({type(error).__name__}: {error}): download it again"
        ) from None
    folder = index.parent
    headers: dict[str, dict[str, Stored]] = {}
    for name in dict.fromkeys(places.values()):
        if Path(name).name != name:
            raise WrongFile(f"{index} names {name!r}, which is no file beside it")
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{index} names {name}, which is not in {folder}: copy or download it, too"
            )
        headers[name] = read_header(folder / name, counter)
    missing = [key for key, name in places.items() if key not in headers[name]]
    if missing:
        raise WrongFile(
            f"{index} says that {missing[0]!r} is in {places[missing[0]]}, which has no such "
            f"tensor ({len(missing)} in all): index and files are of different models; download "
            "the folder again"
        )
    return {key: headers[name][key] for key, name in places.items()}
