"""Hugging Face's Trainer, and those made of it: the model is sharded and compiled by autoshard."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME

from autoshard.integrations.accelerate import with_autoshard
from autoshard.runtime.weights.save import save_pretrained


class AutoshardMixin(Trainer):
    """Trainer whose model is sharded and compiled by autoshard.

        class Tuner(AutoshardMixin, SFTTrainer): ...

        trainer = Tuner(model, args=args, train_dataset=data, autoshard={"bucketing": "auto"})

    Checkpoints, resuming, evaluation and the best model are the Trainer's own, as with FSDP2: each
    rank writes its shards. `save_model` writes what `from_pretrained` loads, whole.

    autoshard: options of the backend, arguments of `autoshard.shard` among them; None for none.
    Other arguments are of the Trainer. Raises ValueError as `with_autoshard`.
    """

    def __init__(self, *args: Any, autoshard: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._autoshard_options = autoshard or {}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and have it shard with autoshard.

        Raises ValueError for `save_only_model` with `load_best_model_at_end`, as with FSDP2: the
        best model is loaded from shards, which are not written then.
        """
        if self.args.save_only_model and self.args.load_best_model_at_end:
            raise ValueError(
                "autoshard can't load the best model of checkpoints by save_only_model: leave "
                "save_only_model or load_best_model_at_end out"
            )
        super().create_accelerator_and_postprocess()
        with_autoshard(self.accelerator, **self._autoshard_options)
        self.is_fsdp_enabled = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`, with its tokenizer and the arguments.

        All ranks call this. For a checkpoint the Trainer has shards written, and nothing here,
        unless there is to be nothing but the model.
        """
        is_checkpoint = _internal_call and output_dir is not None and not self.args.save_only_model
        if is_checkpoint or "FULL_STATE_DICT" in str(
            self.accelerator.state.fsdp_plugin.state_dict_type
        ):
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or str(self.args.output_dir))
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        getattr(model, "save_pretrained", functools.partial(save_pretrained, model))(folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


class AutoshardTrainer(AutoshardMixin):
    """Trainer of transformers that shards and compiles its model with autoshard."""
