"""Adapters of PEFT in a model: which tensors are theirs, names in files, and first values.

PEFT puts layers of its own around some of a model's, whose parameters get longer names so:
`q_proj.weight` is `q_proj.base_layer.weight` then. Those of the adapters are in no file of the
model; they have a folder of their own, or first values by PEFT's own methods. Tried with PEFT 0.21.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.runtime.weights.targets import Target

_PREFIX = "base_model.model."  # of names in the files of adapters: the path of the model there
_COMPUTED_BY = ("peft_type", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora")
"""Entries of an adapter's config by which values mean something else."""

_FIRST_VALUES = (True, "gaussian")  # values of `init_lora_weights` that no weight is needed for


def base_of(model: nn.Module) -> nn.Module:
    """Return the model that a PeftModel was made of, with its adapters; any other model itself.

    Raises ValueError for adapters that are not inside it, and on meta.
    """
    kind = _class("peft", "PeftModel")
    if kind is None or not isinstance(model, kind):
        return model
    base: nn.Module = model.get_base_model()
    inside = set(base.parameters())
    outside = [n for n, p in model.named_parameters() if p.is_meta and p not in inside]
    if outside:
        raise ValueError(
            f"{outside[:4]} of the adapters are on the meta device and not inside the model: build "
            "the model on a real device, put the adapters in, and call autoshard.shard(model)"
        )
    return base


def are_in(folder: Path) -> bool:
    """Tell whether `folder` holds adapters, not a model."""
    return (folder / "adapter_config.json").is_file()


@dataclass(frozen=True)
class Split:
    """Parameters and saved buffers of a model, told apart from those of its adapters.

    own:     by the names that files of the model have.
    wrapped: those that PEFT has put a layer around, by their names in the model.
    added:   by their names in the model; without copies.
    copies:  of modules that an adapter trains as a whole, by their names in the model. Those on
             meta are among the `copies` of what they were made of, too.
    """

    own: dict[str, Target] = field(default_factory=dict)
    wrapped: dict[str, Target] = field(default_factory=dict)
    added: dict[str, Target] = field(default_factory=dict)
    copies: dict[str, Target] = field(default_factory=dict)

    @property
    def to_initialise(self) -> list[Target]:
        """Targets among `added` that have no values yet, each once."""
        return list({id(its): its for its in self.added.values() if its.is_on_meta}.values())


def are_trained(model: Any) -> bool:
    """Tell whether adapters of `model` were trained before, so that they are to be loaded."""
    return any(config.inference_mode for config in _configs(model).values())


def split(model: nn.Module, targets: dict[str, Target]) -> Split:
    """Tell the `targets` of `model` apart."""
    layers = {path for path, _ in _layers(model)}
    kind = _class("peft.utils", "ModulesToSaveWrapper")
    wrappers = {
        path for path, each in model.named_modules() if kind is not None and isinstance(each, kind)
    }
    found = Split()
    copied: list[tuple[str, Target]] = []
    for name, target in targets.items():
        plain, whose = _plain_name(name, layers, wrappers)
        if whose == "own":
            target.names = [plain if each == name else each for each in target.names]
            found.own[plain] = target
            if plain != name:
                found.wrapped[name] = target
        elif whose == "added":
            found.added[name] = target
        else:
            found.copies[name] = target
            copied.append((plain, target))
    for plain, target in copied:
        if plain in found.own and target.is_on_meta:
            found.own[plain].copies.append(target)
    return found


def _plain_name(name: str, layers: set[str], wrappers: set[str]) -> tuple[str, str]:
    """Return the name of a tensor without adapters, and whether it is "own", "added" or a "copy".

    layers, wrappers: paths of modules that PEFT has put around others.
    """
    plain: list[str] = []
    whose = "own"
    parts = name.split(".")
    at = 0
    while at < len(parts):
        path = ".".join(parts[:at])
        if path in layers:
            whose = whose if parts[at] == "base_layer" else "added"
        elif path in wrappers and parts[at] == "modules_to_save":
            whose = "copy"
            at += 1  # the adapter's name
        elif path not in wrappers or parts[at] != "original_module":
            plain.append(parts[at])
        at += 1
    return ".".join(plain), whose


def check(model: nn.Module, without_values: Container[Tensor]) -> None:
    """Raise ValueError if there is no way to give first values to adapters in `without_values`."""
    lora = _class("peft.tuners.lora", "LoraLayer")
    for path, layer in _layers(model):
        own = [p for name, p in layer.named_parameters() if not name.startswith("base_layer.")]
        if not any(param in without_values for param in own):
            continue
        assert lora is not None
        if not isinstance(layer, lora):
            raise ValueError(f"{path} is a {type(layer).__name__}, {_ONLY_LORA}")
        if not _configs(model):
            raise ValueError(
                f"{path} has an adapter, and {type(model).__name__} no peft_config: give "
                "load_pretrained() the model that get_peft_model() returned"
            )
        for adapter, config in _configs(model).items():
            first = config.init_lora_weights
            if first not in _FIRST_VALUES:
                raise ValueError(
                    f"the adapter {adapter!r} has init_lora_weights={first!r}, which takes the "
                    f"model's weights to compute, {_ONLY_LORA}"
                )
        for each in _magnitudes(layer).values():
            if type(each).__name__ != "DoraLinearLayer":
                raise ValueError(f"{path} has a {type(each).__name__}, {_ONLY_LORA}")


