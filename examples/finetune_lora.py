"""Fine-tune a Llama with LoRA adapters, by TRL's trainer and PEFT, the model sharded.

    pip install 'autoshard[hosts]'
    torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py

Without --model it makes a tiny Llama and a tokenizer of its own, as there is nothing to download;
with it, a folder or a name of the hub. Stopped, it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from autoshard.integrations.trainer import AutoshardMixin


class Tuner(AutoshardMixin, SFTTrainer):
    """TRL's trainer, with the model sharded and compiled by autoshard."""


def read(name: str | None) -> tuple[Any, Any]:
    """Return a model and its tokenizer: those of `name`, or tiny ones of bytes."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {word: number for number, word in enumerate(["<pad>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(known, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=len(known),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config), PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )


def sums(number: int) -> Dataset:
    """Make questions and answers: sums of numbers below ten."""
    digits = torch.randint(0, 10, (number, 2), generator=torch.Generator().manual_seed(0)).tolist()
    return Dataset.from_list(
        [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in digits]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=Path("finetuned"))
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    model, tokenizer = read(options.model)
    arguments = SFTConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_length=64,
        logging_steps=10,
        save_steps=20,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    tuner = Tuner(
        model,
        args=arguments,
        train_dataset=sums(512),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
    )
    last = get_last_checkpoint(options.out) if options.out.is_dir() else None
    tuner.train(resume_from_checkpoint=last)
    tuner.save_model(str(options.out / "adapters"))

    asked = tokenizer("2 + 3 =", return_tensors="pt").to(tuner.args.device)
    words = tuner.model.generate(**asked, max_new_tokens=4, do_sample=False)  # on all ranks
    if tuner.is_world_process_zero():
        print("generated:", tokenizer.decode(words[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
