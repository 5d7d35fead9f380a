"""Read a checkpoint's files without running code.

torch pickles the index, and what is no tensor. The index may only have types that belong there;
objects are read as weights only.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from autoshard.runtime.training.checkpoint.on_ranks import CheckpointError, reasons, this_rank


class Reader(FileSystemReader):
    """Reader of a checkpoint's files, whose index may have nothing but what belongs there."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's index, which is read once.

        Raises FileNotFoundError if there is none, UnpicklingError if it has other types or names a
        file outside of the checkpoint.
        """
        if self._index is not None:
            return self._index
        try:
            with open(Path(self.path) / ".metadata", "rb") as file:
                metadata = _Index(file).load()
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.path} is not there: do all ranks share it?") from None
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(metadata).__name__} is no checkpoint's index")
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise pickle.UnpicklingError(f"{stored.relative_path} is outside of the checkpoint")
        self._index = metadata
        return metadata


def read_into(reader: Reader, state: dict[str, Any]) -> None:
    """Read into the tensors of `state`, and replace its other values; all ranks call this.

    That goes for dicts inside it, too. Its own keys are the same on all ranks, who wait for each
    other. Raises CheckpointError if something can't be read; tensors read until then have changed.
    """
    try:
        load(state, storage_reader=reader, planner=_Planner())
    except CheckpointException as error:
        raise CheckpointError(
            f"rank {this_rank()}: {reader.path} could not be read: {reasons(error)}. If it "
            "is spoiled, move it away, or give `step` for another one"
        ) from None


def new_tensor(saved: TensorStorageMetadata) -> Tensor:
    """Make an uninitialized CPU tensor of the size and dtype of a saved one, to read it into."""
    return torch.empty(saved.size, dtype=saved.properties.dtype)


_NAMED_IN_METADATA = {
    *("TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "MetadataIndex"),
    *("ChunkStorageMetadata", "Metadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
}


class _Index(pickle.Unpickler):
    """Unpickler of a checkpoint's index: makes the types that belong there, and nothing else.

    Raises UnpicklingError for any other.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that the index names, if it belongs there; else raise."""
        if module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(torch, name)
        if (
            (module == "torch.distributed.checkpoint.metadata" and name in _NAMED_IN_METADATA)
            or (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
            or (module, name) == ("torch.serialization", "_get_layout")
            or (module == "pathlib" and name in ("PosixPath", "PurePosixPath"))
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index")


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load `value` as weights only, and give torch, which would load anything, a copy."""
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
