"""For models of transformers."""

from __future__ import annotations

ATTENTION_BY_FLAG = "sdpa_by_flag"


def attention_by_flag() -> str:
    """Register attention that is told by a flag that it is causal; return its name.

        model.set_attn_implementation(attention_by_flag())

    For models that are compiled as a whole by torch before 2.14, on batches without padding: their
    own `sdpa` makes a tensor of the causal mask then, with which torch has no FlashAttention, and
    attention takes 3.5 times as long on an H100 (`benchmarks/reports/2026-11-27-on-gpu.md`). Values
    are the same but for rounding. An `attention_mask` is not heeded, nor is a window of attention:
    all tokens before one are attended to.
    Raises ImportError without transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION_BY_FLAG, sdpa_attention_forward)
    AttentionMaskInterface.register(ATTENTION_BY_FLAG, _no_mask)
    return ATTENTION_BY_FLAG


def _no_mask(*_: object, **__: object) -> None:
    """Make no mask, where transformers asks for one."""
