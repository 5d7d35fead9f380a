"""Saving of weights as safetensors files that transformers' `from_pretrained` loads.

    the model's tensors --conversions of transformers, back--> tensors of files, not gathered yet
    file by file, tensor by tensor: all ranks gather what it is made of; the file's rank writes it

A rank holds its shards, and what one tensor is made of, meanwhile. That the files are written by
several ranks takes their memory, disks and networks together; nothing is written twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from autoshard import _torch
from autoshard.runtime.eager import access
from autoshard.runtime.training.checkpoint.model_state import quiet
from autoshard.runtime.training.checkpoint.on_ranks import (
    num_ranks,
    on_each_rank,
    on_first_rank,
    this_rank,
)
from autoshard.runtime.weights import adapters, first_values, hugging_face
from autoshard.runtime.weights.full_state import gather
from autoshard.runtime.weights.lazy import (
    Box,
    LazyTensor,
    Node,
    node_of,
    part_of,
    read_box,
    sources_of,
)
from autoshard.runtime.weights.targets import Target, check_together, targets_of
from autoshard.runtime.weights.writing import ASIDE, Part, Writer, clear, parts_of, publish


@torch.inference_mode(False)
@torch.no_grad()
def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB"
) -> None:
    """Write `model` to `folder` as safetensors files, as `from_pretrained` loads them.

    All ranks call this, and share `folder`: each writes some of the files, each tensor once, a
    tensor at a time. Of transformers' models, the names and forms are those of the files that they
    come from (experts one by one, say), and rank 0 writes config.json and generation_config.json,
    too; any other module is saved under its own names. Of tied parameters there is one. Tensors
    keep their dtypes. What is in `folder` of a save before is replaced once all ranks have written.

    max_shard_size: of a file, in bytes, or as "5GB", "500MB". There is one file,
        model.safetensors, or several and model.safetensors.index.json.

    Raises CheckpointError on every rank if one can't write: what was there before stays so.
    RuntimeError if ranks don't call it together; ValueError for a wrong size, or a PeftModel.
    """
    most_bytes = read_size(max_shard_size, "max_shard_size")
    inner = _torch.dynamo.compiled_module(model) or model
    if adapters.base_of(inner) is not inner:
        raise ValueError(
            "a PeftModel's adapters are saved by model.save_pretrained(folder), on all ranks; to "
            "save a whole model, give what model.merge_and_unload() returns"
        )
    where = Path(folder).absolute()
    check_together(inner, f"save_pretrained(max_shard_size={max_shard_size!r})")
    what = f"weights to {where}"
    lazy = on_each_rank(lambda: _tensors_to_save(inner), what)
    nodes = {key: node_of(tensor) for key, tensor in lazy.items()}
    parts = parts_of(nodes, most_bytes, num_ranks())
    on_first_rank(lambda: _make_folder(where), what)
    writing = _Writing(where, parts, lazy)
    writing.run()
    try:
        on_each_rank(writing.end, what)
    except Exception:
        on_first_rank(lambda: clear(where), what)
        raise
    on_first_rank(lambda: _finish(inner, where, parts, nodes), what)


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)


def _finish(model: nn.Module, folder: Path, parts: list[Part], nodes: Mapping[str, Node]) -> None:
    if hugging_face.is_pretrained(model):
        hugging_face.save_configs(model, access.original_class(model).__name__, folder)
    publish(folder, parts, nodes)


class _Gathered(Node):
    """Tensor of the model, which is gathered before it is read.

    whole: all of it, while it is needed.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self.tensor = tensor
        self.whole: Tensor | None = None

    def read(self, box: Box) -> Tensor:
        """Read the part `box` of what was gathered."""
        assert self.whole is not None
        return part_of(self.whole, box)


def _tensors_to_save(model: nn.Module) -> dict[str, Tensor]:
    """Return what is to be saved, by the names in files; nothing is gathered yet.

    Raises RuntimeError for a tensor on meta, ValueError for state that is no tensor.
    """
    targets = targets_of(model)
    with quiet():
        state = _torch.checkpoint.state_of(model, {})
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise ValueError(
            f"the model has extra state {odd[:4]}, which safetensors can't hold: save it with "
            "autoshard.save_checkpoint()"
        )
    meta = [name for name, value in state.items() if value.is_meta]
    if meta:
        raise RuntimeError(
            f"parameters {meta[:8]} ({len(meta)} in all) are still on the meta device: load them, "
            "as by load_pretrained(), before they are saved"
        )
    left_out = hugging_face.not_to_save(model)
    nodes: dict[str, Tensor] = {}
    for name, value in state.items():
        if name not in left_out and name == _main_name(model, name, targets):
            nodes[name] = LazyTensor.of(_Gathered(value))
    if hugging_face.is_pretrained(model):
        with first_values.set_aside(model):
            return hugging_face.convert_back(model, nodes)
    return nodes


def _main_name(model: nn.Module, name: str, targets: Mapping[str, Target]) -> str:
    """Return the name under which the tensor `name` is saved: the one others are tied to."""
    target = targets.get(name)
    if target is None:
        return name
    tied = hugging_face.tied_names(model)
    return next((each for each in target.names if each not in tied), target.names[0])


class _Writing:
    """Files that this rank writes, while all ranks gather what is in all files.

    A rank that fails goes on with the gathers, as others wait for it, and writes no more.
    """

    def __init__(self, folder: Path, parts: list[Part], tensors: Mapping[str, Tensor]) -> None:
        self._folder, self._parts, self._tensors = folder, parts, tensors
        self._failed: Exception | None = None
        self._gathered: list[_Gathered] = []

    def run(self) -> None:
        """Gather all tensors, in order, and write those of this rank's files."""
        for part in self._parts:
            writer = self._begin(part)
            for key in part.keys:
                self._gather_for(self._tensors[key])
                if writer is not None and self._failed is None:
                    try:
                        tensor = self._tensors[key]
                        writer.write(read_box(tensor, node_of(tensor).all_of_it))
                    except Exception as error:
                        self._failed = error
            if writer is not None:
                try:
                    writer.close()
                except Exception as error:
                    self._failed = self._failed or error
        self._drop(())

    def end(self) -> None:
        """Raise the error of this rank, if there was one."""
        if self._failed is not None:
            raise self._failed

    def _begin(self, part: Part) -> Writer | None:
        if part.rank != this_rank() or self._failed is not None:
            return None
        try:
            nodes = {key: node_of(self._tensors[key]) for key in part.keys}
            return Writer(self._folder / f"{ASIDE}{part.name}", nodes)
        except Exception as error:
            self._failed = error
            return None

    def _gather_for(self, tensor: Tensor) -> None:
        """Gather what `tensor` is made of, and was not gathered for the one before; drop the rest.

        All ranks keep it, so that they go on alike.
        """
        needed = [node for node in sources_of(tensor) if isinstance(node, _Gathered)]
        self._drop(needed)
        for node in needed:
            if node.whole is None:
                node.whole = gather(node.tensor)
        self._gathered = needed

    def _drop(self, kept: Sequence[_Gathered]) -> None:
        for node in self._gathered:
            if node not in kept:
                node.whole = None


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read_size(size: int | str, name: str) -> int:
    """Read a number of bytes, from text too: "5GB", "40GiB".

    name: of the argument, for the ValueError that is raised for anything else.
    """
    match = re.fullmatch(r"(\d+)\s*([KMG]I?B)?", str(size).strip().upper())
    if match is None or isinstance(size, bool) or int(match[1]) < 1:
        raise ValueError(f'{name} is {size!r}; expected bytes, or text like "5GB"')
    return int(match[1]) * _UNITS[match[2] or ""]
