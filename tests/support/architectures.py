"""Architectures that people train, tiny: of Hugging Face's `transformers`, and a DiT."""

from __future__ import annotations

from typing import Any

import torch
from support.dit import DiT, dit_loss
from support.models import tokens
from torch import Tensor, nn

ARCHITECTURES = ("llama", "bert", "gpt2", "vit", "t5", "mixtral", "dit")
EXPERTS = ("grouped_mm", "batched_mm", "eager")
"""How `transformers` computes a mixture of experts; the last loops over those that are hit."""

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def architecture(name: str, *, experts: str = "grouped_mm") -> nn.Module:
    """Random weights, no dropout. experts: Mixtral's, see EXPERTS."""
    import transformers as hf

    if name == "dit":
        return DiT()
    if name == "llama":
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(
                **_SMALL,
                vocab_size=97,
                num_key_value_heads=2,
                max_position_embeddings=64,
            )
        )
    if name == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=97,
                n_positions=64,
                n_embd=32,
                n_layer=2,
                n_head=4,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                loss_type="ForCausalLMLoss",
            )
        )
    if name == "bert":
        return hf.BertForMaskedLM(
            hf.BertConfig(
                **_SMALL,
                vocab_size=97,
                max_position_embeddings=64,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    if name == "t5":
        return hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=97,
                d_model=32,
                d_kv=8,
                d_ff=56,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        )
    if name == "vit":
        return hf.ViTForImageClassification(
            hf.ViTConfig(
                **_SMALL,
                image_size=16,
                patch_size=4,
                num_labels=5,
                problem_type="single_label_classification",  # else the first forward writes it
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    if name == "mixtral":
        return hf.MixtralForCausalLM(
            hf.MixtralConfig(
                **_SMALL,
                vocab_size=97,
                num_key_value_heads=2,
                max_position_embeddings=64,
                num_local_experts=5,
                num_experts_per_tok=2,
                experts_implementation=experts,
            )
        )
    raise ValueError(name)


def architecture_loss(model: Any, name: str, rank: int, step: int) -> Tensor:
    """On data of its own for each rank and step."""
    if name == "dit":
        return dit_loss(model, rank, step)
    if name == "vit":
        generator = torch.Generator().manual_seed(1000 * step + rank)
        images = torch.randn(2, 3, 16, 16, generator=generator)
        return model(pixel_values=images, labels=torch.tensor([rank, step % 5])).loss
    ids = torch.stack([tokens(rank, step + 100 * row, length=12, vocab=97) for row in range(2)])
    return model(input_ids=ids, labels=ids).loss
