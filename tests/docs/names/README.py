"""Names that fragments of the README take for granted."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import autoshard


class Blocks(nn.Module):
    """Model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Loader:
    """Position in the data."""

    def state_dict(self) -> dict[str, int]:
        return {"position": 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def names() -> dict[str, object]:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    if dist.get_rank() == 0:
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        LlamaForCausalLM(config).save_pretrained("downloaded")
    dist.barrier()
    return {
        "AutoConfig": AutoConfig,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "autoshard": autoshard,
        "folder": "downloaded",
        "loader": Loader(),
        "model": model,
        "optimizer": optimizer,
        "scaler": torch.amp.GradScaler("cpu"),
        "schedule": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "steps": 2,
        "torch": torch,
    }
