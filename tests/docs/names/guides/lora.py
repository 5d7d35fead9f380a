# needs peft
"""What the fragments of docs/guides/lora.md take for granted."""

from __future__ import annotations

from typing import Any

from support import guides
from torch import Tensor, nn


class Adapted(nn.Module):
    """Frozen linear layer with a trainable one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def names() -> dict[str, Any]:
    """Add a small Llama, and other adapters than the page's, to what other guides have."""
    from support.hosts import llama

    tiny = llama(bos_token_id=None, eos_token_id=None)
    given = guides.names()
    ids = given["ids"] % tiny.config.vocab_size
    return {**given, "ids": ids, "Adapted": Adapted, "llama": tiny}