def refuse_without_weights(model: nn.Module) -> None:
    """Raise ValueError if weights that adapters are put around are on meta."""
    for path, layer in _layers(model):
        if any(param.is_meta for param in layer.get_base_layer().parameters()):
            raise ValueError(
                f"{path} is an adapter around weights on the meta device, which would be random: "
                "call autoshard.load_pretrained(model, folder), which shards the model, too, after "
                "the adapters were put in and before it is prepared or called"
            )


_ONLY_LORA = (
    "and on the meta device only LoRA, and DoRA of linear layers, can be given first values: build "
    "the model on a real device, put the adapters in, and call autoshard.shard(model)"
)


def initialise(model: nn.Module, fresh: Container[Tensor]) -> set[Tensor]:
    """Have PEFT give first values to adapters' tensors among `fresh`, which are whole; return them.

    DoRA's magnitudes, which follow from weights, are left out.
    Raises ValueError as `check`.
    """
    check(model, fresh)
    configs = _configs(model)
    done: set[Tensor] = set()
    for _, layer in _layers(model):
        for adapter, config in configs.items():
            parts = [
                getattr(layer, name)[adapter]
                for name in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
                if adapter in getattr(layer, name, {})
            ]
            tensors = [
                tensor
                for each in parts
                for tensor in ([each] if isinstance(each, Tensor) else each.parameters())
            ]
            if any(tensor in fresh for tensor in tensors):
                layer.reset_lora_parameters(adapter, config.init_lora_weights)
                done.update(tensors)
    return done


@dataclass(frozen=True)
class Magnitude:
    """Magnitudes of DoRA, and the weight whose columns' lengths they are at first."""

    param: nn.Parameter
    weight: nn.Parameter
    layer: Any  # DoraLinearLayer

    def compute(self, weight: Tensor) -> Tensor:
        """Return the first values for `weight`, which is whole, while LoRA adds nothing to it."""
        lengths: Tensor = self.layer.get_weight_norm(weight, torch.zeros_like(weight), 1.0)
        return lengths.detach()


def magnitudes(model: nn.Module) -> Iterator[Magnitude]:
    """Yield all magnitudes of DoRA in `model`."""
    for _, layer in _layers(model):
        for each in _magnitudes(layer).values():
            yield Magnitude(each._parameters["weight"], _weight_of(layer), each)


def by_names_in_files(
    model: Any, folder: Path, split: Split, stored: Container[str]
) -> dict[str, Target]:
    """Return what an adapter has in `model`, by the names in the adapter's own files, now its own.

    stored: all names in the files in `folder`. Embeddings may be among them, which PEFT saves
        beside what is put around them.
    Raises ValueError if `model` has several adapters, or one that computes otherwise than the
    config in `folder` says.
    """
    from peft.utils import get_peft_model_state_dict

    configs = _configs(model)
    if len(configs) > 1:
        raise ValueError(
            f"the model has adapters {sorted(configs)}, and the folder is of one: load it into a "
            "model that has that one alone"
        )
    adapter, config = next(iter(configs.items()))
    theirs = json.loads((folder / "adapter_config.json").read_text())
    differ = [
        f"{key}={theirs[key]!r}, not {getattr(config, key)!r}"
        for key in _COMPUTED_BY
        if key in theirs and theirs[key] != getattr(config, key, theirs[key])
    ]
    if differ:
        raise ValueError(
            f"the adapter in {folder} has {', '.join(differ)} as the model's adapter {adapter!r}: "
            "make that with the config that is there, PeftConfig.from_pretrained(folder)"
        )
    targets = {**split.added, **split.copies}
    tokens = {name: torch.empty(0) for name in targets}
    named = get_peft_model_state_dict(
        model, tokens, adapter_name=adapter, save_embedding_layers=False
    )
    by_token = {id(token): targets[name] for name, token in tokens.items()}
    found = {f"{_PREFIX}{name}": by_token[id(token)] for name, token in named.items()}
    wrapped = {f"{_PREFIX}{path}": target for path, target in split.wrapped.items()}
    found.update((name, target) for name, target in wrapped.items() if name in stored)
    for name, target in found.items():
        target.names = [name]
    return found


def _class(module: str, name: str) -> Any:
    """Return a class of PEFT's; None where PEFT has not been imported."""
    return getattr(sys.modules.get(module), name, None)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that PEFT has put around others, with their paths."""
    kind = _class("peft.tuners.tuners_utils", "BaseTunerLayer")
    if kind is not None:
        for path, module in model.named_modules():
            if isinstance(module, kind):
                yield path, module


def _configs(model: Any) -> dict[str, Any]:
    """Return the configs of the adapters of `model`, by their names."""
    return dict(getattr(model, "peft_config", None) or {})


def _magnitudes(layer: Any) -> dict[str, Any]:
    return dict(getattr(layer, "lora_magnitude_vector", None) or {})


def _weight_of(layer: Any) -> nn.Parameter:
    weight: nn.Parameter = layer.get_base_layer()._parameters["weight"]
    return weight
