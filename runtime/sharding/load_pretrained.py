"""Loading of weights, as users call it: a model that is not sharded yet is sharded first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autoshard import _torch
from autoshard.runtime.eager import access
from autoshard.runtime.sharding.adopt import adopt_module
from autoshard.runtime.sharding.first_call import shard_as_compiled
from autoshard.runtime.sharding.materialize import left_on_meta
from autoshard.runtime.unit.param import find
from autoshard.runtime.weights import adapters, hugging_face
from autoshard.runtime.weights.load import LoadedWeights, load_into


def load_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    key_mapping: Mapping[str, str] | None = None,
    **shard_arguments: Any,
) -> LoadedWeights:
    """Load the safetensors files of a Hugging Face model into `model`; all ranks call this.

    Each rank reads its own rows, a parameter at a time. The values are those that transformers'
    `from_pretrained` gives, cast to the dtypes of `model`: with its other names, conversions
    (of stacked experts, fused projections) and ties. A model that is on meta, as built under
    `torch.device("meta")`, needs memory for its shards only; buffers that are in no file are
    computed, and parameters that transformers keeps in float32 become so. A model that is not
    sharded yet is sharded first, as its `torch.compile(..., backend="autoshard")` says, or by
    `shard(model, **shard_arguments)`. Any other module can be loaded, too, by its own names.
    Training and eval mode stay as they are.

    A model that PEFT has put LoRA or DoRA into is loaded by its names from before. Adapters on meta
    get first values by PEFT, the same on all ranks; those that were trained, as their config's
    `inference_mode` says, stay on meta. A folder of one adapter, with adapter_config.json, is
    loaded into the model's only adapter.

    folder: one with model.safetensors, or model.safetensors.index.json and the files that it names.
    strict: False initialises parameters that the files lack, as transformers does, with values
        that are the same on all ranks, and leaves out what the model lacks; both with a warning.
    key_mapping: as of `from_pretrained`: patterns of names in files, and what replaces them.
    shard_arguments: of `shard()`, for a model that is not sharded and not compiled.

    Returns what this rank has read. Raises CheckpointError on every rank, which names the tensor,
    the file and the rank, and before the model is changed: for a tensor that is missing,
    unexpected, or of another size or kind of dtype, for a file that is missing, damaged or cut
    short, and for quantized weights; later, the model being changed in part, for a file that can't
    be read any more. Raises RuntimeError if ranks find other files, and, naming them, for buffers
    that nothing computes; ValueError for `shard_arguments` of a model that is sharded already, and
    for prompts and the like of PEFT, on meta, that are not inside the model.
    """
    inner = _torch.dynamo.compiled_module(model) or model
    base = adapters.base_of(inner)
    _shard_on_meta(inner, base, shard_arguments)
    return load_into(base, folder, strict=strict, key_mapping=key_mapping)


def _shard_on_meta(model: nn.Module, base: nn.Module, arguments: dict[str, Any]) -> None:
    """Shard `model` if it is not; what is on meta stays there. Raises as `load_pretrained`.

    base: it, or the model in it that the weights are of.
    """
    if any(find(param) is not None for _, param in access.named_sharded(model)):
        if arguments:
            raise ValueError(
                f"load_pretrained got {sorted(arguments)} for {type(model).__name__}, which is "
                "sharded already: pass them to shard(), or load before it is sharded"
            )
        return
    params = list(model.parameters())
    if any(param.is_meta for param in params):  # some models make one on the CPU nevertheless
        for param in params:
            if not param.is_meta:
                made = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
                torch.utils.swap_tensors(param, made)
    if hugging_face.is_pretrained(base) and any(param.is_meta for param in params):
        for param, dtype in hugging_face.kept_dtypes(base).items():
            wider = nn.Parameter(torch.empty_like(param, dtype=dtype), param.requires_grad)
            torch.utils.swap_tensors(param, wider)
    with left_on_meta():
        if arguments or not shard_as_compiled(model):
            adopt_module(model, arguments)
