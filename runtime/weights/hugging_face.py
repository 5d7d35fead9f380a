"""Names, conversions and ties of weights in the files of a transformers model, as it knows them.

Tried with transformers 5.23 and 5.24, whose own functions are called: a checkpoint's keys are
renamed, and its tensors stacked, joined or cut, as `from_pretrained` does. They get `LazyTensor`s,
so that nothing is read meanwhile.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.runtime.weights import first_values


@dataclass
class Converted:
    """Tensors by the model's names.

    found:      each tensor, not read yet.
    unexpected: the model's names for what it has no place for.
    transforms: those of transformers' that were of use, by which a later save goes back.
    """

    found: dict[str, Tensor] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    transforms: list[Any] = field(default_factory=list)


def is_pretrained(model: nn.Module) -> bool:
    """Tell whether `model` is one of transformers'."""
    kind = first_values.pretrained_class()
    return kind is not None and isinstance(model, kind)


def convert(
    model: Any,
    stored: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    key_mapping: Mapping[str, str] | None,
) -> Converted:
    """Give the tensors of a checkpoint the names and forms that `model`, of transformers, has.

    stored: what the checkpoint has. targets: what the model has, by name.
    key_mapping: as of `from_pretrained`: patterns of keys, and what replaces them.
    Raises what a conversion raises, with a note that names the tensor.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    made = Converted()
    transforms: dict[str, Any] = {}
    known = dict(targets)
    for key in sorted(stored, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        if name not in known and key in known:
            name, pattern = loading.rename_source_key(key, [], [], model.base_model_prefix, known)
        if name not in known:
            made.unexpected.append(name)
            continue
        if pattern is None:
            transform = transforms.setdefault(name, loading.WeightRenaming(key, name))
            pattern = key
        elif name not in transforms:
            transform = transforms[name] = copy.deepcopy(by_pattern[pattern])
        else:
            transform = transforms[name]
        check_kind(name, stored[key].dtype, known[name].dtype)
        # Before it is joined to others, as `from_pretrained` does.
        transform.add_tensor(name, key, pattern, stored[key].to(known[name].dtype))
    for name, transform in transforms.items():
        sources = [str(key) for keys in transform.layer_targets.values() for key in sorted(keys)]
        try:
            results = transform.convert(name, model=model, config=model.config)
        except Exception as error:
            error.add_note(f"in the conversion of {sources[:8]} to {name!r}")
            raise
        for target, value in results.items():
            made.found[target] = value[0] if isinstance(value, list) else value
    made.transforms = [each for each in mapping if each.was_used()]
    return made


def kept_dtypes(model: Any) -> dict[nn.Parameter, torch.dtype]:
    """Find parameters that `from_pretrained` keeps in another dtype than that of `model`."""
    from transformers.core_model_loading import build_glob_alternation

    plan: dict[str, torch.dtype] = model._get_dtype_plan(model.dtype)
    if not plan:
        return {}
    pattern, by_group, _ = build_glob_alternation(list(plan))
    found = {}
    for name, param in model.named_parameters():
        match = pattern.search(name)
        if match is not None and param.is_floating_point():
            found[param] = plan[by_group[match.lastgroup or ""]]
    return {param: dtype for param, dtype in found.items() if param.dtype != dtype}


def check_kind(name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Raise ValueError if tensor `name` is one of integers in files, or in the model, alone."""
    if stored.is_floating_point != wanted.is_floating_point:
        raise ValueError(
            f"{name!r} is {stored} in the files, and {wanted} in the model: it is of another "
            "model, or quantized"
        )


def expected_to_miss(model: Any, missing: Sequence[str]) -> set[str]:
    """Return those of `missing` that a checkpoint of `model` need not have, as the model says."""
    found = _Keys(set(missing), set())
    model._adjust_missing_and_unexpected_keys(found)
    return set(missing) - found.missing_keys


def expected_to_find(model: Any, unexpected: Sequence[str]) -> set[str]:
    """Return those of `unexpected` that a checkpoint of `model` may have, as the model says."""
    found = _Keys(set(), set(unexpected))
    model._adjust_missing_and_unexpected_keys(found)
    return set(unexpected) - found.unexpected_keys


@dataclass
class _Keys:
    """Keys of a load's report, from which a model of transformers takes those that it expects."""

    missing_keys: set[str]
    unexpected_keys: set[str]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map names of tensors to that of the one that they are tied to, as the model says."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def refuse_quantized(folder: Path) -> None:
    """Raise ValueError if the weights in `folder` are quantized, as its config.json says."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    if quantization:
        method = dict(quantization).get("quant_method", "some method")
        raise ValueError(
            f"the weights in {folder} are quantized ({method}): load a checkpoint that is not, or "
            "dequantize it with transformers' from_pretrained and save that"
        )


def end_loading(model: Any, folder: Path, converted: Converted) -> None:
    """Note how the weights were converted, for a save, and read the folder's generation config."""
    model._weight_conversions = converted.transforms
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = type(model.generation_config).from_pretrained(folder)


def has_adapters(model: nn.Module) -> bool:
    """Tell whether `model`, of transformers, has adapters of PEFT, which alone are saved then."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def not_to_save(model: nn.Module) -> set[str]:
    """Return names that `model` says are not to be saved."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def convert_back(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors of `model` the names and forms that they have in files."""
    from transformers.core_model_loading import revert_weight_conversion

    back: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return back


def save_configs(model: Any, architecture: str, folder: Path) -> None:
    """Write the configs of `model`, whose class is named `architecture`. Raises OSError."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [architecture]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
