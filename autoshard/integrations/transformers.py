"""Settings of transformers with which its models are faster when they are compiled."""

from __future__ import annotations

from typing import Any

import torch

ATTENTION_BY_FLAG = "sdpa_by_flag"


def attention_by_flag() -> str:
    """Register attention that is told by a flag that it is causal; return its name.

        model.set_attn_implementation(attention_by_flag())

    For models that torch before 2.14 compiles as a whole: their own `sdpa` makes a tensor of the
    causal mask then, with which torch has no FlashAttention, and attention takes 3.5 times as long
    on an H100 (`benchmarks/reports/2026-11-27-on-gpu.md`). Values are the same but for rounding.
    With an `attention_mask`, a window, a mask of the model's own, or a cache of earlier tokens,
    there is a tensor as before. Compiled, several sequences that `position_ids` pack into one are
    not told apart: give such a batch an `attention_mask`, or keep `sdpa`.
    Raises ImportError without transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION_BY_FLAG, sdpa_attention_forward)
    AttentionMaskInterface.register(ATTENTION_BY_FLAG, _mask)
    return ATTENTION_BY_FLAG


def _mask(**given: Any) -> torch.Tensor | None:
    """Make the mask that `sdpa` has, as transformers asks for it; None if it is causal alone.

    Compiled, transformers can't tell whether sequences are packed, and forbids to leave it out.
    """
    from transformers.masking_utils import sdpa_mask

    has_own = given.get("use_vmap", False) or any(
        given.get(name) is not None for name in ("attention_mask", "local_size")
    )
    is_square = given.get("q_length") == given.get("kv_length")
    may_be_left_out = given.get("allow_is_causal_skip", True) or torch.compiler.is_compiling()
    if is_square and may_be_left_out and not has_own:
        return None
    made: torch.Tensor | None = sdpa_mask(**given)
    return made
