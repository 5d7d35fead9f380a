"""Sharded models that have a `save_pretrained` of their own, as those of transformers.

Theirs takes shards for whole tensors, and fails; or, called on rank 0 alone, would save its shards.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.eager import access
from autoshard.runtime.sharding.sharded_module import ShardedModule
from autoshard.runtime.training.checkpoint.on_ranks import this_rank
from autoshard.runtime.training.full_params import full_params
from autoshard.runtime.weights import hugging_face
from autoshard.runtime.weights.full_state import full_state_dict
from autoshard.runtime.weights.save import save_pretrained

_OURS = {"max_shard_size", "is_main_process", "safe_serialization", "save_function", "state_dict"}
"""Arguments with which a save is one of ours: they say nothing, or what ours knows."""


class SavesItself:
    """Mixin for modules of sharded models, in place of their own `save_pretrained`."""

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        """Save as the model's own `save_pretrained` does; all ranks call this.

        Of a model of transformers, each rank writes some of the files, as
        `autoshard.save_pretrained` does. With arguments other than `max_shard_size`, and for models
        of other libraries, rank 0 saves all of it by the model's own method, and needs memory for
        all of it. A `state_dict` of plain tensors is saved by that method, on this rank alone.

        Raises RuntimeError if other ranks don't call it, and what either method raises.
        """
        own = getattr(super(), "save_pretrained")  # noqa: B009  # mypy knows no class with it
        state = kwargs.get("state_dict")
        has_shards = state is None or any(isinstance(each, DTensor) for each in state.values())
        if not has_shards:
            return own(save_directory, *args, **kwargs)
        model: nn.Module = self  # type: ignore[assignment]  # a mixin of modules' classes
        is_theirs = hugging_face.is_pretrained(model)
        if is_theirs and not args and set(kwargs) <= _OURS and not hugging_face.has_adapters(model):
            size = kwargs.get("max_shard_size", "5GB")
            return save_pretrained(model, save_directory, max_shard_size=size)
        if is_theirs:
            kwargs["state_dict"] = full_state_dict(model, cpu_offload=True, rank0_only=True)
            return own(save_directory, *args, **kwargs) if this_rank() == 0 else None
        with full_params(model, writeback=False):
            return own(save_directory, *args, **kwargs) if this_rank() == 0 else None


class SelfSavingModule(SavesItself, ShardedModule):
    """`ShardedModule` of a class that has `save_pretrained`."""


def offer_saving(model: nn.Module) -> None:
    """Give the models of transformers inside `model` a `save_pretrained` that knows of shards.

    PEFT has one inside its own, which is what is left once adapters are merged into it.
    """
    for inner in model.modules():
        if hugging_face.is_pretrained(inner) and not isinstance(inner, SavesItself):
            access.mix_in(inner, SavesItself)


def methods_for(module: nn.Module) -> type[ShardedModule]:
    """Return the class that gives `module` its methods as the head of a unit."""
    saves_itself = callable(getattr(module, "save_pretrained", None))
    return SelfSavingModule if saves_itself else ShardedModule
