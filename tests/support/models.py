"""Small models, their batches and losses: what the tests train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A pre-norm block with sizes that two ranks can't share evenly."""

    def __init__(self, dim: int = 6, hidden: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, and a head tied to the embedding.

    checkpointing: None, "non-reentrant" or "reentrant".
    """

    def __init__(
        self, layers: int = 3, *, tied: bool = True, checkpointing: str | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)


def tokens(rank: int, step: int, *, length: int = 5, vocab: int = 11) -> Tensor:
    """One sequence of token ids, its own for each rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocab, (length,), generator=generator)


def net_loss(model: Any, rank: int, step: int) -> Tensor:
    ids = tokens(rank, step)
    return functional.cross_entropy(model(ids), ids.roll(-1))


HF_MODELS = ("llama", "bert", "gpt2", "vit", "t5")


def hf_model(name: str) -> nn.Module:
    """A tiny model of Hugging Face `transformers` with random weights."""
    import transformers as hf

    if name == "llama":
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=97,
                hidden_size=32,
                intermediate_size=56,
                num_hidden_layers=2,
                num_attention_heads=4,
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
                vocab_size=97,
                hidden_size=32,
                intermediate_size=56,
                num_hidden_layers=2,
                num_attention_heads=4,
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
                hidden_size=32,
                intermediate_size=56,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=16,
                patch_size=4,
                num_labels=5,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    raise ValueError(name)


def hf_loss(model: Any, name: str, rank: int, step: int) -> Tensor:
    if name == "vit":
        generator = torch.Generator().manual_seed(1000 * step + rank)
        images = torch.randn(2, 3, 16, 16, generator=generator)
        return model(pixel_values=images, labels=torch.tensor([rank, step % 5])).loss
    ids = torch.stack([tokens(rank, step + 100 * row, length=12, vocab=97) for row in range(2)])
    return model(input_ids=ids, labels=ids).loss
